"""`megascale check` compares `[model]` with the weights that the run would begin with or resume from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.checkpoint import offline
from megascale.cli.main import main
from tests.runs import settings, write_config

THERE: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rope_theta": 500.0,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
HERE = {
    "num_layers": 4, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 48, "vocab_size": 101,
    "seq_length": 16, "block": "serial", "norm": "rmsnorm", "position": "rope", "activation": "swiglu", "bias": False,
    "tie_embeddings": False, "rope_theta": 500.0, "norm_eps": 1e-5,
}  # fmt: skip


def weights(folder: Path, **keys: Any) -> Path:
    """A folder of foreign weights, of which `check` reads config.json alone."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(THERE | keys))
    return folder


def checked(tmp_path: Path, capsys: pytest.CaptureFixture[str], *overrides: str, status: int = 0) -> str:
    """What `check` says of a run of the model HERE."""
    config = tmp_path / "run.toml"
    if not config.exists():
        write_config(settings(HERE, tmp_path), config)
    assert main(["check", str(config), *overrides]) == status
    out, err = capsys.readouterr()
    return out + err


def test_the_weights_of_the_same_model_are_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Shorter sequences are no other model, and are said."""
    folder = weights(tmp_path / "hf")
    said = checked(tmp_path, capsys, f"checkpoint.resume=hf:{folder}")
    assert "no mistakes found" in said
    assert said.splitlines()[-1] == f"differs from {folder}: model.seq_length 64 -> 16"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"hidden_size": 64}, "is of another model: hidden_size 64 there, 32 here; head_dim 16 there, 8 here"),
        ({"num_hidden_layers": 5}, "is of another model: num_layers 5 there, 4 here  -> [model] as there"),
        ({"model_type": "qwen2"}, "is of another model: qkv_bias True there, False here"),
        ({"model_type": "mamba"}, "model_type is 'mamba'  -> a model of gpt2, llama"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "are quantized, it has quantization_config, by quant",
        ),
        ({"compression_config": {"format": "int-quantized"}}, "the weights are quantized, it has compression_config"),
    ],
)
def test_other_weights_are_refused_before_the_start(
    keys: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = weights(tmp_path / "hf", **keys)
    said = checked(tmp_path, capsys, f"checkpoint.resume=hf:{folder}", status=2)
    assert words in said and len(said.splitlines()) == 2 and said.startswith("checkpoint.resume  ")
    report = json.loads(checked(tmp_path, capsys, f"checkpoint.resume=hf:{folder}", "--json", status=2))
    assert words.partition("  ->")[0] in report["problems"][0]["message"]


def test_files_beside_the_weights_are_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = weights(tmp_path / "hf")
    (folder / "generation_config.json").write_text("{")
    assert f"{folder}/generation_config.json is not JSON" in checked(
        tmp_path, capsys, f"checkpoint.resume=hf:{folder}", status=2
    )


def checkpoint(folder: Path, **keys: Any) -> Path:
    folder.mkdir(parents=True)
    offline.write_state(folder, [("weights.a", torch.zeros(1))], {"model": HERE | keys, "optimizer": {"lr": 1.0}})
    return folder


def test_the_checkpoint_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run's own newest one first, whatever `checkpoint.resume` names; with `never`, none."""
    given = checkpoint(tmp_path / "given" / "checkpoints" / "step-00000007", num_layers=2)
    resume = f"checkpoint.resume={tmp_path / 'given'}"
    assert f"{given} is of another model: num_layers 2 there, 4 here" in checked(tmp_path, capsys, resume, status=2)
    odd = checkpoint(tmp_path / "odd", num_heads="many", hidden_size=None)
    said = checked(tmp_path, capsys, f"checkpoint.resume={odd}", status=2)
    assert "hidden_size None there, 32 here; num_heads many there" in said
    own = tmp_path / "test" / "checkpoints"
    checkpoint(own / "step-00000009", num_layers=3)
    checkpoint(own / "step-00000010")
    said = checked(tmp_path, capsys, resume)
    assert f"goes on from {own}/step-00000010: {resume.replace('=', ' = ')} is not read" in said
    for its in (own / "step-00000010", own, own.parent, "auto"):
        assert "is not read" not in checked(tmp_path, capsys, f"checkpoint.resume={its}")
    assert f"differs from {own}/step-00000010: optimizer.lr 1.0 -> " in said
    checkpoint(own / "step-00000010.1", num_layers=3)
    assert "num_layers 3 there, 4 here" in checked(tmp_path, capsys, status=2)
    assert "no mistakes found" in checked(tmp_path, capsys, "checkpoint.resume=never")
    (own / "step-00000010.1" / "manifest.json").write_text("{")
    assert "no mistakes found" in checked(tmp_path, capsys), "training passes damaged ones over"
