"""Extrapolated times of long pipelines: close to full simulations, and exact for uniform pipelines."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.catalog.schedules import SCHEDULES
from megascale.config.loading import load_config
from megascale.core.registry import Card
from megascale.layout.stages import placement_of
from megascale.plan.simulate import extrapolate, profiles
from megascale.plan.simulate.event_simulator import StageTimes
from megascale.plan.simulate.extrapolate import Pipeline, pipeline_time, with_fewer_stages
from megascale.plan.simulate.profiles import Overlaps
from megascale.plan.simulate.step_time import StepParts
from megascale.schedule.ir import RankSchedule, backward, forward
from megascale.schedule.lower import compute_order
from tests.marks import only_quick_rows

ALL = Overlaps(tp="all", pp=True, dp=True)
FEW = 10_000
"""Most actions of a simulation here, a sixth of the default, to extrapolate pipelines that tests can also simulate."""


@st.composite
def pipelines(draw: Any) -> tuple[Pipeline, StageTimes, Overlaps]:
    """A pipeline with evenly cut layers, an embedding and a head, and with many micro-batches or many stages. In units
    of a layer's forward messages take up to 0.1, collectives up to 2.
    """
    name = draw(st.sampled_from(sorted(name for name, card in SCHEDULES.cards.items() if card.facts["periodic"])))
    facts = SCHEDULES[name].facts
    v = facts["v"] or draw(st.integers(2, 4))
    p = draw(st.one_of(st.integers(2, 8), st.integers(30, 60)))
    m = draw(st.integers(FEW // (2 * p * v) + 1, 20_000 // (2 * p * v)))
    layers_per_chunk, extra = divmod(draw(st.integers(p * v, 4 * p * v)), p * v)
    head, back = draw(st.sampled_from([0.0, 0.3, 1.2])), draw(st.sampled_from([1.5, 2.0, 3.0]))
    places = [(rank, chunk) for rank in range(p) for chunk in range(v)]
    stages = placement_of(name, p, v)
    layers = {place: layers_per_chunk + (1 <= stages.stage(*place) <= extra) for place in places}
    forward = {**layers, (0, 0): layers[0, 0] + 0.1}
    forward[stages.places[-1]] += head
    ends = {(0, 0): 0.5, stages.places[-1]: 0.5}
    sizes = {place: count + ends.get(place, 0.0) for place, count in layers.items()}
    reduce, gather = draw(st.sampled_from([0.0, 0.3, 2.0])), draw(st.sampled_from([0.0, 0.3, 2.0]))
    times = StageTimes(
        forward,
        {place: back * took for place, took in forward.items()},
        draw(st.sampled_from([0.0, 0.02, 0.1])) * layers_per_chunk,
        draw(st.sampled_from([0.0, 0.05])) * layers_per_chunk,
        {place: reduce * size for place, size in sizes.items()},
        {place: gather * size for place, size in sizes.items()},
        buckets=dict.fromkeys(places, draw(st.sampled_from([1, 4, 16]))),
        slowdown=draw(st.sampled_from([0.0, 0.25])),
        share_link=draw(st.booleans()),
        weight_gradient=forward,
    )
    return Pipeline(name, p, v, m, draw(st.booleans())), times, Overlaps(pp=draw(st.booleans()), dp=draw(st.booleans()))


@settings(max_examples=5, deadline=None)
@given(pipelines())
def test_extrapolation_is_close_to_the_simulation(drawn: tuple[Pipeline, StageTimes, Overlaps]) -> None:
    pipeline, times, overlaps = drawn
    compute_order.cache_clear()
    extrapolated, simulated = (pipeline_time(pipeline, times, overlaps, actions) for actions in (FEW, 10**9))
    assert extrapolated == pytest.approx(simulated, rel=0.015)


BUBBLES = {
    "zb_h1": lambda p: p - 1, "interleaved_zb": lambda p: p - 1, "zb_v": lambda p: p - 1,
    "dualpipev": lambda p: 2 * (p - 1),
}  # fmt: skip
"""Bubbles of p ranks with split backwards, for an F, I and W of 1 on a chunk."""

PERIODIC = [name for name in SCHEDULES.names() if SCHEDULES[name].facts["periodic"]]
SIZES = [(4, 5000), (100, 100), (100, 150), (100, 430), (200, 9000), (64, 16)]
QUICK = [(100, 150), (64, 16)]
"""More micro-batches than stages, or fewer."""

UNIFORM = [
    (name, p, m)
    for name, (p, m) in itertools.product(PERIODIC, SIZES)
    if m >= 2 * p or SCHEDULES[name].facts["placement"] == "loop"
]


@pytest.mark.parametrize(("name", "p", "m"), only_quick_rows(UNIFORM, *(case for case in UNIFORM if case[1:] in QUICK)))
def test_a_uniform_pipeline_is_exact(name: str, p: int, m: int) -> None:
    """Work of all micro-batches plus the bubble of p - 1 stages, with more idle time for m < p."""
    facts = SCHEDULES[name].facts
    v = facts["v"] or 3
    forward = dict.fromkeys(itertools.product(range(p), range(v)), 1.0)
    times = StageTimes(forward, dict.fromkeys(forward, 2.0), 0.0, 0.0, {}, {}, weight_gradient=forward)
    if m >= p:
        ideal = 3 * m * v + BUBBLES.get(name, lambda p: 3 * (p - 1))(p)
    else:
        ideal = 2 * (p * v + m) - 1 if facts["split"] else 3 * (p * v + m - 1)
    assert pipeline_time(Pipeline(name, p, v, m), times, ALL, FEW) == pytest.approx(ideal, rel=1e-9)


def test_short_pipelines_are_simulated_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    played = list[tuple[Any, ...]]()
    monkeypatch.setattr(extrapolate, "compute_order", lambda *line: played.append(line) or compute_order(*line))
    places = list(itertools.product(range(4), range(2)))
    times = StageTimes(dict.fromkeys(places, 1.0), dict.fromkeys(places, 2.0), 0.1, 0.0, {}, {})
    short, long = (Pipeline("interleaved_1f1b", 4, 2, m) for m in (extrapolate.MAX_ACTIONS // 16, 10**6))
    pipeline_time(short, times, ALL)
    assert played == [("interleaved_1f1b", placement_of("interleaved_1f1b", 4, 2), short.m, (), 1, 1)]
    played.clear()
    pipeline_time(long, times, ALL)
    assert len(played) == 2 and sum(2 * at.count * m for _, at, m, *_ in played) <= 2 * extrapolate.MAX_ACTIONS


def test_a_smaller_pipeline_has_the_ends_the_slowest_and_the_means() -> None:
    p, few = 42, 12
    forward = {(rank, 0): 1.0 + 0.01 * rank for rank in range(p)} | {(17, 0): 9.0}
    times = StageTimes(forward, {place: 2 * took for place, took in forward.items()}, 0.1, 0.0, {}, {})
    short = with_fewer_stages(times, p, 1, few)
    assert list(short.forward) == [(rank, 0) for rank in range(few)]
    assert (short.forward[0, 0], short.forward[few - 1, 0]) == (forward[0, 0], forward[p - 1, 0])
    (slow,) = [rank for rank in range(few) if short.forward[rank, 0] == 9.0]
    assert slow == pytest.approx(17 * few / p, abs=1.5)
    assert short.forward[1, 0] == pytest.approx(1.0 + 0.01 * (1 + 2 + 3 + 4) / 4)
    assert short.backward == {place: pytest.approx(2 * took) for place, took in short.forward.items()}
    assert short.reduce == short.gather == {} and short.message == times.message


def test_schedules_without_a_period_are_simulated_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule that drains the pipeline after every eight micro-batches."""

    def in_waves(p: int, v: int, m: int, rank: int) -> RankSchedule:
        waves = [range(first, min(m, first + 8)) for first in range(0, m, 8)]
        return [action(0, i) for wave in waves for action in (forward, backward) for i in wave]

    monkeypatch.setitem(in_waves.__globals__, "in_waves", in_waves)
    card = Card("in_waves", "", f"{__name__}:in_waves", {"v": 1, "unbounded_in_flight": False})
    monkeypatch.setitem(SCHEDULES.cards, card.name, SCHEDULES.complete(card))
    times = StageTimes(
        *(dict.fromkeys([(rank, 0) for rank in range(3)], took) for took in (1.0, 2.0)), 0.0, 0.0, {}, {}
    )
    assert pipeline_time(Pipeline("in_waves", 3, 1, 800), times, ALL, 1000) == pytest.approx(100 * 3 * (8 + 3 - 1))


@pytest.mark.parametrize(
    ("gpus", "keys"),
    [
        pytest.param(
            512,
            ["model.num_layers=8192", "parallel.tp=1", "parallel.sp=false", "parallel.pp=512", "parallel.vpp=16"],
            marks=pytest.mark.slow,
        ),
        pytest.param(8000, ["model.num_layers=1000", "parallel.pp=1000", "parallel.vpp=1"], marks=pytest.mark.slow),
        (64, ["parallel.vpp=1", "parallel.schedule=gpipe"]),
    ],
)
def test_the_longest_pipelines_take_seconds(gpus: int, keys: list[str]) -> None:
    config = load_config("configs/gpu/megascale-175b.toml", [*keys, "batch.global=10000"], world_size=gpus)
    hardware, stack = profiles.hardware("a100-80g"), profiles.stack("megascale")
    compute_order.cache_clear()
    began = time.process_time()
    estimated = StepParts(config, hardware, stack).estimate
    assert time.process_time() - began < 10, "under a second; a busy machine may take some seconds"
    assert sum(estimated.causes.values()) == pytest.approx(estimated.step_s) and min(estimated.causes.values()) >= 0
