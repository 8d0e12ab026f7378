"""Step time of a configuration on hardware with a stack, by cause (`estimate`, `simulate_spans`, `StepParts`)."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import starmap

from megascale.catalog.precisions import PRECISIONS
from megascale.config.run import RunConfig
from megascale.layout.chunks import bucket_sizes, stages_of
from megascale.layout.param_groups import ParamGroup
from megascale.layout.parts.times import PassTimes, Seconds
from megascale.layout.stages import Place
from megascale.plan.account.attended import expected_scores
from megascale.plan.account.flops import mfu, token_flops
from megascale.plan.account.optimizer_state import fullest_owner, optimizer_state_bytes
from megascale.plan.account.sizes import message_bytes, replicas
from megascale.plan.account.traffic import mean_calls
from megascale.plan.simulate.event_simulator import Simulation, StageTimes
from megascale.plan.simulate.extrapolate import Pipeline, pipeline_time
from megascale.plan.simulate.layer_time import LayerTimes, chunk_times
from megascale.plan.simulate.link_time import Operation, Route, group_route, neighbour_route
from megascale.plan.simulate.profiles import LARGE_JOB, Hardware, Overlaps, Stack


@dataclass(frozen=True)
class Estimate:
    """An estimated step. `causes`: seconds of the mean pipeline rank by cause, with `step_s` as sum."""

    step_s: float
    tokens_per_s: float
    mfu_full: float
    mfu_causal: float
    causes: dict[str, float]


def estimate(config: RunConfig, hardware: Hardware, stack: Stack) -> Estimate:
    """Estimate a step of a resolved configuration."""
    parts = StepParts(config, hardware, stack)
    without_messages = replace(parts.times, message=0.0, receive=0.0)
    compute_only = replace(without_messages, reduce={}, gather={})
    ended, without_pp, without_dp = map(parts.pipeline_s, (parts.times, without_messages, compute_only))
    step = parts.seconds(ended)
    causes = parts.causes(ended, min(ended, without_pp), min(ended, without_pp, without_dp))
    tokens = config.batch.total * config.model.seq_length / step
    flops = token_flops(config.model, expected_scores(config.model, config.data))
    peak = hardware.device.peak_of("fp8" if config.train.quantizes else parts.layers.kernels.dtype)
    peak *= config.world_size / hardware.node.ranks_per_core(config.world_size)  # as training reports MFU
    return Estimate(step, tokens, mfu(flops.full, tokens, peak), mfu(flops.causal, tokens, peak), causes)


def simulate_spans(config: RunConfig, hardware: Hardware, stack: Stack) -> Simulation:
    """Simulate all actions of a step's pipeline and record all events."""
    parts = StepParts(config, hardware, stack)
    return parts.pipeline.simulate(parts.times, parts.overlaps, spans=True)


@dataclass(frozen=True)
class DataParallel:
    """Data-parallel collectives. `sharded`: ZeRO stage 1 or higher; `gradient`, `weight`: bytes of an element."""

    route: Route
    ranks: int
    sharded: bool
    gradient: int
    weight: int

    def reduce(self, buckets: tuple[int, ...]) -> float:
        """Time the gradient reduction of buckets, in elements."""
        operation: Operation = "reduce_scatter" if self.sharded else "all_reduce"
        return sum(self.route.collective(operation, self.gradient * size, self.ranks) for size in buckets)

    def gather(self, buckets: tuple[int, ...]) -> float:
        """Time the weight all-gather of buckets, 0 without sharding."""
        sizes = buckets if self.sharded else ()
        return sum(self.route.collective("all_gather", self.weight * size, self.ranks) for size in sizes)


@dataclass(frozen=True)
class StepParts:
    """Durations of a step's parts in seconds, for a resolved configuration."""

    config: RunConfig
    hardware: Hardware
    stack: Stack

    @property
    def pipeline(self) -> Pipeline:
        p = self.config.parallel
        assert p.schedule, "a resolved configuration names its schedule"
        reduces_each = p.zero == 2 and self.stack.reduces_each and not self.stack.shards_weights
        chunks, keep = self.config.num_chunks, self.config.data.keep_chunks
        return Pipeline(p.schedule, p.pp, p.vpp, self.config.num_microbatches, reduces_each, chunks, keep)

    @property
    def overlaps(self) -> Overlaps:
        can, overlap = self.stack.overlaps, self.config.overlap
        return Overlaps(tp=can.tp, pp=can.pp and overlap.pp, dp=can.dp and overlap.dp)

    def pipeline_s(self, times: StageTimes) -> float:
        """Seconds from the first forward to the last gradient reduction."""
        return pipeline_time(self.pipeline, times, self.overlaps)

    @cached_property
    def layers(self) -> LayerTimes:
        return LayerTimes.from_config(self.config, self.hardware, self.stack)

    @cached_property
    def dp(self) -> DataParallel:
        c, facts = self.config, PRECISIONS[self.config.train.precision].facts
        route = group_route(self.hardware, replicas(c), c.parallel.tp, c.world_size, together=c.parallel.tp)
        sharded, gradient = c.parallel.zero > 0 or self.stack.shards_weights, self.stack.gradient_bytes
        return DataParallel(route, replicas(c), sharded, gradient or facts["accumulate_bytes"], facts["compute_bytes"])

    @cached_property
    def buckets(self) -> dict[Place, tuple[int, ...]]:
        """Elements of every chunk's buckets. Chunks of equally many layers share a result, but for the model's ends."""
        p, stages = self.config.parallel, stages_of(self.config)
        known, sizes = dict[tuple[int, bool, bool], tuple[int, ...]](), dict[Place, tuple[int, ...]]()
        for rank, chunk in itertools.product(range(p.pp), range(p.vpp)):
            stage = stages.index(rank, chunk)
            key = len(stages.layers(stage)), stage == 0, stage == stages.count - 1
            if key not in known:
                known[key] = tuple(bucket.numel for bucket in bucket_sizes(self.config, rank, [chunk])[0])
            sizes[rank, chunk] = known[key]
        return sizes

    @cached_property
    def pairs(self) -> dict[Place, PassTimes]:
        """Times of every chunk, with the exposed collectives of ZeRO-3."""
        pairs = chunk_times(self.config, self.hardware, self.stack)
        if not self.stack.shards_weights:
            return pairs
        return {place: self._with_gathers(pair, self.buckets[place]) for place, pair in pairs.items()}

    @cached_property
    def slowest_rank(self) -> PassTimes:
        """Times of the slowest pipeline rank: the sum of its chunks."""
        p = self.config.parallel
        ranks = (sum((self.pairs[rank, c] for c in range(p.vpp)), PassTimes()) for rank in range(p.pp))
        return max(ranks, key=lambda pair: pair.total)

    @cached_property
    def most_layers(self) -> int:
        """Layers of the pipeline rank with most."""
        layout, p = stages_of(self.config), self.config.parallel
        return max(sum(len(layout.layers(layout.index(rank, chunk))) for chunk in range(p.vpp)) for rank in range(p.pp))

    def _with_gathers(self, pair: PassTimes, buckets: tuple[int, ...]) -> PassTimes:
        gather, reduce = self.dp.gather(buckets), self.dp.reduce(buckets)
        return pair + PassTimes(self._layerwise(pair.forward, gather), self._layerwise(pair.backward, gather + reduce))

    def _layerwise(self, work: Seconds, sent: float) -> Seconds:
        """Exposed seconds of a chunk's collectives, `sent` in sum, which overlap with the layer before."""
        if not self.overlaps.dp:
            return Seconds(dp=sent)
        layers = max(1, self.config.model.num_layers // len(self.buckets))
        least = sent * max(1 / layers, 1 - self.hardware.attained.overlap)
        return Seconds(dp=max(least, sent - work.total * (layers - 1) / layers))

    @cached_property
    def times(self) -> StageTimes:
        """Durations of the pipeline's actions and communication."""
        c, p, apart = self.config, self.config.parallel, self.stack.shards_weights
        between = neighbour_route(self.hardware, p.tp * replicas(c), c.world_size, together=p.tp)
        receive = 0.0 if p.sp else self.layers.exchange.gather()  # a message is 1 / tp of an activation
        reduce, gather = cache(self.dp.reduce), cache(self.dp.gather)
        buckets = {} if apart else self.buckets
        return StageTimes(
            {place: pair.forward.total for place, pair in self.pairs.items()},
            {place: pair.backward.total for place, pair in self.pairs.items()},
            between.message(message_bytes(c)),
            receive,
            {place: reduce(sizes) for place, sizes in buckets.items()},
            {place: gather(sizes) for place, sizes in buckets.items()},
            {place: len(sizes) for place, sizes in self.buckets.items()},
            1 - self.hardware.attained.overlap,
            share_link=between.network and self.dp.route.network,
        )

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.seconds(self.pipeline_s(self.times))

    @cached_property
    def update(self) -> float:
        """Seconds of the optimizer on the largest rank: state is read and written, gradients are read and cleared;
        GEMMs of rules of whole matrices on the owner with most, with decompositions at the rate of GEMMs.
        """
        facts = PRECISIONS[self.config.train.precision].facts
        p, wide = self.config.parallel, facts["accumulate_bytes"]
        elements = max(sum(sum(self.buckets[rank, chunk]) for chunk in range(p.vpp)) for rank in range(p.pp))
        shard = elements / (replicas(self.config) if self.dp.sharded else 1)
        gradients = shard if self.stack.shards_weights else elements
        masters = wide * shard if facts["master_weights"] else 0
        zero = 1 if self.dp.sharded else 0
        state = masters + max(optimizer_state_bytes(self.config, rank, zero) for rank in range(p.pp))
        moved = 2 * state + shard * (2 * wide + facts["compute_bytes"]) + gradients * wide
        owners = (fullest_owner(self.config, rank) for rank in range(p.pp))
        gemms = max(sum(starmap(self._update_gemms, matrices)) for matrices in owners)
        return moved / self.layers.kernels.bandwidth + gemms

    def _update_gemms(self, group: ParamGroup, shape: tuple[int, int]) -> float:
        """Seconds of the GEMMs of a matrix's update."""
        gemm = self.layers.kernels.gemm
        return sum(count * gemm(m, n, k) for count, (m, n, k) in group.gemms(shape))

    def seconds(self, pipeline: float) -> float:
        """Seconds of a step from seconds of the pipeline, with the loss of large jobs."""
        return self._unscaled(pipeline) * scale(self.config.world_size, self.stack)

    def _unscaled(self, pipeline: float) -> float:
        """Seconds of a step without the loss of large jobs. Ranks on the same core take turns."""
        fixed = self.update + self.stack.attained.step_s
        crowd, times = self.hardware.node.ranks_per_core(self.config.world_size), self.times
        if crowd == 1:
            return pipeline + fixed
        p, count = self.config.parallel, self.config.num_microbatches
        work = count * sum([*times.forward.values(), *times.backward.values()])
        work += count * self.config.dropped_share * sum(times.forward.values())
        work += sum([*times.reduce.values(), *times.gather.values()])
        work += 2 * (p.pp * p.vpp - 1) * count * (times.message + times.receive)
        waits = (crowd - 1) * self.hardware.node.turn_s * mean_calls(self.config)  # a rank finds the caches cold
        return max(pipeline + fixed, crowd * (work / p.pp + fixed) + waits)

    def causes(self, ended: float, without_pp: float, without_dp: float) -> dict[str, float]:
        """Seconds of the mean rank by cause. `without_pp`: pipeline without messages; `without_dp`: compute only."""
        count, fixed = self.config.num_microbatches, self.stack.attained.step_s
        total = sum((pair.forward + pair.backward for pair in self.pairs.values()), Seconds())
        again = self.config.dropped_share * sum(pair.forward.total for pair in self.pairs.values())
        total += Seconds(recompute=again)
        total *= count / self.config.parallel.pp
        unscaled = self._unscaled(ended)
        causes = {
            **vars(total), "dp": total.dp + without_pp - without_dp, "pp": ended - without_pp,
            "bubble": without_dp - total.total, "optimizer": self.update, "other": fixed,
            "cores": unscaled - ended - self.update - fixed, "scale": self.seconds(ended) - unscaled,
        }  # fmt: skip
        return {cause: 0.0 if -1e-9 * unscaled < value < 0 else value for cause, value in causes.items()}  # rounding


def scale(world: int, stack: Stack) -> float:
    """Return the factor of step time for large jobs, which grows with every doubling beyond `LARGE_JOB` devices."""
    return 1 + stack.attained.scale_loss * max(0.0, math.log2(world / LARGE_JOB))
