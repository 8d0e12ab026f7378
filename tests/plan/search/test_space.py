"""A space has all legal layouts and no others, and fixed keys keep their values."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

from megascale.catalog.schedules import SCHEDULES
from megascale.config.loading import load_config, load_config_tree
from megascale.config.rules import RULES, run_rules, sections_of
from megascale.config.run import RunConfig
from megascale.config.world_rules import world_findings
from megascale.plan.search.space import LAYOUT_KEYS, MIN_SHARED_TOKENS, RESHARD, Layout, Space
from tests.marks import only_quick

DEVICES = 12
MICRO = (1, 2, 3, 4, 5, 6, 12)
"""Samples of a micro-batch that are tried: of the others up to DEVICES none divides the batches of a case."""
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
    return load_config_tree(
        {**TREE, **{name: {**TREE.get(name, {}), **keys} for name, keys in sections.items()}}, "test"
    )


def all_of(space: Space) -> list[Layout]:
    return list(space.layouts(range(1, space.devices + 1)))


def legal(space: Space, layout: Layout) -> bool:
    config = space.with_layout(layout)
    rules = [rule for rule in RULES if {"parallel", "batch", "train"} & sections_of(rule)]
    return not any(run_rules(rules, dict(config))) and not any(world_findings(config, space.devices))


def all_legal(space: Space) -> set[Layout]:
    """Enumerate all legal combinations without duplicates in effect."""
    counts, parallel = range(1, space.devices + 1), space.config.parallel
    bounded = {name: card.facts for name, card in SCHEDULES.cards.items() if not card.facts["unbounded_in_flight"]}
    schedules = [name for name, facts in bounded.items() if space.config.model.experts or not facts["pairs"]]
    axes = (
        counts,
        (False, True),
        counts,
        range(1, 8),
        schedules,
        counts,
        MICRO,
        ("none", "selective", "full"),
        range(4),
    )
    layouts = set()
    for tp, pp in itertools.product(counts, counts):
        if space.devices % (tp * pp):
            continue
        dp = space.devices // tp // pp
        for keys in itertools.product([tp], axes[1], [pp], *axes[3:5], [dp], *axes[6:]):
            layout = Layout(*keys[:2], 1, "ring", 1, *keys[2:], reshard="forward" if keys[-1] == 3 else None)
            no_effect = (tp == 1 and layout.sp != parallel.sp) or (dp == 1 and layout.zero != parallel.zero)
            facts = SCHEDULES[layout.schedule].facts
            duplicate = (facts["v"] or max(2, layout.vpp)) != layout.vpp
            duplicate |= pp == 1 and layout.schedule not in ("1f1b", "interleaved_1f1b")
            if not no_effect and not duplicate and legal(space, layout):
                layouts.add(layout)
    return layouts


SECTIONS: list[dict[str, Any]] = [
    {},
    {"parallel": {"sp": True, "tp": 3, "zero": 2}},
    {"parallel": {"pp": 2, "vpp": 3, "layers_per_chunk": [0, 1, 1, 1, 1, 1]}},
    {"parallel": {"pp": 2, "vpp": 2}, "train": {"recompute": "full"}},
    {"train": {"precision": "fp8", "recompute": "selective", "recompute_ops": ["norm"]},
     "fp8": {"first_layers_bf16": 0, "last_layers_bf16": 0}, "model": {"seq_length": 24}},
    {"batch": {"global": 24, "rampup": [12, 6, 60]}},
    {"model": {"experts": 1, "experts_per_token": 1, "router_normalize": False, "bias": False},
     "moe": {"balance": "group", "balance_group": 4, "token_blocks": 8}},
    {"parallel": {"sp": True, "tp": 3, "zero": 2}, "batch": {"global": 24, "rampup": [12, 6, 60]}},
]  # fmt: skip


@pytest.mark.parametrize("devices", only_quick([6, DEVICES], 6))
@pytest.mark.parametrize(
    "sections",
    only_quick(SECTIONS, SECTIONS[-1]),
    ids=["plain", "sp", "cut", "chunks", "fp8", "ramp-up", "groups and blocks", "sp, ramp-up"],
)
def test_a_space_has_all_legal_layouts(sections: dict[str, Any], devices: int) -> None:
    space = Space(config_of(**sections), devices, frozenset())
    layouts = all_of(space)
    assert len(layouts) == len(set(layouts)) > 20
    assert layouts == all_of(Space(space.config, devices, frozenset()))
    assert set(layouts) == all_legal(space)


LONG = {"model": {"seq_length": 6 * MIN_SHARED_TOKENS}, "parallel": {"vpp": 1, "schedule": "1f1b"}}


def contexts(space: Space) -> set[Layout]:
    """Enumerate the legal layouts of one stage, without recomputation and with the configuration's ZeRO stage, that
    differ in tp, sp, the keys of cp, dp and micro-batch, without duplicates in effect.
    """
    counts, modes = (1, 2, 3, 4, 6, 12), ("ring", "allgather", "ulysses", "usp")
    layouts = set()
    for tp, cp, mode, heads, micro in itertools.product(counts, counts, modes, counts, counts):
        dp, rest = divmod(space.devices, tp * cp)
        duplicate = (cp == 1 and mode != "ring") or (mode == "usp" and heads in (1, cp)) or math.gcd(cp, micro) > 1
        if rest or duplicate or cp > 6:
            continue
        for sp in (False, True) if tp > 1 else (False,):
            layout = Layout(tp, sp, cp, mode, heads, 1, 1, "1f1b", dp, micro, "none", 1)
            if legal(space, layout):
                layouts.add(layout)
    return layouts


def test_a_space_has_all_ways_of_sharing_sequences() -> None:
    fixed = ("parallel.pp", "parallel.vpp", "parallel.schedule", "parallel.zero", "train.recompute")
    space = Space(config_of(**LONG), DEVICES, frozenset(fixed))
    layouts = all_of(space)
    assert len(layouts) == len(set(layouts))
    assert set(layouts) == contexts(space)
    assert {layout.cp_mode for layout in layouts} == {"ring", "allgather", "ulysses", "usp"}
    assert {layout.cp for layout in layouts} == {1, 2, 3, 4, 6}  # with 12, ranks would have fewer tokens


def test_a_space_has_all_sizes_of_ep() -> None:
    """They divide the experts and the ranks of a stage, and ranks of tp that share no sequence have no experts."""
    model = {"experts": 8, "bias": False, "block": "serial"}
    fixed = ("parallel.vpp", "parallel.schedule", "parallel.zero", "train.recompute", "batch.micro")
    parallel = {"vpp": 1, "schedule": "1f1b"}
    space = Space(config_of(model=model, parallel=parallel, batch={"micro": 1}), DEVICES, frozenset(fixed))
    counts, expected = (1, 2, 3, 4, 6, 12), set()
    for tp, pp, ep in itertools.product(counts, counts, range(1, 13)):
        dp, rest = divmod(DEVICES, tp * pp)
        layout = Layout(tp, tp > 1, 1, "ring", 1, pp, 1, "1f1b", dp, 1, "none", 1, ep)
        if not rest and legal(space, layout):
            expected.add(layout)
    layouts = all_of(space)
    assert len(layouts) == len(set(layouts)) and set(layouts) == expected
    assert {layout.ep for layout in layouts} == {1, 2, 4}
    measured = space.config.train.model_copy(update={"noise_scale_every": 5})
    with_noise = all_of(replace(space, config=space.config.model_copy(update={"train": measured})))
    assert {layout.ep for layout in with_noise} == {1}, "the noise scale is of whole micro-batches"
    one = all_of(replace(space, fixed=space.fixed | {"parallel.ep"}))
    assert {layout.ep for layout in one} == {1} and set(one) < expected


def test_groups_of_samples_may_span_ranks() -> None:
    """A micro-batch of one sample is legal where the ranks of dp have a group together."""
    config = config_of(
        model={"experts": 4, "bias": False}, moe={"balance": "group", "balance_group": 4}, batch={"micro": 1}
    )
    layouts = all_of(Space(config, DEVICES, frozenset(["batch.micro"])))
    assert {(layout.dp, layout.micro) for layout in layouts} == {(4, 1), (12, 1)}


def test_ways_of_sharing_sequences_can_be_fixed() -> None:
    shared = {"cp": 6, "cp_mode": "usp", "cp_a2a_size": 3}
    config = config_of(model={"seq_length": 36}, parallel=shared)
    layouts = all_of(Space(config, DEVICES, frozenset(f"parallel.{key}" for key in shared)))
    assert {(layout.cp, layout.cp_mode, layout.cp_a2a_size) for layout in layouts} == {(6, "usp", 3)}
    assert {layout.micro for layout in layouts} > {2, 4}  # also where a smaller cp would do


def test_a_layout_equals_its_keys_in_a_configuration() -> None:
    path, devices = "configs/gpu/megascale-175b.toml", 512
    space = Space(load_config(path, ["batch.global=512"]), devices, frozenset())
    for layout in all_of(space)[::2100]:
        overrides = [
            f"{key}={'auto' if value is None else str(value).lower()}"
            for key, value in zip(LAYOUT_KEYS, layout, strict=True)
        ]
        assert space.with_layout(layout) == load_config(path, ["batch.global=512", *overrides], world_size=devices)


QUICK_KEYS = ("parallel.tp", "parallel.schedule", "batch.micro", "train.recompute")


@pytest.mark.parametrize("key", only_quick(LAYOUT_KEYS, *QUICK_KEYS))
def test_fixed_keys_keep_their_values(key: str) -> None:
    parallel = {"tp": 3, "sp": True, "pp": 2, "vpp": 2, "dp": 2, "zero": 2, "schedule": "interleaved_1f1b"}
    config = config_of(parallel=parallel, train={"recompute": "full"})
    layouts = all_of(Space(config, DEVICES, frozenset([key])))
    section, _, name = key.partition(".")
    assert {getattr(layout, name) for layout in layouts} == {getattr(getattr(config, section), name)}
    same = [
        layout
        for layout in all_of(Space(config, DEVICES, frozenset()))
        if getattr(layout, name) == getattr(layouts[0], name)
    ]
    assert len(same) > 5
    if key == "parallel.schedule":  # with one chunk interleaving has no effect
        layouts = [layout for layout in layouts if layout.vpp > 1]
    assert layouts == same


@pytest.mark.parametrize("keys", [{"zero": 3}, {"zero": 3, "pp": 2, "vpp": 2, "reshard": "microbatch"}])
def test_sharded_weights_can_be_fixed(keys: dict[str, Any]) -> None:
    """With all legal ways to release them, or the one given; otherwise with the one that takes least memory."""
    config = config_of(parallel=keys)
    fixed = [f"parallel.{key}" for key in ("zero", "reshard") if key in keys]
    layouts = all_of(Space(config, DEVICES, frozenset(fixed)))
    assert {layout.reshard for layout in layouts} == ({"microbatch"} if "reshard" in keys else set(RESHARD))
    assert {layout.zero for layout in layouts} == {3}
    for layout in layouts[::7]:
        assert legal(Space(config, DEVICES), layout), layout
    free = all_of(Space(config, DEVICES))
    assert {(layout.zero, layout.reshard) for layout in free} == {(0, None), (1, None), (2, None), (3, "forward")}


def test_weights_may_be_sharded_in_nodes() -> None:
    """With 4 devices in a node; a dp_shard that is given divides dp."""
    free = all_of(Space(config_of(), DEVICES, node=4))
    assert {(layout.tp, layout.zero, layout.dp_shard) for layout in free if layout.dp_shard} == {(1, 3, 4)}
    for layout in [layout for layout in free if layout.dp_shard][::20]:
        assert legal(Space(config_of(), DEVICES), layout), layout
    given = Space(config_of(parallel={"dp_shard": 3}), DEVICES, frozenset(["parallel.dp_shard"]), 4)
    layouts = all_of(given)
    assert {layout.dp_shard for layout in layouts} == {3} and {layout.zero for layout in layouts} == {1, 2, 3}
    assert {layout.dp for layout in layouts} == {3, 6, 12}


def test_layers_per_chunk_can_be_fixed() -> None:
    config = config_of(parallel={"pp": 3, "layers_per_chunk": [2, 2, 1]})
    free, fixed = (Space(config, DEVICES, frozenset(keys)) for keys in ((), ("parallel.layers_per_chunk",)))
    assert {layout.pp * layout.vpp for layout in all_of(fixed)} == {3}
    assert {layout.pp * layout.vpp for layout in all_of(free)} > {1, 3}
    cuts = {layout.pp * layout.vpp: free.with_layout(layout).parallel.layers_per_chunk for layout in all_of(free)}
    assert cuts[3] == [2, 2, 1]
    assert cuts[1] is None


def test_any_schedule_can_be_fixed() -> None:
    space = Space(config_of(parallel={"schedule": "gpipe"}), DEVICES, frozenset(["parallel.schedule"]))
    assert {(layout.schedule, layout.vpp) for layout in all_of(space)} == {("gpipe", 1)}


def test_no_layout() -> None:
    assert all_of(Space(config_of(), 11, frozenset())) == []


def test_the_nearest_legal_number_of_devices() -> None:
    space = Space(config_of(), 11, frozenset())
    near = space.nearest_legal()
    assert near is not None and near != 11 and all_of(replace(space, devices=near))
    closer = range(12 - abs(near - 11), 11 + abs(near - 11))
    assert not any(all_of(replace(space, devices=count)) for count in closer)
    assert Space(config_of(), 11, frozenset(["parallel.tp", "parallel.pp", "parallel.dp"])).nearest_legal() == 1
