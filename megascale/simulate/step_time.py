"""How long a step of a configuration takes on some hardware with some stack, and why."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from megascale.account.flops import mfu, token_flops
from megascale.account.traffic import calls, message_bytes
from megascale.catalog.optimizers import OPTIMIZERS
from megascale.catalog.precisions import PRECISIONS
from megascale.config.run import RunConfig
from megascale.layout.chunks import packed, stages_of
from megascale.simulate.event_simulator import Place, Replay, Times, replay
from megascale.simulate.extrapolate import Pipeline, program, seconds
from megascale.simulate.layer_time import Layers, Pair, Seconds, chunk_times
from megascale.simulate.link_time import Operation, Route, group_route, neighbour_route
from megascale.simulate.profiles import SCALE, Hardware, Hides, Stack

Kind = TypeVar("Kind")
Cost = TypeVar("Cost")


@dataclass(frozen=True)
class Estimate:
    """One step. `causes`: seconds of the mean pipeline rank, which add up to `step_s`; `exposed`: those of them that
    are communication, by axis; `bubble`: the pipeline's idle share of a step; `pipeline_s`: from the first forward to
    the last reduction.
    """

    step_s: float
    tokens_per_s: float
    mfu_full: float
    mfu_causal: float
    bubble: float
    exposed: dict[str, float]
    causes: dict[str, float]
    pipeline_s: float


def estimate(config: RunConfig, hardware: Hardware, stack: Stack) -> Estimate:
    """Estimate a step of a resolved configuration."""
    parts = StepParts(config, hardware, stack)
    silent = replace(parts.times, message=0.0, hops=0.0)
    bare = replace(silent, reduce={}, gather={})
    ended, without_pp, without_dp = seconds(parts.pipeline, [parts.times, silent, bare], parts.hides)
    step = parts.seconds(ended)
    causes = parts.causes(ended, min(ended, without_pp), min(ended, without_pp, without_dp))
    tokens, flops = config.batch.total * config.model.seq_length / step, token_flops(config.model)
    peak = hardware.device.peak_of("fp8" if config.train.precision == "fp8" else parts.layers.kernels.number_format)
    peak *= config.world / hardware.node.ranks_a_core(config.world)  # as a run measures its MFU
    full, causal = (mfu(each, tokens, peak) for each in (flops.full, flops.causal))
    exposed = {axis: causes[axis] for axis in ("tp", "pp", "dp")}
    return Estimate(step, tokens, full, causal, causes["bubble"] / step, exposed, causes, ended)


def step_seconds(config: RunConfig, hardware: Hardware, stack: Stack) -> float:
    """Seconds of a step of a resolved configuration, as `estimate` has them."""
    return StepParts(config, hardware, stack).step_s


def stage_times(config: RunConfig, hardware: Hardware, stack: Stack) -> Times:
    """The durations of the parts of a step's pipeline."""
    return StepParts(config, hardware, stack).times


def with_spans(config: RunConfig, hardware: Hardware, stack: Stack) -> Replay:
    """Simulate all of a step's pipeline, with all that happens in it, however long that takes."""
    parts = StepParts(config, hardware, stack)
    return replay(program(parts.pipeline), parts.times, parts.hides, spans=True)


@dataclass(frozen=True)
class DataParallel:
    """The collectives of data parallelism, for buckets given by their elements. `sharded`: each rank has a part of the
    optimizer's state; `gradient`, `weight`: bytes of an element.
    """

    route: Route
    ranks: int
    sharded: bool
    gradient: int
    weight: int

    def reduce(self, buckets: Sequence[int]) -> float:
        """Seconds of reducing gradients."""
        return self._each("reduce_scatter" if self.sharded else "all_reduce", self.gradient, buckets)

    def gather(self, buckets: Sequence[int]) -> float:
        """Seconds of gathering weights, if ranks have parts of them."""
        return self._each("all_gather", self.weight, buckets) if self.sharded else 0.0

    def _each(self, operation: Operation, size: int, buckets: Sequence[int]) -> float:
        return sum(self.route.collective(operation, size * elements, self.ranks) for elements in buckets)


@dataclass(frozen=True)
class StepParts:
    """The durations that a step is made of."""

    config: RunConfig
    hardware: Hardware
    stack: Stack

    @property
    def pipeline(self) -> Pipeline:
        p = self.config.parallel
        assert p.schedule, "a resolved configuration names its schedule"
        each = p.zero == 2 and self.stack.reduces_each and not self.stack.shards_weights
        return Pipeline(p.schedule, p.pp, p.vpp, self.config.micro_batches, each)

    @property
    def hides(self) -> Hides:
        can, overlap = self.stack.hides, self.config.overlap
        return Hides(tp=can.tp, pp=can.pp and overlap.pp, dp=can.dp and overlap.dp)

    @cached_property
    def layers(self) -> Layers:
        return Layers.of(self.config, self.hardware, self.stack)

    @cached_property
    def dp(self) -> DataParallel:
        c, facts = self.config, PRECISIONS[self.config.train.precision].facts
        route = group_route(self.hardware, c.dp, c.parallel.tp, c.world, together=c.parallel.tp)
        sharded, gradient = c.parallel.zero > 0 or self.stack.shards_weights, self.stack.gradient_bytes
        return DataParallel(route, c.dp, sharded, gradient or facts["accumulate_bytes"], facts["compute_bytes"])

    @cached_property
    def buckets(self) -> dict[Place, tuple[int, ...]]:
        """Elements of each chunk's buckets: chunks with as many layers have the same, but for the network's ends."""
        p, stages = self.config.parallel, stages_of(self.config)
        known, found = dict[tuple[int, bool, bool], tuple[int, ...]](), dict[Place, tuple[int, ...]]()
        for rank, chunk in itertools.product(range(p.pp), range(p.vpp)):
            index = stages.index(rank, chunk)
            alike = len(stages.layers(index)), index == 0, index == stages.count - 1
            if alike not in known:
                known[alike] = tuple(bucket.numbers for bucket in packed(self.config, rank, [chunk])[0])
            found[rank, chunk] = known[alike]
        return found

    @cached_property
    def pairs(self) -> dict[Place, Pair]:
        """The times of each chunk, with what ZeRO 3 exposes of its collectives."""
        times = chunk_times(self.config, self.hardware, self.stack)
        if not self.stack.shards_weights:
            return times
        return of_places({place: (pair, self.buckets[place]) for place, pair in times.items()}, self._with_gathers)

    def _with_gathers(self, chunk: tuple[Pair, tuple[int, ...]]) -> Pair:
        pair, buckets = chunk
        gather, reduce = self.dp.gather(buckets), self.dp.reduce(buckets)
        return pair + Pair(self._layerwise(pair.forward, gather), self._layerwise(pair.backward, gather + reduce))

    def _layerwise(self, work: Seconds, travel: float) -> Seconds:
        """Exposed seconds of a chunk's collectives where each layer's run behind the compute of the layer before."""
        if not self.hides.dp:
            return Seconds(dp=travel)
        layers = max(1, self.config.model.num_layers // len(self.buckets))
        least = travel * max(1 / layers, 1 - self.hardware.attained.hiding)
        return Seconds(dp=max(least, travel - work.total * (layers - 1) / layers))

    @cached_property
    def times(self) -> Times:
        """The durations that the pipeline is played with."""
        c, p, apart = self.config, self.config.parallel, self.stack.shards_weights
        between = neighbour_route(self.hardware, p.tp * c.dp, c.world, together=p.tp)
        hops = 0.0 if p.sp else self.layers.exchange.gather()  # each rank of tp was sent its part
        return Times(
            {place: pair.forward.total for place, pair in self.pairs.items()},
            {place: pair.backward.total for place, pair in self.pairs.items()},
            between.message(message_bytes(c)),
            hops,
            {} if apart else of_places(self.buckets, self.dp.reduce),
            {} if apart else of_places(self.buckets, self.dp.gather),
            {place: len(sizes) for place, sizes in self.buckets.items()},
            1 - self.hardware.attained.hiding,
            contends=between.network and self.dp.route.network,
        )

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.seconds(seconds(self.pipeline, [self.times], self.hides)[0])

    @cached_property
    def update(self) -> float:
        """Seconds of the optimizer on the fullest rank: every element of its state is read and written, the gradient
        read and cleared.
        """
        facts = PRECISIONS[self.config.train.precision].facts
        tensors = OPTIMIZERS[self.config.optimizer.name].facts["state"] + (1 if facts["master"] else 0)
        elements = [0] * self.config.parallel.pp
        for (rank, _), sizes in self.buckets.items():
            elements[rank] += sum(sizes)
        most, wide = max(elements), facts["accumulate_bytes"]
        own = most / (self.config.dp if self.dp.sharded else 1)
        gradients = own if self.stack.shards_weights else most
        return self.layers.kernels.update(
            own * (2 * tensors * wide + 2 * wide + facts["compute_bytes"]) + gradients * wide
        )

    def seconds(self, pipeline: float) -> float:
        """Seconds of a step whose pipeline takes so many; large jobs lose some to their size."""
        return self._alone(pipeline) * scale(self.config.world, self.stack)

    def _alone(self, pipeline: float) -> float:
        """Seconds of a step without the loss to its size: where ranks share cores, at least their turns on them."""
        fixed = self.update + self.stack.attained.step_s
        crowd, times = self.hardware.node.ranks_a_core(self.config.world), self.times
        if crowd == 1:
            return pipeline + fixed
        p, count = self.config.parallel, self.config.micro_batches
        work = count * sum([*times.forward.values(), *times.backward.values()])
        work += sum([*times.reduce.values(), *times.gather.values()])
        work += 2 * (p.pp * p.vpp - 1) * count * (times.message + times.hops)
        waits = (crowd - 1) * self.hardware.node.turn_s * calls(self.config)  # others have filled the caches
        return max(pipeline + fixed, crowd * (work / p.pp + fixed) + waits)

    def causes(self, ended: float, without_pp: float, without_dp: float) -> dict[str, float]:
        """Seconds of the mean rank by cause. `ended`: of a step's pipeline; `without_pp`: if its messages took no time;
        `without_dp`: if its collectives over dp took none either. What is idle then is the bubble.
        """
        count, fixed = self.config.micro_batches, self.stack.attained.step_s
        total = sum((pair.forward + pair.backward for pair in self.pairs.values()), Seconds())
        total *= count / self.config.parallel.pp
        alone = self._alone(ended)
        found = {
            **vars(total), "dp": total.dp + without_pp - without_dp, "pp": ended - without_pp,
            "bubble": without_dp - total.total, "optimizer": self.update, "other": fixed,
            "cores": alone - ended - self.update - fixed, "scale": self.seconds(ended) - alone,
        }  # fmt: skip
        return {cause: 0.0 if -1e-9 * alone < value < 0 else value for cause, value in found.items()}  # rounding


def scale(world: int, stack: Stack) -> float:
    """The factor by which a step grows with the number of devices, for each doubling beyond `SCALE`."""
    return 1 + stack.attained.scale_loss * max(0.0, math.log2(world / SCALE))


def of_places(values: Mapping[Place, Kind], cost: Callable[[Kind], Cost]) -> dict[Place, Cost]:
    """Map each place to the cost of its value; equal values are computed once."""
    known = {value: cost(value) for value in set(values.values())}
    return {place: known[value] for place, value in values.items()}
