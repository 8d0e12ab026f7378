"""Tensors and parameters of the model by global name: shape, sharding, initialization and training flags.

Initialization, sharding, optimizers, FP8, checkpoints, parameter counts and memory all read this list, which does not
depend on the layout.

TensorSpec: a tensor as checkpoints store it. ParamSpec: a parameter of a module, made of a tensor or of several stacked
tensors that share a GEMM (q, k and v; gate and up). layer_params, stage_params, all_params: lists of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from megascale.catalog.layers import NORMS
from megascale.config.model import ModelConfig
from megascale.layout.blocks import AttentionSpec, ColumnParallel, LinearGroup, LinearSpec, NormSpec, block_spec
from megascale.layout.topology import DATA_AXES, Coord, Topology

Init = Literal["normal", "zeros", "ones"]

Kind = Literal["matrix", "embedding", "head", "norm", "bias"]
"""Kinds of parameters, by which optimizers treat them: weights of linear layers, embeddings, the output head, gains and
biases of norms, biases of linear layers.
"""

VOCAB_MULTIPLE = 64
"""The multiple to which the vocabulary rows of a rank are padded, for tensor cores. Padding rows stay zero."""

TOKEN_EMBEDDING = "embedding.token.weight"
HEAD = "head.weight"  # unless tied to the token embedding


@dataclass(frozen=True)
class TensorSpec:
    """A tensor as checkpoints store it.

    `sharding`: axis of parallelism -> sharded dimension; the tensor is replicated over all other axes. `init`, `std`:
    initialization. `pad_multiple`: the multiple to which a rank pads its rows. `head_dim`: rows of an attention head,
    of which the tensor is a stack; None for other tensors. `width_ratio`: by which muP scales the learning rate.
    """

    name: str
    shape: tuple[int, ...]
    sharding: Mapping[str, int] = field(default_factory=dict)
    init: Init = "normal"
    std: float = 0.0
    pad_multiple: int = 1
    head_dim: int | None = None
    width_ratio: float = 1.0

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

    `is_matrix`: optimizers may treat the parameter as a matrix; LAMB, for example, applies its trust ratio to matrices.
    `weight_decay`: weight decay applies. `fp8`: the weight's GEMMs may run in FP8. `tp_partial`: a replica's gradient
    is of this tp rank's heads only, also without sequence parallelism, and is summed over tp. `kind`: of all parts.
    `reduce_axes`: the axes whose ranks hold the parameter and have parts of its gradient, which are summed.
    """

    name: str
    parts: tuple[TensorSpec, ...]
    is_matrix: bool
    weight_decay: bool
    fp8: bool
    tp_partial: bool = False
    kind: Kind = "matrix"
    reduce_axes: tuple[str, ...] = DATA_AXES

    def __post_init__(self) -> None:
        equal = all(part.sharding == self.sharding for part in self.parts)
        assert equal, f"the parts of {self.name} must have equal sharding"

    @property
    def sharding(self) -> Mapping[str, int]:
        """The sharding of all parts: axis of parallelism -> sharded dimension."""
        return self.parts[0].sharding

    def local_shape(self, topology: Topology) -> tuple[int, ...]:
        """Shape on one rank, with padding."""
        shapes = [part.local_shape(topology) for part in self.parts]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def local_numel(self, topology: Topology) -> int:
        """Elements on one rank, with padding."""
        return math.prod(self.local_shape(topology))


def matrix_param(name: str, *parts: TensorSpec, fp8: bool = False, kind: Kind = "matrix") -> ParamSpec:
    """A matrix, with weight decay. `fp8`: its GEMMs may run in FP8."""
    return ParamSpec(name, parts, is_matrix=True, weight_decay=True, fp8=fp8, kind=kind)


def vector_param(name: str, *parts: TensorSpec, tp_partial: bool = False, kind: Kind = "norm") -> ParamSpec:
    """A vector (the gain of a norm, or a bias), without weight decay. `tp_partial`: as in `ParamSpec`."""
    return ParamSpec(name, parts, is_matrix=False, weight_decay=False, fp8=False, tp_partial=tp_partial, kind=kind)


def _norm(name: str, model: ModelConfig) -> list[ParamSpec]:
    shape = (model.hidden_size,)
    params = [vector_param(f"{name}.weight", TensorSpec(f"{name}.weight", shape, init=_gain_init(model)))]
    if NORMS[model.norm].facts["bias"]:
        params.append(vector_param(f"{name}.bias", TensorSpec(f"{name}.bias", shape, init="zeros")))
    return params


def _gain_init(model: ModelConfig) -> Init:
    """The initial value of a norm's stored gain: with an offset of 1, zero."""
    return "zeros" if NORMS[model.norm].facts["offset"] else "ones"


def _qk_norms(name: str, part: AttentionSpec, model: ModelConfig) -> list[ParamSpec]:
    """The gains of the norms of q and k: one for all heads, or sharded over tp with the heads."""
    full = part.qk_norm == "full"
    gains = [(f"{name}.{norm}.weight", width) for norm, width in part.qk_norms]
    sharding, init = {"tp": 0} if full else {}, _gain_init(model)
    return [
        vector_param(gain, TensorSpec(gain, (width,), sharding, init=init), tp_partial=not full)
        for gain, width in gains
    ]


def _linear(name: str, model: ModelConfig, linear: LinearSpec, dimension: int) -> list[ParamSpec]:
    """The parameters of a linear layer, whose weight tp shards along `dimension`: 0 outputs, 1 inputs.

    Row-parallel weights feed the residual stream, which sums 2 l branches in a network of l layers: their initial
    standard deviation is divided by sqrt(2 l). muP divides by the root of the width.
    """
    ratio = model.width_ratio
    std = model.init_std / math.sqrt(ratio * (1 if dimension == 0 else 2 * model.num_layers))
    prefix, sharding = name.rpartition(".")[0], {"tp": dimension}
    parts = [(f"{prefix}.{part}", rows) for part, rows in linear.parts]
    weights = [
        TensorSpec(
            f"{part}.weight", (rows, linear.inputs), sharding, std=std, head_dim=linear.head_dim, width_ratio=ratio
        )
        for part, rows in parts
    ]
    params = [matrix_param(f"{name}.weight", *weights, fp8=linear.fp8)]
    if linear.bias:
        sharding = sharding if dimension == 0 else {}
        biases = [TensorSpec(f"{part}.bias", (rows,), sharding, init="zeros") for part, rows in parts]
        params.append(vector_param(f"{name}.bias", *biases, kind="bias"))
    return params


def layer_params(model: ModelConfig, index: int) -> list[ParamSpec]:
    """The parameters of a transformer block, in the order of its parts (`layout.blocks`)."""
    params, name = list[ParamSpec](), f"layers.{index}"
    for part in block_spec(model, index):
        if isinstance(part, NormSpec):
            params += _norm(f"{name}.{part.name}", model)
        elif isinstance(part, AttentionSpec):
            params += _qk_norms(name, part, model)
        elif isinstance(part, LinearGroup):
            for linear in part.layers:
                params += _linear(f"{name}.{linear.name}", model, linear, 0 if isinstance(part, ColumnParallel) else 1)
    return params


def padded_vocab(model: ModelConfig, tp: int) -> int:
    """The padded vocabulary size: a multiple of VOCAB_MULTIPLE on every tp rank."""
    unit = VOCAB_MULTIPLE * tp
    return math.ceil(model.vocab_size / unit) * unit


def _vocabulary(name: str, model: ModelConfig) -> ParamSpec:
    shape = (model.vocab_size, model.hidden_size)
    ratio = model.width_ratio if name == HEAD else 1.0
    std = model.init_std / ratio
    tensor = TensorSpec(name, shape, {"tp": 0}, std=std, pad_multiple=VOCAB_MULTIPLE, width_ratio=ratio)
    return matrix_param(name, tensor, kind="head" if name == HEAD else "embedding")


def embedding_params(model: ModelConfig) -> list[ParamSpec]:
    """The parameters before the first layer."""
    params = [_vocabulary(TOKEN_EMBEDDING, model)]
    if model.position == "learned":
        name, shape = "embedding.position.weight", (model.position_rows, model.hidden_size)
        params.append(matrix_param(name, TensorSpec(name, shape, std=model.init_std), kind="embedding"))
    return params


def head_params(model: ModelConfig) -> list[ParamSpec]:
    """The parameters after the last layer. A tied head has the name of the token embedding."""
    name = TOKEN_EMBEDDING if model.tie_embeddings else HEAD
    return [*_norm("final_norm", model), _vocabulary(name, model)]


def stage_params(model: ModelConfig, layers: range, first: bool, last: bool) -> list[ParamSpec]:
    """The parameters of a pipeline stage, without duplicates: a stage with embedding and tied head has them once."""
    params = embedding_params(model) if first else []
    for index in layers:
        params += layer_params(model, index)
    if last:
        names = {parameter.name for parameter in params}
        params += [parameter for parameter in head_params(model) if parameter.name not in names]
    return params


def all_params(model: ModelConfig) -> list[ParamSpec]:
    """The parameters of the full model."""
    return stage_params(model, range(model.num_layers), first=True, last=True)
