"""Upcycled weights: every expert is the dense model's MLP, and the first forward is the dense model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.checkpoint import offline
from megascale.checkpoint.format import manifest
from megascale.cli.main import main
from megascale.config.model import ModelConfig
from megascale.convert.conversion import from_huggingface, to_huggingface
from megascale.convert.huggingface import PretrainedWeights
from megascale.convert.saved_weights import SavedWeights, read_model_section
from megascale.convert.tensor_map import model_tensors
from megascale.core.storage import Location
from tests.convert.tiny import save_tiny
from tests.oracles.ours import Arrays, Result, compute, parameters_of
from tests.runs import LLAMA, build_run, config_of, settings
from tests.worlds import run_world


def location(path: Path) -> Location:
    return Location(str(path))


def weights_of(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """`[model]` and the weights of a checkpoint, or of a Hugging Face folder."""
    section = read_model_section(location(path))
    model = ModelConfig.model_validate(section)
    if (path / "config.json").exists():
        return section, {
            tensor.name: PretrainedWeights(path).read_tensor(tensor.name) for tensor in model_tensors(model)
        }
    saved = SavedWeights(location(path), manifest.read(location(path)))
    return section, {tensor.name: saved.read(tensor.name) for tensor in model_tensors(model)}


def forward(path: Path, folder: Path) -> Result:
    section, weights = weights_of(path)
    arrays: Arrays = {name: tensor.double().numpy() for name, tensor in weights.items()}
    return compute(section, arrays, folder, "fp64")


@pytest.mark.parametrize("name", ["qwen 3", "gemma 2"])
def test_the_first_forward_is_the_dense_models(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path / "dense")
    assert main(["ckpt", "convert", str(tmp_path / "dense"), str(tmp_path / "ours"), "--experts", "6", "2"]) == 0
    dense, mixture = (forward(tmp_path / folder, tmp_path / f"run {folder}") for folder in ("dense", "ours"))
    assert mixture.loss == pytest.approx(dense.loss, rel=1e-13)
    assert dense.logits is not None and mixture.logits is not None
    assert abs(mixture.logits - dense.logits).max() < 1e-12 * abs(dense.logits).max()
    for name in ("embedding.token.weight", "layers.0.attention.q.weight"):
        gap = abs(mixture.gradients[name] - dense.gradients[name]).max()
        assert gap < 1e-11 * abs(dense.gradients[name]).max()
    total = mixture.gradients["layers.1.experts.down.weight"].sum(0)
    assert abs(total - dense.gradients["layers.1.mlp.down.weight"]).max() < 1e-11 * abs(total).max()


def test_a_checkpoint_becomes_experts_and_a_fresh_router(tmp_path: Path) -> None:
    """The router is that of a run from scratch. A Hugging Face mixture is written of it."""
    save_tiny("qwen 3", tmp_path / "hf", torch.bfloat16)
    from_huggingface(tmp_path / "hf", tmp_path / "dense")
    assert main(["ckpt", "convert", str(tmp_path / "dense"), str(tmp_path / "ours"), "--experts", "4", "2"]) == 0
    (_, dense), (section, ours) = weights_of(tmp_path / "dense"), weights_of(tmp_path / "ours")
    assert (section["experts"], section["experts_per_token"], "expert_ffn_size" in section) == (4, 2, False)
    for layer in range(4):
        gate_up = torch.stack([dense[f"layers.{layer}.mlp.{part}.weight"] for part in ("gate", "up")])
        assert all(torch.equal(expert, gate_up) for expert in ours[f"layers.{layer}.experts.gate_up.weight"])
        down = dense[f"layers.{layer}.mlp.down.weight"]
        assert all(torch.equal(expert, down) for expert in ours[f"layers.{layer}.experts.down.weight"])
    kept = [name for name in dense if ".mlp." not in name]
    assert all(torch.equal(ours[name], dense[name]) for name in kept)
    assert len(ours) == len(kept) + 3 * 4
    config = config_of(settings(section, tmp_path / "run", train__precision="fp32"), tmp_path)
    routers = run_world(1, fresh_routers, config)[0]
    assert len(routers) == 4 and all((ours[name].numpy() == numbers).all() for name, numbers in routers.items())
    to_huggingface(location(tmp_path / "ours"), tmp_path / "theirs")
    assert PretrainedWeights(tmp_path / "theirs").config["model_type"] == "qwen3_moe"


def test_biases_are_copied(tmp_path: Path) -> None:
    """The first forward is the dense model's, though a weight of an expert multiplies its bias."""
    save_tiny("smollm", tmp_path / "hf")
    from_huggingface(tmp_path / "hf", tmp_path / "plain")
    section, weights = weights_of(tmp_path / "plain")
    model = ModelConfig.model_validate(section | {"bias": True})
    biases = {tensor.name: torch.randn(tensor.shape) for tensor in model_tensors(model) if tensor.name not in weights}
    assert len(biases) == 4 * 7
    dumped = {"model": model.model_dump(mode="json", by_alias=True)}
    (tmp_path / "dense").mkdir()
    offline.write_state(tmp_path / "dense", ((f"weights.{name}", t) for name, t in (weights | biases).items()), dumped)
    assert main(["ckpt", "convert", str(tmp_path / "dense"), str(tmp_path / "ours"), "--experts", "4", "2"]) == 0
    dense, mixture = (forward(tmp_path / folder, tmp_path / f"run {folder}") for folder in ("dense", "ours"))
    assert mixture.loss == pytest.approx(dense.loss, rel=1e-13)
    total = mixture.gradients["layers.1.experts.down.bias"].sum(0)
    assert abs(total - dense.gradients["layers.1.mlp.down.bias"]).max() < 1e-11 * abs(total).max()


def fresh_routers(rank: Any, config: Any) -> Arrays:
    run = build_run(rank, config)
    return {
        parameter.name: target.detach().numpy().copy()
        for target, _, parameter in parameters_of(run)
        if parameter.name.endswith("router.weight")
    }


@pytest.mark.parametrize(
    ("model", "counts", "words"),
    [
        (LLAMA | {"experts": 2}, (4, 2), "the model has 2 experts  -> a dense model for --experts"),
        (LLAMA, (2, 3), "model.experts_per_token: 3 experts a token, of 2 to choose from  -> at most 2"),
        (LLAMA, (4, 1), "model.router_normalize: makes the weight of a token's only expert 1"),
        (LLAMA | {"block": "parallel"}, (4, 2), "model.block: experts follow attention"),
    ],
)
def test_a_model_that_cannot_have_them_is_refused(
    model: dict[str, Any], counts: tuple[int, int], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ModelConfig.model_validate(model)
    (tmp_path / "dense").mkdir()
    zeros = ((f"weights.{tensor.name}", torch.zeros(tensor.shape)) for tensor in model_tensors(config))
    offline.write_state(tmp_path / "dense", zeros, {"model": config.model_dump(mode="json", by_alias=True)})
    command = ["ckpt", "convert", str(tmp_path / "dense"), str(tmp_path / "ours"), "--experts", *map(str, counts)]
    assert main(command) == 4
    assert f"{tmp_path}/dense: {words}" in capsys.readouterr().err
    assert not list(tmp_path.glob("*ours*"))
