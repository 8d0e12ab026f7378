"""Lower bounds of a layout's step time and memory (`Bounds`), cheap enough for every layout of a search.

A pipeline of p ranks and m micro-batches takes at least the largest of these times, where W is the time of a forward
and a backward of the model, and w of its largest chunk, for a micro-batch:

- m W / p, the mean rank's work, plus exposed collectives over dp;
- fill and drain of a rank, the layers before its first chunk, and m micro-batches of its own layers, plus the same;
- W + (m - 1) w / 2: one micro-batch, and the slower direction of the largest chunk for the others;
- the collectives over dp.

A rank of the first stage holds its state and activations of min(m, p) micro-batches, since p forwards precede the first
backward.
"""

from __future__ import annotations

from functools import cache

from megascale.catalog.schedules import SCHEDULES
from megascale.layout.chunks import stages_of
from megascale.layout.recompute_policy import recompute_policy
from megascale.plan.account.memory import JobMemory
from megascale.plan.account.state_bytes import state_bytes
from megascale.plan.search.space import Layout, Space
from megascale.plan.simulate.chunk_time import chunk_times
from megascale.plan.simulate.profiles import Hardware, Stack
from megascale.plan.simulate.step_time import StepParts, scale

PADDING = 1e-3  # upper bound on the share of bucket padding in a rank's state


class Bounds:
    """Bounds of a space's layouts. Values common to several layouts, such as seconds of a layer, are cached."""

    def __init__(self, space: Space, hardware: Hardware, stack: Stack) -> None:
        self._space, self._hardware, self._stack = space, hardware, stack
        self._cut, self._seconds, self._link = cache(self._cut_of), cache(self._seconds_of), cache(self._link_of)
        self._state = cache(lambda layout: state_bytes(space.with_layout(layout), 0, stack.storage).total)
        self._saved = cache(self._saved_of)

    def step_s(self, layout: Layout) -> float:
        """Lower bound of step time in seconds."""
        m, (_, ranks, largest) = self._micro_batches(layout), self._cut(layout.pp, layout.vpp)
        block, flat = self._reset(layout)
        (network, layer, head), (reduce, gather) = self._seconds(block), self._link(flat)
        busiest = max((before + m * held) * layer + (m * head if last else 0.0) for before, held, last in ranks)
        one_by_one = network + (m - 1) * largest * layer / 2
        overlaps, hidden = self._stack.overlaps.dp, self._hardware.attained.overlap
        if self._stack.shards_weights:  # weights are all-gathered for all forwards and backwards
            link = m * (2 * gather + reduce)
            exposed = link * (1 - hidden) if overlaps else link
        else:
            link = reduce * (m if layout.zero == 2 and self._stack.reduces_each else 1) + gather
            exposed = 0.0 if overlaps else link
        pipeline = max(max(busiest, m * network / layout.pp) + exposed, one_by_one, link)
        return (pipeline + self._stack.attained.step_s) * scale(self._space.devices, self._stack)

    def memory(self, layout: Layout) -> float:
        """Lower bound of the fullest rank's memory in bytes."""
        m, layers = self._micro_batches(layout), self._cut(layout.pp, layout.vpp)[0]
        block, flat = self._reset(layout)
        in_flight = m if SCHEDULES[layout.schedule].facts["unbounded_in_flight"] else min(m, layout.pp)
        return (1 - PADDING) * self._state(flat) + layers * in_flight * self._saved(block)

    def _micro_batches(self, layout: Layout) -> int:
        return self._space.config.batch.total // (layout.dp * layout.micro)

    def _cut_of(self, pp: int, vpp: int) -> tuple[int, list[tuple[int, int, bool]], int]:
        """Count layers: of the first rank; by rank, as (before the first chunk, on the rank, is the last rank); of the
        largest chunk. Among ranks with equal layer counts only the last is listed, for it has the longest fill.
        """
        config = self._space.with_layout(Layout(pp=pp, vpp=vpp))
        stages = stages_of(config.model, config.parallel)
        sizes = [len(stages.layers(index)) for index in range(stages.count)]
        last, _ = stages.placement.places[-1]
        ranks = [
            (stages.starts[own[0]], sum(sizes[stage] for stage in own), rank == last)
            for rank, own in enumerate(stages.placement.stages)
        ]
        return ranks[0][1], list({rank[1:]: rank for rank in ranks}.values()), max(sizes)

    def _seconds_of(self, layout: Layout) -> tuple[float, float, float]:
        """Seconds of a micro-batch's forward and backward: of the model, the fastest layer, and the head."""
        config = self._space.config
        recompute = "none" if config.train.recompute_model_chunks else layout.recompute
        vpp = config.model.num_layers + 2  # a chunk per layer, embedding, head
        dp = self._space.devices // (layout.tp * layout.cp)
        layerwise = self._space.free.with_layout(layout._replace(vpp=vpp, dp=dp, recompute=recompute))
        pairs = chunk_times(StepParts(layerwise, self._hardware, self._stack).layers).values()
        seconds = [pair.forward.total + pair.backward.total for pair in pairs]
        return sum(seconds), min(seconds[1:-1]), 0.0 if config.parallel.vocab_pp else seconds[-1]

    def _link_of(self, layout: Layout) -> tuple[float, float]:
        """Seconds of a rank's gradient reduction and weight all-gather: of the first rank, active first and last; with
        sharded weights, where both are parts of forward and backward, the least of all ranks.
        """
        parts = StepParts(self._space.with_layout(layout), self._hardware, self._stack)
        ranks = range(layout.pp if self._stack.shards_weights else 1)
        chunks = [[parts.buckets[rank, chunk] for chunk in range(layout.vpp)] for rank in ranks]
        reduce, gather = (min(sum(map(cost, rank)) for rank in chunks) for cost in (parts.dp.reduce, parts.dp.gather))
        return reduce, gather

    def _saved_of(self, layout: Layout) -> int:
        """Saved bytes of a layer for a micro-batch."""
        config = self._space.free.with_layout(layout)
        job, recompute = JobMemory(config), recompute_policy(config.train, 0)
        return min(job.layer(layer, recompute).saved for layer in range(config.model.num_layers))

    def _reset(self, layout: Layout) -> tuple[Layout, Layout]:
        """Reset keys without effect on a layer's time and activations; and keys without effect on a rank's state and
        collectives over dp, except for padding.
        """
        vpp = layout.vpp if self._space.config.parallel.layers_per_chunk else 1
        block = layout._replace(pp=1, vpp=1, schedule="1f1b", dp=1, zero=1)
        flat = layout._replace(sp=False, cp_mode="ring", cp_a2a_size=1, vpp=vpp, schedule="1f1b", micro=1)
        return block, flat._replace(recompute="none")
