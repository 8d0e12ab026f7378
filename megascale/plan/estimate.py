"""How long a step of a configuration takes on some hardware with some stack, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Protocol

from megascale.catalog.optimizers import OPTIMIZERS
from megascale.catalog.precisions import PRECISIONS
from megascale.catalog.schedules import SCHEDULES
from megascale.config.run import RunConfig
from megascale.layout.chunks import chunk_parameters, packed
from megascale.plan.flops import mfu, token_flops
from megascale.plan.kernels import Kernels
from megascale.plan.links import Operation, group_route, neighbour_route
from megascale.plan.profiles import Hardware, Hides, Stack
from megascale.plan.simulate import Replay, Times, replay
from megascale.plan.traffic import calls
from megascale.plan.work import Pair, Seconds, Work
from megascale.schedule.ir import Schedule
from megascale.schedule.lower import lower

Place = tuple[int, int]
"""A pipeline rank and its chunk."""

FORMATS = {"fp64": "fp64", "fp32": "fp32", "bf16": "bf16", "fp8": "bf16"}
"""The format of the matrix products that are not in 8 bits, by precision."""


@dataclass(frozen=True)
class Estimate:
    """Of one step. `causes`: mean seconds over the pipeline's ranks, of which the sum is `step_s`; `exposed`: those of
    them that are communication, by axis. `bubble`: the pipeline's idle share of a step.
    """

    step_s: float
    tokens_per_s: float
    mfu_full: float
    mfu_causal: float
    bubble: float
    exposed: dict[str, float]
    causes: dict[str, float]
    replay: Replay


class Known(Protocol):
    """What of a step no efficiency changes: numbers in the buckets of each chunk, and what each pipeline rank does."""

    @property
    def numbers(self) -> Mapping[Place, list[int]]: ...

    def replay(self, variants: Sequence[Times], hides: Hides) -> list[Replay]:
        """Of a step, whose parts take one or another time."""


@dataclass(frozen=True)
class Skeleton:
    """`Known`, as lists."""

    numbers: Mapping[Place, list[int]]
    v: int
    schedule: Schedule

    def replay(self, variants: Sequence[Times], hides: Hides) -> list[Replay]:
        return [replay(self.schedule, self.v, times, hides) for times in variants]


def skeleton(config: RunConfig, stack: Stack) -> Skeleton:
    """Of a resolved configuration. A replay does nothing at receives."""
    p = config.parallel
    assert p.schedule is not None, "a resolved configuration names its schedule"
    numbers = {
        (rank, chunk): [bucket.numbers for bucket in cut]
        for rank in range(p.pp)
        for chunk, cut in enumerate(packed(config, rank))
    }
    compute = SCHEDULES[p.schedule].load()(p.pp, p.vpp, config.micro_batches)
    return Skeleton(numbers, p.vpp, lower(compute, p.vpp, ahead=None, reduce_each=reduces_each(config, stack)))


def reduces_each(config: RunConfig, stack: Stack) -> bool:
    """Whether gradients are reduced after each backward, in a step's schedule."""
    return config.parallel.zero == 2 and not stack.shards_weights


def step_time(config: RunConfig, hardware: Hardware, stack: Stack, known: Known | None = None) -> float:
    """Seconds of a step of a resolved configuration: what `estimate` says, sooner."""
    model = Model(config, hardware, stack, known or skeleton(config, stack))
    return model.seconds(model.known.replay([model.times()], model.hides)[0].last)


def estimate(config: RunConfig, hardware: Hardware, stack: Stack, known: Known | None = None) -> Estimate:
    """Of a resolved configuration."""
    model = Model(config, hardware, stack, known or skeleton(config, stack))
    times = model.times()
    silent = replace(times, message=0.0, hops=0.0)
    bare = replace(silent, reduce={}, gather={})
    found, *less = model.known.replay([times, silent, bare], model.hides)
    step = model.seconds(found.last)
    causes = model.causes(step, found.last, *(each.last for each in less))
    tokens = config.batch.total * config.model.seq_length / step
    flops, number_format = token_flops(config.model), "fp8" if config.train.precision == "fp8" else model.format
    peak = hardware.device.peak_of(number_format) * config.world / model.crowd  # as a run measures its MFU
    return Estimate(
        step,
        tokens,
        mfu(flops.full, tokens, peak),
        mfu(flops.causal, tokens, peak),
        causes["bubble"] / step,
        {axis: causes[axis] for axis in ("tp", "pp", "dp")},
        causes,
        found,
    )


def with_spans(config: RunConfig, hardware: Hardware, stack: Stack) -> Replay:
    """The pipeline of a resolved configuration's step, with all that happens in it."""
    known = skeleton(config, stack)
    model = Model(config, hardware, stack, known)
    return known.replay([model.times()], model.hides)[0]


class Model:
    """The times of a configuration's parts."""

    def __init__(self, config: RunConfig, hardware: Hardware, stack: Stack, known: Known) -> None:
        p, overlap = config.parallel, config.overlap
        facts = PRECISIONS[config.train.precision].facts
        if config.model.dropout:  # this trainer forms all scores then, which memory counts
            stack = stack.model_copy(update={"attention": "unfused"})
        self.config, self.hardware, self.stack = config, hardware, stack
        self.format = FORMATS[config.train.precision]
        self.kernels = Kernels(hardware, stack, self.format, facts["compute_bytes"])
        self.work = Work(config, hardware, stack, self.kernels)
        can = stack.hides
        self.hides = Hides(tp=can.tp, pp=can.pp and overlap.pp, dp=can.dp and overlap.dp)
        self.together = p.tp * p.cp
        self.dp = group_route(hardware, config.dp, self.together, config.world, together=self.together)
        self.crowd = hardware.node.ranks_a_core(config.world)
        self.places = [(rank, chunk) for rank in range(p.pp) for chunk in range(p.vpp)]
        chunks = {place: self.work.chunk(*place) for place in self.places}
        slowed = {pair: self._slowed(pair) for pair in set(chunks.values())}
        self.pairs = {place: slowed[pair] for place, pair in chunks.items()}
        self.numbers, self.known = known.numbers, known
        self.sharded = p.zero > 0 or stack.shards_weights  # what the optimizer has
        if stack.shards_weights:
            gathered: dict[tuple[object, ...], Pair] = {}  # chunks alike are gathered alike
            for place, pair in self.pairs.items():
                alike = pair, tuple(self.numbers[place]), self.work.recompute[place[1]]
                gathered[alike] = self.pairs[place] = gathered.get(alike) or self._with_gathers(place, pair)
        self.update = max(self._update(rank) for rank in range(p.pp))

    def seconds(self, pipeline: float) -> float:
        """Of a step whose pipeline takes so many: at least what all ranks' work takes the cores that they share."""
        return max(pipeline + self.update + self.stack.attained.step_s, self.turns())

    def turns(self) -> float:
        """Seconds in which ranks that share cores have all had their turns: who waits leaves its core to another, and
        has it back with caches that the other has filled.
        """
        if self.crowd == 1:
            return 0.0
        p, count, times = self.config.parallel, self.config.micro_batches, self.times()
        work = sum(each[place] for each in (times.forward, times.backward) for place in self.places) * count
        work += sum(sum(each.values()) for each in (times.reduce, times.gather))
        work += 2 * (p.pp * p.vpp - 1) * count * (times.message + times.hops)
        waits = (self.crowd - 1) * self.hardware.node.turn_s * calls(self.config)
        return self.crowd * (work / p.pp + self.update + self.stack.attained.step_s) + waits

    def times(self) -> Times:
        """For the replay."""
        c, p = self.config, self.config.parallel
        stride = p.tp * p.cp * c.dp
        between = neighbour_route(self.hardware, stride, c.world, together=self.together)
        activation = self.work.whole / p.tp
        hops = 0.0 if p.sp or p.tp == 1 else self.work.gather()  # each rank has sent its part
        apart = self.stack.shards_weights
        still = 0.0 if self.hides.pp else self.stack.attained.message_s
        return Times(
            {place: pair.forward.total for place, pair in self.pairs.items()},
            {place: pair.backward.total for place, pair in self.pairs.items()},
            between.message(activation) + still,
            hops,
            {} if apart else {place: self._reduce(place) for place in self.places},
            {} if apart or not p.zero else {place: self._gather(place) for place in self.places},
            {place: len(numbers) for place, numbers in self.numbers.items()},
            1 - self.hardware.attained.hiding,
            contends=between.network and self.dp.network,
        )

    def causes(self, step: float, ended: float, silent: float, bare: float) -> dict[str, float]:
        """Mean seconds of a rank by cause. `ended`: of a step's pipeline; `silent`: were its messages to take no time,
        `bare`: nor its collectives over dp. What it would be shorter by, they cost; what is left idle then is the
        bubble.
        """
        p, count = self.config.parallel, self.config.micro_batches
        total = sum((pair.forward + pair.backward for pair in self.pairs.values()), Seconds()) * (count / p.pp)
        without_pp = min(ended, silent)
        without_dp = min(without_pp, bare)
        found = {
            "gemm": total.gemm,
            "attention": total.attention,
            "elementwise": total.elementwise,
            "recompute": total.again,
            "host": total.host,
            "stragglers": total.stragglers,
            "tp": total.tp,
            "pp": ended - without_pp,
            "dp": total.dp + without_pp - without_dp,
            "bubble": without_dp - total.total,
            "optimizer": self.update,
            **self._shared(ended, step),
        }
        rounding = 1e-9 * step
        return {cause: 0.0 if -rounding < seconds < 0 else seconds for cause, seconds in found.items()}

    def _shared(self, ended: float, step: float) -> dict[str, float]:
        """What is left of a step after its pipeline and the update."""
        rest = step - ended - self.update
        if self.crowd == 1:
            return {"other": rest}
        other = self.stack.attained.step_s
        return {"other": other, "cores": rest - other}

    def _slowed(self, pair: Pair) -> Pair:
        """All wait for the slowest of the devices that meet in every step."""
        late = self.hardware.spread * largest_of(self.config.world)
        return Pair(*(each + Seconds(stragglers=each.compute * late) for each in (pair.forward, pair.backward)))

    def _reduce(self, place: Place) -> float:
        operation: Operation = "reduce_scatter" if self.sharded else "all_reduce"
        sizes = (self._gradient_bytes * numbers for numbers in self.numbers[place])
        return sum(self.dp.collective(operation, size, self.config.dp) for size in sizes)

    @property
    def _gradient_bytes(self) -> int:
        return self.stack.gradient_bytes or PRECISIONS[self.config.train.precision].facts["accumulate_bytes"]

    def _gather(self, place: Place) -> float:
        size = PRECISIONS[self.config.train.precision].facts["compute_bytes"]
        if self.stack.broadcasts:
            (rank, chunk), whole = place, size * sum(self.numbers[place])
            owners = min(self.config.dp, len(chunk_parameters(self.config, rank)[chunk]))
            return self.dp.broadcasts(whole, self.config.dp, owners)
        return sum(self.dp.collective("all_gather", size * n, self.config.dp) for n in self.numbers[place])

    def _with_gathers(self, place: Place, pair: Pair) -> Pair:
        """Weights gathered before each forward and each backward, and gradients reduced after it, a layer ahead. What a
        stack's own code takes longer than the links slows no compute down.
        """
        facts, numbers = PRECISIONS[self.config.train.precision].facts, sum(self.numbers[place])
        layers = max(1, self.config.model.num_layers // len(self.places))
        again = self.stack.gathers_again and self.work.recompute[place[1]].full

        def shown(gathers: int, reduces: int, compute: float) -> Seconds:
            travel = gathers * self._gather(place) + reduces * self._reduce(place)
            moved = numbers * (gathers * facts["compute_bytes"] + reduces * self._gradient_bytes)
            longer = max(travel, moved / self.stack.gather_rate) if self.stack.gather_rate else travel
            if not self.hides.dp:
                return Seconds(dp=longer)
            least = max(longer / layers, travel * (1 - self.hardware.attained.hiding))
            return Seconds(dp=max(least, longer - compute * (layers - 1) / layers))

        forward, backward = pair.forward, pair.backward
        return Pair(forward + shown(1, 0, forward.total), backward + shown(2 if again else 1, 1, backward.total))

    def _update(self, pp_rank: int) -> float:
        """Of the optimizer: every number of a rank's shard is read and written, the gradient read and cleared."""
        facts = PRECISIONS[self.config.train.precision].facts
        tensors = OPTIMIZERS[self.config.optimizer.name].facts["state"] + (1 if facts["master"] else 0)
        numbers = sum(sum(self.numbers[pp_rank, chunk]) for chunk in range(self.config.parallel.vpp))
        own = numbers / (self.config.dp if self.sharded else 1)
        wide = facts["accumulate_bytes"]
        gradients = own if self.stack.shards_weights else numbers
        return self.kernels.update(own * (2 * tensors * wide + 2 * wide + facts["compute_bytes"]) + gradients * wide)


def largest_of(count: int) -> float:
    """The expected largest of so many numbers of a standard normal distribution (Blom 1958)."""
    return NormalDist().inv_cdf((count - math.pi / 8) / (count - math.pi / 4 + 1)) if count > 1 else 0.0
