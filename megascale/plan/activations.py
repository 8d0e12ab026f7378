"""Bytes of activations that a rank keeps for its backwards: what autograd saves, and the most of it at once.

Counted is every storage that lives from a micro-batch's forward on a chunk to its backward, as Korthikanti et al. 2022,
4, do, with torch's operators, not compiled: other libraries' and compiled ones may keep more or less. What an operation
needs only while it runs, such as the gradients between two layers, comes on top. Weights and what all micro-batches
share are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from megascale.catalog.layers import BLOCKS
from megascale.catalog.precisions import PRECISIONS
from megascale.catalog.recipes import RECIPES
from megascale.config.run import RunConfig
from megascale.layout.chunks import eight_bit_layers, stages_of
from megascale.layout.loss import loss_chunks
from megascale.layout.recompute import NOTHING, Recompute, recompute_of
from megascale.layout.tensors import padded_vocab
from megascale.layout.windows import spans
from megascale.plan.orders import Piece, kinds

BOOL, INDEX, SCALE = 1, 8, 4
"""Bytes of a mask's element, of a token's number, and of the scale of a tensor in eight bits."""


@dataclass(frozen=True)
class BlockBytes:
    """What one block keeps of one micro-batch. `input`: where its first norm starts from, `middle`: its second;
    `statistics` and `normed`: of one norm; `core`: what attention keeps beside its result, `attended`, for which it
    needs `qkv`; `core_again`: how much more that is when it is computed again from qkv; `inner` and `activated`: before
    and after the MLP's non-linearity; `masks`: of dropout. `cast`: linear layers keep their inputs (`normed`,
    `attended` and `activated`) in eight bits, which are not formed again.
    """

    norms: int
    input: int
    middle: int
    statistics: int
    normed: int
    qkv: int
    core: int
    core_again: int
    attended: int
    inner: int
    activated: int
    masks: int
    cast: bool
    shared: bool

    def kept(self, recompute: Recompute) -> int:
        """From its forward to its backward."""
        if recompute.full:
            return self.input
        found = self.input + self.middle + self.norms * self.statistics + self.attended + self.inner + self.masks
        found += self.qkv if recompute.attention else self.core
        found += 0 if recompute.norm and not self.cast else self.norms * self.normed
        return found + (0 if recompute.activation and not self.cast else self.activated)

    def again(self, recompute: Recompute) -> int:
        """Growth in its backward, when it computes again, beyond what it has released by then; may be negative."""
        if recompute.full:
            return self.kept(NOTHING) - self.input
        if not recompute.attention:
            return 0
        left = self.input + self.statistics + (0 if recompute.norm and not self.cast else self.normed) + self.qkv
        return left + self.core_again - self.kept(recompute)


@dataclass(frozen=True)
class ActivationBytes:
    """On one rank. `kept`: by each of its chunks for one micro-batch; `peak`: the most at once in a step, with what is
    computed again; `logits`: of one chunk of the loss, beside them.
    """

    kept: tuple[int, ...]
    peak: int
    logits: int

    @property
    def total(self) -> int:
        return self.peak + self.logits


class KeptBytes(NamedTuple):
    """On one rank, by each of its chunks for one micro-batch: what is kept, and how much more there is in a backward,
    of what is computed again. `logits`: of one chunk of the loss.
    """

    kept: tuple[int, ...]
    again: tuple[int, ...]
    logits: int

    def in_order(self, order: Iterable[Piece]) -> ActivationBytes:
        """Of a rank that does the actions that `order` says."""
        does = kinds(len(self.kept))
        grows = [-self.kept[kind.chunk] if kind.backward else self.kept[kind.chunk] for kind in does]
        needs = [self.again[kind.chunk] if kind.backward else self.kept[kind.chunk] for kind in does]
        now = most = 0
        for numbers, _, times in order:
            begun, highest = now, 0
            for number in numbers:
                highest = max(highest, now + needs[number])
                now += grows[number]
            each = now - begun
            most = max(most, highest, highest + (times - 1) * each)
            now += (times - 1) * each
        return ActivationBytes(self.kept, most, self.logits)


def kept_bytes(config: RunConfig, pp_rank: int) -> KeptBytes:
    """On a rank of pipeline stage `pp_rank`, of a resolved configuration."""
    sizes, layout = Sizes(config), stages_of(config)
    kept, again, logits = [], [], 0
    for chunk in range(config.parallel.vpp):
        index, recompute = layout.index(pp_rank, chunk), recompute_of(config.train, chunk)
        blocks, head = [sizes.block(layer) for layer in layout.layers(index)], 0
        if index == layout.count - 1:
            head, logits = sizes.head(), sizes.logits()
        embedding = 0 if index else sizes.embedding()
        kept.append(embedding + sum(block.kept(recompute) for block in blocks) + head)
        again.append(_growth(blocks, recompute, head))
    return KeptBytes(tuple(kept), tuple(again), logits)


def _growth(blocks: list[BlockBytes], recompute: Recompute, released: int) -> int:
    """The most that the backwards of a chunk's blocks need beyond what it kept, of which some is `released` before."""
    most = 0
    for block in reversed(blocks):
        most = max(most, block.again(recompute) - released)
        released += block.kept(recompute)
    return most


class Sizes:
    """Counts and bytes of a configuration: `own` tokens that a rank has between the layers, all `tokens` inside."""

    def __init__(self, config: RunConfig) -> None:
        facts = PRECISIONS[config.train.precision].facts
        self.model, self.tp = config.model, config.parallel.tp
        self.cast = eight_bit_layers(config) if RECIPES[config.fp8.recipe].facts["grain"] == "tensor" else range(0)
        self.micro, self.seq = config.batch.micro, config.model.seq_length
        self.tokens = self.micro * self.seq
        self.own = self.tokens // self.tp if config.parallel.sp else self.tokens
        self.gathers_heads = self.micro > 1 and self.model.num_heads > self.tp  # for a product, from among others
        self.compute, self.wide = facts["compute_bytes"], facts["accumulate_bytes"]
        self.residual = self.own * self.model.hidden_size * self.compute
        self.mask = self.own * self.model.hidden_size * BOOL if self.model.dropout else 0
        self._blocks: dict[tuple[int | None, bool], BlockBytes] = {}
        self.statistics = self.own * self.wide * (2 if self.model.norm == "layernorm" else 1)

    def block(self, layer: int) -> BlockBytes:
        kind = self.model.windows[layer], layer in self.cast
        if kind not in self._blocks:
            self._blocks[kind] = self._block(*kind)
        return self._blocks[kind]

    def _block(self, window: int | None, cast: bool) -> BlockBytes:
        m, tp, tokens, compute = self.model, self.tp, self.tokens, self.compute
        norms, inner = BLOCKS[m.block].facts["norms"], tokens * m.ffn_size // tp
        heads, kv_heads = m.num_heads // tp, m.num_kv_heads // tp
        attended, qkv = (tokens * n * m.head_dim for n in (heads, heads + 2 * kv_heads))
        core, starts, result, shared = self._attention(window, heads, attended * compute, qkv * compute)
        # attention starts from a copy, or from q, k and v themselves
        copied = m.position == "rope" or starts != qkv * compute
        return BlockBytes(
            norms=norms,
            input=self.residual,
            middle=(norms - 1) * self.residual,
            statistics=self.statistics,
            normed=self._entering(self.own * m.hidden_size, cast),
            qkv=qkv * compute,
            core=core + starts + (0 if shared and not cast else result),
            core_again=core + (starts if copied else 0) + result,
            attended=self._entering(attended, cast),
            inner=inner * (2 if m.gated else 1) * compute,
            activated=self._entering(inner, cast),
            masks=norms * self.mask,
            cast=cast,
            shared=shared and not cast,
        )

    def _attention(self, window: int | None, heads: int, attended: int, qkv: int) -> tuple[int, int, int, bool]:
        """What attention keeps: by itself, of q, k and v, and of its result; whether that is what it hands on."""
        if self.model.dropout:  # the weights before and after dropout, both masks, k and v for each head, and q
            scores = self.micro * heads * self.seq**2
            core = 2 * scores * self.compute + (scores + self.seq**2) * BOOL + 2 * attended
            return core, attended if self.gathers_heads else qkv, 0, False
        core = self.tokens * heads * self.wide  # the logarithm of each query's sum
        if window is None:
            return core, qkv, attended, True
        blocks = spans(self.seq, window)  # of each the mask, and the result
        masks = sum((queries.stop - queries.start) * (keys.stop - keys.start) for queries, keys in blocks)
        return core + masks * self.compute, qkv, attended, False

    def _entering(self, numbers: int, cast: bool) -> int:
        """Of a linear layer's input."""
        return numbers + SCALE if cast else numbers * self.compute

    def embedding(self) -> int:
        return self.tokens * (INDEX + (BOOL if self.tp > 1 else 0)) + self.mask

    def head(self) -> int:
        """What the norm starts from and the gradient that it will be given."""
        return 2 * self.residual + self.statistics

    def logits(self) -> int:
        columns, rows = padded_vocab(self.model, self.tp) // self.tp, self.own // self.micro
        most = math.ceil(rows / loss_chunks(rows, self.tokens, columns))  # of the positions that a rank has
        return most * self.tokens // rows * columns * self.compute
