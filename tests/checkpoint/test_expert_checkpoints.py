"""Checkpoints of models with experts: any ep loads any other's, and what is missing of an expert is named."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megascale.checkpoint import offline
from megascale.checkpoint.format import manifest
from megascale.checkpoint.format.state import missing_region, slices, split_shards
from megascale.core.rank import Rank
from megascale.core.storage import Location
from megascale.parallel.stateful import GlobalTensor
from tests.checkpoint.test_checkpoints import damage_error, edit
from tests.checkpoint.test_memory_checkpoints import resume, train_and_exit
from tests.runs import LLAMA, MLA, build_run, config_of, curve_of, gather_weights, settings
from tests.worlds import run_world

MODEL = LLAMA | {
    "experts": 8, "experts_per_token": 2, "expert_ffn_size": 24, "shared_ffn_size": 16, "balance_bias": True,
    "bias": True, "router_bias": True,
}  # fmt: skip
MOE = {
    "moe__balance": "step", "moe__balance_weight": 0.5, "moe__bias_rate": 0.05, "train__weight_average": "ema",
    "train__weight_average_every": 1,
}  # fmt: skip
ADAMW_IN_LAYER_3 = [{"params": ["layers.3.*"], "name": "adamw"}]

LATENT = {f"model__{key}": value for key, value in MLA.items() if value != MODEL.get(key)}

V = {"pp": 2, "vpp": 2, "schedule": "zb_v"}

CHAIN: list[dict[str, Any]] = [
    {},
    {"dp": 4, "ep": 4, "zero": 2},
    {"pp": 2, "tp": 2, "sp": True, "ep": 2, "zero": 0},
    V,
    {"pp": 2, "vpp": 2},
    {},
]
"""Layouts, of which each continues the run of the one before it, for a step."""


def expert_config(folder: Path, layout: dict[str, Any], **changes: Any) -> Any:
    parallel = {f"parallel__{key}": value for key, value in layout.items()}
    keys = {
        "batch__global": 4,
        "checkpoint__every": 1,
        "optimizer__name": "muon",
        "optimizer__groups": ADAMW_IN_LAYER_3,
    }
    return config_of(settings(MODEL, folder, **MOE | keys | parallel | changes), folder)


def assembled(ranks: list[dict[str, list[tuple[Any, Any, Any]]]]) -> dict[str, Any]:
    """Assemble global tensors of all ranks' shards; replicas are equal."""
    found: dict[str, Any] = {}
    for rank in ranks:
        for name, shards in rank.items():
            for shape, offset, values in shards:
                whole = found.setdefault(name, np.full(shape, np.nan))
                place = slices(offset, values.shape)
                assert (np.isnan(whole[place]) | (whole[place] == values)).all(), f"replicas of {name} differ"
                whole[place] = values
    assert not any(np.isnan(whole).any() for whole in found.values())
    return found


def state_of(run: Any) -> dict[str, list[tuple[Any, Any, Any]]]:
    """Copy this rank's shards of all that is saved, by name: shape, offset and values."""
    return {
        name: [(tensor.shape, shard.offset, shard.data.double().numpy().copy()) for shard in tensor.shards]
        for part in run.checkpoints._loader.parts
        for name, tensor in part.global_tensors().items()
    }


def train(run: Any, steps: int) -> list[tuple[float, float]]:
    """Train, and average the weights after every step: the curve."""
    curve = []
    for _ in range(steps):
        curve += curve_of(run, 1)
        run.average.update(run.progress.step)
    return curve


def continued(rank: Rank, config: Any, steps: int) -> tuple[list[tuple[float, float]], Any]:
    """Resume, if there is a checkpoint, train, and save: the curve and the state."""
    run = build_run(rank, config)
    if (found := run.checkpoints.resume()) is not None:
        run.progress = found.progress
        run.optimizer.copy_masters_to_weights()
        gather_weights(run)
    curve = train(run, steps)
    run.checkpoints.save(run.progress)
    return curve, state_of(run)


def started(rank: Rank, config: Any) -> tuple[list[tuple[float, float]], Any, list[tuple[float, float]]]:
    """Train as many steps as CHAIN has layouts without a save: curve and state. Then begin the chain: its curve."""
    straight = build_run(rank, config)
    return train(straight, len(CHAIN)), state_of(straight), continued(rank, config, 1)[0]


@pytest.mark.parametrize("changes", [{}, pytest.param(LATENT, marks=pytest.mark.slow)], ids=["", "latent attention"])
def test_a_run_goes_on_in_any_layout(changes: dict[str, Any], tmp_path: Path) -> None:
    """With all state: of Muon by matrix, of AdamW by element."""
    ((expected, state, curve),) = run_world(1, started, expert_config(tmp_path, CHAIN[0], **changes))
    whole = assembled([state])
    for layout in CHAIN[1:]:
        config = expert_config(tmp_path, layout, **changes)
        ranks = run_world(config.world_size, continued, config, 1)
        curve += ranks[0][0]
    assert sum(curve, ()) == pytest.approx(sum(expected, ()), rel=1e-10)
    found = assembled([state for _, state in ranks])
    assert found.keys() == whole.keys()
    kinds = {name.partition(".")[0] for name in found}
    exact = {"balance_bias", "expert_choices", "average_updates"}
    assert kinds == {"weights", "momentum", "exp_avg", "exp_avg_sq", "average0", *exact}
    assert all(np.array_equal(found[name], whole[name]) and whole[name].any() for name in exact)
    for name, values in whole.items():
        assert np.abs(found[name] - values).max() <= 1e-10 * np.abs(values).max(), name


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of two ranks with four experts each, after two steps."""
    folder = tmp_path_factory.mktemp("saved")
    run_world(2, continued, expert_config(folder, {"dp": 2, "ep": 2}), 2)
    return folder


@pytest.mark.parametrize("name", ["weights.layers.2.experts.down.weight", "momentum.layers.2.experts.gate_up.weight"])
def test_a_checkpoint_without_an_expert_is_refused(name: str, saved: Path, tmp_path: Path) -> None:
    """By the rank that needs it, in another layout."""
    shutil.copytree(saved / "test", tmp_path / "test")
    folder = tmp_path / "test/checkpoints/step-00000002"

    def lose(content: dict[str, Any]) -> None:
        boxes = content["tensors"][name]["boxes"]
        boxes[:] = [box for box in boxes if box["offset"][0] not in (4, 5)]

    edit(folder, lose)
    text = damage_error(expert_config(tmp_path, {"dp": 2, "ep": 2, "zero": 0}))
    lacks = "it lacks [4:8, 0:32, 0:24]" if name.startswith("weights") else "it lacks [4:5, 0:1, 0:24, 0:32]"
    assert f"rank 1: {folder} holds only a part of {name} [8, " in text and lacks in text
    assert "it lacks [4:" in "".join(offline.verify(*opened(folder)))


@pytest.mark.parametrize("name", ["balance_bias", "expert_choices"])
def test_what_balances_experts_does_not_begin_anew(name: str, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "test", tmp_path / "test")
    folder = tmp_path / "test/checkpoints/step-00000002"
    edit(folder, lambda content: content["tensors"].pop(name))
    assert f"{folder} has no tensor {name}" in damage_error(expert_config(tmp_path, {}))


def test_other_experts_are_another_model(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "test", tmp_path / "test")
    other = {"model__experts": 4, "model__expert_ffn_size": 48, "model__dense_layers": 1, "model__shared_ffn_size": 0}
    text = damage_error(expert_config(tmp_path, {}, **other))
    for change in ("experts 8 there, 4 here", "expert_ffn_size 24 there, 48 here", "dense_layers 0 there, 1 here"):
        assert change in text
    assert "shared_ffn_size 16 there, 0 here" in text


def opened(folder: Path) -> tuple[Location, manifest.Manifest]:
    return Location(str(folder)), manifest.read(Location(str(folder)))


def test_a_missing_region_is_any_that_no_box_covers() -> None:
    boxes = [((expert, half, 0, 0), (1, 1, 6, 4)) for expert in range(4) for half in range(2)]
    everything = (0, 0, 0, 0), (4, 2, 6, 4)
    assert missing_region(everything, boxes) is None
    for lost in boxes:
        assert missing_region(everything, [box for box in boxes if box != lost]) == lost
    part = (0, 0, 0, 0), (1, 2, 2, 4)
    assert missing_region(((0, 0, 0, 0), (1, 2, 6, 4)), [part]) == ((0, 0, 2, 0), (1, 2, 4, 4))


def test_a_stack_of_large_matrices_is_split_within_them() -> None:
    values = torch.arange(3 * 2 * 64 * 16, dtype=torch.float32).view(3, 2, 64, 16)
    rows = 16 * 4 * 10
    parts = split_shards({"a": GlobalTensor.whole(values)}, (4 << 10) + rows)["a"].shards
    assert max(part.data.nbytes for part in parts) == rows and len(parts) == 3 * 2 * 7
    whole = torch.full_like(values, torch.nan)
    for part in parts:
        assert part.data.is_contiguous() and part.size == tuple(part.data.shape)
        whole[slices(part.offset, part.size)] = part.data
    assert torch.equal(whole, values)


def test_tools_read_stacks(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from megascale.cli.main import main

    folder = saved / "test/checkpoints/step-00000002"
    name = "momentum.layers.2.experts.gate_up.weight"
    assert offline.read_tensor(*opened(folder), name).shape == (8, 2, 24, 32)
    assert main(["ckpt", "verify", str(folder)]) == 0
    assert main(["ckpt", "show", "--tensors", str(folder)]) == 0
    text = capsys.readouterr().out
    assert f"{name}  float64 [8, 2, 24, 32] in " in text and "tp1 cp1 dp2 pp1 ep2" in text
    assert main(["ckpt", "diff", str(folder), str(folder)]) == 0
    assert main(["ckpt", "model", str(folder)]) == 0
    assert "experts = 8" in capsys.readouterr().out


def test_a_lost_rank_s_experts_come_from_the_replica_of_its_copy(tmp_path: Path) -> None:
    """Not from another rank of dp, which has other experts."""
    memory = {"checkpoint__in_memory_dir": str(tmp_path), "checkpoint__in_memory_every": 1, "checkpoint__every": 100}
    config = expert_config(tmp_path, {"dp": 2, "ep": 2, "zero": 0}, checkpoint__replicate=True, **memory)
    before = run_world(2, train_and_exit, config, 3, 1, True)
    experts = [state["weights.layers.2.experts.down.weight"] for state in before]
    assert [[offset[0] for offset, _, _ in shards] for shards in experts] == [[0], [4]]
    shutil.rmtree(tmp_path / "host1")
    after = run_world(2, resume, config, True)
    assert [(step, place, warnings) for _, step, place, warnings in after] == [(3, "memory", [])] * 2
    assert [state for state, *_ in after] == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "name"),
    [({"model__mtp_layers": 1}, "layers.4.merge"), ({"model__exits": [1, 3]}, "exp_avg.exits.3.head")],
    ids=["further depths", "exits"],
)
def test_further_heads_go_on_in_any_layout(model: dict[str, Any], name: str, tmp_path: Path) -> None:
    """The copy of the embedding on the last stage is saved once, and returns to both ends."""
    (whole,) = run_world(1, continued, expert_config(tmp_path / "whole", {}, **model), 4)
    parts = []
    for layout in ({"pp": 2, "dp": 2, "ep": 2, "zero": 2}, {"tp": 2, "sp": True}, {"pp": 4}, V):
        config = expert_config(tmp_path / "parts", layout, **model)
        ranks = run_world(config.world_size, continued, config, 1)
        parts += ranks[0][0]
    assert sum(parts, ()) == pytest.approx(sum(whole[0], ()), rel=1e-10)
    found, expected = assembled([state for _, state in ranks]), assembled([whole[1]])
    assert found.keys() == expected.keys() and any(name in tensor for tensor in found)
    assert all(found[name] == pytest.approx(expected[name], rel=1e-8, abs=1e-10) for name in found)
