"""Few micro-batches stand for many: within a thousandth of a replay of all, and mostly exactly."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.catalog.schedules import SCHEDULES
from megascale.config.explain import load
from megascale.plan import profiles, steps
from megascale.plan.estimate import step_time
from megascale.plan.profiles import Hides
from megascale.plan.simulate import Times, replay
from megascale.plan.steady import EXACT, Repeating, few_for
from megascale.schedule.interleaved import groups_of
from megascale.schedule.ir import Schedule
from megascale.schedule.lower import lower


@given(p=st.integers(1, 64), one=st.booleans(), m=st.integers(1, 5000), step=st.sampled_from([1, 4, 16]))
def test_few_are_groups_of_the_same_sizes(p: int, one: bool, m: int, step: int) -> None:
    few = few_for(p, m, step, one_chunk=one)
    if few is None:
        assert m < (p + 1) * 2 * (8 + 2 * step)
        return
    assert few.micro_batches < m
    assert few.first + sum((run.groups.number + run.left) * run.groups.size for run in few.runs) == m
    groups = tuple(run.groups for run in few.runs)
    assert {size for _, size in groups} == {p} if one else groups == groups_of(p, few.micro_batches)
    assert all(run.left % step == 0 for run in few.runs)
    for _, settled in few.settled():
        assert min(each.start for each in settled.values()) >= p * step + few.first


@st.composite
def pipelines(draw: Any) -> tuple[int, int, int, Times, Hides, bool]:
    """p, v, m, times such as layers cut unevenly give, what is hidden, and whether each backward's are reduced. Often
    messages and reductions meet in every micro-batch.
    """
    p, meet = draw(st.integers(1, 4)), draw(st.booleans())
    v = draw(st.integers(1, 3)) if p > 1 else 1
    each, extra = divmod(draw(st.integers(p * v, p * v * 4)), p * v)
    forward, reduce = {}, {}
    for rank in range(p):
        for chunk in range(v):
            stage = chunk * p + rank
            head = draw(st.sampled_from([0.0, 0.3, 1.2])) if stage == p * v - 1 else 0.0
            forward[rank, chunk] = each + (1 <= stage <= extra) + head + (0.1 if stage == 0 else 0.0)
            reduce[rank, chunk] = draw(st.sampled_from([0.2, 1.0, 3.0])) * forward[rank, chunk]
    times = Times(
        forward,
        {place: 2 * seconds for place, seconds in forward.items()},
        draw(st.sampled_from([0.0, 0.01, 0.1])),
        draw(st.sampled_from([0.0, 0.05])),
        reduce,
        reduce if draw(st.booleans()) else {},
        buckets=dict.fromkeys(forward, draw(st.sampled_from([1, 3]))),
        drag=draw(st.sampled_from([0.0, 0.25])),
        contends=meet or draw(st.booleans()),
    )
    hides = Hides(pp=draw(st.booleans()), dp=meet or draw(st.booleans()))
    return p, v, draw(st.integers(25 * p, 60 * p)), times, hides, meet or draw(st.booleans())


@settings(max_examples=200)
@given(pipelines())
def test_a_replay_of_few_is_one_of_all(drawn: tuple[int, int, int, Times, Hides, bool]) -> None:
    p, v, m, times, hides, each = drawn

    def schedule(count: int) -> Any:
        return lower(SCHEDULES["interleaved_1f1b" if v > 1 else "1f1b"].load()(p, v, count), v, reduce_each=each)

    all, few = replay(schedule(m), v, times, hides), Repeating({}, p, m, each, False, schedule).replay(v, times, hides)
    assert few.last == pytest.approx(all.last, rel=EXACT)
    assert few.end == pytest.approx(all.end, rel=EXACT)
    assert few.reduced == pytest.approx(all.reduced, rel=EXACT)


@settings(max_examples=200)
@given(pipelines())
def test_forwards_and_then_backwards_go_through_a_line(drawn: tuple[int, int, int, Times, Hides, bool]) -> None:
    p, _, m, times, hides, each = drawn

    def schedule(count: int) -> Any:
        return lower(SCHEDULES["gpipe"].load()(p, 1, count), 1, reduce_each=each)

    all, few = replay(schedule(m), 1, times, hides), Repeating({}, p, m, each, True, schedule).replay(1, times, hides)
    assert few.last == pytest.approx(all.last, rel=1e-9)


def test_a_line_is_as_slow_as_its_slowest_machine() -> None:
    overrides = ["model.num_layers=8", "parallel.pp=4", "parallel.vpp=1", "batch.global=64", "parallel.schedule=gpipe"]
    config = load("configs/gpu/megascale-175b.toml", overrides, world=32)
    hardware, stack = profiles.hardware("a100-80g"), profiles.stack("megatron-2023")
    network = hardware.network.model_copy(update={"bandwidth": 1e7})  # where messages are all that a step waits for
    hardware = hardware.model_copy(update={"network": network})
    assert steps.Steps(hardware, stack).step_s(config) == pytest.approx(step_time(config, hardware, stack), rel=1e-9)


def test_a_step_of_a_thousand_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["batch.global=1024", "parallel.pp=4", "parallel.vpp=3"]
    config = load("configs/gpu/megascale-175b.toml", overrides, world=32)
    hardware, stack = profiles.hardware("a100-80g"), profiles.stack("megascale")
    expected, counts = step_time(config, hardware, stack), list[int]()

    def counted(compute: Schedule, v: int, **options: Any) -> Schedule:
        counts.append(len(compute[0]) // (2 * v))
        return lower(compute, v, **options)

    monkeypatch.setattr(steps, "lower", counted)
    assert steps.Steps(hardware, stack).step_s(config) == pytest.approx(expected, rel=1e-9)
    assert len(counts) == 1 and counts[0] < config.micro_batches / 20
