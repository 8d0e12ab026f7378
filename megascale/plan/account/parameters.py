"""Parameter counts, from the specifications of the model's tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from megascale.config.model import ModelConfig
from megascale.layout.blocks import distinct_blocks
from megascale.layout.tensors import ParamSpec, layer_params, stage_params


def parameter_count(model: ModelConfig) -> int:
    """Count the elements of the model's parameters, without padding; a tied embedding counts once."""
    numbers = distinct_blocks(model)[1]
    ends = _elements(stage_params(model, range(0), first=True, last=True))
    layers = (count * _elements(layer_params(model, numbers.index(kind))) for kind, count in Counter(numbers).items())
    return ends + sum(layers)


def _elements(parameters: Iterable[ParamSpec]) -> int:
    return sum(math.prod(tensor.shape) for parameter in parameters for tensor in parameter.parts)
