"""The attention core between its linear layers, with the norms of q and k (`AttentionSpec`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megascale.config.model import ModelConfig
from megascale.config.sparse_pattern import Reach, SparsePattern
from megascale.layout.parts.elementwise import ActivationSpec, gain_init
from megascale.layout.parts.microbatch_sizes import CommOp, MicroBatchSizes, UnitBytes
from megascale.layout.parts.part import Part, Scores, Surroundings, TokenFlops
from megascale.layout.parts.times import OperationTimes, PassTimes, Seconds
from megascale.layout.recompute_policy import RecomputePolicy
from megascale.layout.tensors import ParamSpec, TensorSpec
from megascale.layout.windows import QUERY_BLOCK, count_scores


@dataclass(frozen=True)
class AttentionSpec(Part):
    """The attention core, softmax(q k^T) v. `window`: keys visible to a query, or a sparse pattern; None for all
    earlier positions. `qk_norm`: the norms of q and k before it, over each "head", without a gain if "fixed", or over
    all heads ("full"), or a "tanh", or "none". `softcap`: the scores have a soft cap. `sinks`: beside the scores of a
    query's keys is a learned logit of its head.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: Reach | None
    qk_norm: str = "none"
    softcap: bool = False
    sinks: bool = False

    feeds_rows: ClassVar[bool] = True
    attends: ClassVar[bool] = True

    @property
    def qk_norms(self) -> tuple[tuple[str, int], ...]:
        """Names of the norms of q and k inside the block, and elements of their gains, or of the factor in a tanh."""
        if self.qk_norm in ("none", "fixed"):
            return ()
        if self.qk_norm == "tanh":
            return ("attention.q_norm", 1), ("attention.k_norm", 1)
        q, k = (self.heads, self.kv_heads) if self.qk_norm == "full" else (1, 1)
        return ("attention.q_norm", q * self.head_dim), ("attention.k_norm", k * self.head_dim)

    @property
    def out_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def params(self, block: str, model: ModelConfig) -> list[ParamSpec]:
        """The gains of the norms of q and k: one for all heads, or sharded over tp with the heads; and the sinks."""
        full, init = self.qk_norm == "full", 1.0 if self.qk_norm == "tanh" else gain_init(model)
        gains = [(f"{block}.{norm}.weight", width) for norm, width in self.qk_norms]
        sharding = {"tp": 0} if full else {}
        sinks = TensorSpec(f"{block}.attention.sinks", (self.heads,), {"tp": 0}, std=model.init_std)
        return ([ParamSpec(sinks.name, (sinks,), "bias")] if self.sinks else []) + [
            ParamSpec(gain, (TensorSpec(gain, (width,), sharding, init=init),), "norm", tp_partial=not full)
            for gain, width in gains
        ]

    def flops(self, scores: Scores) -> TokenFlops:
        flops_per_key = 2 * 2 * self.heads * self.head_dim
        full, causal = scores[self.window]
        return TokenFlops(0, flops_per_key * full, flops_per_key * causal)

    def traffic(self, sizes: MicroBatchSizes, backward: bool = False) -> Iterator[CommOp]:
        """List the sums of squares of norms over all heads."""
        if self.qk_norm == "full":
            sums = len(self.qk_norms) * sizes.rows * sizes.batch
            yield CommOp("tp", "all_reduce", sums * sizes.wide, "qk norm gradient" if backward else "qk norm")

    def context_traffic(self, sizes: MicroBatchSizes, backward: bool = False) -> Iterator[CommOp]:
        """List the exchanges of heads before and after attention, in the compute dtype, and of keys and values. Their
        gradients are in the accumulation dtype.
        """
        element = sizes.batch * sizes.rows * self.head_dim * sizes.compute  # of a head's tokens
        queries, keys = self.heads // sizes.tp, self.kv_heads // sizes.tp
        suffix = " gradient" if backward else ""
        if sizes.cp_heads > 1:
            keys = max(keys, sizes.cp_heads)  # repeated for more ranks than heads
            for label, heads in (("heads", queries + 2 * keys), ("attention", queries)):
                yield CommOp("cp.heads", "all_to_all", heads * element, f"{label}{suffix}")
        if sizes.cp_keys == 1:
            return
        block = 2 * keys * element  # keys // cp_heads heads of the tokens of cp_heads ranks
        ranks, visits, gradient = sizes.cp_keys, sizes.cp_keys - 1, block // sizes.compute * sizes.wide
        label = "keys again" if backward else "keys"
        if sizes.gathers:
            yield CommOp("cp.keys", "all_gather", ranks * block, label)
            if backward:
                yield CommOp("cp.keys", "reduce_scatter", ranks * gradient, "keys gradient")
        else:
            yield CommOp("cp.keys", "send_on", visits * block, label, visits)
            if backward:
                yield CommOp("cp.keys", "send_on", ranks * gradient, "keys gradient", ranks)

    def memory(self, sizes: MicroBatchSizes, at: Surroundings) -> UnitBytes:
        """Account for attention: q, k, v, the result and a log-sum-exp per query; with a window, masks for blocks
        of queries; with dropout, where scores are formed, weights before and after dropout, and k, v of every head;
        with documents, a result for each and all of them together. A parallel MLP has its first result beside.
        """
        s = sizes.model.seq_length
        qkv, result = sizes.sharded(self.qkv_width), sizes.sharded(self.out_width)
        heads, weights = self.heads // sizes.tp, 0
        normed, forming = self._norm_bytes(sizes)
        whole = sizes.key_parts == 1 and not self.sinks
        tensors = qkv + normed + sizes.tokens * heads * sizes.wide + (result if self.result_apart(sizes) else 0)
        if sizes.model.dropout:
            weights = sizes.batch * heads * s * s * sizes.compute
            capped = weights if self.softcap else 0
            tensors = qkv + normed + 2 * result + 2 * weights + capped + weights // sizes.compute + s * s
        elif isinstance(self.window, SparsePattern):
            forming = max(forming, (qkv if whole else 0) // sizes.compute * sizes.wide * sizes.narrow)
        elif self.softcap:
            longest = max(sizes.documents, default=s)
            keys = min(longest, (self.window or longest) + QUERY_BLOCK)
            scores = QUERY_BLOCK * keys * sizes.batch * heads * sizes.wide
            forming = max(forming, 4 * scores + qkv // sizes.compute * sizes.wide)
        elif self.window and whole:
            masked = [length for length in sizes.documents or [s] if length > self.window]
            tensors += sum(count_scores(length, self.window) for length in masked) * sizes.compute
        if sizes.cp_heads > 1 or not whole:
            return self._shared_memory(sizes, tensors - qkv, forming)
        saved, recomputed = (qkv, tensors) if sizes.recompute.attention else (tensors, 0)
        beside = sum(sizes.sharded(part.inputs) for part in at.rest if isinstance(part, ActivationSpec))
        forward = tensors - saved + 2 * weights + 2 * qkv + beside  # before and after the rotation
        backward = recomputed + qkv + max((2 if recomputed else 1) * weights, forming)
        small = 0 if sizes.model.dropout else sizes.stays(sizes.tokens * heads * sizes.wide)
        return UnitBytes(saved, forward, backward, qkv - result, small=small)

    def chunk_store(self, sizes: MicroBatchSizes, tokens: int, chunks: int) -> int:
        """Size keys and values, with their gradients in the accumulation dtype."""
        return tokens * 2 * self.kv_heads * self.head_dim * (sizes.compute + sizes.wide) // sizes.tp

    def result_apart(self, sizes: MicroBatchSizes) -> bool:
        """True if the kernels' result is not the next layer's saved input."""
        whole = sizes.key_parts == 1 and not self.sinks
        in_pieces = whole and (sizes.documents or (self.window and not self.softcap))
        in_pieces = in_pieces and not isinstance(self.window, SparsePattern)
        return bool(sizes.cp_heads > 1 or sizes.saves_codes or in_pieces)

    def _shared_memory(self, sizes: MicroBatchSizes, saved: int, forming: int) -> UnitBytes:
        """Account for attention of ranks that share sequences. `saved`: by attention without an exchange, besides q, k
        and v. Exchanges of heads need copies of what is sent and received, of which the received ones are saved. With
        exchanged keys and values the own ones are copied, others visit, and sums are in the accumulation dtype; with
        sinks but for the visits.
        """
        qkv, result = sizes.sharded(self.qkv_width), sizes.sharded(self.out_width)
        pair = 2 * sizes.tokens * self.head_dim * sizes.compute  # bytes of k and v, of one head
        keys = self.kv_heads // sizes.tp
        repeated, pair = pair * (max(keys, sizes.cp_heads) - keys), pair * max(keys, sizes.cp_heads)
        received = qkv + repeated
        tensors, sent = received + saved, received if sizes.cp_heads > 1 else 0
        visiting, sums, wide = 0, 0, sizes.wide / sizes.compute
        if self.sinks:
            tensors += pair
            sums = int(wide * (result + pair)) + pair * sizes.narrow
            forming = max(forming, int(2 * wide * result) * sizes.narrow)
        if sizes.key_parts > 1:
            tensors += pair * (not self.sinks)
            visiting = 2 * pair * (sizes.key_parts if sizes.gathers else 1)  # as they came and sorted, or now and next
            sums = int(wide * (result + pair * (2 * sizes.key_parts if sizes.gathers else 3)))
            sums -= visiting // 2 if sizes.gathers else 0
        saved, recomputed = (qkv, tensors) if sizes.recompute.attention else (tensors, 0)
        forward = tensors - saved + 2 * max(qkv, sent) + visiting + (int(wide * result) if sums else 0)
        backward = recomputed + received + max(forming, visiting + sums, sent)
        return UnitBytes(saved, forward, backward, qkv - result)

    def _norm_bytes(self, sizes: MicroBatchSizes) -> tuple[int, int]:
        """Size what norms of q and k save, their inputs and statistics, and what their backward allocates."""
        if self.qk_norm == "none":
            return 0, 0
        width = (self.heads + self.kv_heads) * self.head_dim
        rows = {"full": 2, "tanh": 0}.get(self.qk_norm, (self.heads + self.kv_heads) // sizes.tp)
        wide = sizes.sharded(width) // sizes.compute * sizes.wide
        return sizes.sharded(width) + sizes.tokens * rows * sizes.wide, 3 * wide

    def seconds(self, times: OperationTimes, fp8: bool) -> PassTimes:
        """Time the core, q, k and v transposed to [b, heads, s, d] before it, and the norms of q and k, a read and a
        write each; over all heads with sums over tp. With sinks k and v are copied, and the result is a sum in the
        accumulation dtype.
        """
        sizes = times.sizes
        total = times.passes(2 * times.tokens * self.qkv_width // sizes.tp)
        if self.qk_norm != "none":
            passes = times.passes(2 * times.tokens * (self.heads + self.kv_heads) * self.head_dim // sizes.tp)
            total += passes + times.sums(2 * times.tokens * sizes.wide) if self.qk_norm == "full" else passes
        if self.sinks:
            widths = self.qkv_width - self.out_width + self.out_width * sizes.wide / sizes.compute
            total += times.passes(2 * times.tokens * widths / sizes.tp)
        exchanges = self.context_traffic(sizes), self.context_traffic(sizes, backward=True)
        return total + times.attention(self.heads, self.window, self.head_dim, exchanges)

    def recomputed_seconds(self, forward: Seconds, recompute: RecomputePolicy, after: Part | None) -> Seconds:
        return Seconds(attention=forward.attention, cp=forward.cp) if recompute.attention else Seconds()
