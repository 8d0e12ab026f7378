"""Parameter counts, from the list of tensors that the model is built from."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from megascale.config.model import ModelConfig
from megascale.layout.blocks import kinds
from megascale.layout.tensors import Parameter, layer, stage


def parameter_count(model: ModelConfig) -> int:
    """Count the elements of the model, without padding; a tied embedding counts once."""
    numbers = kinds(model)[1]
    layers = sum(count * _elements(layer(model, numbers.index(kind))) for kind, count in Counter(numbers).items())
    return layers + _elements(stage(model, range(0), first=True, last=True))


def _elements(parameters: Iterable[Parameter]) -> int:
    return sum(math.prod(tensor.shape) for parameter in parameters for tensor in parameter.parts)
