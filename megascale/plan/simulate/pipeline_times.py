"""Times of a pipeline's actions and communication, for a configuration on hardware with a stack (`PipelineTimes`)."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Self

from megascale.config.run import RunConfig
from megascale.layout.chunks import BucketSize, bucket_sizes, fp8_layers, held_chunks, stages_of
from megascale.layout.parts.times import PassTimes, Seconds
from megascale.layout.recompute_policy import joined_chunks
from megascale.layout.stages import Place
from megascale.plan.account.sizes import step_gather_bytes
from megascale.plan.simulate.chunk_time import chunk_times
from megascale.plan.simulate.event_simulator import StageTimes
from megascale.plan.simulate.extrapolate import Pipeline, pipeline_time
from megascale.plan.simulate.islands import by_stage, far_message, stage_islands
from megascale.plan.simulate.layer_time import LayerTimes
from megascale.plan.simulate.link_time import Buckets, DataParallel, neighbour_route
from megascale.plan.simulate.profiles import Hardware, Overlaps, Stack
from megascale.plan.simulate.unit_stream import Exposed, UnitTimes, streamed


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
        reduces_each = p.zero >= 2 and self.stack.reduces_each and not self.streams
        chunks, keep = self.config.num_chunks, self.config.data.sequence_chunks_saved
        joined = joined_chunks(self.config.train, p, stages_of(self.config.model, p))
        m = self.config.num_microbatches
        reshard = None if self.streams else p.resharding
        return Pipeline(
            p.schedule, p.pp, p.vpp, m, reduces_each, chunks, keep, joined, p.vocab_pp, p.skip_ratio, reshard
        )

    @property
    def streams(self) -> bool:
        """Sharded weights are gathered unit by unit, for every forward and backward."""
        return self.config.parallel.resharding == "forward"

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
        hardware = by_stage(self.hardware, p, self.config.world_size)
        return DataParallel.of_layout(hardware, p, p.zero > 0, self.stack.gradient_bytes or sizes.wide)

    @cached_property
    def modules(self) -> dict[Place, tuple[Buckets, ...]]:
        """Every chunk's buckets, by the modules that they begin with. Chunks of equally many layers, with experts and
        without, in FP8 and not, share a result, but for the model's ends.
        """
        c, p, stages = self.config, self.config.parallel, stages_of(self.config.model, self.config.parallel)
        fp8 = fp8_layers(c.model, c.train, c.fp8)
        known, sizes = dict[tuple[Hashable, ...], tuple[Buckets, ...]](), dict[Place, tuple[Buckets, ...]]()
        for rank, chunk in itertools.product(range(p.pp), held_chunks(p)):
            stage, shared = stages.index(rank, chunk), chunk == p.vpp
            layers = range(0) if shared else stages.layers(stage)
            experts, quantized = sum(map(c.model.has_experts, layers)), sum(layer in fp8 for layer in layers)
            alike = layers if c.train.freeze else len(layers)
            key = alike, experts, quantized, stage == 0, stage == stages.count - 1, shared
            if key not in known:
                (buckets,) = bucket_sizes(c.model, p, c.overlap, c.train, rank, [chunk])
                modules = itertools.groupby(buckets, lambda bucket: bucket.first_module)
                known[key] = tuple(tuple(map(self._sent, own)) for _, own in modules)
            sizes[rank, chunk] = known[key]
        return sizes

    def _sent(self, bucket: BucketSize) -> tuple[tuple[str, ...], int, int]:
        """Return the axes of a bucket, the elements of gradients that are reduced, and the bytes that are gathered."""
        return bucket.reduce_axes, 0 if bucket.frozen else bucket.numel, step_gather_bytes(self.config, bucket)

    @cached_property
    def buckets(self) -> dict[Place, Buckets]:
        """Every chunk's buckets."""
        return {place: tuple(itertools.chain(*modules)) for place, modules in self.modules.items()}

    @cached_property
    def machines(self) -> list[list[Self]]:
        """This pipeline on the hardware of each island in which a stage lies, by stage."""
        hardware, p = self.hardware.machines, self.config.parallel
        on = [self] if hardware == [self.hardware] else [replace(self, hardware=machine) for machine in hardware]
        for machine in on:
            vars(machine)["modules"] = self.modules  # the same on any hardware, and half of the time to plan
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
        """Times of every chunk on this hardware, with the exposed collectives of weights that stream."""
        sent = {
            place: PassTimes(Seconds(dp=each.forward), Seconds(dp=each.backward))
            for place, each in self.streamed.items()
        }
        return {place: pair + sent.get(place, PassTimes()) for place, pair in self._computed.items()}

    @cached_property
    def _computed(self) -> dict[Place, PassTimes]:
        return chunk_times(self.layers)

    @cached_property
    def streamed(self) -> dict[Place, Exposed]:
        """The exposed seconds of every chunk whose weights stream."""
        exposed = cache(partial(
            streamed, turns=self.config.parallel.vpp == 1, overlap=self.overlaps.dp,
            slowdown=1 - self.hardware.attained.overlap,
        ))  # fmt: skip
        return {place: exposed(self._units(place)) for place in self._computed} if self.streams else {}

    @property
    def hiding_tokens(self) -> float:
        """The tokens of a micro-batch that compute for as long as weights that stream are sent, on the stage that needs
        most.
        """
        sent = {at: 2 * self.dp.gather(buckets) + self.dp.reduce(buckets) for at, buckets in self.buckets.items()}
        return self.layers.tokens * max(sent[at] / pair.total for at, pair in self._computed.items())

    def _units(self, place: Place) -> tuple[UnitTimes, ...]:
        """The units of a chunk, whose layers share its compute equally. A tied head uses the embedding's weights."""
        model, modules = self.config.model, self.modules[place]
        stages = stages_of(model, self.config.parallel)
        index = stages.index(*place)
        begin = [self.layers.embedding()] if index == 0 else []
        end = [self.layers.head()] if index == stages.count - 1 else []
        layers = len(modules) - len(begin) - len(end)
        rest = self._computed[place] + sum([*begin, *end], PassTimes()) * -1
        work = [*begin, *[rest * (1 / max(1, layers))] * layers, *end]
        gathers = [*map(self.dp.gather, modules)]
        if model.tie_embeddings and stages.count == 1:
            gathers[-1] += gathers[0]
        times = zip(work, gathers, map(self.dp.reduce, modules), strict=True)
        return tuple(UnitTimes(each.forward.total, each.backward.total, *sent) for each, *sent in times)

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

    @cached_property
    def reductions(self) -> dict[Place, float]:
        """Seconds of the reduction of every chunk's gradients on this hardware, with a share of the sum over copies; of
        weights that stream what is exposed once a step.
        """
        copies, reduce = cache(self.dp.sum_copies), cache(self.dp.reduce)
        last = {at: copies(sizes) for at, sizes in self.buckets.items()}
        if not self.streams:
            count = self.config.num_microbatches if self.pipeline.reduces_each else 1  # the last sums copies
            return {at: reduce(sizes) + last[at] / count for at, sizes in self.buckets.items()}
        slowdown = 1 - self.hardware.attained.overlap
        hidden = {at: pair.backward.total if self.overlaps.dp else 0.0 for at, pair in self._computed.items()}
        return {at: each.ends + max(slowdown * last[at], last[at] - hidden[at]) for at, each in self.streamed.items()}

    @cached_property
    def gathers(self) -> dict[Place, float]:
        """Seconds of the gather of every chunk's weights on this hardware, none if they stream."""
        gather = cache(self.dp.gather)
        return {} if self.streams else {at: gather(sizes) for at, sizes in self.buckets.items()}

    @cached_property
    def times(self) -> StageTimes:
        c, p = self.config, self.config.parallel
        world, size = c.world_size, self.layers.sizes.message
        between = neighbour_route(self.hardware, p.tp * p.cp * c.dp, world, together=p.tp)
        receive = 0.0 if p.sp else self.layers.exchange.gather()  # a message is 1 / tp of an activation
        reduce = {at: max(on.reductions[at] for on in self.machines[at[0]]) for at in self.buckets}
        gather = {at: max(on.gathers[at] for on in self.machines[at[0]]) for at in self.gathers}
        return StageTimes(
            {place: pair.forward.total for place, pair in self.pairs.items()},
            {place: pair.backward.total for place, pair in self.pairs.items()},
            between.message(size),
            receive,
            reduce,
            gather,
            {at: len(self.buckets[at]) for at in gather},
            1 - self.hardware.attained.overlap,
            share_link=between.network and self.dp.network,
            weight_gradient={place: pair.weights.total for place, pair in self.pairs.items()},
            hidden=self.hidden,
            exchange=between.collective("all_reduce", self.layers.sizes.stream, p.pp) if p.vocab_pp else 0.0,
            far=far_message(self.hardware, between, p, world, size),
            islands=stage_islands(self.hardware, p, world) if self.hardware.islands else (),
        )
