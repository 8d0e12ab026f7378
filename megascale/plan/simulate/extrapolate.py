"""Pipeline time by linear extrapolation (`seconds`), for pipelines with too many actions to simulate.

In a steady state p stages take a(p) + b(p) m seconds for m micro-batches; simulations of two smaller m give a and b.
At a constant ratio p / m the time is linear in p, so two smaller pipelines represent many stages: with the first stage,
the last, the slowest, and means of the other stages.

Uniform pipelines are exact. Against full simulations, 120 pipelines of up to 150 stages (the strategy of
tests/plan/simulate/test_extrapolate.py) were 0.01% off in the mean and 0.14% at worst. With 10,000 actions and
collectives of up to eight times a chunk's forward, 3 of 300 were more than 0.5% off, 1.3% at worst.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from megascale.catalog.schedules import SCHEDULES
from megascale.layout.stages import Place, placement_of
from megascale.plan.simulate.event_simulator import Simulation, StageTimes, simulate
from megascale.plan.simulate.profiles import Overlaps
from megascale.schedule.lower import compute_order
from megascale.schedule.resharding import Reshard

MAX_ACTIONS = 60_000  # most forwards and backwards of a full simulation
GROUPS = 2, 3  # fewest micro-batches of the two runs, per stage: interleaved schedules repeat in groups of p


@dataclass(frozen=True)
class Pipeline:
    """A pipeline of p ranks, v chunks per rank and m micro-batches. `reduces_each`: gradients after every backward.
    `parts`: dependent micro-batches of a sequence, of which the last `keep` keep their activations. `joined`: chunks
    whose W follows its I at once. `barriers`: of vocabulary parallelism. `skip_ratio`: of a partial pipeline.
    `reshard`: when chunks of sharded weights are gathered.
    """

    schedule: str
    p: int
    v: int
    m: int
    reduces_each: bool = False
    parts: int = 1
    keep: int = 1
    joined: tuple[int, ...] = ()
    barriers: int = 0
    skip_ratio: float = 0.0
    reshard: Reshard | None = None

    def simulate(self, times: StageTimes, overlaps: Overlaps, *, spans: bool = False) -> Simulation:
        placement = placement_of(self.schedule, self.p, self.v, self.barriers, self.skip_ratio)
        compute = compute_order(self.schedule, placement, self.m, self.joined, self.parts, self.keep)
        return simulate(
            compute, placement, times, overlaps, reduce_each=self.reduces_each, reshard=self.reshard, spans=spans
        )


def pipeline_time(pipeline: Pipeline, times: StageTimes, overlaps: Overlaps, max_actions: int = MAX_ACTIONS) -> float:
    """Estimate a pipeline's seconds. `max_actions`: most actions of a simulation."""
    p, v, m = pipeline.p, pipeline.v, pipeline.m
    facts = SCHEDULES[pipeline.schedule].facts
    periodic = pipeline.parts == 1 and not pipeline.skip_ratio and facts["periodic"]
    if 2 * p * v * m <= max_actions or not periodic:
        return pipeline.simulate(times, overlaps).last
    long = max(6, math.isqrt(max_actions // (2 * GROUPS[1] * v)))  # stages, with enough groups in `max_actions`
    if p <= long:
        return _with_microbatches(pipeline, m, times, overlaps, max_actions)
    short = long // 2

    def scaled(stages: int) -> float:
        fewer = with_fewer_stages(times, p, v + (pipeline.barriers > 0), stages)
        shorter = replace(pipeline, p=stages), m * stages / p, fewer
        return _with_microbatches(*shorter, overlaps, max_actions)

    short_s, long_s = scaled(short), scaled(long)
    return long_s + (long_s - short_s) / (long - short) * (p - long)


def _with_microbatches(pipeline: Pipeline, m: float, times: StageTimes, overlaps: Overlaps, max_actions: int) -> float:
    """Estimate the seconds of m micro-batches, a whole number or not. Both runs keep the group size of m, since larger
    groups have more micro-batches in flight and overlap more messages.
    """
    p, groups = pipeline.p, math.floor(m / pipeline.p)
    max_groups = max(GROUPS[1], max_actions // (2 * p * p * pipeline.v))
    short, long = max(1, math.floor(m)), math.floor(m) + 1
    if groups > max_groups:
        short, long = (math.ceil(m / groups * count - 1e-9) for count in (max(GROUPS[0], max_groups // 2), max_groups))
    short_s, long_s = (replace(pipeline, m=count).simulate(times, overlaps).last for count in (short, long))
    return long_s + (long_s - short_s) / (long - short) * (m - long)


def with_fewer_stages(times: StageTimes, p: int, v: int, stages: int) -> StageTimes:
    """Cut durations to fewer `stages`: the first, the last, the slowest, and means over runs of stages."""
    work = [sum(taken[rank, c] for taken in (times.forward, times.backward) for c in range(v)) for rank in range(p)]
    slowest = max(range(1, p - 1), key=work.__getitem__)
    edges = [1 + at * (p - 2) // (stages - 2) for at in range(stages - 1)]
    inner = ([slowest] if low <= slowest < high else range(low, high) for low, high in itertools.pairwise(edges))
    runs = [[0], *inner, [p - 1]]

    def cut(values: Mapping[Place, float]) -> dict[Place, float]:
        places = itertools.product(enumerate(runs), range(v if values else 0))
        return {(rank, chunk): fmean(values[stage, chunk] for stage in run) for (rank, run), chunk in places}

    buckets = {place: round(mean) for place, mean in cut(times.buckets).items()}
    chunks = range(v if times.hidden else 0)
    hidden = {(rank, one, two): fmean(times.hidden[stage, one, two] for stage in run)
              for (rank, run), one, two in itertools.product(enumerate(runs), chunks, chunks)}  # fmt: skip
    return replace(
        times, forward=cut(times.forward), backward=cut(times.backward), reduce=cut(times.reduce),
        gather=cut(times.gather), buckets=buckets, weight_gradient=cut(times.weight_gradient), hidden=hidden,
        islands=[times.islands[run[0]] for run in runs] if times.islands else (),
    )  # fmt: skip
