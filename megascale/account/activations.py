"""Activation memory of a micro-batch on one rank: bytes saved for backward, and transient bytes of running operations.

A model chunk is a sequence of units, each with a function here: embedding, blocks, head. A block is a list of parts
(`layout.blocks`). The forward of a part adds saved bytes (Korthikanti et al. 2022, section 4). Its backward allocates
dgrad and work space, then frees the output's gradient and the saved tensors. Transient bytes are the peak along this
walk with torch's unfused operators; fused kernels need less. docs/memory.md has the table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megascale.account.attended import expected_documents
from megascale.catalog.layers import NORMS
from megascale.catalog.precisions import PRECISIONS
from megascale.catalog.recipes import RECIPES
from megascale.config.run import RunConfig
from megascale.layout import blocks
from megascale.layout.loss import loss_chunks
from megascale.layout.recompute_policy import RecomputePolicy
from megascale.layout.tensors import padded_vocab
from megascale.layout.windows import QUERY_BLOCK, count_scores

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
        self.micro, self.tokens = config.batch.micro, config.batch.micro * m.seq_length
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
    forward = released = 0
    gradient = backward = sizes.stream  # of the block's result
    for part in reversed(list(_Parts(sizes, fp8, recompute).account(block))):
        forward = max(forward, part.forward - released)
        backward = max(backward, gradient + part.backward - released)
        gradient, released = gradient + part.gradient, released + part.saved
    if recompute.full:  # the recomputed forward's saved tensors exist in this block's backward only
        released, backward = sizes.stream, released + max(forward, backward)
    elements = [layer.weight_numel // sizes.tp for layer in blocks.linears(block)]
    cast = CAST - PRECISIONS["fp8"].facts["fp8_weight_bytes"] + (1 + sizes.compute if sizes.grain == "row" else 0)
    casting = cast * max(elements) if fp8 else 0
    return UnitBytes(released, forward, backward, elements=sum(elements), casting=casting)


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


class _Parts:
    """Parts of blocks. `tensorwise`: one FP8 scale serves forward and wgrad, so saved inputs `shrink` to FP8."""

    def __init__(self, sizes: ActivationSizes, fp8: bool, recompute: RecomputePolicy) -> None:
        self.sizes, self.fp8 = sizes, fp8
        self.recompute, self.tensorwise = recompute, fp8 and sizes.grain == "tensor"
        self.shrink = sizes.compute if self.tensorwise else 1

    def account(self, block: blocks.BlockSpec) -> Iterator[UnitBytes]:
        """Account for a block's parts. Attention and activations are the `sources` of row-parallel layers' inputs."""
        sizes, sources = self.sizes, list[blocks.AttentionSpec | blocks.ActivationSpec]()
        for before, part, after in zip((None, *block), block, (*block[1:], None), strict=False):
            match part:
                case blocks.NormSpec():
                    gradient = sizes.stream - sizes.branch if isinstance(before, blocks.RowParallel) else -sizes.stream
                    saved = sizes.norm_saved - (sizes.stream if part.shares_input else 0)
                    yield UnitBytes(saved, sizes.stream, sizes.norm_backward, gradient)
                case blocks.ColumnParallel():
                    yield self.columns(part, after_norm=isinstance(before, blocks.NormSpec))
                case blocks.AttentionSpec():
                    sources.append(part)
                    yield self.attention(part)
                case blocks.ActivationSpec():
                    sources.append(part)
                    inputs, outputs = sizes.sharded(part.inputs), sizes.sharded(part.outputs)
                    gate = 2 * outputs if inputs > outputs else 0  # two tensors in the backward of SwiGLU
                    yield UnitBytes(inputs, outputs, inputs + gate, inputs - outputs)
                case blocks.RowParallel():
                    result = sizes.stream if isinstance(after, blocks.NormSpec) else sizes.branch
                    yield self.rows(part, sources, result)
                    sources = []
                case blocks.ResidualAdd():
                    yield UnitBytes(sizes.mask, 2 * sizes.stream, 2 * sizes.branch, sizes.branch)

    def columns(self, part: blocks.ColumnParallel, after_norm: bool) -> UnitBytes:
        """Account for column-parallel layers. The input is all-gathered for wgrad while dgrad is reduce-scattered.

        Without a norm before, the input is the residual stream, and dgrad is added to the gradient of the stream.
        """
        sizes, outputs = self.sizes, self.sizes.sharded(sum(layer.outputs for layer in part.layers))
        recomputed = sizes.stream if after_norm and self.recompute.norm and not self.tensorwise else 0
        casts = outputs // sizes.compute if self.fp8 else 0
        wgrad = max(self.wgrad(layer, sizes.sharded(layer.outputs)) for layer in part.layers)
        backward = recomputed + max(casts + 2 * sizes.gathered + sizes.stream + wgrad, CAST * casts)
        saved = 0 if recomputed else sizes.stream // self.shrink
        return UnitBytes(saved, sizes.gathered + outputs, backward, (sizes.stream if after_norm else 0) - outputs)

    def attention(self, part: blocks.AttentionSpec) -> UnitBytes:
        """Account for attention: q, k, v, the result and a log-sum-exp per query; with a window, masks for blocks
        of queries; with dropout, where scores are formed, weights before and after dropout, and k, v of every head;
        with documents, a result for each and all of them together.
        """
        sizes, s = self.sizes, self.sizes.model.seq_length
        qkv, result = sizes.sharded(part.qkv_width), sizes.sharded(part.out_width)
        heads, weights = part.heads // sizes.tp, 0
        normed, forming = self.qk_norms(part)
        # whether the result is not the next layer's saved input
        apart = self.tensorwise or sizes.documents or (part.window and not part.softcap)
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
        elif part.window:
            masked = [length for length in sizes.documents or [s] if length > part.window]
            tensors += sum(count_scores(length, part.window) for length in masked) * sizes.compute
        saved, recomputed = (qkv, tensors) if self.recompute.attention else (tensors, 0)
        forward = tensors - saved + 2 * weights + 2 * qkv  # before and after the rotation
        backward = recomputed + qkv + max((2 if recomputed else 1) * weights, forming)
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
