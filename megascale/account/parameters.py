"""Parameter counts, from the list of tensors that the model is built from."""

from __future__ import annotations

import math

from megascale.config.model import ModelConfig
from megascale.layout.tensors import whole


def parameter_count(model: ModelConfig) -> int:
    """Count the elements of the model, without padding; a tied embedding counts once."""
    return sum(math.prod(tensor.shape) for parameter in whole(model) for tensor in parameter.parts)
