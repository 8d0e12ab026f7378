"""What the search returns is legal, fits, and is what trying everything finds."""

from __future__ import annotations

import math
from collections.abc import Collection

import pytest

from megascale.config.explain import load
from megascale.core.errors import ConfigError
from megascale.plan import profiles
from megascale.plan.candidate import lost
from megascale.plan.estimate import estimate, step_time
from megascale.plan.layouts import Layout, Space
from megascale.plan.memory import fullest_rank
from megascale.plan.search import Found, enough, fitting, search
from megascale.plan.steps import Steps

H100, A100 = profiles.hardware("h100"), profiles.hardware("a100-80g")
STACK = profiles.stack("megascale")
SMALL, LARGE = "configs/gpu/llama3-8b.toml", "configs/gpu/megascale-175b.toml"


def tried(space: Space, tps: Collection[int]) -> list[tuple[float, int, Layout]]:
    """Step time and memory of every layout, the best first."""
    found = []
    for layout in space.layouts(tps):
        for each in [layout._replace(zero=zero) for zero in space.zeros(layout.dp)]:
            config = space.applied(each)
            memory = fullest_rank(config).total
            fast = memory <= H100.device.room
            found.append((estimate(config, H100, STACK).step_s if fast else math.inf, memory, each))
    return sorted(found)


def cut(layout: Layout) -> Layout:
    """What layouts have in common that differ in their chunks alone."""
    return layout._replace(vpp=1, schedule="")


@pytest.fixture(scope="module")
def small() -> Found:
    return search(load(SMALL, ["batch.global=32"]), 16, H100, STACK, H100.device.room)


def test_what_is_found_passes_the_rules_and_fits(small: Found) -> None:
    assert len(small.best) == 10
    for one in small.best:
        keys = [f"{key}={str(value).lower()}" for key, value in one.layout.keys.items()]
        assert load(SMALL, ["batch.global=32", *keys], world=16) == one.config
        assert fullest_rank(one.config) == one.memory
        assert one.memory.total <= H100.device.room
        assert estimate(one.config, H100, STACK).causes == pytest.approx(one.estimate.causes, rel=1e-3, abs=1e-6)
        assert sum(one.estimate.causes.values()) == pytest.approx(one.estimate.step_s)


def test_the_fastest_come_first_and_the_others_say_why_not(small: Found) -> None:
    times = [one.estimate.step_s for one in small.best]
    assert times == sorted(times)
    assert [bool(one.lost) for one in small.best] == [False] + [True] * 9


def test_every_layout_is_counted_once(small: Found) -> None:
    c, space = small.counts, Space(load(SMALL, ["batch.global=32"]), 16, frozenset())
    assert c.legal == sum(len(space.zeros(layout.dp)) for layout in space.layouts([1, 2, 4, 8]))
    assert c.legal == c.too_large + c.pruned + c.simulated
    assert min(c.too_large, c.pruned, c.simulated) > 0
    assert c.simulated < c.legal / 20


def test_trying_everything_finds_the_same() -> None:
    config, fixed = load(SMALL, ["batch.global=16"]), ["parallel.zero", "train.recompute", "parallel.sp"]
    found = search(config, 8, H100, STACK, H100.device.room, fixed)
    every = tried(Space(config, 8, frozenset(fixed)), [1, 2, 4, 8])
    kinds = [cut(layout) for _, _, layout in every]
    expected = [each for at, each in enumerate(every) if kinds.index(kinds[at]) == at]
    assert len(expected) < len(every)
    assert [(one.estimate.step_s, one.memory.total, one.layout) for one in found.best[:3]] == expected[:3]
    assert [one.layout for one in found.best] == [layout for _, _, layout in expected[:10]]
    assert found.counts.too_large <= sum(step_s == math.inf for step_s, _, _ in every)


def test_what_is_fixed_stays() -> None:
    overrides = ["batch.global=32", "parallel.tp=4", "parallel.zero=2", "batch.micro=2"]
    fixed = ["parallel.tp", "parallel.zero", "batch.micro"]
    found = search(load(SMALL, overrides), 16, H100, STACK, H100.device.room, fixed)
    assert {(one.layout.tp, one.layout.zero, one.layout.micro) for one in found.best} == {(4, 2, 2)}
    assert len({one.layout.pp for one in found.best}) > 1


def test_where_nothing_fits_the_smallest_is_told() -> None:
    config, room = load(LARGE, ["batch.global=16"]), A100.device.room
    fixed = ["parallel.sp", "parallel.zero", "batch.micro"]
    found = search(config, 16, A100, STACK, room, fixed)
    assert found.best == ()
    assert found.counts.legal == found.counts.too_large > 0
    assert found.smallest is not None
    assert found.smallest.memory == fullest_rank(found.smallest.config)
    assert found.smallest.memory.total > room
    # tp beyond a node cuts more; now it fits
    assert found.smallest.layout.tp == 16 > A100.node.devices
    again = search(config, 16, A100, STACK, found.smallest.memory.total, fixed)
    assert [one.layout for one in again.best] == [found.smallest.layout]


def test_a_layout_that_fits_is_found_sooner_than_the_fastest(small: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    config, room = load(SMALL, ["batch.global=32"]), H100.device.room
    monkeypatch.setattr(Steps, "step_s", lambda *_: pytest.fail("nothing need be replayed"))
    instead = fitting(config, 16, H100, STACK, room)
    found = instead.fits
    assert found is not None and instead.smallest is None
    assert Space(config, 16, frozenset()).legal(found.config)
    assert found.memory == fullest_rank(found.config) and found.memory.total <= room
    assert step_time(found.config, H100, STACK) < 1.1 * small.best[0].estimate.step_s
    instead = fitting(config, 16, H100, STACK, 1)
    assert instead.fits is None and instead.smallest == search(config, 16, H100, STACK, 1).smallest


def test_the_next_number_of_devices_that_would_do() -> None:
    config = load(LARGE, ["batch.global=16"])
    found = enough(config, 8, A100, STACK, 1.0)
    assert found is not None and found.memory.total <= A100.device.room
    count = found.config.world
    assert count > 16 and search(config, count, A100, STACK, A100.device.room).best
    assert not search(config, count // 2, A100, STACK, A100.device.room).best
    assert enough(config, 8, A100, STACK, 1e-4) is None


def test_the_smallest_is_the_smallest() -> None:
    config, fixed = load(SMALL, ["batch.global=4", "parallel.tp=1"]), ["parallel.tp", "parallel.sp"]
    found = search(config, 4, H100, STACK, 1, fixed)
    space = Space(config, 4, frozenset(fixed))
    layouts = [layout._replace(zero=zero) for layout in space.layouts([1]) for zero in space.zeros(layout.dp)]
    assert found.smallest is not None
    assert found.smallest.memory.total == min(fullest_rank(space.applied(layout)).total for layout in layouts)


def test_where_nothing_is_legal() -> None:
    config = load(SMALL, ["batch.global=32"])
    found = search(config, 37, H100, STACK, H100.device.room)
    assert (found.best, found.smallest, found.counts.legal) == ((), None, 0)
    with pytest.raises(ConfigError):
        load(SMALL, ["batch.global=32", "parallel.tp=1"], world=37)


def test_why_a_layout_loses() -> None:
    overrides = ["batch.global=32", "parallel.tp=1", "parallel.dp=8", "parallel.zero=1"]
    fixed = ["parallel.tp", "parallel.dp", "parallel.zero", "parallel.sp", "batch.micro", "parallel.vpp"]
    found = search(load(SMALL, overrides), 16, H100, STACK, 2**40, fixed)
    none, _, full = sorted(found.best, key=lambda one: ("none", "selective", "full").index(one.layout.recompute))
    assert lost(full, none).startswith("recompute +")
    assert lost(none, none) == "as fast, +0 B"
    bubble = search(load(SMALL, overrides), 16, H100, STACK, 2**40, fixed[:-1])
    assert none.layout.vpp == 1 < bubble.best[0].layout.vpp
    assert lost(none, bubble.best[0]).startswith("bubble +")
