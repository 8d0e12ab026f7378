"""Times of sequences of unequal lengths on a pipeline stage (`SequenceTimes.work`), and exposed communication of
context parallelism by mode (`SequenceTimes.exposed`).

A ring's messages overlap with attention on the block before; Ulysses' all-to-alls and the all-gather come before and
after attention, and are exposed. Ranks of a ring are neighbours in the dp x cp pool, tp ranks apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from megascale.config.run import RunConfig
from megascale.layout.hybrid.sequence_work import SequenceWork
from megascale.layout.parts.times import PassTimes
from megascale.plan.account.activation_offload import offload_share, ranks_with_offload
from megascale.plan.account.chunk_memory import with_context
from megascale.plan.account.context_bytes import ContextMode, Heads, context_bytes
from megascale.plan.account.memory import rank_memory
from megascale.plan.account.sizes import element_bytes
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

    @cached_property
    def stage(self) -> PassTimes:
        """The slowest pipeline stage on `max_tokens`."""
        return self.parts.slowest_rank

    @property
    def forward_share(self) -> float:
        """The forward's share of a stage's time."""
        return self.stage.forward.total / self.stage.total

    @property
    def heads(self) -> Heads:
        m, tp, sizes = self.config.model, self.config.parallel.tp, element_bytes(self.config.train.precision)
        return Heads(m.num_heads // tp, max(1, m.num_kv_heads // tp), m.head_dim, *sizes)

    @cached_property
    def work(self) -> SequenceWork:
        """Seconds of the slowest stage, with the messages of a ring."""
        tokens, once = self.max_tokens, self.stage.attention
        doubled = StepParts(with_context(self.config, 2 * tokens), self.hardware, self.stack)
        # layers with a window take time in proportion to the tokens, others to their square
        quadratic = max(0.0, doubled.slowest_rank.attention - 2 * once) / (2 * tokens**2)
        linear = self.stage.total / tokens - quadratic * tokens
        route = neighbour_route(self.hardware, self.config.parallel.tp, self.config.world_size)
        # a token on each of two ranks: a hop, and with a ring a gradient returns
        hop, ring = (context_bytes(mode, 2, 2, self.heads).total for mode in ("allgather", "ring"))
        sent, returned = (self.parts.most_layers * size / route.bandwidth for size in (hop, ring - hop))
        return SequenceWork(linear, quadratic, sent, 2 * self.parts.most_layers * route.latency, returned)

    def exposed(self, mode: ContextMode, length: int, ranks: int) -> float:
        """Exposed seconds of a rank's context communication in its stage, for a sequence over `ranks`."""
        if ranks == 1:
            return 0.0
        work = self.work
        if mode == "ring":
            return max(0.0, work.shared([length], ranks) - work.whole(length) / ranks)
        p = self.config.parallel
        route = group_route(self.hardware, ranks, p.tp, self.config.world_size, together=p.tp)
        sent = context_bytes(mode, length, ranks, self.heads).total
        calls = 2 * ALL_TO_ALLS if mode == "ulysses" else GATHERS
        return self.parts.most_layers * (sent / route.bandwidth + calls * route.collective("all_gather", 0.0, ranks))

    def crossover(self, ranks: int, longest: int) -> int | None:
        """The shortest sequence, in steps of `ranks` x 128 tokens, from which on a ring exposes less than Ulysses; None
        if there is none up to `longest`.
        """
        step = 128 * ranks
        low, high = 0, longest // step
        if high == 0 or not self._ring_first(high * step, ranks):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._ring_first(middle * step, ranks) else (middle, high)
        return high * step

    def _ring_first(self, length: int, ranks: int) -> bool:
        return self.exposed("ring", length, ranks) < self.exposed("ulysses", length, ranks)

    def offloaded(self, length: int, ranks: int) -> float:
        """The share of activations that leave to host memory in a layer's forward, for a sequence over `ranks`; 0 for
        hardware without a stated link to host memory.
        """
        link = self.hardware.device.host_bandwidth
        if link is None:
            return 0.0
        saved = rank_memory(with_context(self.config, self.max_tokens), self.config.parallel.pp - 1).activations
        held = saved / self.max_tokens * length / ranks / self.parts.most_layers
        taken = self.work.whole(length) / ranks / self.parts.most_layers * self.forward_share
        return offload_share(taken, held, link * self.hardware.attained.link)

    def ranks_of(self, length: int) -> tuple[int, int, float]:
        """The ranks of a sequence without and with offload to host memory, and the share that leaves."""
        least = math.ceil(length / self.max_tokens)
        share = self.offloaded(length, least)
        return least, ranks_with_offload(length, self.max_tokens, self.parts.most_layers, share), share
