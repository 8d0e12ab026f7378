"""Mixture of experts: the choice of experts, the exchange of tokens, and the experts' linear layers."""
