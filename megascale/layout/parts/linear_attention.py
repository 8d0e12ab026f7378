"""Linear attention with decay (MiniMax-01, Li et al. 2025), between its linear layers (`LinearAttentionSpec`).

    q, k, v, gate = x W       column-parallel, one linear layer
    heads = linear attention  of silu(q), silu(k), silu(v), in blocks (`ops.linear_attention`)
    result = rmsnorm(heads) * sigmoid(gate)   over all heads: over tp the sums of squares are added up

With context parallelism a rank sends the states of its spans of tokens, [b, heads / tp, d, d] each, whatever their
length, and in backward their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megascale.config.model import ModelConfig
from megascale.layout.parts.elementwise import gain_init
from megascale.layout.parts.linear import ColumnParallel, RowParallel
from megascale.layout.parts.microbatch_sizes import CommOp, MicroBatchSizes, UnitBytes
from megascale.layout.parts.part import LinearSpec, Part, Scores, Surroundings, TokenFlops
from megascale.layout.parts.times import OperationTimes, PassTimes, Seconds
from megascale.layout.recompute_policy import RecomputePolicy
from megascale.layout.tensors import ParamSpec, TensorSpec

BLOCK = 128
"""Tokens of a block, whose scores are formed; as many as a head has elements cost as much as the states."""


@dataclass(frozen=True)
class LinearAttentionSpec(Part):
    """Linear attention of `heads` of `head_dim` in blocks of `block` tokens, the norm of all heads, and the gate."""

    heads: int
    head_dim: int
    block: int

    feeds_rows: ClassVar[bool] = True
    attends: ClassVar[bool] = True

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    def params(self, block: str, model: ModelConfig) -> list[ParamSpec]:
        """The gain of the norm, sharded over tp with the heads."""
        name = f"{block}.attention.norm.weight"
        return [ParamSpec(name, (TensorSpec(name, (self.width,), {"tp": 0}, init=gain_init(model)),), "norm")]

    def flops(self, scores: Scores) -> TokenFlops:
        """Count two GEMMs with the scores of a block, all or those under the causal mask, and two with a state."""
        within, states = 4 * self.width * self.block, 4 * self.width * self.head_dim
        return TokenFlops(0, within + states, within / 2 + states)

    def traffic(self, sizes: MicroBatchSizes, backward: bool = False) -> Iterator[CommOp]:
        """List the sums of squares of the norm."""
        label = "attention norm gradient" if backward else "attention norm"
        yield CommOp("tp", "all_reduce", sizes.rows * sizes.batch * sizes.wide, label)

    def context_traffic(self, sizes: MicroBatchSizes, backward: bool = False) -> Iterator[CommOp]:
        """List the all-gathers of the states of spans, or of their gradients."""
        label, ranks = "states gradient" if backward else "states", 1
        for group, size in (("cp.heads", sizes.cp_heads), ("cp.keys", sizes.cp_keys)):
            ranks *= size
            if size > 1:
                yield CommOp(group, "all_gather", ranks * sizes.spans * self.state_bytes(sizes), label)

    def state_bytes(self, sizes: MicroBatchSizes) -> int:
        """Size the state of a micro-batch."""
        return sizes.batch * self.width // sizes.tp * self.head_dim * sizes.wide

    def memory(self, sizes: MicroBatchSizes, at: Surroundings) -> UnitBytes:
        """Account for what is projected, the heads, the norm's result and the sigmoid of the gate, with the state
        before each span where there is one; in backward also for the states of all blocks.
        """
        heads, state = sizes.sharded(self.width), self.state_bytes(sizes)
        wide, projected, statistics = heads // sizes.compute * sizes.wide, 4 * heads, sizes.tokens * sizes.wide
        ranks = sizes.cp_heads * sizes.cp_keys
        starts = sizes.spans * state if sizes.key_parts > 1 or ranks > 1 else 0
        tensors = projected + 3 * heads + statistics + starts
        block = min(self.block, sizes.rows) * sizes.batch * self.width // sizes.tp * sizes.wide
        gathered = (ranks * sizes.spans if ranks > 1 else 0) * state
        forming = max(heads, 2 * wide - 2 * heads, gathered + 8 * block - 3 * heads)
        norm = (4 if sizes.narrow else 3) * wide - heads
        blocks = heads + sizes.rows // self.block * state + 12 * block + gathered
        if sizes.recompute.attention:  # beside the result and its gradient
            again = tensors - projected
            return UnitBytes(projected, again + forming, again + 2 * heads + max(norm, blocks), projected - heads)
        return UnitBytes(tensors, forming, max(norm, blocks), projected - heads)

    def chunk_store(self, sizes: MicroBatchSizes, tokens: int, chunks: int) -> int:
        """Size the states between chunks, and the gradient of one."""
        return chunks * self.state_bytes(sizes)

    def seconds(self, times: OperationTimes, fp8: bool) -> PassTimes:
        """Time the GEMMs of blocks, and as passes silu, the norm, which has sums over tp, and the gate."""
        sizes = times.sizes
        exchanges = self.context_traffic(sizes), self.context_traffic(sizes, backward=True)
        total = times.linear_attention(self.heads, self.head_dim, self.block, exchanges)
        total += times.passes(10 * times.tokens * self.width // sizes.tp)
        return total + times.sums(times.tokens * sizes.wide)

    def recomputed_seconds(self, forward: Seconds, recompute: RecomputePolicy, after: Part | None) -> Seconds:
        return forward if recompute.attention else Seconds()


def lightning_branch(model: ModelConfig, layer: int) -> tuple[Part, ...]:
    """Linear attention with its linear layers."""
    width = model.num_heads * model.head_dim
    parts = tuple((part, width) for part in ("q", "k", "v", "gate"))
    project = LinearSpec("attention.qkv", "qkv", model.hidden_size, parts, bias=model.qkv_bias, head_dim=model.head_dim)
    out = LinearSpec("attention.out", "out", width, (("out", model.hidden_size),), bias=model.bias)
    core = LinearAttentionSpec(model.num_heads, model.head_dim, min(BLOCK, model.seq_length))
    return ColumnParallel((project,)), core, RowParallel((out,))
