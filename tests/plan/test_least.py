"""Nothing takes less than the least: time of a replay, of a step, and memory."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megascale.catalog.schedules import SCHEDULES
from megascale.config.run import RunConfig
from megascale.plan import profiles
from megascale.plan.estimate import step_time
from megascale.plan.layouts import VARIED, Layout, Space
from megascale.plan.least import Floors, least_time
from megascale.plan.memory import fullest_rank
from megascale.plan.profiles import Hides
from megascale.plan.simulate import Times, replay
from megascale.plan.steps import Steps
from megascale.schedule.lower import lower
from tests.plan.jobs import jobs

H100 = profiles.hardware("h100")
STACKS = ("megascale", "megatron-2021", "torchtitan-2024")
SLACK = 1 + 1e-12


@st.composite
def pipelines(draw: Any) -> tuple[str, int, int, int, Times, Hides, bool]:
    """A schedule by name, p, v, m, times, what is hidden, and whether gradients are reduced after each backward."""
    p = draw(st.integers(1, 5))
    v = draw(st.integers(1, 3)) if p > 1 else 1
    name = draw(st.sampled_from([n for n in SCHEDULES.names() if v == 1 or SCHEDULES[n].facts["chunks"]]))
    places = [(rank, chunk) for rank in range(p) for chunk in range(v)]

    def seconds(*values: float) -> dict[tuple[int, int], float]:
        return {place: draw(st.sampled_from(values)) for place in places}

    times = Times(
        seconds(0.1, 1.0, 2.0),
        seconds(0.1, 1.0, 4.0),
        draw(st.sampled_from([0.0, 0.05, 0.5])),
        draw(st.sampled_from([0.0, 0.1])),
        draw(st.one_of(st.just({}), st.just(seconds(0.2, 3.0)))),
        draw(st.one_of(st.just({}), st.just(seconds(0.2, 3.0)))),
        buckets={place: draw(st.sampled_from([1, 2, 5])) for place in places},
        drag=draw(st.sampled_from([0.0, 0.3])),
        contends=draw(st.booleans()),
    )
    hides = Hides(pp=draw(st.booleans()), dp=draw(st.booleans()))
    return name, p, v, draw(st.integers(1, 20)), times, hides, draw(st.booleans())


@settings(max_examples=300)
@given(pipelines())
def test_no_replay_takes_less(drawn: tuple[str, int, int, int, Times, Hides, bool]) -> None:
    name, p, v, m, times, hides, each = drawn
    schedule = lower(SCHEDULES[name].load()(p, v, m), v, reduce_each=each)
    assert least_time(times, p, v, m, hides, reduce_each=each) <= replay(schedule, v, times, hides).last * SLACK


def test_an_ideal_pipeline_takes_the_least() -> None:
    for name, p, v, m in (("1f1b", 4, 1, 9), ("gpipe", 4, 1, 9), ("interleaved_1f1b", 4, 3, 8)):
        places = [(rank, chunk) for rank in range(p) for chunk in range(v)]
        times = Times(dict.fromkeys(places, 1.0), dict.fromkeys(places, 2.0), 0.0, 0.0, {}, {})
        ended = replay(lower(SCHEDULES[name].load()(p, v, m), v), v, times, Hides(pp=True, dp=True)).last
        assert ended == least_time(times, p, v, m, Hides(pp=True, dp=True)) == 3 * (p - 1 + m * v)


def layout_of(config: RunConfig) -> Layout:
    values = [getattr(getattr(config, key.split(".")[0]), key.split(".")[1]) for key in VARIED]
    return Layout(*values)


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(jobs(), st.sampled_from(STACKS))
def test_no_job_takes_less(config: RunConfig, name: str) -> None:
    stack, layout = profiles.stack(name), layout_of(config)
    space = Space(config, config.world, frozenset())
    assert space.applied(layout) == config
    floors, found = Floors(space, H100, stack), step_time(config, H100, stack)
    assert floors.step_s(layout) <= found * SLACK
    assert Steps(H100, stack).least_s(config) <= found * SLACK
    if not SCHEDULES[layout.schedule].facts["piles"]:  # of which none is searched
        assert floors.memory(layout) <= fullest_rank(config, shards_weights=stack.shards_weights).total


@settings(max_examples=50, suppress_health_check=list(HealthCheck))
@given(jobs(), st.sampled_from(STACKS))
def test_steps_are_those_of_the_estimate(config: RunConfig, name: str) -> None:
    stack = profiles.stack(name)
    steps = Steps(H100, stack)
    assert [steps.step_s(config), steps.step_s(config)] == [step_time(config, H100, stack)] * 2
    assert steps.estimate(config).step_s == steps.step_s(config)
