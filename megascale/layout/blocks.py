"""Transformer blocks, described as a list of parts in forward order (`BlockSpec`).

Parameters, FLOPs, traffic, memory and time of a block, and the operands that FP8 quantizes, are computed from this
list; `megascale.model.block` executes the block. A new kind of block is a module, a description (here serial_block and
parallel_block), and a card of `catalog.layers` that names both. Sizes are before tensor parallelism shards the weights.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from megascale.catalog.layers import BLOCKS
from megascale.config.model import ModelConfig


@dataclass(frozen=True)
class LinearSpec:
    """A linear layer: a GEMM [tokens, inputs] x [inputs, outputs].

    `name`: path inside the block, such as 'attention.qkv'. `label`: name in the event log. `parts`: logical parts of
    the weight with their rows, stacked along dimension 0. `fp8`: FP8 may run this GEMM; a router, for example, stays
    in the compute dtype. `bias`: the layer has a bias. `head_dim`: rows of an attention head, of which the parts are
    stacks; None for other layers.
    """

    name: str
    label: str
    inputs: int
    parts: tuple[tuple[str, int], ...]
    fp8: bool = True
    bias: bool = False
    head_dim: int | None = None

    @property
    def outputs(self) -> int:
        """Output features: rows of the weight [outputs, inputs]."""
        return sum(rows for _, rows in self.parts)

    @property
    def weight_numel(self) -> int:
        """Elements of the weight."""
        return self.outputs * self.inputs


@dataclass(frozen=True)
class NormSpec:
    """A norm over the hidden size. `name`: path inside the block. `shares_input`: an earlier norm has the same input,
    which both save for backward as a single tensor.
    """

    name: str
    shares_input: bool = False


@dataclass(frozen=True)
class LinearGroup:
    """Parallel linear layers, which share their tp collectives and the FP8 copy of their common operand."""

    layers: tuple[LinearSpec, ...]

    @property
    def fp8(self) -> bool:
        """FP8 may run the GEMMs of the group: all of them, or none."""
        allowed = {layer.fp8 for layer in self.layers}
        assert len(allowed) == 1, f"{self.label}: all GEMMs of a group run in FP8, or none"
        return allowed.pop()

    @property
    def label(self) -> str:
        """The group's name in the event log, such as 'qkv and up'."""
        return " and ".join(layer.label for layer in self.layers)

    @property
    def weight_numel(self) -> int:
        """Elements of the group's weights."""
        return sum(layer.weight_numel for layer in self.layers)


@dataclass(frozen=True)
class ColumnParallel(LinearGroup):
    """Column-parallel layers of a common input X: tp rank i computes Y_i = X W_i^T, a shard of every layer's outputs.
    With sequence parallelism X is all-gathered before the GEMMs.
    """


@dataclass(frozen=True)
class RowParallel(LinearGroup):
    """Row-parallel layers, each with a sharded input: Y = sum of X_i W_i^T over the layers and the tp ranks i. The sum
    over tp is an all-reduce, or a reduce-scatter with sequence parallelism.
    """


@dataclass(frozen=True)
class AttentionSpec:
    """The attention core, softmax(q k^T) v. `window`: keys visible to a query; None for all earlier positions.
    `qk_norm`: the norms of q and k before it, over each "head", or over all heads ("full"), or "none". `softcap`: the
    scores have a soft cap.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    qk_norm: str = "none"
    softcap: bool = False

    def block_window(self, s: int) -> int | None:
        """The window by which torch computes scores in blocks of queries; None for all scores of s tokens at once."""
        return self.window or (s if self.softcap else None)

    @property
    def qk_norms(self) -> tuple[tuple[str, int], ...]:
        """Names of the norms of q and k inside the block, and elements of their gains."""
        if self.qk_norm == "none":
            return ()
        q, k = (self.heads, self.kv_heads) if self.qk_norm == "full" else (1, 1)
        return ("attention.q_norm", q * self.head_dim), ("attention.k_norm", k * self.head_dim)

    @property
    def out_width(self) -> int:
        """Elements of the output per token."""
        return self.heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Elements of q, k and v per token."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


@dataclass(frozen=True)
class ActivationSpec:
    """The activation function of an MLP: elements per token of its input and output."""

    inputs: int
    outputs: int


@dataclass(frozen=True)
class TiledMLP:
    """An MLP in `tiles` of tokens, each with the collectives of its linear layers. `after_norm`: a norm is directly
    before it. `shares_input`: attention's layers have the same input, which is saved once.
    """

    columns: ColumnParallel
    activation: ActivationSpec
    rows: RowParallel
    tiles: int
    after_norm: bool
    shares_input: bool


@dataclass(frozen=True)
class ResidualAdd:
    """The addition of a branch to the residual stream, after dropout if the model has dropout."""


RECENT = 16
"""Models whose blocks are cached: the layouts of a search share a model."""

BlockPart = NormSpec | ColumnParallel | RowParallel | AttentionSpec | ActivationSpec | TiledMLP | ResidualAdd
BlockSpec = tuple[BlockPart, ...]
PartT = TypeVar("PartT")


def block_spec(model: ModelConfig, layer: int) -> BlockSpec:
    """The parts of layer number `layer` of a model, in forward order."""
    return _description(model)(model, layer)


def _description(model: ModelConfig) -> Callable[[ModelConfig, int], BlockSpec]:
    module, _, name = BLOCKS[model.block].facts["description"].partition(":")
    description: Callable[[ModelConfig, int], BlockSpec] = getattr(importlib.import_module(module), name)
    return description


@lru_cache(RECENT)
def distinct_blocks(model: ModelConfig) -> tuple[tuple[BlockSpec, ...], tuple[int, ...]]:
    """List the distinct blocks of a model, and for every layer the index of its block in the list."""
    description = _description(model)
    blocks = [description(model, layer) for layer in range(model.num_layers)]
    distinct = tuple(dict.fromkeys(blocks))
    return distinct, tuple(distinct.index(block) for block in blocks)


def parts_of_type(block: BlockSpec, kind: type[PartT]) -> Iterator[PartT]:
    """The parts of a block that are instances of `kind`."""
    return (part for part in block if isinstance(part, kind))


def linears(block: BlockSpec) -> Iterator[LinearSpec]:
    """The linear layers of a block."""
    return (layer for group in parts_of_type(block, LinearGroup) for layer in group.layers)


def weight_numel(block: BlockSpec) -> int:
    """Count the elements of a block's weights."""
    return sum(layer.weight_numel for layer in linears(block))


def skippable_rows(block: BlockSpec) -> RowParallel | None:
    """The row-parallel layers that full recomputation can skip: no gradient needs their output, the last branch that is
    added to the residual stream. None if a later part reads the output.
    """
    last = next((part for part in reversed(block) if not isinstance(part, ResidualAdd)), None)
    return last if isinstance(last, RowParallel) else None


def is_skippable(block: BlockSpec, part: BlockPart) -> bool:
    """Return True if full recomputation skips the GEMMs of `part`, of `block` or of the block in tiles; an MLP in tiles
    is skipped as a whole.
    """
    last, rows = skippable_rows(block), part.rows if isinstance(part, TiledMLP) else part
    return last is not None and isinstance(rows, RowParallel) and set(rows.layers) <= set(last.layers)


def tile_mlp(block: BlockSpec, tiles: int) -> BlockSpec:
    """Return a block's parts with the MLP in `tiles`, if several: a part of its own, which shares no collective."""
    groups = [group for group in parts_of_type(block, LinearGroup) if _mlp(group)]
    if tiles == 1 or len(groups) != 2:
        return block
    up, down = ColumnParallel(_mlp(groups[0])), RowParallel(_mlp(groups[1]))
    qkv, out = (tuple(layer for layer in group.layers if layer not in _mlp(group)) for group in groups)
    (activation,) = parts_of_type(block, ActivationSpec)
    after_norm = isinstance(block[block.index(groups[0]) - 1], NormSpec)
    parts = list[BlockPart]()
    for part in block:
        if part == groups[0]:
            parts += [ColumnParallel(qkv)] if qkv else []
        elif part == groups[1]:
            parts.append(TiledMLP(up, activation, down, tiles, after_norm, shares_input=bool(qkv)))
        elif not isinstance(part, ActivationSpec):
            parts += [part, RowParallel(out)] if out and isinstance(part, AttentionSpec) else [part]
    return tuple(parts)


def _mlp(group: LinearGroup) -> tuple[LinearSpec, ...]:
    """The layers of the MLP in a group."""
    return tuple(layer for layer in group.layers if layer.name.startswith("mlp."))


def fp8_operands(block: BlockSpec) -> Iterator[str]:
    """The operands that FP8 quantizes: input, weight and output gradient of the linear layers, as 'mlp.up.weight'.
    The column-parallel layers of a group share an input, row-parallel layers an output gradient, named by the first.
    """
    for group in parts_of_type(block, LinearGroup):
        for index, layer in enumerate(group.layers if group.fp8 else ()):
            if index == 0 or isinstance(group, RowParallel):
                yield f"{layer.name}.input"
            yield f"{layer.name}.weight"
            if index == 0 or isinstance(group, ColumnParallel):
                yield f"{layer.name}.gradient"


def serial_block(model: ModelConfig, layer: int) -> BlockSpec:
    """x + attention(norm(x)), then + mlp(norm(.))."""
    return (
        NormSpec("attention_norm"),
        ColumnParallel((qkv(model),)),
        attention(model, layer),
        RowParallel((out(model),)),
        ResidualAdd(),
        NormSpec("mlp_norm"),
        ColumnParallel((up(model),)),
        activation(model),
        RowParallel((down(model),)),
        ResidualAdd(),
    )


def parallel_block(model: ModelConfig, layer: int) -> BlockSpec:
    """x + attention(norm(x)) + mlp(norm(x))."""
    return (
        NormSpec("norm"),
        ColumnParallel((qkv(model), up(model))),
        attention(model, layer),
        activation(model),
        RowParallel((out(model), down(model))),
        ResidualAdd(),
    )


def parallel_two_norms_block(model: ModelConfig, layer: int) -> BlockSpec:
    """x + attention(attention_norm(x)) + mlp(mlp_norm(x))."""
    return (
        NormSpec("attention_norm"),
        ColumnParallel((qkv(model),)),
        attention(model, layer),
        NormSpec("mlp_norm", shares_input=True),
        ColumnParallel((up(model),)),
        activation(model),
        RowParallel((out(model), down(model))),
        ResidualAdd(),
    )


def sandwich_block(model: ModelConfig, layer: int) -> BlockSpec:
    """x + attention_post_norm(attention(attention_norm(x))), then + mlp_post_norm(mlp(mlp_norm(.)))."""
    return (
        NormSpec("attention_norm"),
        ColumnParallel((qkv(model),)),
        attention(model, layer),
        RowParallel((out(model),)),
        NormSpec("attention_post_norm"),
        ResidualAdd(),
        NormSpec("mlp_norm"),
        ColumnParallel((up(model),)),
        activation(model),
        RowParallel((down(model),)),
        NormSpec("mlp_post_norm"),
        ResidualAdd(),
    )


def post_norm_block(model: ModelConfig, layer: int) -> BlockSpec:
    """x + attention_post_norm(attention(x)), then + mlp_post_norm(mlp(.))."""
    return (
        ColumnParallel((qkv(model),)),
        attention(model, layer),
        RowParallel((out(model),)),
        NormSpec("attention_post_norm"),
        ResidualAdd(),
        ColumnParallel((up(model),)),
        activation(model),
        RowParallel((down(model),)),
        NormSpec("mlp_post_norm"),
        ResidualAdd(),
    )


def qkv(model: ModelConfig) -> LinearSpec:
    """The q, k and v projections, as a single linear layer."""
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    parts = (("q", q), ("k", kv), ("v", kv))
    return LinearSpec("attention.qkv", "qkv", model.hidden_size, parts, bias=model.qkv_bias, head_dim=model.head_dim)


def attention(model: ModelConfig, layer: int) -> AttentionSpec:
    """The attention core of layer number `layer`."""
    heads, kv_heads = model.num_heads, model.num_kv_heads
    softcap = model.attention_softcap is not None
    return AttentionSpec(heads, kv_heads, model.head_dim, model.windows[layer], model.qk_norm, softcap)


def out(model: ModelConfig) -> LinearSpec:
    """The output projection of attention, from the heads to the residual stream."""
    width = model.num_heads * model.head_dim
    return LinearSpec("attention.out", "out", width, (("out", model.hidden_size),), bias=model.bias)


def up(model: ModelConfig) -> LinearSpec:
    """The up projection of the MLP; with a gated activation, gate and up projection as a single linear layer."""
    if model.gated:
        parts = (("gate", model.ffn_size), ("up", model.ffn_size))
        return LinearSpec("mlp.gate_up", "up", model.hidden_size, parts, bias=model.bias)
    return LinearSpec("mlp.up", "up", model.hidden_size, (("up", model.ffn_size),), bias=model.bias)


def activation(model: ModelConfig) -> ActivationSpec:
    """The activation function of the MLP."""
    return ActivationSpec((2 if model.gated else 1) * model.ffn_size, model.ffn_size)


def down(model: ModelConfig) -> LinearSpec:
    """The down projection of the MLP, to the residual stream."""
    return LinearSpec("mlp.down", "down", model.ffn_size, (("down", model.hidden_size),), bias=model.bias)
