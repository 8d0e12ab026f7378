"""Tensors and parameters of the model by global name: shape, sharding, initialization and training flags.

TensorSpec: a tensor as checkpoints store it. ParamSpec: a parameter of a module, made of a tensor or of several stacked
tensors that share a GEMM (q, k and v; gate and up). `layout.parameters` lists those of a model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from megascale.config.model import ModelConfig
from megascale.layout.topology import DATA_AXES, Coord, Topology

Init = Literal["normal"] | float
"""Initial values of a tensor: drawn from a normal distribution, or a constant."""

Kind = Literal["matrix", "embedding", "head", "norm", "bias"]
"""Kinds of parameters, by which optimizers treat them: weights of linear layers, embeddings, the output head, gains and
biases of norms, biases of linear layers.
"""

VOCAB_MULTIPLE = 64
"""The multiple to which the vocabulary rows of a rank are padded, for tensor cores. Padding rows stay zero."""

TOKEN_EMBEDDING = "embedding.token.weight"
HEAD = "head.weight"  # unless tied to the token embedding


def exit_name(after: int) -> str:
    """The name of the module of an early exit, `after` as many layers; of its head, followed by `.HEAD`."""
    return f"exits.{after}"


@dataclass(frozen=True)
class TensorSpec:
    """A tensor as checkpoints store it.

    `shape`: of a vector, a matrix, or a stack [..., rows, columns] of matrices, such as those of experts. `sharding`:
    axis of parallelism -> sharded dimension; the tensor is replicated over all other axes. `init`, `std`:
    initialization. `pad_multiple`: the multiple to which a rank pads its rows. `head_dim`: rows of an attention head,
    of which the tensor is a stack; None for other tensors. `width_ratio`: by which muP and unit scaling divide the
    learning rate of a rule like Adam. `vectors`: a stack [..., size] of vectors, such as the biases of experts.
    """

    name: str
    shape: tuple[int, ...]
    sharding: Mapping[str, int] = field(default_factory=dict)
    init: Init = "normal"
    std: float = 0.0
    pad_multiple: int = 1
    head_dim: int | None = None
    width_ratio: float = 1.0
    vectors: bool = False

    @property
    def is_stack(self) -> bool:
        """True for a stack of matrices, each of which optimizers treat as a matrix of its own."""
        return len(self.shape) > 2 and not self.vectors

    @property
    def outer(self) -> tuple[int, ...]:
        """The dimensions of a stack that count its matrices or vectors; () of another tensor."""
        return self.shape[:-1] if self.vectors else self.shape[:-2]

    def local_shape(self, topology: Topology) -> tuple[int, ...]:
        """Shape on one rank, with padding."""
        shape = list(self.shape)
        for axis, dimension in self.sharding.items():
            shape[dimension] = -(-shape[dimension] // getattr(topology, axis))
        shape[0] = -(-shape[0] // self.pad_multiple) * self.pad_multiple
        return tuple(shape)

    def local_box(self, topology: Topology, coord: Coord) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Global offset and size of the shard of the rank at `coord`, without padding."""
        edges = []
        for dimension, (size, local_size) in enumerate(zip(self.shape, self.local_shape(topology), strict=True)):
            axes = [axis for axis, sharded in self.sharding.items() if sharded == dimension]
            start = topology.index_in_group(coord, *axes) * local_size
            edges.append((min(start, size), min(start + local_size, size)))
        return tuple(low for low, _ in edges), tuple(high - low for low, high in edges)


@dataclass(frozen=True)
class ParamSpec:
    """A parameter of a module: `parts` with equal sharding, concatenated along dimension 0. `name`: its module path.

    `kind`: of all parts. `fp8`: the weight's GEMMs may run in FP8. `tp_partial`: a replica's gradient is of this tp
    rank's heads only, also without sequence parallelism, and is summed over tp. `reduce_axes`: the axes whose ranks
    hold the parameter and have parts of its gradient, which are summed. `decays`: weight decay applies to a matrix.
    `frozen`: the parameter is not trained (`layout.freezing`).
    """

    name: str
    parts: tuple[TensorSpec, ...]
    kind: Kind = "matrix"
    fp8: bool = False
    tp_partial: bool = False
    reduce_axes: tuple[str, ...] = DATA_AXES
    decays: bool = True
    frozen: bool = False

    def __post_init__(self) -> None:
        equal = all(part.sharding == self.sharding for part in self.parts)
        assert equal, f"the parts of {self.name} must have equal sharding"

    @property
    def is_matrix(self) -> bool:
        """Optimizers may treat the parameter as a matrix; LAMB, for example, applies its trust ratio to matrices."""
        return self.kind not in ("norm", "bias")

    @property
    def weight_decay(self) -> bool:
        return self.is_matrix and self.decays

    @property
    def sharding(self) -> Mapping[str, int]:
        """The sharding of all parts: axis of parallelism -> sharded dimension."""
        return self.parts[0].sharding

    @property
    def is_replicated(self) -> bool:
        """All ranks of a stage hold the same parameter: no axis shards it."""
        return not self.sharding

    def local_shape(self, topology: Topology) -> tuple[int, ...]:
        """Shape on one rank, with padding."""
        shapes = [part.local_shape(topology) for part in self.parts]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def local_numel(self, topology: Topology) -> int:
        return math.prod(self.local_shape(topology))


def padded_vocab(model: ModelConfig, ranks: int) -> int:
    """The padded vocabulary size: a multiple of VOCAB_MULTIPLE on each of the ranks that share the rows."""
    unit = VOCAB_MULTIPLE * ranks
    return math.ceil(model.vocab_size / unit) * unit


def vocabulary_param(name: str, model: ModelConfig, *axes: str) -> ParamSpec:
    """The token embedding, the head, or that of an exit, by `name`, with rows sharded over tp and further `axes`. Unit
    scaling divides the head's unit weights by hidden_size.
    """
    shape, is_head = (model.vocab_size, model.hidden_size), name != TOKEN_EMBEDDING
    ratio = (model.hidden_size if model.unit_scaling else model.width_ratio) if is_head else 1.0
    std = (1.0 if model.unit_scaling else model.init_std) / ratio
    sharding = dict.fromkeys(("tp", *axes), 0)
    tensor = TensorSpec(name, shape, sharding, std=std, pad_multiple=VOCAB_MULTIPLE, width_ratio=ratio)
    return ParamSpec(name, (tensor,), "head" if is_head else "embedding")
