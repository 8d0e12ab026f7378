"""Times of sequences of unequal lengths (`SequenceTimes`): on a pipeline stage (`work`), with the exposed communication
of context parallelism by mode (`exposed`), and with selective offload to host memory (`ranks_of`).

A ring's messages overlap with attention on the block before; Ulysses' all-to-alls and the all-gather come before and
after attention, and are exposed. Ranks of a ring are neighbours in the dp x cp pool, tp ranks apart.

Offload of a long sequence (ByteScale, Ge et al. 2025): for a sequence of s tokens, Act(s) bytes and T(s) seconds of a
layer's forward, l layers, of which the first and the last stay, and C tokens that a rank holds:

    share r <= T(s) B / Act(s)               what leaves in a layer's time at B bytes/s, all of it at most
    ranks D = ceil((2 Act(s) + (1 - r) (l - 2) Act(s)) / (l Act(C)))

T(s) has a part in s^2, so that long sequences hide all of their offload, and need a fraction of the ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from megascale.config.run import RunConfig
from megascale.layout.hybrid.plan import row_step
from megascale.layout.hybrid.sequence_work import SequenceWork
from megascale.plan.account.chunk_memory import with_context
from megascale.plan.account.context_bytes import ContextMode, Heads, context_bytes
from megascale.plan.account.memory import JobMemory
from megascale.plan.simulate.length_step import Pool
from megascale.plan.simulate.link_time import group_route, neighbour_route
from megascale.plan.simulate.profiles import Hardware, Stack
from megascale.plan.simulate.step_time import StepParts

ALL_TO_ALLS = 2  # of a layer's forward, q, k and v in one and the result, and of its backward
GATHERS = 3  # of a layer: keys and values, the same in backward, and the reduce-scatter of their gradients


@dataclass(frozen=True)
class SequenceTimes:
    """Times for a resolved configuration, of sequences that are split to `max_tokens` a rank."""

    config: RunConfig
    hardware: Hardware
    stack: Stack
    max_tokens: int

    @cached_property
    def parts(self) -> StepParts:
        """Durations of a step whose micro-batches have `max_tokens`."""
        return StepParts(with_context(self.config, self.max_tokens), self.hardware, self.stack)

    @property
    def pool(self) -> Pool:
        p, stage = self.config.parallel, self.parts.slowest_rank
        message = self.parts.times.message if p.pp > 1 else 0.0
        forward = stage.forward.total / stage.total
        step = 1 if self.hardware.device.measured else row_step(self.max_tokens)  # processors need no alike shapes
        return Pool(self.config.dp * p.cp, self.max_tokens, self.work, p.pp, forward, message, step)

    @property
    def heads(self) -> Heads:
        m, tp, sizes = self.config.model, self.config.parallel.tp, self.parts.layers.sizes
        return Heads(m.num_heads // tp, max(1, m.num_kv_heads // tp), m.qk_head_dim, sizes.compute, sizes.wide)

    @cached_property
    def work(self) -> SequenceWork:
        """Seconds of the slowest stage, with the messages of a ring."""
        tokens, stage = self.max_tokens, self.parts.slowest_rank
        doubled = StepParts(with_context(self.config, 2 * tokens), self.hardware, self.stack)
        # layers with a window take time in proportion to the tokens, others to their square
        quadratic = max(0.0, doubled.slowest_rank.attention - 2 * stage.attention) / (2 * tokens**2)
        linear = stage.total / tokens - quadratic * tokens
        route = neighbour_route(self.hardware, self.config.parallel.tp, self.config.world_size)
        # a token on each of two ranks: a hop, and with a ring a gradient returns
        hop, ring = (sum(context_bytes(mode, 2, 2, self.heads)) for mode in ("allgather", "ring"))
        sent, returned = (self.parts.most_layers * size / route.bandwidth for size in (hop, ring - hop))
        return SequenceWork(linear, quadratic, sent, 2 * self.parts.most_layers * route.latency, returned)

    def exposed(self, mode: ContextMode, length: int, ranks: int) -> float:
        """Exposed seconds of a rank's context communication in its stage, for a sequence over `ranks`."""
        if ranks == 1:
            return 0.0
        if mode == "ring":
            return max(0.0, self.work.shared([length], ranks) - self.work.whole(length) / ranks)
        p = self.config.parallel
        route = group_route(self.hardware, ranks, p.tp, self.config.world_size, together=p.tp)
        sent = sum(context_bytes(mode, length, ranks, self.heads))
        calls = 2 * ALL_TO_ALLS if mode == "ulysses" else GATHERS
        return self.parts.most_layers * (sent / route.bandwidth + calls * route.collective("all_gather", 0.0, ranks))

    def crossover(self, ranks: int, longest: int) -> int | None:
        """The shortest sequence, in steps of `ranks` x 128 tokens, from which on a ring exposes less than Ulysses; None
        if there is none up to `longest`.
        """
        step = 128 * ranks

        def ring_first(count: int) -> bool:
            return self.exposed("ring", count * step, ranks) < self.exposed("ulysses", count * step, ranks)

        low, high = 0, longest // step
        if high == 0 or not ring_first(high):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if ring_first(middle) else (middle, high)
        return high * step

    def offloaded(self, length: int, ranks: int) -> float:
        """The share of activations that leave to host memory in a layer's forward, for a sequence over `ranks`; 0 for
        hardware without a stated link to host memory.
        """
        link, layers = self.hardware.device.host_bandwidth, self.parts.most_layers
        if link is None:
            return 0.0
        memory = JobMemory(self.parts.config)
        saved = memory.rank(memory.layout.placement.ends[1]).activations
        held = saved / self.max_tokens * length / ranks / layers
        taken = self.work.whole(length) / ranks / layers * self.pool.forward
        return min(1.0, taken * (link * self.hardware.attained.link) / held)

    def ranks_of(self, length: int) -> tuple[int, int, float]:
        """The ranks of a sequence without and with offload to host memory, and the share that leaves."""
        least = math.ceil(length / self.max_tokens)
        share = self.offloaded(length, least)
        return least, ranks_with_offload(length, self.max_tokens, self.parts.most_layers, share), share


def ranks_with_offload(tokens: int, max_tokens: int, layers: int, share: float) -> int:
    """Count the ranks that hold a sequence of `tokens`, at `max_tokens` without offload, if `share` of each layer but
    two is in host memory.
    """
    resident = 2 + (1 - share) * (layers - 2) if layers > 2 else layers
    return max(1, math.ceil(tokens * resident / (layers * max_tokens) - 1e-9))
