"""Times of a pipeline's actions and communication, for a configuration on hardware with a stack (`PipelineTimes`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Self

from megascale.config.run import RunConfig
from megascale.layout.chunks import bucket_sizes, held_chunks, stages_of
from megascale.layout.parts.times import PassTimes, Seconds
from megascale.layout.recompute_policy import joined_chunks
from megascale.layout.stages import Place
from megascale.plan.simulate.chunk_time import chunk_times
from megascale.plan.simulate.event_simulator import StageTimes
from megascale.plan.simulate.extrapolate import Pipeline, pipeline_time
from megascale.plan.simulate.islands import by_stage, far_message, stage_islands
from megascale.plan.simulate.layer_time import LayerTimes
from megascale.plan.simulate.link_time import Buckets, DataParallel, neighbour_route
from megascale.plan.simulate.profiles import Hardware, Overlaps, Stack


@dataclass(frozen=True)
class PipelineTimes:
    """Durations of a pipeline's parts in seconds, for a resolved configuration."""

    config: RunConfig
    hardware: Hardware
    stack: Stack

    @property
    def pipeline(self) -> Pipeline:
        p = self.config.parallel
        assert p.schedule, "a resolved configuration names its schedule"
        reduces_each = p.zero >= 2 and self.stack.reduces_each and not self.gathers_by_layer
        chunks, keep = self.config.num_chunks, self.config.data.sequence_chunks_saved
        joined = joined_chunks(self.config.train, p)
        m = self.config.num_microbatches
        return Pipeline(p.schedule, p.pp, p.vpp, m, reduces_each, chunks, keep, joined, p.vocab_pp, p.skip_ratio)

    @property
    def gathers_by_layer(self) -> bool:
        """Weights are all-gathered for every forward and backward, layer by layer; kept ones once a step."""
        return self.stack.shards_weights or self.config.parallel.resharding in ("microbatch", "forward")

    @property
    def overlaps(self) -> Overlaps:
        can, overlap = self.stack.overlaps, self.config.overlap
        return Overlaps(tp=can.tp, pp=can.pp and overlap.pp, dp=can.dp and overlap.dp)

    def pipeline_s(self, times: StageTimes) -> float:
        """Seconds from the first forward to the last gradient reduction."""
        return pipeline_time(self.pipeline, times, self.overlaps)

    @cached_property
    def layers(self) -> LayerTimes:
        hardware = by_stage(self.hardware, self.config.parallel, self.config.world_size)
        return LayerTimes.from_config(self.config, hardware, self.stack)

    @cached_property
    def dp(self) -> DataParallel:
        p, sizes = self.config.parallel, self.layers.sizes
        element_bytes = self.stack.gradient_bytes or sizes.wide, sizes.compute
        hardware = by_stage(self.hardware, p, self.config.world_size)
        return DataParallel.of_layout(hardware, p, p.zero > 0 or self.stack.shards_weights, element_bytes)

    @cached_property
    def buckets(self) -> dict[Place, Buckets]:
        """Every chunk's buckets. Chunks of equally many layers, with experts and without, share a result, but for the
        model's ends.
        """
        c, p, stages = self.config, self.config.parallel, stages_of(self.config.model, self.config.parallel)
        known, sizes = dict[tuple[int, int, bool, bool, bool], Buckets](), dict[Place, Buckets]()
        for rank, chunk in itertools.product(range(p.pp), held_chunks(p)):
            stage, shared = stages.index(rank, chunk), chunk == p.vpp
            layers = range(0) if shared else stages.layers(stage)
            key = len(layers), sum(map(c.model.has_experts, layers)), stage == 0, stage == stages.count - 1, shared
            if key not in known:
                (buckets,) = bucket_sizes(c.model, p, c.overlap, c.train, rank, [chunk])
                known[key] = tuple((bucket.reduce_axes, bucket.numel) for bucket in buckets)
            sizes[rank, chunk] = known[key]
        return sizes

    @cached_property
    def machines(self) -> list[list[Self]]:
        """This pipeline on the hardware of each island in which a stage lies, by stage."""
        hardware, p = self.hardware.machines, self.config.parallel
        on = [self] if hardware == [self.hardware] else [replace(self, hardware=machine) for machine in hardware]
        islands = stage_islands(self.hardware, p, self.config.world_size)
        return [[on[number] for number in {island % len(on) for island in some}] for some in islands]

    @cached_property
    def pairs(self) -> dict[Place, PassTimes]:
        """Times of every chunk, in its slowest island."""
        return {
            place: max((machine.own_pairs[place] for machine in self.machines[place[0]]), key=lambda pair: pair.total)
            for place in self.machines[0][0].own_pairs
        }

    @cached_property
    def slowness(self) -> list[float]:
        """Seconds of the model in the slowest island of each virtual stage."""
        seconds = [max(sum(pair.total for pair in on.own_pairs.values()) for on in row) for row in self.machines]
        return [seconds[rank] for rank, _ in stages_of(self.config.model, self.config.parallel).placement.places]

    @cached_property
    def own_pairs(self) -> dict[Place, PassTimes]:
        """Times of every chunk on this hardware, with the exposed collectives of weights that are gathered by layer."""
        pairs = chunk_times(self.layers)
        for place, pair in pairs.items() if self.gathers_by_layer else ():
            gather, reduce = self.dp.gather(self.buckets[place]), self.dp.reduce(self.buckets[place])
            forward, backward = self._layerwise(pair.forward, gather), self._layerwise(pair.backward, gather + reduce)
            pairs[place] = pair + PassTimes(forward, backward)
        return pairs

    @cached_property
    def hidden(self) -> dict[tuple[int, int, int], float]:
        """Seconds that an overlapped forward and backward take less than both, by rank and their chunks: the exchanges
        of experts of each are hidden behind the other's compute, which they slow down.
        """
        p, share, found = self.config.parallel, self.hardware.attained.overlap, dict[tuple[int, int, int], float]()
        chunks = range(p.vpp if p.ep > 1 else 0)
        for rank, one, two in itertools.product(range(p.pp), chunks, chunks):
            ahead, back = self.pairs[rank, one].forward, self.pairs[rank, two].backward
            behind = min(ahead.ep, back.total - back.ep) + min(back.ep, ahead.total - ahead.ep)
            found[rank, one, two] = share * behind
        return found

    @cached_property
    def slowest_rank(self) -> PassTimes:
        p = self.config.parallel
        ranks = (sum((self.pairs[rank, c] for c in held_chunks(p)), PassTimes()) for rank in range(p.pp))
        return max(ranks, key=lambda pair: pair.total)

    @cached_property
    def most_layers(self) -> int:
        layout = stages_of(self.config.model, self.config.parallel)
        return max(sum(len(layout.layers(stage)) for stage in own) for own in layout.placement.stages)

    def _layerwise(self, work: Seconds, sent: float) -> Seconds:
        """Exposed seconds of a chunk's collectives, `sent` in sum, which overlap with the layer before."""
        if not self.overlaps.dp:
            return Seconds(dp=sent)
        layers = max(1, self.config.model.num_layers // len(self.buckets))
        least = sent * max(1 / layers, 1 - self.hardware.attained.overlap)
        return Seconds(dp=max(least, sent - work.total * (layers - 1) / layers))

    @cached_property
    def times(self) -> StageTimes:
        c, p, apart = self.config, self.config.parallel, self.gathers_by_layer
        world, size = c.world_size, self.layers.sizes.message
        between = neighbour_route(self.hardware, p.tp * p.cp * c.dp, world, together=p.tp)
        receive = 0.0 if p.sp else self.layers.exchange.gather()  # a message is 1 / tp of an activation
        buckets = {} if apart else self.buckets
        reduce, gather = (
            {place: max(on.costs[index](sizes) for on in self.machines[place[0]]) for place, sizes in buckets.items()}
            for index in range(2)
        )
        return StageTimes(
            {place: pair.forward.total for place, pair in self.pairs.items()},
            {place: pair.backward.total for place, pair in self.pairs.items()},
            between.message(size),
            receive,
            reduce,
            gather,
            {place: len(sizes) for place, sizes in self.buckets.items()},
            1 - self.hardware.attained.overlap,
            share_link=between.network and self.dp.network,
            weight_gradient={place: pair.weights.total for place, pair in self.pairs.items()},
            hidden=self.hidden,
            exchange=between.collective("all_reduce", self.layers.sizes.stream, p.pp) if p.vocab_pp else 0.0,
            far=far_message(self.hardware, between, p, world, size),
            islands=stage_islands(self.hardware, p, world) if self.hardware.islands else (),
        )

    @cached_property
    def costs(self) -> tuple[Callable[[Buckets], float], Callable[[Buckets], float]]:
        """Seconds of the gradient reduction and of the weight all-gather of buckets on this hardware."""
        return cache(self.dp.reduce), cache(self.dp.gather)
