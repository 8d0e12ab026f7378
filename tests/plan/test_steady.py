"""Few micro-batches stand for many: within a ten-thousandth of a replay of all, and mostly exactly."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.catalog.schedules import SCHEDULES
from megascale.config.explain import load
from megascale.core.registry import Card
from megascale.plan import profiles, steady, steps
from megascale.plan.estimate import step_time
from megascale.plan.profiles import Hides
from megascale.plan.simulate import Replay, Times, replay
from megascale.plan.steady import EXACT, Repeating
from megascale.plan.wavefronts import Window, program
from megascale.schedule.ir import Order, Schedule
from megascale.schedule.lower import lower
from megascale.schedule.one_f_one_b import one_f_one_b
from megascale.schedule.runs import runs_of


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
        draw(st.sampled_from([0.0, 0.01, 0.1, 2.5])),
        draw(st.sampled_from([0.0, 0.05])),
        reduce,
        {place: draw(st.sampled_from([1, 50])) * seconds for place, seconds in reduce.items()}
        if draw(st.booleans())
        else {},
        buckets=dict.fromkeys(forward, draw(st.sampled_from([1, 3]))),
        drag=draw(st.sampled_from([0.0, 0.25])),
        contends=meet or draw(st.booleans()),
    )
    hides = Hides(pp=draw(st.booleans()), dp=meet or draw(st.booleans()))
    return p, v, draw(st.integers(25 * p, 60 * p)), times, hides, meet or draw(st.booleans())


def replayed(name: str, p: int, v: int, m: int, times: Times, hides: Hides, each: bool) -> tuple[Replay, Replay]:
    """All micro-batches, and a few of them."""
    schedule = partial(runs_of, SCHEDULES[name].load(), p, v)
    few = program(schedule, p, v, m, piles=name == "gpipe", repeats=True, reduces_each=each)
    (found,) = Repeating({}, lambda: few).replay([times], hides)
    return replay(lower(SCHEDULES[name].load()(p, v, m), v, reduce_each=each), v, times, hides), found


@settings(max_examples=200)
@given(pipelines())
def test_a_replay_of_few_is_one_of_all(drawn: tuple[int, int, int, Times, Hides, bool]) -> None:
    p, v, m, times, hides, each = drawn

    all, few = replayed("interleaved_1f1b" if v > 1 else "1f1b", p, v, m, times, hides, each)
    assert few.last == pytest.approx(all.last, rel=EXACT)
    assert few.end == pytest.approx(all.end, rel=EXACT)
    assert few.reduced == pytest.approx(all.reduced, rel=EXACT)


@settings(max_examples=200)
@given(pipelines())
def test_forwards_and_then_backwards_go_through_a_line(drawn: tuple[int, int, int, Times, Hides, bool]) -> None:
    p, _, m, times, hides, each = drawn

    all, few = replayed("gpipe", p, 1, m, times, hides, each)
    assert few.last == pytest.approx(all.last, rel=1e-9)


def test_a_line_is_as_slow_as_its_slowest_machine() -> None:
    overrides = ["model.num_layers=8", "parallel.pp=4", "parallel.vpp=1", "batch.global=64", "parallel.schedule=gpipe"]
    config = load("configs/gpu/megascale-175b.toml", overrides, world=32)
    hardware, stack = profiles.hardware("a100-80g"), profiles.stack("megatron-2023")
    network = hardware.network.model_copy(update={"bandwidth": 1e7})  # where messages are all that a step waits for
    hardware = hardware.model_copy(update={"network": network})
    assert steps.Steps(hardware, stack).step_s(config) == pytest.approx(step_time(config, hardware, stack), rel=1e-9)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many wavefronts were gone through, each time."""
    found, play = list[int](), steady.Clocks.play

    def counted(clocks: steady.Clocks, start: int, end: int, window: Window | None = None) -> None:
        found.append(end - start)
        play(clocks, start, end, window)

    monkeypatch.setattr(steady.Clocks, "play", counted)
    return found


def test_a_step_of_a_thousand_micro_batches(played: list[int]) -> None:
    overrides = ["batch.global=1024", "parallel.pp=4", "parallel.vpp=3"]
    config = load("configs/gpu/megascale-175b.toml", overrides, world=32)
    hardware, stack = profiles.hardware("a100-80g"), profiles.stack("megascale")
    expected = step_time(config, hardware, stack)
    assert steps.Steps(hardware, stack).step_s(config) == pytest.approx(expected, rel=1e-9)
    assert sum(played) < 2 * 3 * config.micro_batches / 20


@pytest.mark.parametrize("v", [1, 2])
def test_weights_that_messages_hold_up_for_the_whole_step(v: int, played: list[int]) -> None:
    """Both take all of the way, always: no group is unlike the others."""
    forward = {(rank, chunk): 0.1 for rank in range(3) for chunk in range(v)}
    times = Times(forward, forward, 1.0, 0.0, {}, dict.fromkeys(forward, 50.0), contends=True)
    all, few = replayed("1f1b" if v == 1 else "interleaved_1f1b", 3, v, 4000, times, Hides(pp=True, dp=True), False)
    assert few.last == pytest.approx(all.last, rel=1e-9)
    assert sum(played) < 200


@pytest.mark.parametrize("paces", [[1.0, 1.1, 0.7, 2.0], [2.0, 0.7, 1.1, 1.0]])
@pytest.mark.parametrize("reduce", [0.1, 3.0])
def test_a_line_goes_on_as_it_did(paces: list[float], reduce: float) -> None:
    """Each rank at its own pace: those before a slow one wait for it, those behind it get ahead."""
    forward = {(rank, 0): pace for rank, pace in enumerate(paces)}
    times = Times(forward, forward, 0.3, 0.1, dict.fromkeys(forward, reduce), {}, contends=True)
    hides = Hides(pp=True, dp=True)
    less, more = (replayed("gpipe", 4, 1, m, times, hides, each=True)[0].last for m in (2000, 3000))
    made = program(
        partial(runs_of, SCHEDULES["gpipe"].load(), 4, 1), 4, 1, 10**6, piles=True, repeats=True, reduces_each=True
    )
    (found,) = Repeating({}, lambda: made).replay([times], hides)
    assert found.last == pytest.approx(less + (more - less) * 998, rel=1e-9)


@pytest.mark.parametrize("reduce", [0.0, 0.7, 1.9])
def test_a_pipeline_that_takes_long_to_settle(reduce: float, played: list[int]) -> None:
    """The last rank is slower by so little that thousands of micro-batches go by before all wait for it."""
    forward = {(rank, 0): 1.0 + (0.0003 if rank == 5 else 0.00001 * rank) for rank in range(6)}
    backward = {place: 2 * seconds for place, seconds in forward.items()}
    times = Times(forward, backward, 0.3, 0.01, dict.fromkeys(forward, reduce), {}, drag=0.1, contends=True)
    all, few = replayed("1f1b", 6, 1, 20000, times, Hides(pp=True, dp=True), each=reduce > 0)
    assert few.last == pytest.approx(all.last, rel=EXACT)
    assert sum(played) < 2000


def test_a_schedule_that_does_not_say_that_it_repeats_is_gone_through_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the pipeline runs empty after every eight micro-batches."""

    def in_waves(p: int, v: int, m: int) -> Schedule:
        orders = [Order() for _ in range(p)]
        for first in range(0, m, 8):
            for order, wave in zip(orders, one_f_one_b(p, v, min(8, m - first)), strict=True):
                order += [action._replace(microbatch=action.microbatch + first) for action in wave]
        return orders

    monkeypatch.setitem(in_waves.__globals__, "in_waves", in_waves)
    card = Card("in_waves", "", f"{__name__}:in_waves", {"chunks": False, "piles": False})
    monkeypatch.setitem(SCHEDULES.cards, card.name, card)
    overrides = ["parallel.pp=4", "parallel.vpp=1", "parallel.schedule=in_waves", "batch.global=200"]
    config = load("configs/gpu/llama3-8b.toml", overrides, world=32)
    hardware, stack = profiles.hardware("a100-80g"), profiles.stack("megascale")
    assert steps.Steps(hardware, stack).step_s(config) == pytest.approx(step_time(config, hardware, stack), rel=1e-9)


@given(pipelines(), st.data())
def test_variants_do_not_see_each_other(drawn: tuple[int, int, int, Times, Hides, bool], data: st.DataObject) -> None:
    p, v, m, times, hides, each = drawn
    m = data.draw(st.integers(1, 8 * p))
    function = SCHEDULES["interleaved_1f1b" if v > 1 else "1f1b"].load()
    few = program(partial(runs_of, function, p, v), p, v, m, piles=False, repeats=True, reduces_each=each)
    variants = [times, replace(times, message=0.0, hops=0.0), replace(times, reduce={}, gather={}, contends=False)]
    lowered = lower(function(p, v, m), v, reduce_each=each)
    for found, alone in zip(Repeating({}, lambda: few).replay(variants, hides), variants, strict=True):
        assert found.end == pytest.approx(replay(lowered, v, alone, hides).end, rel=EXACT)
