"""Lower bounds of a layout's step time and memory (`Bounds`), cheap enough for every layout of a search.

A pipeline of p ranks and m micro-batches takes at least the largest of these times, where W is the time of a forward
and a backward of the model, and w of its largest chunk, for a micro-batch:

- m W / p, the mean rank's work, plus exposed collectives over dp;
- fill and drain of a rank, the layers before its first chunk, and m micro-batches of its own layers, plus the same;
- W + (m - 1) w / 2: one micro-batch, and the slower direction of the largest chunk for the others;
- the collectives over dp.

With split backwards weights' gradients are in none of the times but m W / p and m micro-batches: they fill the drain.

A rank of the first stage holds its state, and activations as its schedule says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from megascale.catalog.schedules import SCHEDULES
from megascale.layout.blocks import block_spec
from megascale.layout.chunks import stages_of
from megascale.layout.recompute_policy import recompute_policy
from megascale.plan.account.memory import JobMemory
from megascale.plan.account.rank_actions import rank_order
from megascale.plan.account.state_bytes import state_bytes
from megascale.plan.search.layer_split import balanced
from megascale.plan.search.space import Layout, Space
from megascale.plan.simulate.chunk_time import block_times, chunk_times
from megascale.plan.simulate.layer_time import LayerTimes
from megascale.plan.simulate.link_time import Buckets
from megascale.plan.simulate.profiles import Hardware, Stack
from megascale.plan.simulate.step_time import StepParts, scale
from megascale.schedule.ir import RankSchedule, most_live, parts
from megascale.schedule.shared_vocabulary import delay_backwards

SPLIT = "zb_h1"  # stands for all schedules with split backwards
PADDING = 1e-3  # upper bound on the share of bucket padding in a rank's state


class Bounds:
    """Bounds of a space's layouts. Values common to several layouts, such as seconds of a layer, are cached."""

    def __init__(self, space: Space, hardware: Hardware, stack: Stack) -> None:
        self._space, self._hardware, self._stack = space, hardware, stack
        self._cut, self._seconds, self._link = cache(self._cut_of), cache(self._seconds_of), cache(self._link_of)
        self._passes = cache(lambda layout: list(chunk_times(self._layers(layout)).values()))
        self._blocks = cache(self._blocks_of)
        self._most = cache(self._most_of)
        self._state = cache(lambda layout: state_bytes(space.with_layout(layout), 0, stack.storage).total)
        self._saved = cache(self._saved_of)

    def step_s(self, layout: Layout) -> float:
        """Lower bound of step time in seconds."""
        m, (_, ranks, largest) = self._micro_batches(layout), self._cut(layout.pp, layout.vpp, layout.schedule)
        block, flat = self._reset(self.in_blocks(layout))
        (network, layer, head, *apart), (reduce, gather, streams) = self._seconds(block), self._link(flat)
        path, direct, fill = apart if SCHEDULES[layout.schedule].facts["split"] else (network, layer, layer)
        if self._space.config.parallel.vocab_pp and layout.pp > 1:  # all stages share the head
            path, head = path - head, 0.0
        busiest = max(before * fill + m * held * layer + (m * head if last else 0.0) for before, held, last in ranks)
        one_by_one = path + (m - 1) * largest * direct / 2
        overlaps, hidden = self._stack.overlaps.dp, self._hardware.attained.overlap
        if streams:  # weights are all-gathered for all forwards and backwards
            link = m * (2 * gather + reduce)
            exposed = link * (1 - hidden) if overlaps else link
        else:
            link = reduce * (m if layout.zero >= 2 and self._stack.reduces_each else 1) + gather
            exposed = 0.0 if overlaps else link
        pipeline = max(max(busiest, m * network / layout.pp) + exposed, one_by_one, link)
        return (pipeline + self._stack.attained.step_s) * scale(self._space.devices, self._stack)

    def memory(self, layout: Layout) -> float:
        """Lower bound of the fullest rank's memory in bytes."""
        block, flat = self._reset(layout)
        most = self._most(layout.pp, layout.vpp, layout.schedule, self._micro_batches(layout))
        return (1 - PADDING) * self._state(flat) + most * self._saved(block)

    def in_blocks(self, layout: Layout) -> Layout:
        """Return a layout with the blocks of tokens in which a layer takes least (FSMoE, Pan et al. 2025)."""
        if len(self._space.token_blocks(layout)) == 1:
            return layout
        return layout._replace(token_blocks=self._blocks(self._reset(layout)[0]))

    def balanced(self, layout: Layout, slowness: Sequence[float]) -> list[int]:
        """Split the layers over a layout's stages by time. `slowness`: by stage, the seconds of equal work."""
        first, *layers, last = (pair.total for pair in self._passes(self._reset(self.in_blocks(layout))[0]))
        shared = self._space.config.parallel.vocab_pp
        return balanced(layers, first, 0.0 if shared else last, layout.pp * layout.vpp, slowness)

    def _micro_batches(self, layout: Layout) -> int:
        return self._space.config.batch.total // (layout.dp * layout.micro)

    def _most_of(self, pp: int, vpp: int, schedule: str, m: int) -> int:
        """Count the most layers whose activations the first rank holds."""
        parallel = self._space.with_layout(Layout(pp=pp, vpp=vpp, schedule=schedule)).parallel
        order = rank_order(parallel.model_copy(update={"vocab_pp": 0}), m, 1, 1, 0)  # its passes hold no layers
        freed = RankSchedule(part for entry in order for part in reversed(parts(entry)))  # pairs free as they allocate
        return most_live(delay_backwards(freed, parallel.vocab_pp), self._cut(pp, vpp, schedule)[0])

    def _cut_of(self, pp: int, vpp: int, schedule: str) -> tuple[list[int], list[tuple[int, int, bool]], int]:
        """Count layers: of the first rank by chunk; by rank, as (before the first chunk, on the rank, has the head); of
        the largest chunk. Among ranks with equal layer counts only the last is listed, for it has the longest fill.
        """
        config = self._space.with_layout(Layout(pp=pp, vpp=vpp, schedule=schedule))
        stages = stages_of(config.model, config.parallel)
        sizes = [len(stages.layers(index)) for index in range(stages.count)]
        last, _ = stages.placement.places[-1]
        ranks = [
            (stages.starts[own[0]], sum(sizes[stage] for stage in own), rank == last)
            for rank, own in enumerate(stages.placement.stages)
        ]
        return (
            [sizes[stage] for stage in stages.placement.stages[0]],
            list({rank[1:]: rank for rank in ranks}.values()),
            max(sizes),
        )

    def _seconds_of(self, layout: Layout) -> tuple[float, ...]:
        """Seconds of a micro-batch's forward and backward: of the model, the fastest layer, and the head; of the first
        two without weights' gradients; and of the fastest layer's forward.
        """
        pairs = self._passes(layout)
        seconds, direct = [pair.total for pair in pairs], [pair.total - pair.weights.total for pair in pairs]
        forward = min(pair.forward.total for pair in pairs[1:-1])
        return sum(seconds), min(seconds[1:-1]), seconds[-1], sum(direct), min(direct[1:-1]), forward

    def _layers(self, layout: Layout) -> LayerTimes:
        """Time layers on one pipeline stage, with a chunk for each, for the embedding, and for the head with the layers
        after it.
        """
        dp = self._space.devices // (layout.tp * layout.cp)
        layerwise = layout._replace(vpp=self._space.config.model.num_layers + 2, dp=dp)
        return LayerTimes.from_config(self._space.free.with_layout(layerwise), self._hardware, self._stack)

    def _blocks_of(self, layout: Layout) -> int:
        """Choose the blocks of tokens of the last layer's experts, the fewest of those that are equally fast."""
        model = self._space.config.model
        block = block_spec(model, model.num_layers - 1)

        def seconds(blocks: int) -> float:
            layers = self._layers(layout._replace(token_blocks=blocks))
            train = layers.config.train
            return block_times(layers, block, train.quantizes, recompute_policy(train, model.num_layers - 1)).total

        return min(self._space.token_blocks(layout), key=seconds)

    def _link_of(self, layout: Layout) -> tuple[float, float, bool]:
        """Seconds of a rank's gradient reduction and weight all-gather, and whether weights stream: of the first rank,
        active first and last; with weights that stream, where both are parts of forward and backward, the least of all
        ranks, without the units that two actions share.
        """
        parts = StepParts(self._space.with_layout(layout), self._hardware, self._stack)
        ranks = range(layout.pp if parts.streams else 1)
        chunks = [[parts.modules[rank, chunk] for chunk in range(layout.vpp)] for rank in ranks]
        inner = slice(1, -1) if parts.streams else slice(None)

        def least(cost: Callable[[Buckets], float], units: slice) -> float:
            return min(sum(cost(module) for modules in rank for module in modules[units]) for rank in chunks)

        return least(parts.dp.reduce, slice(None)), least(parts.dp.gather, inner), parts.streams

    def _saved_of(self, layout: Layout) -> int:
        """Saved bytes of a layer for a micro-batch."""
        config = self._space.free.with_layout(layout)
        job, layers = JobMemory(config), range(config.model.num_layers)
        return min(job.layer(layer, recompute_policy(config.train, layer)).saved for layer in layers)

    def _reset(self, layout: Layout) -> tuple[Layout, Layout]:
        """Reset keys without effect on a layer's time and activations; and keys without effect on a rank's state and
        collectives over dp, except for padding.
        """
        vpp = layout.vpp if self._space.config.parallel.layers_per_chunk else 1
        schedule = SPLIT if SCHEDULES[layout.schedule].facts["split"] else "1f1b"
        block = layout._replace(pp=1, vpp=1, schedule=schedule, dp=1, zero=1, reshard=None, dp_shard=None)
        block = block._replace(far_axis="pp")
        flat = layout._replace(sp=False, cp_mode="ring", cp_a2a_size=1, vpp=vpp, schedule="1f1b", micro=1)
        return block, flat._replace(recompute="none", token_blocks=1)
