"""A decoder-only transformer, a part per file. Activations are [s, b, h]: sequence, batch, hidden size."""
