"""State in checkpoints: bit-equal after a resume, in another layout, and what another rule keeps."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.catalog.optimizers import OPTIMIZERS
from megascale.comm.mesh import Mesh
from megascale.core.rank import Rank
from megascale.layout.param_groups import ParamGroup, ParamGroups
from megascale.layout.parameters import all_params
from megascale.layout.topology import topology_of
from megascale.optim.saved_state import fresh_state, saved_groups
from megascale.train.resume import load_initial_state
from tests.marks import only_quick_rows
from tests.optim.layouts import LAYOUTS, LR, SMALL, Trained, assembled, configuration
from tests.optim.test_update_rules import ALL_RULES, MORE_GROUPS, MORE_RULES
from tests.runs import build_run, curve_of
from tests.thread_world import run_threads, simulate
from tests.worlds import run_world

STEPS = 2

NEAR = [group for group in MORE_GROUPS if group["name"] in ("spam_sparse", "grad_norm_lorp", "poet")]
DRAWN_OR_REPARAMETERISED = {"name": "adamw", "groups": NEAR}


EVERY_RULE = [name for name in OPTIMIZERS.names() if name != "lamb"]


def trained(name: str, mesh: Mesh, folder: Path, steps: int = STEPS, **keys: Any) -> Trained:
    """Train with a rule and small ranks."""
    small = {key: 4 for key in ("rank", "block", "history") if key in OPTIMIZERS[name].facts["options"]}
    optimizer = {"name": name, "options": {**small, **keys.pop("options", {})}, **keys}
    return Trained(mesh, configuration(folder, optimizer, SMALL), steps)


def take_over(run: Trained, before: Trained) -> dict[str, bool]:
    """Load what a run has as from its checkpoint. Returns for every state tensor of the later run if it was loaded."""
    saved = before.optimizer.global_tensors()
    shapes = {name: tensor.shape for name, tensor in saved.items()}
    for tensor in run.optimizer.global_tensors().values():
        for shard in tensor.shards:
            shard.data.fill_(7)
    loaded = run.optimizer.begin_load(shapes, before.config.model_dump(mode="json", by_alias=True))
    for name, tensor in loaded.items():
        for shard, source in zip(tensor.shards, saved[name].shards, strict=True):
            assert shard.size == source.size and tensor.dtype == saved[name].dtype
            shard.data.copy_(source.data)
    run.optimizer.end_load()
    return {name: name in loaded for name in run.optimizer.global_tensors() if not name.startswith("weights.")}


def test_a_parameter_keeps_all_of_its_state_or_none(tmp_path: Path) -> None:
    """From a rule to others, and back: what is loaded means the same, the rest is zero."""
    rules = [*EVERY_RULE, *EVERY_RULE[:2]]
    pairs = {
        (old, now)
        for old, *others in zip(rules, rules, rules[1:], rules[2:], strict=False)
        for now in (*others, "adamw")
    }

    def body(mesh: Mesh) -> None:
        before = {name: trained(name, mesh, tmp_path, 1) for name in EVERY_RULE}
        after = {name: trained(name, mesh, tmp_path, 0) for name in EVERY_RULE}
        meaning = {name: ParamGroup(name, 0.0).meaning for name in EVERY_RULE}
        for old, now in sorted(pairs | {(now, old) for old, now in pairs}):
            kept = take_over(after[now], before[old])
            tensors = after[now].optimizer.global_tensors()
            for name, is_kept in kept.items():
                same = [kept[other] for other in kept if other.partition(".")[2] == name.partition(".")[2]]
                assert len(set(same)) == 1, (old, now, name)
                if not is_kept:
                    assert not any(shard.data.any() for shard in tensors[name].shards), (old, now, name)
                elif ".mlp." in name:
                    assert meaning[old] == meaning[now], (old, now, name)
            if old == now:
                assert all(kept.values()), old
                config = before[old].config.model_dump(mode="json", by_alias=True)
                missing = after[now].optimizer.begin_load({}, config)
                assert missing.keys() == tensors.keys(), "what is missing is damage, which the reader reports"

    simulate(topology_of(configuration(tmp_path, {}, SMALL).parallel), body)


@pytest.mark.parametrize(
    ("before", "now", "kept"),
    [
        ({"name": "muon"}, {"name": "reg"}, True),
        ({"name": "lamb"}, {"name": "adamw", "groups": [{"kinds": ["matrix"], "lr_mult": 2.0}]}, True),
        ({"name": "galore"}, {"name": "galore", "options": {"subspace": "online_pca"}}, False),
        ({"name": "galore"}, {"name": "galore", "options": {"rank": 3}}, False),
        ({"name": "galore", "options": {"residual": "fira"}}, {"name": "galore"}, True),
        ({"name": "galore", "options": {"natural": True}}, {"name": "galore"}, False),
        ({"name": "soap"}, {"name": "soap", "options": {"max_size": 8}}, False),
        ({"name": "adam_mini"}, {"name": "ada_pm", "options": {"momentum": "full"}}, True),
        ({"name": "adafactor"}, {"name": "came"}, False),
        ({"name": "adamw", "groups": [{"params": ["layers.0.*"], "kinds": ["matrix"], "name": "soap"}]},
         {"name": "soap"}, False),
        (None, {"name": "adamw"}, False),
    ],
)  # fmt: skip
def test_what_another_configuration_keeps(before: Any, now: Any, kept: bool, tmp_path: Path) -> None:
    """State of matrices in blocks, of the last layer."""
    after = configuration(tmp_path, now, SMALL)
    config = {} if before is None else configuration(tmp_path, before, SMALL).model_dump(mode="json", by_alias=True)
    groups, was = ParamGroups(after.optimizer), saved_groups(config)
    assert (was is None) == (before is None)
    matrices = [p for p in all_params(after.model) if p.kind == "matrix" and p.name.startswith("layers.1")]
    names = [f"{state}.{t.name}" for p in matrices for t in p.parts for state in groups.group_of(p, t).state]
    assert fresh_state(names, matrices, groups, config) == ([] if kept else names)


def test_a_rule_that_is_not_installed_leaves_nothing(tmp_path: Path) -> None:
    config = configuration(tmp_path, {}, SMALL).model_dump(mode="json", by_alias=True)
    config["optimizer"]["name"] = "of_a_plug_in"
    assert saved_groups(config) is None


@pytest.mark.parametrize("name", EVERY_RULE)
def test_adamw_takes_steps_of_its_size_after_every_rule(name: str, tmp_path: Path) -> None:
    """Moments of another meaning moved weights by thousands."""

    def body(mesh: Mesh) -> float:
        run = trained("adamw", mesh, tmp_path, 0)
        take_over(run, trained(name, mesh, tmp_path))
        weights = run.optimizer.shards[0].master.clone()
        for step in range(STEPS + 1, STEPS + 7):
            run.step(mesh, step)
        return float((run.optimizer.shards[0].master - weights).abs().max())

    (moved,) = simulate(topology_of(configuration(tmp_path, {}, SMALL).parallel), body)
    assert 0.01 < moved < 6 * LR * 1.2


@pytest.mark.parametrize(
    ("resumed", "layout"),
    only_quick_rows(
        itertools.product([False, True], ["dp2 zero1", "tp2 sp dp2"]), (False, "tp2 sp dp2"), (True, "dp2 zero1")
    ),
)
def test_soap_s_first_gradient_moves_no_matrix(resumed: bool, layout: str, tmp_path: Path) -> None:
    """Nor does decay, as in the authors' code, on ranks that do not own it too; also after another rule."""
    soap = configuration(tmp_path, {"name": "soap", "weight_decay": 0.5}, SMALL, **LAYOUTS[layout])
    adamw = configuration(tmp_path, {"name": "adamw"}, SMALL, **LAYOUTS[layout])

    def body(mesh: Mesh) -> Any:
        run, after = Trained(mesh, soap, 0), []
        if resumed:
            take_over(run, Trained(mesh, adamw, STEPS))
        for step in range(STEPS + 1, STEPS + 4):
            weights = {name: values for name, values in run.tensors().items() if name.startswith("weights.")}
            after.append({n: [(shape, at, x.clone()) for shape, at, x in parts] for n, parts in weights.items()})
            run.step(mesh, step)
        return after

    start, first, second = map(assembled, zip(*simulate(topology_of(soap.parallel), body), strict=True))
    for name, values in start.items():
        matrix = ".attention." in name or ".mlp." in name
        assert torch.equal(values, first[name]) == matrix, name
        assert not torch.equal(first[name], second[name])


@pytest.mark.parametrize("name", ["soap", "galore", "conda", "shampoo", "grad_norm_lorp", "ada_pm"])
def test_state_begins_in_the_first_step_that_is_not_skipped(name: str, tmp_path: Path) -> None:
    """In a new run, after another rule, and after a checkpoint of a run whose first step was skipped."""

    def body(mesh: Mesh) -> None:
        expected, other = trained(name, mesh, tmp_path, 0), trained("lion", mesh, tmp_path, 1)
        skipping, changed, again = (trained(name, mesh, tmp_path, 0) for _ in range(3))
        take_over(changed, other)
        take_over(expected, other)
        skipping.step(mesh, 1, skip=True)
        changed.step(mesh, 2, skip=True)
        take_over(again, changed)
        for run in (expected, changed, again):
            run.step(mesh, 3)
            run.step(mesh, 4)
            assert all(map(torch.equal, run.optimizer.flat_tensors(), expected.optimizer.flat_tensors()))
        skipping.step(mesh, 2)
        bases = [
            x
            for key, parts in skipping.tensors().items()
            if "basis" in key or key.startswith("left.")
            for *_, x in parts
        ]
        assert all(bool(x.any()) for x in bases)

    simulate(topology_of(configuration(tmp_path, {}, SMALL).parallel), body)


def state(run: Any) -> dict[str, list[Any]]:
    return {
        name: [(shard.offset, shard.data.clone()) for shard in tensor.shards]
        for name, tensor in run.optimizer.global_tensors().items()
    }


def equal(one: dict[str, list[Any]], other: dict[str, list[Any]]) -> bool:
    return one.keys() == other.keys() and all(
        offset == other_offset and torch.equal(values, other_values)
        for name in one
        for (offset, values), (other_offset, other_values) in zip(one[name], other[name], strict=True)
    )


def no_weights(folder: Path) -> Any:
    raise AssertionError(f"{folder} is no folder of another project's weights")


def resumed(rank: Rank, config: Any, other: Any, changed: Any) -> tuple[bool, Any, Any, str]:
    """Save halfway. Return if a resumed run is bit-equal to one without a break, the curves of that run and in another
    layout, and what a run with another rule says.
    """
    straight = build_run(rank, config)
    whole = curve_of(straight, 2 * STEPS)
    half = build_run(rank, config, straight.mesh)
    curve_of(half, STEPS)
    half.checkpoints.save(half.progress)
    again = build_run(rank, config, straight.mesh)
    load_initial_state(again, no_weights)
    same = curve_of(again, STEPS) == whole[STEPS:] and equal(state(again), state(straight))
    elsewhere = build_run(rank, other)
    load_initial_state(elsewhere, no_weights)
    ruled = build_run(rank, changed, straight.mesh)
    text = load_initial_state(ruled, no_weights)
    curve_of(ruled, 1)
    return same, whole[STEPS:], curve_of(elsewhere, STEPS), text


@pytest.mark.parametrize("world", [2, *(pytest.param(world, marks=pytest.mark.slow) for world in (1, 4))])
def test_resumes_bit_equal_in_another_layout_and_with_another_rule(world: int, tmp_path: Path) -> None:
    layout = {"parallel__tp": min(world, 2), "parallel__dp": max(world // 2, 1)}
    there = {"parallel__dp": world, "parallel__zero": 2 if world > 1 else 0}
    keys = {"checkpoint__every": 1, "train__precision": "fp64"}
    config = configuration(tmp_path, ALL_RULES, SMALL, **keys, **layout)
    other = configuration(tmp_path, ALL_RULES, SMALL, **keys, **there)
    changed = configuration(tmp_path, {"name": "muon"}, SMALL, **keys, **layout)
    for rank, (same, curve, elsewhere, text) in enumerate(run_world(world, resumed, config, other, changed)):
        assert same
        assert sum(elsewhere, ()) == pytest.approx(sum(curve, ()), rel=1e-10)
        if rank == 0:
            assert 'changed since the checkpoint: optimizer.name "adamw" -> "muon"' in text
            assert "or is of another rule, begins at zero: exp_avg" in text
            assert "momentum" in text


def saved(rank: Rank, config: Any) -> dict[str, Any]:
    """Train and save; return weights and state."""
    run = build_run(rank, config)
    curve_of(run, STEPS)
    run.checkpoints.save(run.progress)
    return shards_of(run)


def loaded(rank: Rank, config: Any) -> dict[str, Any]:
    run = build_run(rank, config)
    load_initial_state(run, no_weights)
    return shards_of(run)


def shards_of(run: Any) -> dict[str, Any]:
    """Return the shards of a rank, by name and dtype, as lists, which processes can send."""
    return {
        f"{name} {tensor.dtype}": [(tensor.shape, shard.offset, shard.data.tolist()) for shard in tensor.shards]
        for name, tensor in run.optimizer.global_tensors().items()
    }


def received(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the shards of all ranks as tensors again."""
    return [
        {name: [(shape, offset, torch.tensor(x, dtype=torch.float64)) for shape, offset, x in shards]
         for name, shards in rank.items()}
        for rank in ranks
    ]  # fmt: skip


def test_all_state_is_bit_equal_in_another_layout(tmp_path: Path) -> None:
    """Codes of 8 bits with the scales and exponents of their blocks, drawn elements, generators of rotations, bases."""
    keys = {"checkpoint__every": 1, "train__precision": "bf16"}
    there = configuration(tmp_path, MORE_RULES, SMALL, **keys, parallel__tp=2)
    here = configuration(tmp_path, MORE_RULES, SMALL, **keys, parallel__dp=2, overlap__bucket_bytes=4000)
    before, after = (assembled(received(run_world(2, body, c))) for body, c in ((saved, there), (loaded, here)))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert bool((after["exp_avg_sq_power.layers.1.mlp.down.weight torch.float32"] > 1).all())
    for name in ("layers.0.mlp.gate.weight", "layers.0.mlp.up.weight", "layers.1.mlp.down.weight"):
        codes, scales = after[f"exp_avg.{name} torch.uint8"], after[f"exp_avg_scale.{name} torch.float32"]
        assert len(codes.unique()) > 50 and bool((scales > 0).all())
    for name in ("exp_avg.layers.1.mlp.gate", "left.layers.1.mlp.up", "length.layers.1.attention.out"):
        assert bool(after[f"{name}.weight torch.float32"].any()), name


def curve(run: Any) -> Any:
    return curve_of(run, 2 * STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"parallel__tp": 2, "parallel__sp": True, "parallel__dp": 2},
        {"parallel__pp": 2, "parallel__dp": 2, "parallel__zero": 2},
        {"parallel__tp": 2, "parallel__dp": 2, "parallel__zero": 0},
        {"parallel__dp": 4, "overlap__bucket_bytes": 4000},
    ],
    ids=lambda layout: " ".join(f"{key[10:]}{value}" for key, value in layout.items()),
)
@pytest.mark.parametrize("rules", [ALL_RULES, DRAWN_OR_REPARAMETERISED], ids=["most", "drawn or reparameterised"])
def test_a_model_trains_alike_in_every_layout(layout: dict[str, Any], rules: dict[str, Any], tmp_path: Path) -> None:
    """Forward, backward, reductions and rules."""
    (alone,) = run_threads(configuration(tmp_path, rules, SMALL), curve)
    for trained in run_threads(configuration(tmp_path, rules, SMALL, **layout), curve):
        assert sum(trained, ()) == pytest.approx(sum(alone, ()), rel=1e-10)
