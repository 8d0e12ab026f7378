"""Transformer blocks, described as a list of parts in forward order (`BlockSpec`).

Parameters, FLOPs, traffic, memory and time of a block, and the operands that FP8 quantizes, are those of its parts
(`layout.parts`); `megascale.model.block` executes the block. A new kind of block is a module, a description (here
serial_block and parallel_block), and a card of `catalog.layers` that names both.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import takewhile

from megascale.catalog.layers import BLOCKS
from megascale.config.model import ModelConfig
from megascale.core.registry import Card
from megascale.layout.freezing import mark_frozen, matches
from megascale.layout.parts.attention import AttentionSpec
from megascale.layout.parts.elementwise import ActivationSpec, NormSpec, ResidualAdd
from megascale.layout.parts.latent_projections import latent_branch
from megascale.layout.parts.linear import ColumnParallel, LinearGroup, RowParallel
from megascale.layout.parts.part import LinearSpec, Part, Surroundings
from megascale.layout.tensors import TOKEN_EMBEDDING

BlockSpec = tuple[Part, ...]

RECENT = 16  # models whose blocks are cached: the layouts of a search share a model


def block_spec(model: ModelConfig, layer: int) -> BlockSpec:
    """The parts of layer number `layer` of a model, in forward order. From `num_layers` on, those of multi-token
    prediction.
    """
    block = described(BLOCKS[model.block], model, layer)
    if layer < model.num_layers:
        return block
    from megascale.layout.parts.depth_input import DepthInput

    return DepthInput(model.hidden_size), *block, NormSpec("final_norm")


def frozen_names(model: ModelConfig, layer: int, freeze: Sequence[str]) -> frozenset[str]:
    """The names of parameters of a layer that match `freeze`, in its block, and that of the token embedding."""
    if not freeze:
        return frozenset()
    name, own = f"layers.{layer}", {TOKEN_EMBEDDING} if matches(TOKEN_EMBEDDING, freeze) else set()
    params = [param for part in block_spec(model, layer) for param in part.params(name, model)]
    return frozenset(own | {p.name.removeprefix(f"{name}.") for p in mark_frozen(params, freeze) if p.frozen})


def described(card: Card, model: ModelConfig, layer: int) -> BlockSpec:
    """List the parts of what a card describes, in layer number `layer`."""
    module, _, name = card.facts["description"].partition(":")
    parts: BlockSpec = getattr(importlib.import_module(module), name)(model, layer)
    return parts


@lru_cache(RECENT)
def distinct_blocks(model: ModelConfig, freeze: tuple[str, ...] = ()) -> tuple[tuple[BlockSpec, ...], tuple[int, ...]]:
    """List the blocks of a model that are distinct, in their parts or in the names of frozen parameters, and for every
    layer the index of its block in the list.
    """
    layers = range(model.total_layers)
    kinds = [(block_spec(model, layer), frozen_names(model, layer, freeze)) for layer in layers]
    distinct = list(dict.fromkeys(kinds))
    return tuple(block for block, _ in distinct), tuple(map(distinct.index, kinds))


def linears(block: BlockSpec) -> Iterator[LinearSpec]:
    """The linear layers of a block."""
    return (layer for part in block for layer in part.linears)


def fp8_operands(block: BlockSpec) -> Iterator[str]:
    """The operands that FP8 quantizes: input, weight and output gradient of the linear layers, as 'mlp.up.weight'.
    The column-parallel layers of a group share an input, row-parallel layers an output gradient, named by the first.
    """
    return (operand for part in block for operand in part.fp8_operands())


def surroundings(block: BlockSpec) -> Iterator[tuple[Part, Surroundings]]:
    """Yield the parts of a block with their surroundings."""
    adds, sources = any(part.adds_gradient for part in block), tuple[Part, ...]()
    for number, (before, part) in enumerate(zip((None, *block), block, strict=False), 1):
        rest = tuple(takewhile(lambda part: part != ResidualAdd(), block[number:]))
        yield part, Surroundings(before, rest, sources, adds)
        sources = () if part.results else (*sources, part) if part.feeds_rows else sources


def skipped_layers(block: BlockSpec) -> frozenset[LinearSpec]:
    """The row-parallel layers that full recomputation can skip: no gradient needs their output, the last branch that is
    added to the residual stream. Empty if a later part reads the output.
    """
    last = next((part for part in reversed(block) if part != ResidualAdd()), None)
    return frozenset(last.results if last else ())


def is_skippable(block: BlockSpec, part: Part) -> bool:
    """Return True if full recomputation skips the result of `part`, of `block` or of the block in tiles; an MLP in
    tiles is skipped as a whole.
    """
    return bool(part.results) and skipped_layers(block).issuperset(part.results)


def tile_mlp(block: BlockSpec, tiles: int, stored: int = 0) -> BlockSpec:
    """Return a block's parts with the MLP in `tiles`, if several: a part of its own, which shares no collective.
    `stored`: tiles that are not recomputed.
    """
    groups = [part for part in block if isinstance(part, LinearGroup) and _mlp_layers(part)]
    if tiles == 1 or len(groups) != 2:
        return block
    from megascale.layout.parts.tiled_mlp import TiledMLP

    up, down = ColumnParallel(_mlp_layers(groups[0])), RowParallel(_mlp_layers(groups[1]))
    qkv, out = (tuple(layer for layer in group.layers if layer not in _mlp_layers(group)) for group in groups)
    (activation,) = (part for part in block if isinstance(part, ActivationSpec))
    after_norm = block[block.index(groups[0]) - 1].normalizes
    parts = list[Part]()
    for part in block:
        if part == groups[0]:
            parts += [ColumnParallel(qkv)] if qkv else []
        elif part == groups[1]:
            parts.append(TiledMLP(up, activation, down, tiles, after_norm, bool(qkv), bool(out), stored))
        elif part != activation:
            parts += [part, RowParallel(out)] if out and part.attends else [part]
    return tuple(parts)


def _mlp_layers(group: LinearGroup) -> tuple[LinearSpec, ...]:
    """The layers of the MLP in a group."""
    return tuple(layer for layer in group.layers if layer.name.startswith("mlp."))


def serial_block(
    model: ModelConfig, layer: int, before: bool = True, after: bool = False, gain: float = 1.0
) -> BlockSpec:
    """x + attention(norm(x)), then + mlp(norm(.)); with norms `before` each branch, or `after`, or both. `gain`: of
    norms after a branch, at the start.
    """
    parts = list[Part]()
    branches = described(model.attention_kind(layer), model, layer), feed_forward(model, layer)
    for name, branch in zip(("attention", "mlp"), branches, strict=True):
        first, last = [NormSpec(f"{name}_norm")] * before, [NormSpec(f"{name}_post_norm", gain=gain)] * after
        parts += [*first, *branch, *last, ResidualAdd()]
    return tuple(parts)


def sandwich_block(model: ModelConfig, layer: int) -> BlockSpec:
    """x + attention_post_norm(attention(attention_norm(x))), then + mlp_post_norm(mlp(mlp_norm(.)))."""
    return serial_block(model, layer, after=True)


def post_norm_block(model: ModelConfig, layer: int) -> BlockSpec:
    """x + attention_post_norm(attention(x)), then + mlp_post_norm(mlp(.))."""
    return serial_block(model, layer, before=False, after=True)


def fog_block(model: ModelConfig, layer: int) -> BlockSpec:
    """As `post_norm_block`, with initial gains that give all 2 l branches together a variance of 2."""
    return serial_block(model, layer, before=False, after=True, gain=model.num_layers**-0.5)


def parallel_block(model: ModelConfig, layer: int, one_norm: bool = True) -> BlockSpec:
    """x + attention(norm(x)) + mlp(norm(x)), of `one_norm`, whose result both branches take, or of one each."""
    up, activation, down = mlp(model)
    core, end = attention(model, layer), (activation, RowParallel((out(model), *down.layers)), ResidualAdd())
    if one_norm:
        return NormSpec("norm"), ColumnParallel((qkv(model), *up.layers)), core, *end
    norms = NormSpec("attention_norm"), NormSpec("mlp_norm", shares_input=True)
    return norms[0], ColumnParallel((qkv(model),)), core, norms[1], up, *end


def parallel_two_norms_block(model: ModelConfig, layer: int) -> BlockSpec:
    """x + attention(attention_norm(x)) + mlp(mlp_norm(x))."""
    return parallel_block(model, layer, one_norm=False)


def feed_forward(model: ModelConfig, layer: int) -> BlockSpec:
    """The MLP of layer number `layer`, or its experts."""
    if not model.has_experts(layer):
        return mlp(model)
    from megascale.layout.parts.expert_layer import expert_layer

    return (expert_layer(model, mlp(model, "shared") if model.shared_ffn_size else None),)


def mlp(model: ModelConfig, place: str = "mlp") -> tuple[ColumnParallel, ActivationSpec, RowParallel]:
    """An MLP: up projection, of a gated activation in one linear layer with the gate, activation, and down projection
    to the residual stream. `place`: in the layer, or "shared" for the MLP of the shared expert.
    """
    width, label = (model.ffn_size, "") if place == "mlp" else (model.shared_ffn_size, f"{place} ")
    parts = (("gate", width), ("up", width)) if model.gated else (("up", width),)
    name = "_".join(part for part, _ in parts)
    up = LinearSpec(f"{place}.{name}", f"{label}up", model.hidden_size, parts, bias=model.bias)
    down = LinearSpec(f"{place}.down", f"{label}down", width, (("down", model.hidden_size),), bias=model.bias)
    return ColumnParallel((up,)), ActivationSpec(len(parts) * width, width), RowParallel((down,))


def softmax_branch(model: ModelConfig, layer: int) -> BlockSpec:
    """Softmax attention with its linear layers, latent with `kv_lora_rank`."""
    if model.kv_lora_rank:
        return latent_branch(model, layer)
    return ColumnParallel((qkv(model),)), attention(model, layer), RowParallel((out(model),))


def qkv(model: ModelConfig) -> LinearSpec:
    """The q, k and v projections, as a single linear layer."""
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    parts = (("q", q), ("k", kv), ("v", kv))
    return LinearSpec("attention.qkv", "qkv", model.hidden_size, parts, bias=model.qkv_bias, head_dim=model.head_dim)


def attention(model: ModelConfig, layer: int) -> AttentionSpec:
    """The attention core of layer number `layer`."""
    heads, kv_heads = model.num_heads, model.num_kv_heads
    softcap = model.attention_softcap is not None
    window, sinks = model.windows[layer], model.attention_sinks
    return AttentionSpec(heads, kv_heads, model.head_dim, window, model.qk_norm, softcap, sinks)


def out(model: ModelConfig) -> LinearSpec:
    """The output projection of attention, from the heads to the residual stream."""
    width = model.num_heads * model.value_head_dim
    return LinearSpec("attention.out", "out", width, (("out", model.hidden_size),), bias=model.bias, alone=False)
