"""Lower bounds of a layout's step time and of its memory, in a few operations each: a search asks them of every layout.

The pipeline of a step with m micro-batches on p ranks with v chunks each takes at least

- m W / p, the mean rank's work, for W seconds of a forward and a backward of the whole network;
- for each rank the fill and drain, through the first chunks of the ranks before it, and all m micro-batches of its own
  layers: with equal chunks (p - 1 + m v) of them;
- one micro-batch's way, W, while the others wait for the longest forward or backward of a chunk;
- the collectives over dp, one after another, on top where nothing hides them.

A rank of the first stage holds its state, and what all its layers save of min(m, p) micro-batches: p forwards come
before the first backward.
"""

from __future__ import annotations

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
    """The bounds of one space's layouts. What layouts share, such as the seconds of a layer, is computed once."""

    def __init__(self, space: Space, hardware: Hardware, stack: Stack) -> None:
        self._space, self._hardware, self._stack = space, hardware, stack
        parallel = space.config.parallel.model_copy(update={"layers_per_chunk": None})
        train = space.config.train.model_copy(update={"recompute_chunks": None})
        self._plain = Space(space.config.model_copy(update={"parallel": parallel, "train": train}), space.devices)
        self._cut, self._seconds, self._link = cache(self._cut_of), cache(self._seconds_of), cache(self._link_of)
        self._batch = space.config.batch.total
        self._state, self._saved = cache(self._state_of), cache(self._saved_of)

    def step_s(self, layout: Layout) -> float:
        """Seconds that a step takes at least."""
        m, (ranks, largest) = self._batch // (layout.dp * layout.micro), self._cut(layout.pp, layout.vpp)
        network, layer, head = self._seconds(self._block(layout))
        before, own = ranks[-1]
        work = max(
            m * network / layout.pp,
            max(before + m * own for before, own in ranks) * layer,
            (before + m * own) * layer + m * head,
            network + (m - 1) * largest * layer / 2,
        )
        reduce, gather = self._link(self._flat(layout))
        if self._stack.shards_weights:  # weights for each forward and each backward
            link = m * (2 * gather + reduce)
        else:
            link = reduce * (m if layout.zero == 2 and self._stack.reduces_each else 1) + gather
        pipeline = max(work, link) if self._stack.hides.dp else work + link
        return (pipeline + self._stack.attained.step_s) * scale(self._space.devices, self._stack)

    def memory(self, layout: Layout) -> float:
        """Bytes that the fullest rank holds at least."""
        m, layers = self._batch // (layout.dp * layout.micro), self._cut(layout.pp, layout.vpp)[0][0][1]
        alive = m if SCHEDULES[layout.schedule].facts["piles"] else min(m, layout.pp)
        return (1 - PADDING) * self._state(self._flat(layout)) + layers * alive * self._saved(self._block(layout))

    def _cut_of(self, pp: int, vpp: int) -> tuple[list[tuple[int, int]], int]:
        """The layers before each rank's first chunk and its own, and the layers of the largest chunk. Of inner ranks
        with as many layers only the last is there, which waits longest.
        """
        stages = stages_of(self._space.applied(Layout(pp=pp, vpp=vpp)))
        sizes = [len(stages.layers(index)) for index in range(stages.count)]
        ranks = [(stages.starts[rank], sum(sizes[rank::pp])) for rank in range(pp)]
        inner = {own: (before, own) for before, own in ranks[1:-1]}
        return [ranks[0], *inner.values(), ranks[-1]], max(sizes)

    def _seconds_of(self, layout: Layout) -> tuple[float, float, float]:
        """Seconds of a micro-batch, forward and backward: of the network, of its fastest layer, and of the head, from
        chunks of one layer each between the embedding's and the head's.
        """
        own = self._space.config
        recompute = "none" if own.train.recompute_chunks else layout.recompute
        vpp, dp = own.model.num_layers + 2, self._space.devices // layout.tp
        config = self._plain.applied(layout._replace(vpp=vpp, dp=dp, recompute=recompute))
        pairs = chunk_times(config, self._hardware, self._stack).values()
        both = [pair.forward.total + pair.backward.total for pair in pairs]
        return sum(both), min(both[1:-1]), both[-1]

    def _link_of(self, layout: Layout) -> tuple[float, float]:
        """Seconds of reducing the first rank's gradients over dp, and of gathering its weights."""
        sharded = self._stack.shards_weights
        config = self._space.applied(layout._replace(zero=1) if sharded else layout)
        times = StepParts(config, self._hardware, self._stack.model_copy(update={"shards_weights": False})).times
        reduce, gather = (sum(found[0, chunk] for chunk in range(layout.vpp)) for found in (times.reduce, times.gather))
        return reduce, gather

    def _state_of(self, layout: Layout) -> int:
        """Bytes of weights, gradients and optimizer on the first rank."""
        return state_bytes(self._space.applied(layout), 0, self._stack.holding).total

    def _saved_of(self, layout: Layout) -> int:
        """Bytes that a layer saves of a micro-batch."""
        config = self._plain.applied(layout)
        sizes, recompute, fp8 = Sizes(config), recompute_of(config.train, 0), eight_bit_layers(config)
        distinct, numbers = kinds(config.model)
        alike = {(number, layer in fp8) for layer, number in enumerate(numbers)}
        return min(block_bytes(sizes, distinct[number], cast, recompute).saved for number, cast in alike)

    def _block(self, layout: Layout) -> Layout:
        """The layout without what changes neither a layer's time nor what it saves."""
        return layout._replace(pp=1, vpp=1, schedule="1f1b", dp=1, zero=1)

    def _flat(self, layout: Layout) -> Layout:
        """The layout without what changes neither a rank's state nor its collectives over dp, but by padding."""
        vpp = layout.vpp if self._space.config.parallel.layers_per_chunk else 1
        return layout._replace(sp=False, vpp=vpp, schedule="1f1b", micro=1, recompute="none")


def least_seconds(parts: StepParts) -> float:
    """Seconds that the step of a resolved configuration takes at least, from the times of its own chunks."""
    times, (p, v, m) = parts.times, (parts.pipeline.p, parts.pipeline.v, parts.pipeline.m)
    hop, shown = times.message + times.hops, times.hops + (0.0 if parts.hides.pp else times.message)
    repeats = m if parts.pipeline.reduces_each else 1
    every = [*times.forward.values(), *times.backward.values()]
    fill, pipeline = 0.0, sum(every) + 2 * (p * v - 1) * hop + (m - 1) * max(every)
    for rank in range(p):
        chunks = [(rank, chunk) for chunk in range(v)]
        messages = 2 * v - (rank == 0) - (rank == p - 1)  # of a micro-batch, received and sent
        work = m * (sum(times.forward[place] + times.backward[place] for place in chunks) + messages * shown)
        link = sum(times.reduce.get(place, 0.0) * repeats + times.gather.get(place, 0.0) for place in chunks)
        pipeline = max(pipeline, link, fill + work + (0.0 if parts.hides.dp else link))
        fill += times.forward[rank, 0] + times.backward[rank, 0] + 2 * hop
    return parts.seconds(pipeline)
