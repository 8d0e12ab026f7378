"""Calls and bytes of context parallelism: what ranks that share sequences exchange in attention, and FP8 amaxes."""

from __future__ import annotations

from collections.abc import Iterator

from megascale.catalog.recipes import RECIPES
from megascale.config.run import RunConfig
from megascale.layout import blocks
from megascale.layout.blocks import AttentionSpec, BlockSpec, ColumnParallel, LinearGroup
from megascale.layout.chunks import fp8_layers, stages_of
from megascale.layout.recompute_policy import RecomputePolicy, recompute_policy
from megascale.layout.topology import Coord
from megascale.plan.account.comm_op import FP32, CommOp, element_bytes


def context_traffic(config: RunConfig, part: AttentionSpec, backward: bool = False) -> Iterator[CommOp]:
    """List the exchanges of context parallelism in a pass of attention over a micro-batch: of heads before and after
    it, in the compute dtype, and of keys and values. Their gradients are in the accumulation dtype.
    """
    p, (compute, wide) = config.parallel, element_bytes(config)
    element = config.batch.micro * config.row_tokens * part.head_dim * compute  # of a head's tokens
    queries, keys = part.heads // p.tp, part.kv_heads // p.tp
    suffix = " gradient" if backward else ""
    if p.cp_heads > 1:
        keys = max(keys, p.cp_heads)  # repeated for more ranks than heads
        for label, heads in (("heads", queries + 2 * keys), ("attention", queries)):
            yield CommOp("cp.heads", "all_to_all", heads * element, f"{label}{suffix}")
    if p.cp_keys == 1:
        return
    block = 2 * keys * element  # keys // cp_heads heads of the tokens of cp_heads ranks
    ranks, visits, gradient = p.cp_keys, p.cp_keys - 1, block // compute * wide
    label = "keys again" if backward else "keys"
    if p.cp_mode == "allgather":
        yield CommOp("cp.keys", "all_gather", ranks * block, label)
        if backward:
            yield CommOp("cp.keys", "reduce_scatter", ranks * gradient, "keys gradient")
    else:
        yield CommOp("cp.keys", "send_on", visits * block, label, visits)
        if backward:
            yield CommOp("cp.keys", "send_on", ranks * gradient, "keys gradient", ranks)


def context_parallel(config: RunConfig, coord: Coord) -> Iterator[CommOp]:
    """List a rank's communication over cp in a step: exchanges of attention, and amaxes in FP8."""
    layout, fp8 = stages_of(config), fp8_layers(config)
    for chunk in range(layout.vpp if config.parallel.cp > 1 else 0):
        recompute = recompute_policy(config.train, chunk)
        for layer in layout.layers(layout.index(coord.pp, chunk)):
            sent = _block_traffic(config, blocks.block_spec(config.model, layer), layer in fp8, recompute)
            yield from (operation._replace(times=config.num_microbatches) for operation in sent)


def _block_traffic(config: RunConfig, block: BlockSpec, fp8: bool, recompute: RecomputePolicy) -> Iterator[CommOp]:
    """List a block's communication over cp for a micro-batch."""
    for backward in (False, False, True) if recompute.full else (False, True):
        yield from _token_amaxes(config, block, backward) if fp8 else ()
    for part in blocks.parts_of_type(block, AttentionSpec):
        for backward in (False, False, True) if recompute.full or recompute.attention else (False, True):
            yield from context_traffic(config, part, backward)


def _token_amaxes(config: RunConfig, block: BlockSpec, backward: bool) -> Iterator[CommOp]:
    """List the all-reduces over cp in a pass of a block: of FP8 amaxes whose scales cover a micro-batch's tokens. With
    scales per row these are those of the operands of wgrad.
    """
    p, facts = config.parallel, RECIPES[config.fp8.recipe].facts
    ranks = {"cp.heads": p.cp_heads, "cp.keys": p.cp_keys}
    for part in blocks.parts_of_type(block, LinearGroup) if facts["scaling"] == "current" else ():
        column = isinstance(part, ColumnParallel)  # layers of a common X, otherwise of a common dY
        inputs = [layer.inputs // (1 if column else p.tp) for layer in part.layers][: 1 if column else None]
        gradients = [layer.outputs // (p.tp if column else 1) for layer in part.layers][: None if column else 1]
        counts = {"tensor": [1] * len(gradients if backward else inputs), "row": inputs + gradients if backward else []}
        for count in counts.get(facts["granularity"], []):
            yield from (CommOp(group, "all_reduce", FP32 * count, "amax") for group in ranks if ranks[group] > 1)
