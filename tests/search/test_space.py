"""The layouts of a space are those that the rules let pass, all of them, and nothing that is fixed changes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from megascale.catalog.schedules import SCHEDULES
from megascale.config.explain import load, load_tree
from megascale.config.rules import RULES, world_findings
from megascale.config.run import RunConfig
from megascale.search.space import VARIED, Layout, Space

DEVICES = 12
TREE = {
    "name": "small",
    "model": {"num_layers": 5, "hidden_size": 96, "num_heads": 6, "num_kv_heads": 3, "ffn_size": 192,
              "vocab_size": 100, "seq_length": 12},
    "batch": {"micro": 2, "global": 12},
    "train": {"steps": 10, "precision": "bf16"},
    "optimizer": {"lr": 1e-3},
    "data": {"mock": True},
}  # fmt: skip


def config_of(**sections: dict[str, Any]) -> RunConfig:
    return load_tree({**TREE, **{name: {**TREE.get(name, {}), **keys} for name, keys in sections.items()}}, "test")


def all_of(space: Space) -> list[Layout]:
    return list(space.layouts(range(1, space.devices + 1)))


def legal(space: Space, layout: Layout) -> bool:
    config = space.applied(layout)
    rules = [rule for reads, rule in RULES if {"parallel", "batch", "train"}.intersection(reads)]
    return not any(any(rule(config)) for rule in rules) and not any(world_findings(config, space.devices))


def judged(space: Space) -> set[Layout]:
    """Every combination that the rules let pass, of which none does the same as another."""
    counts, own = range(1, space.devices + 1), space.config.parallel
    schedules = ["1f1b", "interleaved_1f1b"]
    axes = (
        counts,
        (False, True),
        counts,
        range(1, 8),
        schedules,
        counts,
        counts,
        ("none", "selective", "full"),
        range(3),
    )
    found = set()
    for tp, pp in itertools.product(counts, counts):
        if space.devices % (tp * pp):
            continue
        dp = space.devices // tp // pp
        for layout in itertools.starmap(Layout, itertools.product([tp], axes[1], [pp], *axes[3:5], [dp], *axes[6:])):
            moot = (tp == 1 and layout.sp != own.sp) or (dp == 1 and layout.zero != own.zero)
            twin = SCHEDULES[layout.schedule].facts["chunks"] != (layout.vpp > 1)
            if not moot and not twin and legal(space, layout):
                found.add(layout)
    return found


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"parallel": {"sp": True, "tp": 3, "zero": 2}},
        {"parallel": {"pp": 2, "vpp": 3, "layers_per_chunk": [0, 1, 1, 1, 1, 1]}},
        {"parallel": {"pp": 2, "vpp": 2}, "train": {"recompute": "full", "recompute_chunks": [1]}},
        {"train": {"precision": "fp8", "recompute": "selective", "recompute_ops": ["norm"]},
         "fp8": {"bf16_first": 0, "bf16_last": 0}, "model": {"seq_length": 24}},
    ],
    ids=["plain", "sp", "cut", "chunks", "fp8"],
)  # fmt: skip
def test_all_that_the_rules_let_pass(sections: dict[str, Any]) -> None:
    space = Space(config_of(**sections), DEVICES, frozenset())
    found = all_of(space)
    assert len(found) == len(set(found)) > 20
    assert found == all_of(Space(space.config, DEVICES, frozenset()))
    assert set(found) == judged(space)


def test_a_layout_is_its_keys() -> None:
    path, devices = "configs/gpu/megascale-175b.toml", 512
    space = Space(load(path, ["batch.global=512"]), devices, frozenset())
    for layout in all_of(space)[::700]:
        overrides = [f"{key}={str(value).lower()}" for key, value in zip(VARIED, layout, strict=True)]
        assert space.applied(layout) == load(path, ["batch.global=512", *overrides], world=devices)


@pytest.mark.parametrize("key", VARIED)
def test_what_is_fixed_stays(key: str) -> None:
    parallel = {"tp": 3, "sp": True, "pp": 2, "vpp": 2, "dp": 2, "zero": 2, "schedule": "interleaved_1f1b"}
    config = config_of(parallel=parallel, train={"recompute": "full"})
    found = all_of(Space(config, DEVICES, frozenset([key])))
    section, _, name = key.partition(".")
    assert {getattr(layout, name) for layout in found} == {getattr(getattr(config, section), name)}
    same = [
        layout
        for layout in all_of(Space(config, DEVICES, frozenset()))
        if getattr(layout, name) == getattr(found[0], name)
    ]
    assert len(same) > 5
    if key == "parallel.schedule":  # with one chunk it does what another is for
        found = [layout for layout in found if layout.vpp > 1]
    assert found == same


def test_how_layers_are_cut_may_be_fixed() -> None:
    config = config_of(parallel={"pp": 3, "layers_per_chunk": [2, 2, 1]})
    free, fixed = (Space(config, DEVICES, frozenset(keys)) for keys in ((), ("parallel.layers_per_chunk",)))
    assert {layout.pp * layout.vpp for layout in all_of(fixed)} == {3}
    assert {layout.pp * layout.vpp for layout in all_of(free)} > {1, 3}
    cuts = {layout.pp * layout.vpp: free.applied(layout).parallel.layers_per_chunk for layout in all_of(free)}
    assert cuts[3] == [2, 2, 1]
    assert cuts[1] is None


def test_a_schedule_that_is_fixed_may_be_any() -> None:
    space = Space(config_of(parallel={"schedule": "gpipe"}), DEVICES, frozenset(["parallel.schedule"]))
    assert {(layout.schedule, layout.vpp) for layout in all_of(space)} == {("gpipe", 1)}


def test_no_layout() -> None:
    assert all_of(Space(config_of(), 11, frozenset())) == []


def test_the_nearest_number_of_devices_has_a_layout() -> None:
    space = Space(config_of(), 1000, frozenset())
    near = space.nearest_legal()
    assert near is not None and near != 1000 and all_of(replace(space, devices=near))
    closer = range(1001 - abs(near - 1000), 1000 + abs(near - 1000))
    assert not any(all_of(replace(space, devices=count)) for count in closer)
    assert Space(config_of(), 11, frozenset(["parallel.tp", "parallel.pp", "parallel.dp"])).nearest_legal() == 1
