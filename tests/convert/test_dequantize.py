"""Published weights in MXFP4 and in FP8 by tiles are read as transformers dequantizes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megascale.cli.main import main
from megascale.convert.conversion import from_huggingface
from megascale.convert.huggingface import WEIGHTS_FILE, PretrainedWeights
from megascale.core.errors import CheckpointError
from tests.convert.tiny import save_tiny

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def quantized_folder(folder: Path, name: str, tensors: dict[str, torch.Tensor], quantization: dict[str, Any]) -> Path:
    """A tiny model of transformers with some tensors in place of those whose names theirs begin with."""
    save_tiny(name, folder, torch.bfloat16)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    replaced = {name.removesuffix("_blocks") for name in tensors}
    kept = {name: tensor for name, tensor in load_file(folder / WEIGHTS_FILE).items() if name not in replaced}
    save_file(kept | tensors, folder / WEIGHTS_FILE)
    return folder


def mxfp4(outer: int, rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = outer, rows, columns // 32
    blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(110, 125, shape, generator=generator, dtype=torch.uint8)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Experts in MXFP4, and what transformers makes of them. An inner width of 64 has two groups of elements."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors, dequantized = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for layer in range(4):
        for part, rows, columns in (("gate_up_proj", 128, 32), ("down_proj", 32, 64)):
            name = f"model.layers.{layer}.mlp.experts.{part}"
            blocks, scales = mxfp4(6, rows, columns, layer)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            dequantized[name] = convert_moe_packed_tensors(blocks, scales)
    folder = tmp_path_factory.mktemp("mxfp4")
    return quantized_folder(folder, "gpt-oss of 64", tensors, MXFP4), dequantized


def test_mxfp4_is_dequantized_as_by_transformers(packed: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, theirs = packed
    given = PretrainedWeights(folder)
    given.check_tensors()
    for layer in range(4):
        up, down = (given.read_tensor(f"layers.{layer}.experts.{part}.weight") for part in ("gate_up", "down"))
        both = theirs[f"model.layers.{layer}.mlp.experts.gate_up_proj"]
        assert up.dtype == torch.bfloat16 and up.shape == (6, 2, 64, 32)
        assert torch.equal(up, torch.stack([both[..., ::2], both[..., 1::2]], 1).transpose(-2, -1))
        assert torch.equal(down, theirs[f"model.layers.{layer}.mlp.experts.down_proj"].transpose(-2, -1))
    region = given.read_tensor("layers.3.experts.down.weight", ((2, 5, 7), (3, 9, 40)))
    assert torch.equal(region, down[2:5, 5:14, 7:47])


def test_dequantized_weights_are_written_in_bf16(
    packed: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, theirs = packed
    for pair in ((folder, tmp_path / "ours"), (tmp_path / "ours", tmp_path / "again")):
        assert main(["ckpt", "convert", *map(str, pair)]) == 0
    assert "no quantization_config included: weights that were quantized are written in" in capsys.readouterr().err
    again = load_file(tmp_path / "again" / WEIGHTS_FILE)
    kept = {name: tensor for name, tensor in load_file(folder / WEIGHTS_FILE).items() if tensor.dtype != torch.uint8}
    assert again.keys() == kept.keys() | theirs.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in (kept | theirs).items())
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert "quantization_config" not in config


def test_scales_are_counted(packed: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.down_proj_scales"
    stored = load_file(packed[0] / WEIGHTS_FILE)
    (tmp_path / "config.json").write_text((packed[0] / "config.json").read_text())
    scales = stored.pop(name)
    for damaged in ({name: scales[:, :, :1].clone()}, {}):
        save_file(stored | damaged, tmp_path / WEIGHTS_FILE)
        with pytest.raises(CheckpointError, match=rf"down_proj needs {name} of shape \[6, 32, 2\]"):
            from_huggingface(tmp_path, tmp_path / "ours")


def test_fp8_tiles_are_dequantized(tmp_path: Path) -> None:
    """Also at the ends of a matrix, where tiles are smaller, and in regions that begin within a tile."""
    generator = torch.Generator().manual_seed(0)
    name = "model.layers.1.mlp.up_proj.weight"
    weight = torch.randn(272, 144, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, generator=generator)
    tensors = {name: weight, f"{name}_scale_inv": scales}
    given = PretrainedWeights(quantized_folder(tmp_path, "llama of 144", tensors, FP8))
    given.check_tensors()
    wide = scales.repeat_interleave(128, 0)[:272].repeat_interleave(128, 1)[:, :144]
    expected = (weight.float() * wide).bfloat16()
    assert torch.equal(given.read_tensor("layers.1.mlp.up.weight"), expected)
    region = given.read_tensor("layers.1.mlp.up.weight", ((120, 100), (140, 40)))
    assert torch.equal(region, expected[120:260, 100:140])


def test_fp8_without_tiles_is_refused(tmp_path: Path) -> None:
    folder = quantized_folder(tmp_path, "llama of 144", {}, FP8 | {"weight_block_size": None})
    with pytest.raises(CheckpointError, match="the weights are quantized, it has quantization_config, by quant_method"):
        PretrainedWeights(folder)
