"""The direction of a rule that computes the new weight: reparameterisations of a linear layer."""

from __future__ import annotations

from torch import Tensor


def direction_of(change: Tensor, lr: float) -> Tensor:
    """Return the direction along which a step with the rate `lr` adds `change` to the weight; zero if `lr` is."""
    return change / -lr if lr else change * 0.0
