"""What the search returns is legal, fits, and is what trying everything finds."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

import pytest

from megascale.account.memory import fullest_rank
from megascale.config.explain import load
from megascale.core.errors import ConfigError
from megascale.search.plan import Plan
from megascale.search.report import lost, search_tables
from megascale.search.search import Found, row, search
from megascale.search.space import VARIED, Layout, Space
from megascale.simulate import profiles
from megascale.simulate.step_time import StepParts

H100, A100 = profiles.hardware("h100"), profiles.hardware("a100-80g")
STACK = profiles.stack("megascale")
HOLDING = STACK.holding
SMALL, LARGE = "configs/gpu/llama3-8b.toml", "configs/gpu/megascale-175b.toml"


def tried(space: Space, tps: Collection[int]) -> list[tuple[float, int, Layout]]:
    """Step time and memory of every layout, the best first."""
    found = []
    for layout in space.layouts(tps):
        config = space.applied(layout)
        memory = fullest_rank(config, HOLDING).total
        fits = memory <= H100.room(1)
        found.append((StepParts(config, H100, STACK).step_s if fits else math.inf, memory, layout))
    return sorted(found)


@pytest.fixture(scope="module")
def small() -> Found:
    return search(load(SMALL, ["batch.global=32"]), 16, H100, STACK, filled=1.0)


def test_what_is_found_passes_the_rules_and_fits(small: Found) -> None:
    assert len(small.best) == 10
    for one in small.best:
        keys = [f"{key}={str(value).lower()}" for key, value in zip(VARIED, one.layout, strict=True)]
        assert load(SMALL, ["batch.global=32", *keys], world=16) == one.config
        assert fullest_rank(one.config, HOLDING) == one.memory
        assert one.memory.total <= H100.room(1)
        assert sum(one.estimate.causes.values()) == pytest.approx(one.estimate.step_s)
        assert one.estimate.step_s == StepParts(one.config, H100, STACK).step_s


def test_the_fastest_come_first_and_the_others_say_why_not(small: Found) -> None:
    times = [one.estimate.step_s for one in small.best]
    assert times == sorted(times)
    assert [bool(lost(one, small.best[0])) for one in small.best] == [False] + [True] * 9
    assert len({row(one.layout) for one in small.best}) == 10


def test_every_layout_is_counted_once(small: Found) -> None:
    c, space = small.counts, Space(load(SMALL, ["batch.global=32"]), 16)
    assert c["legal"] == len(list(space.layouts([1, 2, 4, 8])))
    assert c["legal"] == c["too_large"] + c["pruned"] + c["simulated"]
    assert min(c["too_large"], c["pruned"], c["simulated"]) > 0
    assert c["simulated"] < c["legal"] / 10


def test_trying_everything_finds_the_same() -> None:
    config, fixed = load(SMALL, ["batch.global=16"]), ["parallel.zero", "parallel.sp"]
    found = search(config, 8, H100, STACK, fixed, filled=1.0)
    every = tried(Space(config, 8, frozenset(fixed)), [1, 2, 4, 8])
    rows = [row(layout) for _, _, layout in every]
    expected = [each for at, each in enumerate(every) if rows.index(rows[at]) == at and each[0] < math.inf]
    assert 3 < len(expected) < len(every)
    assert [(one.estimate.step_s, one.memory.total, one.layout) for one in found.best] == expected[:10]
    assert found.counts["too_large"] <= sum(step_s == math.inf for step_s, _, _ in every)


def test_layouts_that_differ_in_recomputation_alone_are_one_row() -> None:
    fixed = ["parallel.tp", "parallel.pp", "parallel.sp", "batch.micro"]
    config = load(SMALL, ["batch.global=32", "parallel.tp=2", "parallel.pp=2", "batch.micro=1"])
    (one,) = search(config, 16, H100, STACK, fixed).best
    assert one.layout.recompute == "none" and one.layout.vpp > 1
    (tight,) = search(config, 16, H100, STACK, fixed, filled=0.9 * one.memory.total / H100.room(1)).best
    assert tight.layout != one.layout and row(tight.layout) == row(one.layout)
    assert tight.estimate.step_s > one.estimate.step_s


def test_choices_closer_than_the_error_are_said(small: Found) -> None:
    first = small.best[0]
    assert first.expected_error
    most = first.estimate.step_s * (1 + first.expected_error)
    near = sum(one.estimate.step_s <= most for one in small.best)
    *_, line = search_tables(small)
    assert near > 1 and str(line).startswith(f"the first {near} differ by less than the expected error of ")
    alone = replace(small, best=small.best[:1])
    assert len(list(search_tables(alone))) == 2


def test_what_is_fixed_stays() -> None:
    overrides = ["batch.global=32", "parallel.tp=4", "parallel.zero=2", "batch.micro=2"]
    fixed = ["parallel.tp", "parallel.zero", "batch.micro"]
    found = search(load(SMALL, overrides), 16, H100, STACK, fixed, filled=1.0)
    assert {(one.layout.tp, one.layout.zero, one.layout.micro) for one in found.best} == {(4, 2, 2)}
    assert len({one.layout.pp for one in found.best}) > 1


def test_where_nothing_fits_the_smallest_is_told() -> None:
    config = load(LARGE, ["batch.global=16"])
    fixed = ["parallel.sp", "parallel.zero", "batch.micro"]
    found = search(config, 16, A100, STACK, fixed, filled=1.0)
    assert found.best == []
    assert found.counts["legal"] == found.counts["too_large"] > 0
    assert found.smallest is not None
    assert found.smallest.memory == fullest_rank(found.smallest.config, HOLDING)
    assert found.smallest.memory.total > A100.room(1)
    # tp beyond a node cuts more; now it fits
    assert found.smallest.layout.tp == 16 > A100.node.devices
    filled = (found.smallest.memory.total + 1) / A100.room(1)
    assert [one.layout for one in search(config, 16, A100, STACK, fixed, filled=filled).best] == [found.smallest.layout]


def test_the_next_number_of_devices_that_would_do() -> None:
    config = load(LARGE, ["batch.global=16"])
    found = search(config, 8, A100, STACK, filled=1.0).larger
    assert found is not None and found.memory.total <= A100.room(1)
    count = found.config.world
    assert count > 16 and search(config, count, A100, STACK, filled=1.0).best
    assert not search(config, count // 2, A100, STACK, filled=1.0).best
    assert search(config, 8, A100, STACK, filled=1e-4).larger is None


def test_the_smallest_is_the_smallest() -> None:
    config, fixed = load(SMALL, ["batch.global=4", "parallel.tp=1"]), ["parallel.tp", "parallel.sp"]
    found = search(config, 4, H100, STACK, fixed, filled=1e-9)
    space = Space(config, 4, frozenset(fixed))
    assert found.smallest is not None
    sizes = [fullest_rank(space.applied(layout), HOLDING).total for layout in space.layouts([1])]
    assert found.smallest.memory.total == min(sizes)


def test_where_nothing_is_legal() -> None:
    config = load(SMALL, ["batch.global=32"])
    found = search(config, 37, H100, STACK)
    assert (found.best, found.smallest, found.counts["legal"]) == ([], None, 0)
    assert found.space.nearest_legal() == 36
    with pytest.raises(ConfigError):
        load(SMALL, ["batch.global=32", "parallel.tp=1"], world=37)


def test_why_a_layout_loses() -> None:
    def candidate(*overrides: str) -> Plan:
        keys = ["batch.global=32", "parallel.tp=1", "parallel.sp=false", "parallel.pp=2", "parallel.dp=8", *overrides]
        return Plan(load(SMALL, keys, world=16), H100, STACK)

    none, full = candidate("train.recompute=none"), candidate("train.recompute=full")
    same, bubble = candidate("train.recompute=none"), candidate("parallel.vpp=4")
    assert lost(full, none).startswith("recompute +")
    assert lost(none, none) == ""
    assert lost(same, none) == "as fast, +0 B"
    assert lost(none, bubble).startswith("bubble +")
