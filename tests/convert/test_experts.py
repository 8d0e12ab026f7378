"""Experts are one tensor each in files of Hugging Face, and slices of a stack here: each is accounted for."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megascale.checkpoint import folders, offline
from megascale.checkpoint.format import manifest
from megascale.config.model import ModelConfig
from megascale.convert import huggingface
from megascale.convert.conversion import from_huggingface, to_huggingface
from megascale.convert.families.config_json import make_config, read_model
from megascale.convert.huggingface import INDEX_FILE, WEIGHTS_FILE, PretrainedWeights
from megascale.convert.saved_weights import SavedWeights, read_model_section
from megascale.core.errors import CheckpointError
from megascale.core.rank import Rank
from megascale.core.storage import Location
from megascale.parallel.stateful import BALANCE_BIAS, WEIGHTS
from tests.convert.test_families import PUBLISHED, weights_in
from tests.convert.tiny import save_tiny
from tests.runs import build_run, config_of, settings
from tests.worlds import run_world

UP, DOWN = "layers.2.experts.gate_up.weight", "layers.2.experts.down.weight"
THEIRS = "model.layers.2.mlp.experts"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    save_tiny("qwen 3 mixture", folder, torch.bfloat16)
    return folder


def damaged(folder: Path, output: Path, *without: str, **changed: torch.Tensor) -> Path:
    """Copy the folder, without some tensors and with others in their place."""
    output.mkdir()
    (output / "config.json").write_text((folder / "config.json").read_text())
    kept = {name: tensor for name, tensor in load_file(folder / WEIGHTS_FILE).items() if name not in without}
    save_file(kept | changed, output / WEIGHTS_FILE)
    return output


def test_a_stack_holds_gate_and_up_of_every_expert(folder: Path) -> None:
    given, theirs = PretrainedWeights(folder), load_file(folder / WEIGHTS_FILE)
    given.check_tensors()
    up, down = given.read_tensor(UP), given.read_tensor(DOWN)
    assert up.shape == (6, 2, 24, 32) and down.shape == (6, 32, 24)
    for expert in range(6):
        names = [f"{THEIRS}.{expert}.{part}_proj.weight" for part in ("gate", "up", "down")]
        assert torch.equal(up[expert], torch.stack([theirs[name] for name in names[:2]]))
        assert torch.equal(down[expert], theirs[names[2]])


def test_a_region_of_a_stack_is_read(folder: Path) -> None:
    """As ranks of ep, and shards of optimizers within an expert, read it."""
    given = PretrainedWeights(folder)
    for name, edges in ((UP, [(2, 4), (0, 1), (3, 17), (5, 20)]), (DOWN, [(5, 1), (0, 32), (7, 2)])):
        whole = given.read_tensor(name)
        for starts in itertools.product((True, False), repeat=len(edges)):
            region = [edge if take else (0, size) for edge, take, size in zip(edges, starts, whole.shape, strict=True)]
            offset, size = zip(*region, strict=True)
            part = given.read_tensor(name, (offset, size))
            assert torch.equal(part, whole[tuple(slice(o, o + n) for o, n in region)])


def test_experts_are_counted(folder: Path, tmp_path: Path) -> None:
    name = f"{THEIRS}.3.up_proj.weight"
    tensor = load_file(folder / WEIGHTS_FILE)[name]
    cases = {
        "missing": (damaged(folder, tmp_path / "missing", name), f"has no tensor {name}"),
        "further": (
            damaged(folder, tmp_path / "further", **{name.replace(".3.", ".6."): tensor}),
            f"1 tensors unknown to its config.json: {THEIRS}.6.up_proj.weight",
        ),
        "narrow": (
            damaged(folder, tmp_path / "narrow", **{name: tensor[:8].clone()}), f"{name} has shape [8, 32], its config"
        ),
        "wide": (
            damaged(folder, tmp_path / "wide", **{name: tensor.float()}),
            f"{THEIRS}.5.up_proj.weight in BF16 and {name} in F32  -> experts of one dtype in a layer",
        ),
    }  # fmt: skip
    for case, words in cases.values():
        with pytest.raises(CheckpointError) as caught:
            from_huggingface(case, tmp_path / "ours")
        assert words in str(caught.value)
        assert not list(tmp_path.glob("*ours*"))


def test_an_index_that_names_a_lost_expert_is_refused(folder: Path, tmp_path: Path) -> None:
    name = f"{THEIRS}.3.up_proj.weight"
    lost = damaged(folder, tmp_path / "lost", name)
    weight_map = dict.fromkeys(load_file(folder / WEIGHTS_FILE), WEIGHTS_FILE)
    (lost / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=f"{WEIGHTS_FILE} has no tensor {name}, unlike {INDEX_FILE}"):
        from_huggingface(lost, tmp_path / "ours")


def test_an_overflow_names_the_expert(folder: Path, tmp_path: Path) -> None:
    name = f"{THEIRS}.3.down_proj.weight"
    tensor = load_file(folder / WEIGHTS_FILE)[name]
    tensor[4, 5] = 1e5
    from_huggingface(damaged(folder, tmp_path / "large", **{name: tensor}), tmp_path / "ours")
    with pytest.raises(CheckpointError, match=rf"ours: {DOWN}\[3\] overflows in float16: 1 of its 768 elements"):
        to_huggingface(Location(str(tmp_path / "ours")), tmp_path / "half", torch.float16)
    first, last = (f"{THEIRS}.{expert}.down_proj.weight" for expert in (0, 5))
    with pytest.raises(CheckpointError, match=f"large: {first} to {last} overflows in float16: 1 of its 4608"):
        from_huggingface(tmp_path / "large", tmp_path / "half", torch.float16)


def test_export_reads_an_expert_at_a_time(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into files that are smaller than a stack."""
    from_huggingface(folder, tmp_path / "ours")
    sizes = []
    read = offline.read_tensor

    def recorded(*args: object) -> torch.Tensor:
        tensor: torch.Tensor = read(*args)  # type: ignore[arg-type]
        sizes.append((args[2], tensor.numel()))
        return tensor

    monkeypatch.setattr(offline, "read_tensor", recorded)
    monkeypatch.setattr(huggingface, "MAX_SHARD_BYTES", 7_000)
    to_huggingface(Location(str(tmp_path / "ours")), tmp_path / "again")
    assert {size for name, size in sizes if "experts" in str(name)} == {24 * 32}
    again, theirs = weights_in(tmp_path / "again"), weights_in(folder)
    assert again.keys() == theirs.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in theirs.items())


def test_a_region_of_a_stored_stack_is_checked(folder: Path, tmp_path: Path) -> None:
    from_huggingface(folder, tmp_path / "ours")
    path = Location(str(tmp_path / "ours"))
    saved = manifest.read(path)
    whole = offline.read_tensor(path, saved, WEIGHTS + UP)
    part = offline.read_tensor(path, saved, WEIGHTS + UP, ((1, 1, 0, 0), (2, 1, 24, 32)))
    assert torch.equal(part, whole[1:3, 1:])
    shard = saved.tensors[WEIGHTS + UP].shards[0]
    with (tmp_path / "ours" / shard.file).open("r+b") as file:
        file.seek(shard.start)
        file.write(b"\xff\xff")
    with pytest.raises(manifest.DamagedError, match="the CRC-32 of"):
        offline.read_tensor(path, saved, WEIGHTS + UP, ((0, 0, 0, 0), (1, 1, 24, 32)))


def test_sizes_without_effect_hinder_no_export() -> None:
    """The width of dense layers, of which there are none."""
    given = PUBLISHED["Mixtral-8x7B-v0.1"]
    keys = read_model(given, "config.json").model_dump(by_alias=True)
    model = ModelConfig.model_validate(keys | {"ffn_size": 64, "expert_ffn_size": 14_336})
    assert make_config(model, given) == given
    assert make_config(model, {})["intermediate_size"] == 14_336


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"dense_layers": 1}, "mixtral has dense_layers = 0"),
        ({"router_scale": 2.5}, "mixtral has router_scale = 1.0"),
        ({"router_score": "sigmoid"}, "mixtral has router_score = 'softmax'"),
        ({"balance_bias": True}, "mixtral has balance_bias = False"),
        ({"shared_ffn_size": 64}, "mixtral has shared_ffn_size = 0"),
        ({"router_normalize": False}, "mixtral has router_normalize = True"),
    ],
)
def test_a_router_of_no_family_is_refused(keys: dict[str, object], words: str) -> None:
    model = read_model(PUBLISHED["Mixtral-8x7B-v0.1"], "config.json").model_dump(by_alias=True)
    with pytest.raises(CheckpointError) as caught:
        make_config(ModelConfig.model_validate(model | keys), {})
    assert words in str(caught.value)


GLM_BIAS = "model.layers.{}.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("biased")
    save_tiny("glm 4 mixture", folder, torch.bfloat16)
    return folder


def test_a_run_begins_with_the_biases_of_foreign_weights(biased: Path, tmp_path: Path) -> None:
    """On every rank, from the folder or from the checkpoint that it converts to; and they return after training."""
    from_huggingface(biased, tmp_path / "ours")
    theirs = load_file(biased / WEIGHTS_FILE)
    wanted = torch.stack([torch.zeros(6), *(theirs[GLM_BIAS.format(layer)] for layer in (1, 2, 3))])
    model = read_model_section(Location(str(biased)))
    saved = []
    for resume in (f"hf:{biased}", str(tmp_path / "ours")):
        folder = tmp_path / str(len(saved))
        changes = {"parallel__dp": 2, "parallel__ep": 2, "moe__bias_rate": 0.25, "checkpoint__every": 1}
        tree = settings(model, folder, checkpoint__resume=resume, train__precision="fp32", **changes)
        config = config_of(tree, folder)
        for before, after in run_world(2, biases_of_a_step, config):
            assert torch.equal(torch.from_numpy(before), wanted.double())
            moved = torch.from_numpy(after) - wanted.double()
            assert set(moved.view(-1).tolist()) <= {-0.25, 0.0, 0.25} and moved[1:].any() and not moved[0].any()
        to_huggingface(folders.find_checkpoint(Location(str(config.folder))), folder / "again")
        again = load_file(folder / "again" / WEIGHTS_FILE)
        assert all(
            torch.equal(again[GLM_BIAS.format(layer)], torch.from_numpy(after[layer]).float()) for layer in (1, 2, 3)
        )
        saved.append(after.tolist())
    assert saved[0] == saved[1]


def biases_of_a_step(rank: Rank, config: Any) -> tuple[Any, Any]:
    """Begin, train a step and save. Returns the biases [layers, experts] before and after."""
    from megascale.train.resume import load_initial_state
    from megascale.train.step import train_step

    run = build_run(rank, config)
    load_initial_state(run, PretrainedWeights)
    run.buffers.finish_param_gather()
    bias = run.stages[0].layers["1"].mlp._experts.bias
    before = bias.numpy().copy()
    train_step(run, run.train_loader.batch(run.progress.samples))
    run.buffers.finish_param_gather()
    run.checkpoints.save(run.progress)
    return before, bias.numpy().copy()


def test_biases_are_counted(biased: Path, tmp_path: Path) -> None:
    name = GLM_BIAS.format(2)
    with pytest.raises(CheckpointError, match=f"has no tensor {name}"):
        from_huggingface(damaged(biased, tmp_path / "missing", name), tmp_path / "ours")
    from_huggingface(biased, tmp_path / "ours")
    path = Location(str(tmp_path / "ours"))
    saved = manifest.read(path)
    del saved.tensors[BALANCE_BIAS]
    with pytest.raises(manifest.DamagedError, match="has no tensor balance_bias"):
        SavedWeights(path, saved).read("balance_bias.layers.2")


def test_biases_keep_their_dtype(biased: Path, tmp_path: Path) -> None:
    """Casts both ways leave them exact; they move by less than bf16 resolves."""
    exact = {GLM_BIAS.format(layer): torch.linspace(0.1, 0.7, 6) for layer in (1, 2, 3)}
    from_huggingface(damaged(biased, tmp_path / "exact", **exact), tmp_path / "ours", torch.bfloat16)
    to_huggingface(Location(str(tmp_path / "ours")), tmp_path / "half", torch.float16)
    again = load_file(tmp_path / "half" / WEIGHTS_FILE)
    assert {name for name, tensor in again.items() if tensor.dtype == torch.float32} == exact.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in exact.items())
