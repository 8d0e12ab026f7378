"""Spectrum: the signal in singular values, and the list that freezes the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megascale.checkpoint import offline
from megascale.cli.main import main
from megascale.config.loading import load_config
from megascale.config.model import ModelConfig
from megascale.convert.spectrum import frozen_tensors, signal_to_noise
from megascale.convert.tensor_map import model_tensors
from tests.runs import LLAMA, settings, write_config


@pytest.mark.parametrize("shape", [(256, 256), (128, 512), (512, 64)])
def test_noise_has_no_signal_and_a_low_rank_part_has_much(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(shape, generator=generator)
    assert signal_to_noise(noise) * torch.linalg.matrix_norm(noise, 2) < 0.02
    left, right = (torch.linalg.qr(torch.randn(size, 4, generator=generator)).Q for size in shape)
    strong = noise + 8 * sum(size**0.5 for size in shape) / 2 * left @ right.T
    assert signal_to_noise(strong) * torch.linalg.matrix_norm(strong, 2) > 0.05
    assert signal_to_noise(strong) > 10 * signal_to_noise(noise)
    assert signal_to_noise(torch.zeros(shape)) == 0.0


def test_every_kind_keeps_its_share() -> None:
    kinds = {
        "layers.*.out": {(f"layers.{i}.out",): float(i) for i in range(4)},
        "layers.*.qkv": {(f"layers.{i}.q", f"layers.{i}.k"): float(-i) for i in range(4)},
        "layers.*.router": {("layers.3.router",): 0.0},
    }
    assert frozen_tensors(kinds, 0.5) == [
        "layers.0.out", "layers.1.out", "layers.2.q", "layers.2.k", "layers.3.q", "layers.3.k",
    ]  # fmt: skip


def test_the_file_freezes_all_but_the_weights_with_a_signal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = LLAMA | {"experts": 4, "dense_layers": 1}
    generator, tensors = torch.Generator().manual_seed(1), {}
    for tensor in model_tensors(config := ModelConfig.model_validate(model)):
        tensors[f"weights.{tensor.name}"] = torch.randn(tensor.shape, generator=generator)
    for name in ("layers.1.attention.out.weight", "layers.3.attention.out.weight"):
        weight = tensors[f"weights.{name}"]
        weight += 60 * torch.outer(*(torch.nn.functional.normalize(torch.ones(size), dim=0) for size in weight.shape))
    (tmp_path / "saved").mkdir()
    offline.write_state(tmp_path / "saved", tensors.items(), {"model": config.model_dump(mode="json", by_alias=True)})
    output = tmp_path / "freeze.toml"
    assert main(["ckpt", "spectrum", str(tmp_path / "saved"), "--output", str(output), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name for name in found["freeze"] if ".out." in name} == {
        "layers.0.attention.out.weight", "layers.2.attention.out.weight",
    }  # fmt: skip
    assert found["snr"]["layers.1.attention.out.weight"] > 10 * found["snr"]["layers.0.attention.out.weight"]
    assert not any(name.startswith(("embedding", "head")) or "norm" in name for name in found["freeze"])
    tree = settings(model, tmp_path)
    path = write_config({"extends": "freeze.toml"} | tree, tmp_path / "on.toml")
    assert load_config(str(path)).train.freeze == found["freeze"]
