"""The network. Each file is one part of a decoder-only transformer; activations are [s, b, h] throughout."""
