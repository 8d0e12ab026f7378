"""Every tensor of the model by its global name: shape, sharding, initial values, and how it is trained.

Initialisation, sharding, optimizers, FP8, checkpoints, parameter counts and memory all read this one list, which is the
same for every layout. A `Parameter` is what a module holds: one tensor, or several that one GEMM multiplies (q, k and
v; gate and up), one above the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from megascale.config.model import ModelConfig
from megascale.layout.blocks import Columns, Linear, Linears, Norm, block
from megascale.layout.topology import DATA, Coord, Topology

Init = Literal["normal", "zeros", "ones"]

VOCAB_MULTIPLE = 64
"""Rows of the vocabulary on each rank are a multiple of this: what tensor cores want. Padding rows stay zero."""

TOKEN_EMBEDDING = "embedding.token.weight"
HEAD = "head.weight"  # where it is not the token embedding


@dataclass(frozen=True)
class Tensor:
    """A tensor as a checkpoint knows it.

    `sharding`: the dimension that each axis of parallelism shards; along other axes every rank holds all of it.
    `multiple`: each rank pads its rows to a multiple of this.
    """

    name: str
    shape: tuple[int, ...]
    sharding: Mapping[str, int] = field(default_factory=dict)
    init: Init = "normal"
    std: float = 0.0
    multiple: int = 1

    def local_shape(self, topology: Topology) -> tuple[int, ...]:
        """Shape on one rank, with padding."""
        shape = list(self.shape)
        for axis, dimension in self.sharding.items():
            shape[dimension] = -(-shape[dimension] // getattr(topology, axis))
        shape[0] = -(-shape[0] // self.multiple) * self.multiple
        return tuple(shape)

    def local(self, topology: Topology, coord: Coord) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offset and size of the box of this tensor that the rank at `coord` holds, without padding."""
        edges = []
        for dimension, (size, each) in enumerate(zip(self.shape, self.local_shape(topology), strict=True)):
            axes = [axis for axis, sharded in self.sharding.items() if sharded == dimension]
            start = topology.index(coord, *axes) * each
            edges.append((min(start, size), min(start + each, size)))
        return tuple(low for low, _ in edges), tuple(high - low for low, high in edges)


@dataclass(frozen=True)
class Parameter:
    """A parameter of a module: logical `parts`, sharded alike, joined along their first dimension. `name` is the
    module's path to it.

    `is_matrix`: an optimizer may treat it as a matrix, as LAMB does, which scales its update to its norm.
    `weight_decay`: weight decay applies. `fp8`: FP8 may multiply it.
    """

    name: str
    parts: tuple[Tensor, ...]
    is_matrix: bool
    weight_decay: bool
    fp8: bool

    def __post_init__(self) -> None:
        alike = all(part.sharding == self.sharding for part in self.parts)
        assert alike, f"the parts of {self.name} are sharded alike"

    @property
    def sharding(self) -> Mapping[str, int]:
        """The dimension that each axis of parallelism shards."""
        return self.parts[0].sharding

    @property
    def reduce_axes(self) -> tuple[str, ...]:
        """The axes over which its gradient is summed: those of data parallelism that do not shard it."""
        return tuple(axis for axis in DATA if axis not in self.sharding)

    def local_shape(self, topology: Topology) -> tuple[int, ...]:
        """Shape on one rank, with padding."""
        shapes = [part.local_shape(topology) for part in self.parts]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def local_numel(self, topology: Topology) -> int:
        """Elements on one rank, with padding."""
        return math.prod(self.local_shape(topology))


def matrix(name: str, *parts: Tensor, fp8: bool = False) -> Parameter:
    """A matrix, which decays. `fp8`: FP8 may multiply it."""
    return Parameter(name, parts, is_matrix=True, weight_decay=True, fp8=fp8)


def vector(name: str, *parts: Tensor) -> Parameter:
    """The gain of a norm or a bias, which does not decay."""
    return Parameter(name, parts, is_matrix=False, weight_decay=False, fp8=False)


def _norm(name: str, model: ModelConfig) -> list[Parameter]:
    shape = (model.hidden_size,)
    found = [vector(f"{name}.weight", Tensor(f"{name}.weight", shape, init="ones"))]
    if model.norm == "layernorm":
        found.append(vector(f"{name}.bias", Tensor(f"{name}.bias", shape, init="zeros")))
    return found


def _linear(name: str, model: ModelConfig, linear: Linear, dimension: int) -> list[Parameter]:
    """A linear layer of a block. tp shards `dimension` of its weight: 0 outputs, 1 inputs. Weights back into the
    residual stream, where a network of l layers adds up 2 l branches, start smaller.
    """
    std = model.init_std if dimension == 0 else model.init_std / math.sqrt(2 * model.num_layers)
    prefix, sharding = name.rpartition(".")[0], {"tp": dimension}
    parts = [(f"{prefix}.{part}", rows) for part, rows in linear.parts]
    weights = [Tensor(f"{part}.weight", (rows, linear.inputs), sharding, std=std) for part, rows in parts]
    found = [matrix(f"{name}.weight", *weights, fp8=linear.fp8)]
    if model.bias:
        sharding = sharding if dimension == 0 else {}
        biases = [Tensor(f"{part}.bias", (rows,), sharding, init="zeros") for part, rows in parts]
        found.append(vector(f"{name}.bias", *biases))
    return found


def layer(model: ModelConfig, index: int) -> list[Parameter]:
    """The parameters of one transformer block, in the order of its parts (`layout.blocks`)."""
    found, name = list[Parameter](), f"layers.{index}"
    for part in block(model, index):
        if isinstance(part, Norm):
            found += _norm(f"{name}.{part.name}", model)
        elif isinstance(part, Linears):
            for linear in part.layers:
                found += _linear(f"{name}.{linear.name}", model, linear, 0 if isinstance(part, Columns) else 1)
    return found


def padded_vocab(model: ModelConfig, tp: int) -> int:
    """Rows of the vocabulary with padding: a multiple of VOCAB_MULTIPLE on each of tp ranks."""
    unit = VOCAB_MULTIPLE * tp
    return math.ceil(model.vocab_size / unit) * unit


def _vocabulary(name: str, model: ModelConfig) -> Parameter:
    shape = (model.vocab_size, model.hidden_size)
    return matrix(name, Tensor(name, shape, {"tp": 0}, std=model.init_std, multiple=VOCAB_MULTIPLE))


def embedding(model: ModelConfig) -> list[Parameter]:
    """The parameters before the first layer."""
    found = [_vocabulary(TOKEN_EMBEDDING, model)]
    if model.position == "learned":
        name, shape = "embedding.position.weight", (model.seq_length, model.hidden_size)
        found.append(matrix(name, Tensor(name, shape, std=model.init_std)))
    return found


def head(model: ModelConfig) -> list[Parameter]:
    """The parameters after the last layer. A tied head is the token embedding under its own name."""
    name = TOKEN_EMBEDDING if model.tie_embeddings else HEAD
    return [*_norm("final_norm", model), _vocabulary(name, model)]


def stage(model: ModelConfig, layers: range, first: bool, last: bool) -> list[Parameter]:
    """The parameters of a pipeline stage, each once: a stage that has both ends holds a tied embedding once."""
    found = embedding(model) if first else []
    for index in layers:
        found += layer(model, index)
    if last:
        known = {parameter.name for parameter in found}
        found += [parameter for parameter in head(model) if parameter.name not in known]
    return found


def whole(model: ModelConfig) -> list[Parameter]:
    """The parameters of the whole model."""
    return stage(model, range(model.num_layers), first=True, last=True)
