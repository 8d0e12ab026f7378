"""Bytes of activations on one rank for one micro-batch: saved from a forward to its backward, and transient, while one
of them runs.

A chunk is a sequence of units: the embedding, blocks, the head. A block is the list of its parts (`layout.blocks`). The
forward of a part adds to the saved bytes (Korthikanti et al. 2022, section 4); its backward forms the gradient of its
input, needs work space, and releases the gradient of its output and its saved tensors. Transient bytes are the most
along this walk, with torch's operators one by one: fused kernels need less. docs/memory.md has the table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from megascale.catalog.precisions import PRECISIONS
from megascale.catalog.recipes import RECIPES
from megascale.config.run import RunConfig
from megascale.layout.blocks import Activation, Attention, Block, Columns, Linear, Norm, Residual, Rows, linears
from megascale.layout.loss import loss_chunks
from megascale.layout.recompute import Recompute
from megascale.layout.tensors import padded_vocab
from megascale.layout.windows import scores

TOKEN, CAST = 8, 8
"""Bytes of a token id, and transient bytes of an element that is cast to FP8: fp32 before and after its scaling."""


class UnitBytes(NamedTuple):
    """Bytes of a unit, or of a part of a block: `saved` from its forward to its backward; the most beside while its
    `forward` runs, while its `backward` runs, and while its weights are cast to FP8 (`casting`). `gradient`: by how
    much the gradient of its input is larger than that of its output. `elements`: of its weights.
    """

    saved: int
    forward: int
    backward: int
    gradient: int = 0
    elements: int = 0
    casting: int = 0


class Sizes:
    """Sizes that all units share. `local`: tokens of a rank between the layers, fewer than `tokens` where the residual
    stream is `cut` along the sequence. `compute`, `wide`: bytes of an element of an activation, and in the accumulation
    dtype, which is wider if `narrow`. In bytes: the residual stream of all tokens (`full`) and of a rank (`stream`); an
    all-gathered one (`gathered`); the copied gradient of a branch with dropout (`branch`), and its `mask`.
    """

    def __init__(self, config: RunConfig) -> None:
        p, m = config.parallel, config.model
        facts, self.grain = PRECISIONS[config.train.precision].facts, RECIPES[config.fp8.recipe].facts["grain"]
        self.model, self.tp = m, p.tp
        self.micro, self.tokens = config.batch.micro, config.batch.micro * m.seq_length
        self.compute, self.wide = int(facts["compute_bytes"]), int(facts["accumulate_bytes"])
        self.narrow, self.cut = self.compute < self.wide, p.sp and p.tp > 1
        self.local = self.tokens // self.tp if self.cut else self.tokens
        self.full, self.stream = (tokens * m.hidden_size * self.compute for tokens in (self.tokens, self.local))
        self.gathered, self.branch = self.full if self.cut else 0, self.stream if m.dropout else 0
        self.mask = self.branch // self.compute  # a byte an element
        rms, wide_stream = m.norm == "rmsnorm", self.local * m.hidden_size * self.wide
        self.norm_saved = self.stream + self.local * self.wide * (1 if rms else 2)  # its input, its statistics
        copies = (4 if rms else 3) * wide_stream + (self.stream if rms else 0)
        self.norm_backward = copies if self.narrow else (3 if rms else 1) * self.stream
        self.vocabulary = padded_vocab(m, self.tp) // self.tp * m.hidden_size  # elements

    def sharded(self, width: int) -> int:
        """Bytes of a tensor [tokens, width / tp]."""
        return self.tokens * width // self.tp * self.compute


def block_bytes(sizes: Sizes, block: Block, fp8: bool, recompute: Recompute) -> UnitBytes:
    """Account for a block. `fp8`: its linear layers multiply in FP8."""
    forward = released = 0
    gradient = backward = sizes.stream  # of the block's result
    for part in reversed(list(_Parts(sizes, fp8, recompute).account(block))):
        forward = max(forward, part.forward - released)
        backward = max(backward, gradient + part.backward - released)
        gradient, released = gradient + part.gradient, released + part.saved
    if recompute.full:  # only the backward of this block holds what its forward saves
        released, backward = sizes.stream, released + max(forward, backward)
    elements = [layer.elements // sizes.tp for layer in linears(block)]
    cast = CAST - PRECISIONS["fp8"].facts["cast_bytes"] + (1 + sizes.compute if sizes.grain == "row" else 0)
    casting = cast * max(elements) if fp8 else 0
    return UnitBytes(released, forward, backward, elements=sum(elements), casting=casting)


def embedding_bytes(sizes: Sizes) -> UnitBytes:
    """Account for the embedding, whose backward forms the gradient of all tokens, also in the accumulation dtype."""
    saved = sizes.tokens * (TOKEN + (1 if sizes.tp > 1 else 0)) + sizes.mask  # with tp those of other ranks are marked
    backward = sizes.stream + sizes.full + sizes.full // sizes.compute * sizes.wide
    positions = sizes.model.seq_length * sizes.model.hidden_size if sizes.model.position == "learned" else 0
    return UnitBytes(saved, 2 * sizes.stream, backward, elements=sizes.vocabulary + positions)


def head_bytes(sizes: Sizes) -> UnitBytes:
    """Account for the final norm, the head's GEMM and the loss. The forward forms the gradients of its input and of the
    head's weight, chunk by chunk of tokens (`parallel.cross_entropy`); the backward is that of the norm.
    """
    hidden, rows = sizes.model.hidden_size, sizes.local // sizes.micro
    chunks = loss_chunks(rows, sizes.tokens, sizes.vocabulary // hidden)
    chunk = math.ceil(rows / chunks) * (sizes.tokens // rows) * sizes.compute
    loss = chunk * (sizes.vocabulary // hidden + (3 if sizes.cut else 1) * hidden)  # logits, the gradient of the input
    loss += sizes.vocabulary * sizes.compute if sizes.narrow else 0
    loss += sizes.stream * (chunks - 1) // chunks  # gradients of the input from earlier chunks
    return UnitBytes(sizes.stream + sizes.norm_saved, loss, sizes.norm_backward, elements=sizes.vocabulary)


class _Parts:
    """The parts of blocks. `tensorwise`: one FP8 scale serves both directions, so each saved input `shrinks` to FP8."""

    def __init__(self, sizes: Sizes, fp8: bool, recompute: Recompute) -> None:
        self.sizes, self.fp8 = sizes, fp8
        self.recompute, self.tensorwise = recompute, fp8 and sizes.grain == "tensor"
        self.shrinks = sizes.compute if self.tensorwise else 1

    def account(self, block: Block) -> Iterator[UnitBytes]:
        """Account for each part. Inputs of row-parallel layers are the results of attention and activations."""
        sizes, sources = self.sizes, list[Attention | Activation]()
        for before, part, after in zip((None, *block), block, (*block[1:], None), strict=False):
            match part:
                case Norm():
                    gradient = sizes.stream - sizes.branch if isinstance(before, Rows) else -sizes.stream
                    yield UnitBytes(sizes.norm_saved, sizes.stream, sizes.norm_backward, gradient)
                case Columns():
                    yield self.columns(part, recomputes=self.recompute.norm and isinstance(before, Norm))
                case Attention():
                    sources.append(part)
                    yield self.attention(part)
                case Activation():
                    sources.append(part)
                    inputs, outputs = sizes.sharded(part.inputs), sizes.sharded(part.outputs)
                    gate = 2 * outputs if inputs > outputs else 0  # two tensors of a gated one's backward
                    yield UnitBytes(inputs, outputs, inputs + gate, inputs - outputs)
                case Rows():
                    result = sizes.stream if isinstance(after, Norm) else sizes.branch
                    yield self.rows(part, sources, result)
                    sources = []
                case Residual():
                    yield UnitBytes(sizes.mask, 2 * sizes.stream, 2 * sizes.branch, sizes.branch)

    def columns(self, part: Columns, recomputes: bool) -> UnitBytes:
        """Account for column-parallel layers. Their input is saved, or recomputed by the norm before, and all-gathered
        for wgrad, which overlaps with the reduce-scatter of dgrad.
        """
        sizes, outputs = self.sizes, self.sizes.sharded(sum(layer.outputs for layer in part.layers))
        recomputed = sizes.stream if recomputes and not self.tensorwise else 0
        casts = outputs // sizes.compute if self.fp8 else 0
        wgrad = max(self.wgrad(layer, sizes.sharded(layer.outputs)) for layer in part.layers)
        backward = recomputed + max(casts + 2 * sizes.gathered + sizes.stream + wgrad, CAST * casts)
        saved = 0 if recomputed else sizes.stream // self.shrinks
        return UnitBytes(saved, sizes.gathered + outputs, backward, sizes.stream - outputs)

    def attention(self, part: Attention) -> UnitBytes:
        """Account for attention: q, k, v, its result and the log-sum-exp of each query; in a window the masks of blocks
        of queries; with dropout, for which scores are formed, weights before and after it, and k, v for each head.
        """
        sizes, s = self.sizes, self.sizes.model.seq_length
        qkv, result = sizes.sharded(part.qkv), sizes.sharded(part.attended)
        heads, weights = part.heads // sizes.tp, 0
        tensors = qkv + sizes.tokens * heads * sizes.wide + (result if self.tensorwise or part.window else 0)
        if sizes.model.dropout:
            weights = sizes.micro * heads * s * s * sizes.compute
            tensors = qkv + 2 * result + 2 * weights + weights // sizes.compute + s * s
        elif part.window:
            tensors += scores(s, part.window) * sizes.compute
        saved, recomputed = (qkv, tensors) if self.recompute.attention else (tensors, 0)
        forward = tensors - saved + 2 * weights + 2 * qkv  # before and after the rotation
        return UnitBytes(saved, forward, recomputed + qkv + (2 if recomputed else 1) * weights, qkv - result)

    def rows(self, part: Rows, sources: list[Attention | Activation], result: int) -> UnitBytes:
        """Account for row-parallel layers. Their inputs are saved, or recomputed by the activation before; the gradient
        of their result, of which a rank has `result` bytes of its own, is all-gathered.
        """
        sizes, recomputes = self.sizes, self.recompute.activation and not self.tensorwise
        inputs = [sizes.sharded(layer.inputs) for layer in part.layers]
        pairs = zip(inputs, sources, strict=True)
        recomputed = sum(size for size, source in pairs if recomputes and isinstance(source, Activation))
        wgrad = max(map(self.wgrad, part.layers, inputs))
        reduced = sizes.full + (sizes.stream + sizes.full if sizes.cut else 0)
        backward = recomputed + sum(inputs) + sizes.gathered + wgrad
        saved = (sum(inputs) - recomputed) // self.shrinks
        return UnitBytes(saved, sizes.stream + recomputed + reduced, backward, sum(inputs) - result)

    def wgrad(self, layer: Linear, nbytes: int) -> int:
        """Bytes of a weight's gradient before its sum in a wider dtype. In FP8 its operands, of `full` and of `nbytes`,
        are cast along the tokens, one after the other, and the result is in fp32.
        """
        sizes, elements = self.sizes, layer.elements // self.sizes.tp
        if not self.fp8:
            return elements * sizes.compute if sizes.narrow else 0
        first, second = sizes.full // sizes.compute, nbytes // sizes.compute
        cast = 1 if self.tensorwise else CAST + sizes.compute
        result = elements * sizes.wide * (3 if sizes.grain == "block" else 1)  # two blocks and their sum
        return max(cast * first, first + max(cast * second, second + result))
