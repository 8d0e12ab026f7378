"""Bytes of activations on one rank for one micro-batch: saved from a forward to its backward, and transient, while one
of them runs.

A chunk is a sequence of units: the embedding, blocks, the head. A block is the list of its parts (`layout.blocks`). The
forward of a part adds to what is saved (Korthikanti et al. 2022, section 4); its backward forms the gradient of its
input, needs work space, and then releases the gradient of its output and its saved tensors. A unit's transient bytes
are the most along this walk, with torch's operators one by one: fused kernels need less. docs/memory.md has the table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from megascale.catalog.precisions import PRECISIONS
from megascale.catalog.recipes import RECIPES
from megascale.config.run import RunConfig
from megascale.layout.blocks import (
    Activation,
    Attention,
    Block,
    Columns,
    Linear,
    Norm,
    Residual,
    Rows,
    linears,
    unread,
    weights,
)
from megascale.layout.loss import loss_chunks
from megascale.layout.recompute import Recompute
from megascale.layout.tensors import padded_vocab
from megascale.layout.windows import scores

MASK, TOKEN = 1, 8
"""Bytes of a dropout mask's element, and of a token id."""

CAST = 8
"""Transient bytes of an element that is cast to FP8: it is in fp32 before and after it is scaled."""


class UnitBytes(NamedTuple):
    """Bytes of a unit: `saved` from its forward to its backward; the most beside while its `forward` runs, while its
    `backward` runs, and while its weights are cast to FP8. `elements`: of its weights.
    """

    saved: int
    forward: int
    backward: int
    elements: int
    casting: int = 0


class _PartBytes(NamedTuple):
    """Bytes of a part of a block: `saved` from its forward to its backward; the most beside while its `forward` runs,
    and while its `backward` runs, of gradients, recomputed tensors and work space; how much more the `gradient` of its
    input takes than that of its output.
    """

    saved: int
    forward: int
    backward: int
    gradient: int


class Sizes:
    """Sizes that all units share. `own`: tokens that a rank has between the layers, where the residual stream may be
    `cut` along the sequence; `compute`, `wide`: bytes of an element of an activation and of what accumulates; `narrow`:
    they differ, so that results are copied. In bytes: `full`, the residual stream of all tokens, `stream`, a rank's,
    and `gathered`, room for an all-gathered one; `branch`, the gradient of a branch that dropout copies, and its
    `mask`.
    """

    def __init__(self, config: RunConfig) -> None:
        p, facts = config.parallel, PRECISIONS[config.train.precision].facts
        m, self.grain = config.model, RECIPES[config.fp8.recipe].facts["grain"]
        self.model, self.tp = m, p.tp
        self.micro, self.overlap = config.batch.micro, config.overlap.tp
        self.compute, self.wide = int(facts["compute_bytes"]), int(facts["accumulate_bytes"])
        self.narrow, self.cut = self.compute < self.wide, p.sp and p.tp > 1
        self.tokens = self.micro * m.seq_length
        self.own = self.tokens // self.tp if self.cut else self.tokens
        self.full, self.stream = (tokens * m.hidden_size * self.compute for tokens in (self.tokens, self.own))
        self.gathered, self.branch = self.full if self.cut else 0, self.stream if m.dropout else 0
        self.mask = self.branch // self.compute * MASK
        self.statistics = self.own * self.wide * (2 if m.norm == "layernorm" else 1)
        copies = (4 if m.norm == "rmsnorm" else 3) * self.own * m.hidden_size * self.wide
        several = 3 if m.norm == "rmsnorm" else 1
        self.norm_backward = copies + (self.stream if several > 1 else 0) if self.narrow else several * self.stream
        self.vocabulary = padded_vocab(m, self.tp) // self.tp * m.hidden_size  # elements

    def sharded(self, width: int) -> int:
        """Bytes of a tensor [tokens, width / tp]."""
        return self.tokens * width // self.tp * self.compute


def block_bytes(sizes: Sizes, block: Block, fp8: bool, recompute: Recompute) -> UnitBytes:
    """Account for a block. `fp8`: its linear layers multiply in FP8."""
    forward = released = 0
    gradient = backward = sizes.stream  # that of its result
    for part in reversed(list(_Parts(sizes, fp8, recompute).account(block))):
        forward = max(forward, part.forward - released)
        backward = max(backward, gradient + part.backward - released)
        gradient, released = gradient + part.gradient, released + part.saved
    if sizes.model.position == "rope":  # q, k and v before rotation
        forward += sum(sizes.sharded(part.qkv) for part in block if isinstance(part, Attention))
    each = CAST - PRECISIONS["fp8"].facts["cast_bytes"] + (1 + sizes.compute if sizes.grain == "row" else 0)
    casting = each * max(layer.elements for layer in linears(block)) // sizes.tp if fp8 else 0
    if recompute.full:  # all that a forward saves is there for the backward of the block alone
        released, backward = sizes.stream, released + max(forward, backward)
    return UnitBytes(released, forward, backward, weights(block) // sizes.tp, casting)


def embedding_bytes(sizes: Sizes) -> UnitBytes:
    """Account for the embedding: token ids, and which of them other ranks have; the gradient of all tokens."""
    saved = sizes.tokens * (TOKEN + (MASK if sizes.tp > 1 else 0)) + sizes.mask
    copies = 3 if sizes.model.dropout else 2 if sizes.model.position == "learned" else 1
    wide = sizes.full // sizes.compute * sizes.wide if sizes.narrow else 0
    rows = (sizes.full if sizes.tp > 1 else 0) + max(sizes.gathered, wide)
    return UnitBytes(saved, copies * sizes.stream, sizes.stream + max(rows, sizes.stream), sizes.vocabulary)


def head_bytes(sizes: Sizes) -> UnitBytes:
    """Account for the final norm, the head's GEMM and the loss. The forward forms the gradients of its input and of the
    head's weight, chunk by chunk of tokens (`parallel.cross_entropy`); the backward is that of the norm.
    """
    hidden, rows = sizes.model.hidden_size, sizes.own // sizes.micro
    chunks = loss_chunks(rows, sizes.tokens, sizes.vocabulary // hidden)
    chunk = math.ceil(rows / chunks) * (sizes.tokens // rows) * sizes.compute
    loss = chunk * sizes.vocabulary // hidden + chunk * hidden  # logits, and the gradient of the input
    loss += chunk * hidden + chunk * hidden // sizes.tp if sizes.cut else 0
    loss += sizes.vocabulary * sizes.compute if sizes.narrow else 0
    earlier = sizes.stream * (chunks - 1) // chunks
    return UnitBytes(2 * sizes.stream + sizes.statistics, earlier + loss, sizes.norm_backward, sizes.vocabulary)


class _Parts:
    """The parts of blocks. `tensorwise`: linear layers save in FP8, for one scale serves both directions."""

    def __init__(self, sizes: Sizes, fp8: bool, recompute: Recompute) -> None:
        self.sizes, self.fp8 = sizes, fp8
        self.recompute, self.tensorwise = recompute, fp8 and sizes.grain == "tensor"

    def account(self, block: Block) -> Iterator[_PartBytes]:
        """Account for each part. Inputs of row-parallel layers are the results of attention and activations."""
        sources, formed = list[Attention | Activation](), 0
        sizes = self.sizes
        for before, part, after in zip((None, *block), block, (*block[1:], None), strict=False):
            match part:
                case Norm():
                    gradient = sizes.stream - sizes.branch if isinstance(before, Rows) else -sizes.stream
                    saved = sizes.stream + sizes.statistics
                    yield _PartBytes(saved, sizes.stream, sizes.norm_backward, gradient)
                case Columns(layers):
                    formed = sum(layer.outputs for layer in layers)
                    yield self.columns(part, sizes.sharded(formed), after_norm=isinstance(before, Norm))
                case Attention():
                    sources.append(part)
                    yield self.attention(part, sizes.sharded(formed))
                case Activation():
                    sources.append(part)
                    yield self.activation(part)
                case Rows():
                    taken = sizes.stream if isinstance(after, Norm) else sizes.branch
                    value = not (self.recompute.full and part is unread(block))
                    yield self.rows(part, sources, taken, value)
                    sources = []
                case Residual():
                    yield _PartBytes(sizes.mask, 2 * sizes.stream, 2 * sizes.branch, sizes.branch)

    def columns(self, part: Columns, outputs: int, after_norm: bool) -> _PartBytes:
        """Account for column-parallel layers. Their input is saved, or recomputed by the norm before, and all-gathered
        for wgrad; dgrad is reduce-scattered.
        """
        sizes = self.sizes
        again = sizes.stream if after_norm and self.recompute.norm and not self.tensorwise else 0
        casts = outputs // sizes.compute if self.fp8 else 0
        wgrad = max(self.wgrad(layer, sizes.sharded(layer.outputs)) for layer in part.layers)
        dgrad = max(sizes.gathered, wgrad + (sizes.gathered if sizes.overlap else 0))  # whose sum overlaps with wgrad
        backward = again + max(casts + sizes.gathered + sizes.stream + dgrad, CAST * casts)
        saved = 0 if again else self.saved(sizes.stream)
        return _PartBytes(saved, sizes.gathered + outputs, backward, sizes.stream - outputs)

    def attention(self, part: Attention, formed: int) -> _PartBytes:
        """Account for attention: q, k, v, its result and the log-sum-exp of each query; in a window the masks of blocks
        of queries; with dropout, for which scores are formed, weights before and after it, and k, v for each head.
        `formed`: what the layers before have formed.
        """
        sizes, heads = self.sizes, part.heads // self.sizes.tp
        qkv, result = sizes.sharded(part.qkv), sizes.sharded(part.attended)
        own = qkv + sizes.tokens * heads * sizes.wide + (result if self.tensorwise or part.window else 0)
        s, formed_scores = sizes.model.seq_length, 0
        if sizes.model.dropout:
            formed_scores = sizes.micro * heads * s * s * sizes.compute
            own = qkv + 2 * result + 2 * formed_scores + MASK * (formed_scores // sizes.compute + s * s)
        elif part.window:
            own += scores(s, part.window) * sizes.compute
        again, saved = (own, qkv) if self.recompute.attention else (0, own)
        forward = own - saved + 2 * formed_scores + formed
        return _PartBytes(saved, forward, again + qkv + (2 if again else 1) * formed_scores, qkv - result)

    def activation(self, part: Activation) -> _PartBytes:
        """Account for the non-linearity, which saves its input. A gated one forms two tensors more in its backward."""
        before, after = self.sizes.sharded(part.inputs), self.sizes.sharded(part.outputs)
        return _PartBytes(before, after, before + (2 * after if before > after else 0), before - after)

    def rows(self, part: Rows, sources: list[Attention | Activation], taken: int, value: bool) -> _PartBytes:
        """Account for row-parallel layers. Their inputs are saved, or recomputed by the activation before; the gradient
        of their result, of which this rank's part takes `taken` bytes, is all-gathered. `value`: the result is formed.
        """
        sizes, widths = self.sizes, [layer.inputs for layer in part.layers]
        recomputes = self.recompute.activation and not self.tensorwise
        formed = [recomputes and isinstance(source, Activation) for source in sources]
        again = sum(sizes.sharded(width) for width, each in zip(widths, formed, strict=True) if each)
        saved = sum(self.saved(sizes.sharded(width)) for width, each in zip(widths, formed, strict=True) if not each)
        inputs, last = sizes.sharded(sum(widths)), sizes.sharded(widths[-1])
        wgrad = max(self.wgrad(layer, sizes.sharded(layer.inputs)) for layer in part.layers)
        casting = last + (CAST - self.tensorwise) * last // sizes.compute if self.fp8 else 0
        reduced = sizes.full + (sizes.stream + (sizes.full if sizes.overlap else 0) if sizes.cut else 0)
        forward = sizes.stream + max(again + (reduced if value else 0), casting)
        return _PartBytes(saved, forward, again + inputs + sizes.gathered + wgrad, inputs - taken)

    def saved(self, nbytes: int) -> int:
        """Bytes of a linear layer's saved input."""
        return nbytes // self.sizes.compute if self.tensorwise else nbytes

    def wgrad(self, layer: Linear, nbytes: int) -> int:
        """Bytes of a weight's gradient before it is added to that of a wider dtype. In FP8 its operands, of `full` and
        of `nbytes`, are cast along the tokens, one after the other, and the result is in fp32.
        """
        sizes, elements = self.sizes, layer.elements // self.sizes.tp
        if not self.fp8:
            return elements * sizes.compute if sizes.narrow else 0
        one, other = sizes.full // sizes.compute, nbytes // sizes.compute
        each = 1 if self.tensorwise else CAST + sizes.compute
        result = elements * sizes.wide * (3 if sizes.grain == "block" else 1)  # two blocks and their sum
        return max(each * one, one + each * other, one + other + result)
