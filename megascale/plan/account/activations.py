"""Activation memory of a micro-batch on one rank: bytes saved for backward, and transient bytes of running operations.

A model chunk is a sequence of units, each with a function here: embedding, blocks, head. A block is a list of parts
(`layout.parts`). The forward of a part adds saved bytes (Korthikanti et al. 2022, section 4). Its backward allocates
dgrad and work space, then frees the output's gradient and the saved tensors. Transient bytes are the peak along this
walk with torch's unfused operators; fused kernels need less. docs/memory.md has the table. A split backward leaves the
inputs of linear layers and the gradients of their outputs for W.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from megascale.catalog.recipes import QuantizerSpec
from megascale.layout.blocks import BlockSpec, distinct_blocks, linears, surroundings, tile_mlp
from megascale.layout.loss import BLOCK_BYTES, loss_chunks
from megascale.layout.parts.microbatch_sizes import MicroBatchSizes, UnitBytes, walk
from megascale.layout.recompute_policy import RecomputePolicy
from megascale.layout.tensors import padded_vocab

TOKEN = 8  # bytes of a token id

Shares = tuple[float, float]
"""Bytes in gradient shards of an element of dense weights, and of experts."""


def angle_bytes(sizes: MicroBatchSizes) -> UnitBytes:
    """Account for the rotary angles of a micro-batch with documents, which all of its layers share."""
    m = sizes.model
    tables = (1 if m.local_rope_theta is None else 2) if sizes.documents and m.position == "rope" else 0
    return UnitBytes(tables * sizes.tokens * m.rotary_dim * sizes.wide, 0, 0)


def block_bytes(sizes: MicroBatchSizes, block: BlockSpec, fp8: bool, recompute: RecomputePolicy) -> UnitBytes:
    """Account for a block. `fp8`: the linear layers run FP8 GEMMs."""
    of_block = replace(sizes, fp8=fp8, recompute=recompute)
    tiled = tile_mlp(block, recompute.mlp_tiles, recompute.stored_tiles)
    parts = [part.memory(of_block, at) for part, at in surroundings(tiled)]
    walked = walk(parts, sizes.stream, sizes.split)
    saved, forward, backward = walked[:3]
    stay = sum(part.small for part in parts)
    if recompute.full:  # the recomputed forward's saved tensors exist in this block's backward only
        stay = sum(part.kept(of_block) for part in block)
        held = sizes.stream if sizes.model.residual_tau else 0  # the result's gradient, beside its weighted one
        saved, backward = sizes.stream + stay, saved + max(forward, backward + held)
    moved = saved - stay if recompute.store != "device" else 0
    saved, forward, backward = saved - moved, forward + moved, backward + moved
    elements = [layer.weight_numel // sizes.tp for layer in linears(block)]
    weight: QuantizerSpec = sizes.recipe["weight"]
    turned = 0 if weight.block.serves_transpose else 1 + sizes.compute
    casting = int((weight.cast_bytes - sizes.recipe["weight_bytes"] + turned) * max(elements)) if fp8 else 0
    if fp8 and sizes.cast_where_used:  # the operands of the largest weight, of codes a transpose in backward
        forward = forward if weight.gathers_codes else max(forward + max(elements), casting)
        backward, casting = max(backward + max(elements), casting), 0
    experts = sum(part.expert_numel for part in block) // sizes.ep
    whole = sum(part.whole_numel for part in block)
    weights = sum(elements) + whole + experts
    return UnitBytes(saved, forward, backward, 0, weights, casting, experts, walked.left, walked.wgrad, moved=moved)


def layer_bytes(sizes: MicroBatchSizes, fp8: range) -> Callable[[int, RecomputePolicy], UnitBytes]:
    """Return a function that accounts for a layer by its number; equal blocks are walked once. `fp8`: the layers with
    FP8 GEMMs.
    """
    blocks, numbers = distinct_blocks(sizes.model)
    of_kind = cache(lambda number, quantized, recompute: block_bytes(sizes, blocks[number], quantized, recompute))
    return lambda layer, recompute: of_kind(numbers[layer], layer in fp8, recompute)


def embedding_bytes(sizes: MicroBatchSizes) -> UnitBytes:
    """Account for the embedding. Backward forms the gradient of all tokens, also in the accumulation dtype."""
    saved = sizes.tokens * (TOKEN + (1 if sizes.tp > 1 else 0)) + sizes.mask  # with tp a mask of other ranks' tokens
    backward = sizes.stream + sizes.full + sizes.full // sizes.compute * sizes.wide
    positions = sizes.model.seq_length * sizes.model.hidden_size if sizes.model.position == "learned" else 0
    left, wide = saved + sizes.full if sizes.split else 0, backward - sizes.stream - sizes.full
    elements = _vocabulary(sizes) + positions
    return UnitBytes(saved, 2 * sizes.stream, backward, elements=elements, left=left, wgrad=wide)


def head_bytes(sizes: MicroBatchSizes, soft: int = 0) -> UnitBytes:
    """Account for the final norm, head and loss. Forward computes the head's dgrad and wgrad by chunks of tokens. With
    `soft` tokens of a teacher for a label a chunk has their columns, logits and shares.
    """
    hidden, rows, vocabulary = sizes.model.hidden_size, sizes.local // sizes.batch, _vocabulary(sizes)
    chunks = loss_chunks(rows, sizes.tokens, vocabulary // hidden)
    chunk = math.ceil(rows / chunks) * (sizes.tokens // rows) * sizes.compute
    # logits, the gradient of the input, and of a gathered one the input, and the rank's part of the gradient
    loss = chunk * (vocabulary // hidden + hidden) + (chunk * hidden + chunk * hidden // sizes.tp if sizes.cut else 0)
    loss += chunk // sizes.compute * soft * (TOKEN + 4 * sizes.wide)
    loss += vocabulary * sizes.compute if sizes.narrow else 0
    loss += sizes.stream * (chunks - 1) // chunks  # gradients of the input from earlier chunks
    return UnitBytes(sizes.stream + sizes.norm_saved, loss, sizes.norm_backward, elements=vocabulary)


def stage_ends(sizes: MicroBatchSizes) -> tuple[UnitBytes, UnitBytes]:
    """Account for the units of the first and of the last stage if all stages share the vocabulary: what follows the
    lookup of embeddings, and the final norm.
    """
    positions = embedding_bytes(sizes).elements - _vocabulary(sizes)
    first = UnitBytes(sizes.mask, 2 * sizes.stream, sizes.stream, elements=positions)
    return first, UnitBytes(sizes.stream + sizes.norm_saved, sizes.stream, sizes.norm_backward)


def vocabulary_bytes(sizes: MicroBatchSizes, stages: int, barriers: int) -> UnitBytes:
    """Account for the passes over the rows of one of all stages: logits are saved from VS to VT, and with one barrier
    the gradient of the hidden state.
    """
    columns, wide = _vocabulary(sizes, stages) // sizes.model.hidden_size, sizes.full // sizes.compute * sizes.wide
    saved = sizes.full * (3 - barriers) + sizes.tokens * (columns * sizes.compute + 3 * sizes.tp * stages * sizes.wide)
    wgrad = _vocabulary(sizes, stages) * sizes.compute if sizes.narrow else 0
    backward = 2 * wide + sizes.full if barriers == 1 else sizes.full + (sizes.stream if sizes.cut else 0)
    block = min(BLOCK_BYTES, sizes.tokens * columns * sizes.wide)  # of the softmax
    return UnitBytes(saved, block, max(block, backward, wgrad + (wide if barriers == 1 else sizes.full)))


def _vocabulary(sizes: MicroBatchSizes, stages: int = 1) -> int:
    """Count the elements of the embedding on a tp rank of one of the `stages` that share it."""
    ranks = sizes.tp * stages
    return padded_vocab(sizes.model, ranks) // ranks * sizes.model.hidden_size


def with_copies(units: Sequence[UnitBytes]) -> list[UnitBytes]:
    """Return a chunk's units with the tensors of other units that are on their way: of the last one before with any,
    which leave until the end of the next, and come back from the beginning of its backward. Beside the first those of
    the last leave, of another micro-batch.
    """
    found, leaving, coming = list[UnitBytes](), next((unit.moved for unit in reversed(units) if unit.moved), 0), 0
    for unit in units:
        found.append(unit._replace(forward=unit.forward + leaving, backward=unit.backward + coming))
        leaving, coming = unit.moved or leaving, unit.moved or coming
    return found


def chunk_bytes(units: Sequence[UnitBytes], shares: Shares = (0.0, 0.0), stay: bool = False) -> UnitBytes:
    """Account for a chain of units: a unit's backward begins after later units freed their saved tensors, but for what
    they have left, and ends with gradient shards (`shard_bytes`), freed at once or at the chain's end (`stay`). The
    chain's `moved` bytes are of the last unit with any, which stay until another moves.
    """
    saved = forward = backward = casting = left = wgrad = waiting = 0
    for unit in reversed(units):
        shard = shard_bytes(unit, shares)
        forward, casting = max(forward, unit.forward - saved), max(casting, unit.casting - saved)
        backward = max(backward, unit.backward + left - saved, shard - unit.saved - saved)
        wgrad = max(wgrad, unit.wgrad - waiting, shard - unit.left - waiting)
        saved, left = saved + unit.saved - (shard if stay else 0), left + unit.left
        waiting += unit.left - (shard if stay else 0)
    elements, experts = sum(unit.elements for unit in units), sum(unit.experts for unit in units)
    moved = next((unit.moved for unit in reversed(units) if unit.moved), 0)
    return UnitBytes(saved, forward, backward, 0, elements, casting, experts, left, wgrad, moved=moved)


class UnitGradients(NamedTuple):
    """Bytes of a unit's gradients: unsharded, in this rank's shard, and in reduction after its backward."""

    full: int
    shard: int
    reducing: int


def by_unit(works: Sequence[tuple[int, int]], gradients: Sequence[UnitGradients]) -> tuple[int, int]:
    """Size the transient bytes of a backward with unsharded gradients of a unit, and of the one before in reduction: of
    a backward that begins without any, and beside those that the last one left, which end behind its first unit.
    `works`: by unit, transient bytes and those that it frees.
    """
    peaks, freed, beside = list[int](), 0, 0
    for (work, frees), (full, shard, reducing) in zip(reversed(works), reversed(gradients), strict=True):
        peaks.append(max(work, shard - frees) + full + beside - freed)
        freed, beside = freed + frees, reducing
    return max(peaks), max(peaks[0], max(peaks) - gradients[0].reducing)


def shard_bytes(unit: UnitBytes, shares: Shares) -> int:
    """Size the gradient shards of a unit."""
    dense, experts = shares
    return int(dense * (unit.elements - unit.experts) + experts * unit.experts)


def key_store_bytes(sizes: MicroBatchSizes, layers: Iterable[int], tokens: int, chunks: int) -> int:
    """Size the keys and values, or the states, that the `chunks` of a sequence of `tokens` share in `layers`."""
    blocks, numbers = distinct_blocks(sizes.model)
    return sum(part.chunk_store(sizes, tokens, chunks) for layer in layers for part in blocks[numbers[layer]])
