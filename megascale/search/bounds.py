"""Lower bounds of a layout's step time and memory, in a few operations each: a search asks them of every layout.

The pipeline of a step with m micro-batches on p ranks with v chunks each takes at least

- m W / p, the mean rank's work, for W seconds of a forward and a backward of the whole network;
- for each rank its fill and drain, the layers before its first chunk, and all m micro-batches of its own layers;
- W for one micro-batch, while the others wait for the longest forward or backward of a chunk;
- the collectives over dp, one after another, on top where nothing hides them.

A rank of the first stage holds its state, and saves activations of min(m, p) micro-batches, for p forwards come before
the first backward.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from megascale.account.activations import Sizes, block_bytes
from megascale.account.memory import state_bytes
from megascale.catalog.schedules import SCHEDULES
from megascale.layout.blocks import kinds
from megascale.layout.chunks import eight_bit_layers, stages_of
from megascale.layout.recompute import recompute_of
from megascale.search.space import Layout, Space
from megascale.simulate.layer_time import chunk_times
from megascale.simulate.profiles import Hardware, Stack
from megascale.simulate.step_time import StepParts, scale

PADDING = 1e-3
"""More than buckets padded to whole shards add to a rank's state."""


class Bounds:
    """The bounds of the layouts of a space. What layouts share, such as the seconds of a layer, is computed once."""

    def __init__(self, space: Space, hardware: Hardware, stack: Stack) -> None:
        self._space, self._hardware, self._stack = space, hardware, stack
        self._free = replace(space, fixed=frozenset())
        self._cut, self._seconds, self._link = cache(self._cut_of), cache(self._seconds_of), cache(self._link_of)
        self._state, self._saved = cache(self._state_of), cache(self._saved_of)

    def step_s(self, layout: Layout) -> float:
        """Seconds that a step takes at least."""
        m, (_, ranks, largest) = self._micro_batches(layout), self._cut(layout.pp, layout.vpp)
        block, flat = self._reset(layout)
        (network, layer, head), (reduce, gather) = self._seconds(block), self._link(flat)
        busiest = max((before + m * held) * layer + (m * head if last else 0.0) for before, held, last in ranks)
        one_by_one = network + (m - 1) * largest * layer / 2
        hides, hiding = self._stack.hides.dp, self._hardware.attained.hiding
        if self._stack.shards_weights:  # weights for each forward and each backward
            link = m * (2 * gather + reduce)
            exposed = link * (1 - hiding) if hides else link
        else:
            link = reduce * (m if layout.zero == 2 and self._stack.reduces_each else 1) + gather
            exposed = 0.0 if hides else link
        pipeline = max(max(busiest, m * network / layout.pp) + exposed, one_by_one, link)
        return (pipeline + self._stack.attained.step_s) * scale(self._space.devices, self._stack)

    def memory(self, layout: Layout) -> float:
        """Bytes that the fullest rank holds at least."""
        m, layers = self._micro_batches(layout), self._cut(layout.pp, layout.vpp)[0]
        block, flat = self._reset(layout)
        in_flight = m if SCHEDULES[layout.schedule].facts["piles"] else min(m, layout.pp)
        return (1 - PADDING) * self._state(flat) + layers * in_flight * self._saved(block)

    def _micro_batches(self, layout: Layout) -> int:
        return self._space.config.batch.total // (layout.dp * layout.micro)

    def _cut_of(self, pp: int, vpp: int) -> tuple[int, list[tuple[int, int, bool]], int]:
        """Layers of the first rank; for each rank the layers before its first chunk, its own layers, and True for the
        last; and layers of the largest chunk. Of ranks with equal layers only the last is listed, which waits longest.
        """
        stages = stages_of(self._space.applied(Layout(pp=pp, vpp=vpp)))
        sizes = [len(stages.layers(index)) for index in range(stages.count)]
        ranks = [(stages.starts[rank], sum(sizes[rank::pp]), rank == pp - 1) for rank in range(pp)]
        return ranks[0][1], list({rank[1:]: rank for rank in ranks}.values()), max(sizes)

    def _seconds_of(self, layout: Layout) -> tuple[float, float, float]:
        """Seconds of a micro-batch, forward and backward: of the network, of its fastest layer, and of the head.
        Each layer, the embedding and the head are timed as a chunk.
        """
        config = self._space.config
        recompute = "none" if config.train.recompute_chunks else layout.recompute
        vpp, dp = config.model.num_layers + 2, self._space.devices // layout.tp
        layerwise = self._free.applied(layout._replace(vpp=vpp, dp=dp, recompute=recompute))
        pairs = chunk_times(layerwise, self._hardware, self._stack).values()
        seconds = [pair.forward.total + pair.backward.total for pair in pairs]
        return sum(seconds), min(seconds[1:-1]), seconds[-1]

    def _link_of(self, layout: Layout) -> tuple[float, float]:
        """Seconds of reducing a rank's gradients over dp, and of gathering its weights: of the first rank, which
        computes first and last; with sharded weights, a part of every forward and backward, at least of any rank.
        """
        parts = StepParts(self._space.applied(layout), self._hardware, self._stack)
        ranks = range(layout.pp if self._stack.shards_weights else 1)
        chunks = [[parts.buckets[rank, chunk] for chunk in range(layout.vpp)] for rank in ranks]
        reduce, gather = (min(sum(map(cost, rank)) for rank in chunks) for cost in (parts.dp.reduce, parts.dp.gather))
        return reduce, gather

    def _state_of(self, layout: Layout) -> int:
        """Bytes of weights, gradients and optimizer on the first rank."""
        return state_bytes(self._space.applied(layout), 0, self._stack.holding).total

    def _saved_of(self, layout: Layout) -> int:
        """Bytes that a layer saves of a micro-batch."""
        config = self._free.applied(layout)
        sizes, recompute, fp8 = Sizes(config), recompute_of(config.train, 0), eight_bit_layers(config)
        distinct, numbers = kinds(config.model)
        alike = {(number, layer in fp8) for layer, number in enumerate(numbers)}
        return min(block_bytes(sizes, distinct[number], cast, recompute).saved for number, cast in alike)

    def _reset(self, layout: Layout) -> tuple[Layout, Layout]:
        """Reset the keys that change neither a layer's time nor its saved activations; and the keys that change neither
        a rank's state nor its collectives over dp, except for padding.
        """
        vpp = layout.vpp if self._space.config.parallel.layers_per_chunk else 1
        block = layout._replace(pp=1, vpp=1, schedule="1f1b", dp=1, zero=1)
        return block, layout._replace(sp=False, vpp=vpp, schedule="1f1b", micro=1, recompute="none")
