"""Results of the search are legal, fit, and equal an exhaustive search."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

import pytest

from megascale.catalog.schedules import SCHEDULES
from megascale.config.loading import load_config
from megascale.core.errors import ConfigError
from megascale.plan.account.memory import JobMemory
from megascale.plan.search import plan as plan_module
from megascale.plan.search.plan import Plan
from megascale.plan.search.report import search_tables, slowdown_causes
from megascale.plan.search.search import SearchResult, row, search
from megascale.plan.search.space import LAYOUT_KEYS, Layout, Space
from megascale.plan.simulate import profiles
from megascale.plan.simulate.step_time import StepParts

H100, A100 = profiles.hardware("h100"), profiles.hardware("a100-80g")
STACK = profiles.stack("megascale")
STORAGE = STACK.storage
SMALL, LARGE = "configs/gpu/llama3-8b.toml", "configs/gpu/megascale-175b.toml"
FIXED = ["parallel.cp", "parallel.zero"]


def exhaustive(space: Space, tps: Collection[int]) -> list[tuple[float, int, Layout]]:
    """Time and size every layout, the fastest first."""
    results = []
    for layout in space.layouts(tps):
        config = space.with_layout(layout)
        memory = JobMemory(config, STORAGE).fullest().total
        fits = memory <= H100.memory_limit(1)
        results.append((StepParts(config, H100, STACK).step_s if fits else math.inf, memory, layout))
    return sorted(results)


@pytest.fixture(scope="module")
def small() -> SearchResult:
    return search(load_config(SMALL, ["batch.global=16"]), 8, H100, STACK, FIXED, memory_fraction=1.0)


def test_results_are_legal_and_fit(small: SearchResult) -> None:
    assert len(small.best) == 10
    for plan in small.best:
        values = zip(LAYOUT_KEYS, plan.layout, strict=True)
        keys = [f"{key}={'auto' if value is None else str(value).lower()}" for key, value in values]
        keys += [f"parallel.layers_per_chunk={plan.config.parallel.layers_per_chunk or 'auto'}"]
        assert load_config(SMALL, ["batch.global=16", *keys], world_size=8) == plan.config
        assert JobMemory(plan.config, STORAGE).fullest() == plan.memory
        assert plan.memory.total <= H100.memory_limit(1)
        assert sum(plan.estimate.causes.values()) == pytest.approx(plan.estimate.step_s)
        assert plan.estimate.step_s == StepParts(plan.config, H100, STACK).step_s


def test_results_are_sorted_with_the_causes_of_slower_ones(small: SearchResult) -> None:
    times = [plan.estimate.step_s for plan in small.best]
    assert times == sorted(times)
    assert [bool(slowdown_causes(plan, small.best[0])) for plan in small.best] == [False] + [True] * 9
    assert len({row(plan.layout) for plan in small.best}) == 10


def test_every_layout_is_counted_once(small: SearchResult) -> None:
    c, space = small.counts, Space(load_config(SMALL, ["batch.global=16"]), 8, frozenset(FIXED))
    assert c["legal"] == len(list(space.layouts([1, 2, 4, 8])))
    assert c["legal"] == c["too_large"] + c["pruned"] + c["simulated"]
    assert min(c["too_large"], c["pruned"], c["simulated"]) > 0
    assert c["simulated"] < c["legal"] / 10


@pytest.mark.slow
def test_an_exhaustive_search_has_equal_results() -> None:
    config, fixed = (
        load_config(SMALL, ["batch.global=8"]),
        ["parallel.zero", "parallel.sp", "parallel.layers_per_chunk"],
    )
    result = search(config, 8, H100, STACK, fixed, memory_fraction=1.0)
    every = exhaustive(Space(config, 8, frozenset(fixed)), [1, 2, 4, 8])
    rows = [row(layout) for _, _, layout in every]
    expected = [timed for at, timed in enumerate(every) if rows.index(rows[at]) == at and timed[0] < math.inf]
    assert 3 < len(expected) < len(every)
    assert [(plan.estimate.step_s, plan.memory.total, plan.layout) for plan in result.best] == expected[:10]
    assert result.counts["too_large"] <= sum(step_s == math.inf for step_s, _, _ in every)


def test_layouts_that_differ_only_in_recomputation_share_a_row() -> None:
    fixed = ["parallel.tp", "parallel.cp", "parallel.pp", "parallel.sp", "parallel.zero", "batch.micro"]
    config = load_config(SMALL, ["batch.global=32", "parallel.tp=2", "parallel.pp=2", "batch.micro=1"])
    (plan,) = search(config, 16, H100, STACK, fixed).best
    assert plan.layout.recompute == "none" and plan.layout.vpp > 1
    (tight,) = search(
        config, 16, H100, STACK, fixed, memory_fraction=0.9 * plan.memory.total / H100.memory_limit(1)
    ).best
    assert tight.layout != plan.layout and row(tight.layout) == row(plan.layout)
    assert tight.estimate.step_s > plan.estimate.step_s


def test_split_backwards_win() -> None:
    keys = {"parallel.tp": 2, "parallel.pp": 4, "parallel.vpp": 2, "batch.micro": 1, "train.recompute": "none"}
    config = load_config(SMALL, ["batch.global=32", *(f"{key}={value}" for key, value in keys.items())])
    fixed = [*keys, "parallel.cp", "parallel.sp", "parallel.zero", "parallel.layers_per_chunk"]
    (split,), (whole,) = (search(config, 16, H100, STACK, [*fixed, *more]).best for more in ([], ["parallel.schedule"]))
    assert SCHEDULES[split.layout.schedule].facts["split"] and whole.layout.schedule == "interleaved_1f1b"
    assert split.estimate.causes["bubble"] < whole.estimate.causes["bubble"]
    assert split.estimate.step_s < whole.estimate.step_s


def test_weights_are_sharded_where_gradients_alone_do_not_suffice() -> None:
    """8B on one stage fits without recomputation if weights are sharded, and a model of 8 layers without."""
    layout = ["parallel.tp=1", "parallel.sp=false", "parallel.pp=1", "parallel.vpp=1"]
    fixed = [*(key.partition("=")[0] for key in layout), "parallel.cp"]

    def first(*keys: str) -> Layout:
        own = [*fixed, *(key.partition("=")[0] for key in keys)]
        return search(load_config(SMALL, ["batch.global=64", *layout, *keys]), 64, H100, STACK, own).best[0].layout

    large, without, small = first(), first("parallel.zero=2"), first("model.num_layers=8")
    assert (large.zero, large.reshard, large.recompute) == (3, "forward", "none")
    assert without.recompute != "none" and small.zero < 3
    kept = first("parallel.zero=3", "model.num_layers=8")
    assert kept.reshard == "keep", "as fast as any way"


def test_results_closer_than_the_error_are_reported(small: SearchResult, monkeypatch: pytest.MonkeyPatch) -> None:
    first = small.best[0]
    assert first.expected_error is None, "unknown for so few devices"
    monkeypatch.setattr(plan_module, "MIN_DEVICES", 1)
    assert first.expected_error
    most = first.estimate.step_s * (1 + first.expected_error)
    near = sum(plan.estimate.step_s <= most for plan in small.best)
    *_, line = search_tables(small)
    assert near > 1 and str(line).startswith(f"the first {near} differ by less than the expected error of ")
    alone = replace(small, best=small.best[:1])
    assert len(list(search_tables(alone))) == 2


def test_fixed_keys_keep_their_values() -> None:
    overrides = ["batch.global=16", "parallel.tp=4", "parallel.zero=2", "batch.micro=2"]
    fixed = ["parallel.tp", "parallel.cp", "parallel.zero", "batch.micro", "train.recompute"]
    result = search(load_config(SMALL, overrides), 8, H100, STACK, fixed, memory_fraction=1.0)
    assert {(plan.layout.tp, plan.layout.zero, plan.layout.micro) for plan in result.best} == {(4, 2, 2)}
    assert len({plan.layout.pp for plan in result.best}) > 1


def test_long_sequences_are_shared() -> None:
    """More ranks than heads work on few long sequences."""
    config = load_config(SMALL, ["model.seq_length=131072", "batch.global=2"])
    fixed = ["parallel.vpp", "parallel.schedule", "parallel.zero"]
    first = search(config, 128, H100, STACK, fixed).best[0]
    assert first.layout.cp > 1 and first.layout.dp <= 2
    assert first.estimate.causes["cp"] > 0
    alone = search(
        load_config(SMALL, ["model.seq_length=131072", "batch.global=2", "parallel.cp=1"]),
        128,
        H100,
        STACK,
        [*fixed, "parallel.cp"],
    ).best
    assert not alone or alone[0].estimate.step_s > first.estimate.step_s


def test_the_smallest_plan_if_nothing_fits() -> None:
    config = load_config(LARGE, ["batch.global=16"])
    fixed = [*FIXED, "parallel.sp", "parallel.schedule", "batch.micro"]
    result = search(config, 16, A100, STACK, fixed, memory_fraction=1.0)
    assert result.best == []
    assert result.counts["legal"] == result.counts["too_large"] > 0
    assert result.smallest is not None
    assert result.smallest.memory == JobMemory(result.smallest.config, STORAGE).fullest()
    assert result.smallest.memory.total > A100.memory_limit(1)
    # tp across nodes shards more
    assert result.smallest.layout.tp == 16 > A100.node.devices
    memory_fraction = (result.smallest.memory.total + 1) / A100.memory_limit(1)
    assert [plan.layout for plan in search(config, 16, A100, STACK, fixed, memory_fraction=memory_fraction).best] == [
        result.smallest.layout
    ]


@pytest.mark.slow
def test_a_larger_job_that_fits() -> None:
    config = load_config(LARGE, ["batch.global=16"])
    fixed = ["parallel.cp"]
    larger = search(config, 8, A100, STACK, fixed, memory_fraction=1.0).larger
    assert larger is not None and larger.memory.total <= A100.memory_limit(1)
    count = larger.config.world_size
    assert count > 16 and search(config, count, A100, STACK, fixed, memory_fraction=1.0).best
    assert not search(config, count // 2, A100, STACK, fixed, memory_fraction=1.0).best
    assert search(config, 8, A100, STACK, fixed, memory_fraction=1e-4).larger is None


@pytest.mark.slow
def test_the_smallest_plan_has_the_lowest_memory() -> None:
    config, fixed = load_config(SMALL, ["batch.global=4", "parallel.tp=1"]), ["parallel.tp", "parallel.sp"]
    result = search(config, 4, H100, STACK, fixed, memory_fraction=1e-9)
    space = Space(config, 4, frozenset(fixed))
    assert result.smallest is not None
    sizes = [JobMemory(space.with_layout(layout), STORAGE).fullest().total for layout in space.layouts([1])]
    assert result.smallest.memory.total == min(sizes)


def test_no_legal_layout() -> None:
    config = load_config(SMALL, ["batch.global=32"])
    result = search(config, 37, H100, STACK)
    assert (result.best, result.smallest, result.counts["legal"]) == ([], None, 0)
    assert result.space.nearest_legal() == 36
    with pytest.raises(ConfigError):
        load_config(SMALL, ["batch.global=32", "parallel.tp=1"], world_size=37)


def test_causes_of_a_slower_layout() -> None:
    def candidate(*overrides: str) -> Plan:
        keys = ["batch.global=32", "parallel.tp=1", "parallel.sp=false", "parallel.pp=2", "parallel.dp=8", *overrides]
        return Plan(load_config(SMALL, keys, world_size=16), H100, STACK)

    none, full = candidate("train.recompute=none"), candidate("train.recompute=full")
    same, bubble = candidate("train.recompute=none"), candidate("parallel.vpp=4")
    assert slowdown_causes(full, none).startswith("recompute +")
    assert slowdown_causes(none, none) == ""
    assert slowdown_causes(same, none) == "as fast, +0 B"
    assert slowdown_causes(none, bubble).startswith("bubble +")
