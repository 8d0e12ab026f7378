"""Activation memory of a micro-batch on one rank: bytes saved for backward, and transient bytes of running operations.

A model chunk is a sequence of units, each with a function here: embedding, blocks, head. A block is a list of parts
(`layout.blocks`). The forward of a part adds saved bytes (Korthikanti et al. 2022, section 4). Its backward allocates
dgrad and work space, then frees the output's gradient and the saved tensors. Transient bytes are the peak along this
walk with torch's unfused operators; fused kernels need less. docs/memory.md has the table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import copy
from typing import NamedTuple

from megascale.catalog.layers import NORMS
from megascale.catalog.precisions import PRECISIONS
from megascale.catalog.recipes import RECIPES
from megascale.config.run import RunConfig
from megascale.layout import blocks
from megascale.layout.loss import loss_chunks
from megascale.layout.recompute_policy import NO_RECOMPUTE, RecomputePolicy
from megascale.layout.tensors import padded_vocab
from megascale.layout.windows import QUERY_BLOCK, count_scores
from megascale.plan.account.attended import expected_documents

TOKEN, CAST = 8, 8  # bytes of a token id; of quantizing an element to FP8: fp32 before and after scaling


class UnitBytes(NamedTuple):
    """Bytes of a unit, or of a block's part: `saved` for backward; transient peaks of `forward`, of `backward` and of
    `casting` weights to FP8; `gradient`, the input's gradient minus the output's. `elements`: weights of the unit.
    """

    saved: int
    forward: int
    backward: int
    gradient: int = 0
    elements: int = 0
    casting: int = 0


class ActivationSizes:
    """Sizes shared by all units. `tokens` of a micro-batch, `local` in the rank's residual stream, fewer if sequence
    parallelism has `cut` the stream. Bytes of an element: `compute` dtype, `wide` accumulation dtype (`narrow`: compute
    < wide). `documents`: their expected lengths in a row with a document mask. Bytes of the residual stream: `full` for
    all tokens, `stream` for local ones, `gathered` by an all-gather; with dropout the gradient of a residual `branch`,
    and the `mask`.
    """

    def __init__(self, config: RunConfig) -> None:
        p, m = config.parallel, config.model
        facts, self.grain = PRECISIONS[config.train.precision].facts, RECIPES[config.fp8.recipe].facts["granularity"]
        self.model, self.tp = m, p.tp
        self.micro, self.tokens = config.batch.micro, config.batch.micro * config.row_tokens
        self.cp_heads, self.gathers = p.cp_heads, p.cp_mode == "allgather"
        self.cp_keys = max(p.cp_keys, 1 + config.attends_in_parts)  # a chunk attends to its own keys and to others
        self.compute, self.wide = int(facts["compute_bytes"]), int(facts["accumulate_bytes"])
        self.narrow, self.cut = self.compute < self.wide, p.sp and p.tp > 1
        self.local = self.tokens // self.tp if self.cut else self.tokens
        self.full, self.stream = (tokens * m.hidden_size * self.compute for tokens in (self.tokens, self.local))
        self.gathered, self.branch = self.full if self.cut else 0, self.stream if m.dropout else 0
        self.mask = self.branch // self.compute  # a byte an element
        self.documents = expected_documents(config) if config.data.mask == "document" else []
        rms, wide_stream = not NORMS[m.norm].facts["mean"], self.local * m.hidden_size * self.wide
        self.norm_saved = self.stream + self.local * self.wide * (1 if rms else 2)  # input and statistics
        copies = (4 if rms else 3) * wide_stream + (self.stream if rms else 0)
        self.norm_backward = copies if self.narrow else (3 if rms else 1) * self.stream
        self.vocabulary = padded_vocab(m, self.tp) // self.tp * m.hidden_size  # elements

    def of_tile(self, tiles: int) -> ActivationSizes:
        """Return the sizes of the largest of `tiles` of tokens."""
        rows = self.local // self.micro
        share, tile = math.ceil(rows / tiles) / rows, copy(self)
        for name in ("tokens", "local", "full", "stream", "gathered", "branch", "mask"):
            setattr(tile, name, round(share * getattr(self, name)))
        return tile

    def sharded(self, width: int) -> int:
        """Bytes of a tensor [tokens, width / tp]."""
        return self.tokens * width // self.tp * self.compute


def angle_bytes(sizes: ActivationSizes) -> UnitBytes:
    """Account for the rotary angles of a micro-batch with documents, which all of its layers share."""
    m = sizes.model
    tables = (1 if m.local_rope_theta is None else 2) if sizes.documents and m.position == "rope" else 0
    return UnitBytes(tables * sizes.tokens * m.rotary_dim * sizes.wide, 0, 0)


def block_bytes(sizes: ActivationSizes, block: blocks.BlockSpec, fp8: bool, recompute: RecomputePolicy) -> UnitBytes:
    """Account for a block. `fp8`: the linear layers run FP8 GEMMs."""
    parts = _Parts(sizes, fp8, recompute).account(blocks.tile_mlp(block, recompute.mlp_tiles))
    released, forward, backward = _walk(list(parts), sizes.stream)
    if recompute.full:  # the recomputed forward's saved tensors exist in this block's backward only
        released, backward = sizes.stream, released + max(forward, backward)
    if recompute.offload:  # on the device: the input, in forward the one before it, in backward two on their way
        released, forward, backward = 0, forward + 2 * sizes.stream, backward + 3 * sizes.stream
    elements = [layer.weight_numel // sizes.tp for layer in blocks.linears(block)]
    cast = CAST - PRECISIONS["fp8"].facts["fp8_weight_bytes"] + (1 + sizes.compute if sizes.grain == "row" else 0)
    casting = cast * max(elements) if fp8 else 0
    return UnitBytes(released, forward, backward, elements=sum(elements), casting=casting)


def _walk(parts: Sequence[UnitBytes], gradient: int) -> tuple[int, int, int]:
    """Walk backward through parts, from a result's `gradient`: bytes saved, and the peaks of forward and backward."""
    forward, backward, released = 0, gradient, 0
    for part in reversed(parts):
        forward = max(forward, part.forward - released)
        backward = max(backward, gradient + part.backward - released)
        gradient, released = gradient + part.gradient, released + part.saved
    return released, forward, backward


def embedding_bytes(sizes: ActivationSizes) -> UnitBytes:
    """Account for the embedding. Backward forms the gradient of all tokens, also in the accumulation dtype."""
    saved = sizes.tokens * (TOKEN + (1 if sizes.tp > 1 else 0)) + sizes.mask  # with tp a mask of other ranks' tokens
    backward = sizes.stream + sizes.full + sizes.full // sizes.compute * sizes.wide
    positions = sizes.model.seq_length * sizes.model.hidden_size if sizes.model.position == "learned" else 0
    return UnitBytes(saved, 2 * sizes.stream, backward, elements=sizes.vocabulary + positions)


def head_bytes(sizes: ActivationSizes) -> UnitBytes:
    """Account for the final norm, head and loss. Forward computes the head's dgrad and wgrad by chunks of tokens."""
    hidden, rows = sizes.model.hidden_size, sizes.local // sizes.micro
    chunks = loss_chunks(rows, sizes.tokens, sizes.vocabulary // hidden)
    chunk = math.ceil(rows / chunks) * (sizes.tokens // rows) * sizes.compute
    loss = chunk * (sizes.vocabulary // hidden + (3 if sizes.cut else 1) * hidden)  # logits, the gradient of the input
    loss += sizes.vocabulary * sizes.compute if sizes.narrow else 0
    loss += sizes.stream * (chunks - 1) // chunks  # gradients of the input from earlier chunks
    return UnitBytes(sizes.stream + sizes.norm_saved, loss, sizes.norm_backward, elements=sizes.vocabulary)


def key_store_bytes(config: RunConfig, layers: int, tokens: int) -> int:
    """Size the keys and values of chunks that share them, of `tokens` in `layers` layers, with their gradients in the
    accumulation dtype.
    """
    m, facts = config.model, PRECISIONS[config.train.precision].facts
    element = int(facts["compute_bytes"]) + int(facts["accumulate_bytes"])
    return tokens * layers * 2 * m.num_kv_heads * m.head_dim * element // config.parallel.tp


class _Parts:
    """Parts of blocks. `tensorwise`: one FP8 scale serves forward and wgrad, so saved inputs `shrink` to FP8."""

    def __init__(self, sizes: ActivationSizes, fp8: bool, recompute: RecomputePolicy) -> None:
        self.sizes, self.fp8 = sizes, fp8
        self.recompute, self.tensorwise = recompute, fp8 and sizes.grain == "tensor"
        self.shrink = sizes.compute if self.tensorwise else 1

    def account(self, block: blocks.BlockSpec) -> Iterator[UnitBytes]:
        """Account for a block's parts. Attention and activations are the `sources` of row-parallel layers' inputs."""
        sizes, sources = self.sizes, list[blocks.AttentionSpec | blocks.ActivationSpec]()
        shared = any(part.shares_input for part in blocks.parts_of_type(block, blocks.TiledMLP))
        for before, part, after in zip((None, *block), block, (*block[1:], None), strict=False):
            match part:
                case blocks.NormSpec():
                    after_branch = isinstance(before, blocks.RowParallel | blocks.TiledMLP) and not part.shares_input
                    gradient = sizes.stream - sizes.branch if after_branch else -sizes.stream
                    saved = sizes.norm_saved - (sizes.stream if part.shares_input else 0)
                    yield UnitBytes(saved, sizes.stream, sizes.norm_backward, gradient)
                case blocks.ColumnParallel():
                    yield self.columns(part, isinstance(before, blocks.NormSpec), holds_gradient=not shared)
                case blocks.AttentionSpec():
                    sources.append(part)
                    yield self.attention(part)
                case blocks.ActivationSpec():
                    sources.append(part)
                    yield self.activation(part)
                case blocks.TiledMLP():
                    result = sizes.stream if isinstance(after, blocks.NormSpec) else sizes.branch
                    yield self.tiled(part, result)
                case blocks.RowParallel():
                    result = sizes.stream if isinstance(after, blocks.NormSpec) else sizes.branch
                    yield self.rows(part, sources, result)
                    sources = []
                case blocks.ResidualAdd():
                    yield UnitBytes(sizes.mask, 2 * sizes.stream, 2 * sizes.branch, sizes.branch)

    def activation(self, part: blocks.ActivationSpec) -> UnitBytes:
        """Account for the activation of an MLP."""
        inputs, outputs = self.sizes.sharded(part.inputs), self.sizes.sharded(part.outputs)
        gate = 2 * outputs if inputs > outputs else 0  # two tensors in the backward of SwiGLU
        return UnitBytes(inputs, outputs, inputs + gate, inputs - outputs)

    def tiled(self, part: blocks.TiledMLP, result: int) -> UnitBytes:
        """Account for an MLP in tiles: its input is saved, unless a norm recomputes it, and its result and its input's
        gradient are whole. The backward of a tile begins with its recomputation.
        """
        sizes, tile = self.sizes, _Parts(self.sizes.of_tile(part.tiles), self.fp8, NO_RECOMPUTE)
        columns, rows = tile.columns(part.columns, True), tile.rows(part.rows, [part.activation], 0)
        saved, forward, backward = _walk([columns, tile.activation(part.activation), rows], 0)
        recomputed = part.after_norm and self.recompute.norm
        again = saved + max(forward, backward) + (tile.sizes.stream if recomputed else 0)
        kept = 0 if recomputed or part.shares_input else sizes.stream
        gradient = (sizes.stream if part.after_norm else 0) - result
        return UnitBytes(kept, sizes.stream + saved + forward, sizes.stream + again, gradient)

    def columns(self, part: blocks.ColumnParallel, after_norm: bool, holds_gradient: bool = True) -> UnitBytes:
        """Account for column-parallel layers. The input is all-gathered for wgrad while dgrad is reduce-scattered.

        Without a norm before, the input is the residual stream, and dgrad is added to the gradient of the stream.
        Without `holds_gradient` it is added to that of an MLP in tiles.
        """
        sizes, outputs = self.sizes, self.sizes.sharded(sum(layer.outputs for layer in part.layers))
        recomputed = sizes.stream if after_norm and self.recompute.norm and not self.tensorwise else 0
        casts = outputs // sizes.compute if self.fp8 else 0
        wgrad = max(self.wgrad(layer, sizes.sharded(layer.outputs)) for layer in part.layers)
        backward = recomputed + max(casts + 2 * sizes.gathered + sizes.stream + wgrad, CAST * casts)
        saved = 0 if recomputed else sizes.stream // self.shrink
        gradient = sizes.stream if after_norm and holds_gradient else 0
        return UnitBytes(saved, sizes.gathered + outputs, backward, gradient - outputs)

    def attention(self, part: blocks.AttentionSpec) -> UnitBytes:
        """Account for attention: q, k, v, the result and a log-sum-exp per query; with a window, masks for blocks
        of queries; with dropout, where scores are formed, weights before and after dropout, and k, v of every head;
        with documents, a result for each and all of them together.
        """
        sizes, s = self.sizes, self.sizes.model.seq_length
        qkv, result = sizes.sharded(part.qkv_width), sizes.sharded(part.out_width)
        heads, weights = part.heads // sizes.tp, 0
        normed, forming = self.qk_norms(part)
        in_pieces = sizes.cp_keys == 1 and (sizes.documents or (part.window and not part.softcap))
        apart = sizes.cp_heads > 1 or self.tensorwise or in_pieces  # the result is not the next layer's saved input
        tensors = qkv + normed + sizes.tokens * heads * sizes.wide + (result if apart else 0)
        if sizes.model.dropout:
            weights = sizes.micro * heads * s * s * sizes.compute
            capped = weights if part.softcap else 0
            tensors = qkv + normed + 2 * result + 2 * weights + capped + weights // sizes.compute + s * s
        elif part.softcap:
            longest = max(sizes.documents, default=s)
            keys = min(longest, (part.window or longest) + QUERY_BLOCK)
            scores = QUERY_BLOCK * keys * sizes.micro * heads * sizes.wide
            forming = max(forming, 4 * scores + qkv // sizes.compute * sizes.wide)
        elif part.window and sizes.cp_keys == 1:
            masked = [length for length in sizes.documents or [s] if length > part.window]
            tensors += sum(count_scores(length, part.window) for length in masked) * sizes.compute
        if sizes.cp_heads * sizes.cp_keys > 1:
            return self.shared_attention(part, tensors - qkv, forming)
        saved, recomputed = (qkv, tensors) if self.recompute.attention else (tensors, 0)
        forward = tensors - saved + 2 * weights + 2 * qkv  # before and after the rotation
        backward = recomputed + qkv + max((2 if recomputed else 1) * weights, forming)
        return UnitBytes(saved, forward, backward, qkv - result)

    def shared_attention(self, part: blocks.AttentionSpec, saved: int, forming: int) -> UnitBytes:
        """Account for attention of ranks that share sequences. `saved`: by attention without an exchange, besides q, k
        and v. Exchanges of heads need copies of what is sent and received, of which the received ones are saved. With
        exchanged keys and values the own ones are copied, others visit, and sums are in the accumulation dtype.
        """
        sizes = self.sizes
        qkv, result = sizes.sharded(part.qkv_width), sizes.sharded(part.out_width)
        pair = 2 * sizes.tokens * part.head_dim * sizes.compute  # bytes of k and v, of one head
        keys = part.kv_heads // sizes.tp
        repeated, pair = pair * (max(keys, sizes.cp_heads) - keys), pair * max(keys, sizes.cp_heads)
        received = qkv + repeated
        tensors, sent = received + saved, received if sizes.cp_heads > 1 else 0
        visiting, sums, wide = 0, 0, sizes.wide / sizes.compute
        if sizes.cp_keys > 1:
            tensors += pair
            visiting = 2 * pair * (sizes.cp_keys if sizes.gathers else 1)  # as they came and in order, or now and next
            sums = int(wide * (result + pair * (2 * sizes.cp_keys if sizes.gathers else 3)))
            sums -= visiting // 2 if sizes.gathers else 0
        saved, recomputed = (qkv, tensors) if self.recompute.attention else (tensors, 0)
        forward = tensors - saved + 2 * max(qkv, sent) + visiting + (int(wide * result) if visiting else 0)
        backward = recomputed + received + max(forming, visiting + sums, sent)
        return UnitBytes(saved, forward, backward, qkv - result)

    def qk_norms(self, part: blocks.AttentionSpec) -> tuple[int, int]:
        """Size what norms of q and k save, their inputs and statistics, and what their backward allocates."""
        if not part.qk_norms:
            return 0, 0
        sizes, width = self.sizes, (part.heads + part.kv_heads) * part.head_dim
        rows = (part.heads + part.kv_heads) // sizes.tp if part.qk_norm == "head" else 2
        wide = sizes.sharded(width) // sizes.compute * sizes.wide
        return sizes.sharded(width) + sizes.tokens * rows * sizes.wide, 3 * wide

    def rows(self, part: blocks.RowParallel, sources: Sequence[blocks.BlockPart], result: int) -> UnitBytes:
        """Account for row-parallel layers. The output's gradient is all-gathered from `result` bytes per rank."""
        sizes, recomputes = self.sizes, self.recompute.activation and not self.tensorwise
        inputs = [sizes.sharded(layer.inputs) for layer in part.layers]
        pairs = zip(inputs, sources, strict=True)
        recomputed = sum(size for size, source in pairs if recomputes and isinstance(source, blocks.ActivationSpec))
        wgrad = max(map(self.wgrad, part.layers, inputs))
        reduced = sizes.full + (sizes.stream + sizes.full if sizes.cut else 0)
        backward = recomputed + sum(inputs) + sizes.gathered + wgrad
        saved = (sum(inputs) - recomputed) // self.shrink
        return UnitBytes(saved, sizes.stream + recomputed + reduced, backward, sum(inputs) - result)

    def wgrad(self, layer: blocks.LinearSpec, nbytes: int) -> int:
        """Size wgrad's result and, in FP8, the operands of `full` and `nbytes` bytes quantized along the tokens."""
        sizes, elements = self.sizes, layer.weight_numel // self.sizes.tp
        if not self.fp8:
            return elements * sizes.compute if sizes.narrow else 0
        first, second = sizes.full // sizes.compute, nbytes // sizes.compute
        cast = 1 if self.tensorwise else CAST + sizes.compute
        result = elements * sizes.wide * (3 if sizes.grain == "block" else 1)  # two partial results and their sum
        return max(cast * first, first + max(cast * second, second + result))
