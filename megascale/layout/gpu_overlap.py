"""Overlap of tp's collectives with the GEMMs beside them on GPUs (`overlaps_on_gpus`), by torch's fused operators or in
pieces, and what a configuration leaves exposed (`exposed_collectives`).

                 torch's fused operators                       pieces
    rows         512 or more                                   512 or more in each
    ranks        of one host                                   up to 4, or without sequence parallelism
    inputs       one                                           any number
    FP8 scales   per tensor, or per row of a multiple of 4     all
    codes        FP8                                           all

Domino's collectives are whole, and overlap with the other half of a micro-batch on any ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any, Literal

from megascale.catalog.recipes import ROW, TENSOR, ScaleBlock
from megascale.config.finding import Finding, divisors
from megascale.config.parallel import ParallelConfig
from megascale.config.run import RunConfig
from megascale.layout.blocks import distinct_blocks
from megascale.layout.parts.linear import RowParallel

MIN_GPU_GEMM_ROWS = 512
"""Minimum rows of a GEMM beside a collective on a GPU. A piece reads the full weight, and its last wave of tiles fills
the GPU only partly: 256 rows by 4,608 columns (GPT-3 175B, tp 8) are 36 tiles of 128 x 256 for 132 multiprocessors.
With fewer rows a blocking collective followed by the full GEMM is faster. torch's own operators do the same for 8 ranks
of up to 256 rows (`_should_use_multimem_all_gather_matmul` in torch.distributed._symmetric_memory).
"""

MAX_GPU_P2P_RANKS = 4
"""Maximum ranks of a group whose pieces are point-to-point messages on GPUs. In larger groups the GEMMs have fewer
columns and their pieces need more rows; across hosts, a rank would send its shard to every rank of another host.
"""

SCALE_ALIGNMENT = 4  # row scales in 16 bytes: cuBLAS requires the fp32 row scales of a GEMM to be aligned to 16 bytes


Operand = Literal["input", "gradient"]

SENT: dict[Operand, str] = {
    "input": "collectives in forward",
    "gradient": "all-gathers of output gradients in backward",
}
"""Collectives that overlap with GEMMs other than wgrad, by the operand of those."""


def can_fuse(rows: int, inputs: int, blocks: Collection[ScaleBlock | None]) -> bool:
    """Return True if torch's fused operators run GEMMs of `rows` rows per rank, whose operands have scales for `blocks`
    (None: has no scales).
    """
    if rows < MIN_GPU_GEMM_ROWS or inputs > 1 or len(set(blocks)) > 1:
        return False
    (block,) = set(blocks)
    return block in (None, TENSOR) or (block == ROW and rows % SCALE_ALIGNMENT == 0)


def max_pieces(rows: int, batch: int, ranks: int, sharded: bool) -> int:
    """Return the maximum number of pieces of `rows` positions of `batch` tokens. Pieces of sharded activations are
    point-to-point messages to every rank; otherwise each piece is an all-reduce.
    """
    return 0 if sharded and ranks > MAX_GPU_P2P_RANKS else rows // -(-MIN_GPU_GEMM_ROWS // batch)


def overlaps_on_gpus(
    p: ParallelConfig, ranks_per_host: int, rows: int, operand: Operand, *, inputs: int = 1,
    fp8: Mapping[str, Any] | None = None,
) -> bool:  # fmt: skip
    """Return True if a tp collective overlaps with GEMMs of `rows` tokens per rank: on `inputs` inputs, or on an output
    gradient, which is gathered without scales if these do not serve its transpose. `fp8`: facts of the recipe of FP8
    GEMMs.
    """
    blocks, integers = {None}, False
    if fp8 is not None:
        spec = fp8[operand]
        blocks = {spec.block if operand == "input" or spec.serves_transpose else None, fp8["weight"].block}
        integers = spec.element == "int8"
    fused = p.sp and p.tp <= ranks_per_host and not integers and can_fuse(rows, inputs, blocks)
    return fused or max_pieces(rows, 1, p.tp, p.sp) > (0 if p.sp else 1)  # a single all-reduce follows the whole GEMM


def exposed_collectives(config: RunConfig, ranks_per_host: int) -> Iterator[Finding]:
    """Yield why GPUs leave collectives of sharded activations exposed; those beside wgrad always overlap with it."""
    p, micro, fp8 = config.parallel, config.batch.micro, config.fp8.facts if config.train.quantizes else None
    overlaps = partial(overlaps_on_gpus, p, ranks_per_host)
    if config.overlap.tp == "domino" and config.train.recompute == "full":
        message = "= full ends every layer with both halves: exposed are a layer's first and last tp collective"
        yield Finding("train.recompute", message, "train.recompute = selective, if memory allows")
    if p.tp == 1 or not p.sp or config.overlap.tp is not True:
        return
    least, exposed = MIN_GPU_GEMM_ROWS, f"with tp {p.tp} a GPU has exposed tp's"
    if (rows := config.row_tokens // p.tp) * micro < least:
        message = (
            f"= {micro} gives GEMMs of {rows * micro} rows, fewer than {least}: {exposed} {' and '.join(SENT.values())}"
        )
        yield Finding("batch.micro", message, _larger_micro(config, -(-least // rows)))
    if not overlaps(least, "input"):
        message = (
            f"= {p.tp} spans hosts, whose GPUs do not map each other's memory: {exposed} {' and '.join(SENT.values())}"
        )
        yield Finding("parallel.tp", message, f"parallel.tp = {math.gcd(p.tp, ranks_per_host)}")
        return
    if unscaled := [sent for operand, sent in SENT.items() if not overlaps(least, operand, fp8=fp8)]:
        message = f"= {config.fp8.recipe} has scales that torch's fused operators do not take: {exposed} "
        yield Finding("fp8.recipe", message + " and ".join(unscaled), "fp8.recipe = tensorwise or delayed")
    groups = (part for block in distinct_blocks(config.model)[0] for part in block if isinstance(part, RowParallel))
    if not overlaps(least, "input", inputs=max((len(group.layers) for group in groups), default=1)):
        message = f"= {config.model.block} reduces two layers' outputs at once: {exposed} reduce-scatters in forward"
        yield Finding("model.block", message, f"parallel.tp = {MAX_GPU_P2P_RANKS}, if memory allows")


def _larger_micro(config: RunConfig, least: int) -> str:
    """Suggest the smallest valid `batch.micro` of at least `least`."""
    from megascale.config.rules import RULES, run_rules, sections_of  # ranks need no rules

    rules = [rule for rule in RULES if "batch" in sections_of(rule)]
    for micro in divisors(config.batch.total // config.dp):
        batch = config.batch.model_copy(update={"micro": micro})
        if micro >= least and not any(run_rules(rules, {**dict(config), "batch": batch})):
            return f"batch.micro = {micro}, if memory allows"
    return f"batch.micro = {least} or more, with a larger batch.global"
