"""Text generation from a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megascale.checkpoint import offline
from megascale.cli.main import main
from megascale.config.model import ModelConfig
from megascale.convert.conversion import to_huggingface
from megascale.convert.tensor_map import model_tensors
from megascale.core.storage import Location
from tests.runs import LLAMA

BYTES = LLAMA | {"vocab_size": 257, "seq_length": 32}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights, for the byte tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint")
    model, generator = ModelConfig.model_validate(BYTES), torch.Generator().manual_seed(0)
    weights = ((f"weights.{t.name}", torch.randn(t.shape, generator=generator)) for t in model_tensors(model))
    keys = model.model_dump(mode="json", by_alias=True)
    offline.write_state(folder, weights, {"model": keys, "data": {"tokenizer": "bytes"}})
    return folder


def written(capsys: pytest.CaptureFixture[str], *words: str | Path, status: int = 0) -> str:
    assert main(["sample", *map(str, words)]) == status
    out, err = capsys.readouterr()
    return out if status == 0 else err


def greedy(folder: Path, prompt: bytes, count: int) -> bytes:
    """Greedy decoding of `count` bytes, written out."""
    from transformers import AutoModelForCausalLM

    net, ids = AutoModelForCausalLM.from_pretrained(folder), list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(net(torch.tensor([ids])).logits[0, -1].argmax()))
    return bytes(n for n in ids if n < 256)


def test_temperature_0_decodes_greedily(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to_huggingface(Location(str(checkpoint)), tmp_path / "hf")
    wanted = greedy(tmp_path / "hf", b"ab", 5).decode("utf-8", errors="replace") + "\n"
    plain = ("--prompt", "ab", "--temperature", "0", "--tokens", "5")
    assert written(capsys, checkpoint, *plain) == wanted
    settings = {"repetition_penalty": 1e-3, "suppress_tokens": [id for id in range(257) if id != 97]}
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps(settings))  # for chats
    assert written(capsys, tmp_path / "hf", *plain, "--tokenizer", "bytes") == wanted


def test_a_seed_determines_the_text(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = written(capsys, checkpoint, "--prompt", "ab", "--prompt", "ab")
    assert text == written(capsys, checkpoint, "--prompt", "ab", "--prompt", "ab", "--top-k", "50")
    assert text != written(capsys, checkpoint, "--prompt", "ab", "--prompt", "ab", "--seed", "1")
    assert text.startswith("ab") and written(capsys, checkpoint) != ""


def test_unusable_arguments_are_refused(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = written(capsys, checkpoint, "--prompt", "x" * 40, status=1)
    assert "a prompt of 40 tokens fills the sequence of 32" in long
    to_huggingface(Location(str(checkpoint)), tmp_path / "hf")
    assert "does not name its tokenizer  -> --tokenizer FILE" in written(capsys, tmp_path / "hf", status=4)
    assert "there is no complete checkpoint" in written(capsys, tmp_path, status=4)
    with pytest.raises(SystemExit):
        main(["sample", str(checkpoint), "--seed", str(1 << 63)])
    assert "is not below 2^63" in capsys.readouterr().err


def test_missing_weights_are_not_initialized_randomly(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to_huggingface(Location(str(checkpoint)), tmp_path / "hf")
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    assert "model.norm.weight" in written(capsys, tmp_path / "hf", "--tokenizer", "bytes", status=4)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    small = transformers.LlamaConfig(
        vocab_size=90, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=32,
    )  # fmt: skip
    transformers.LlamaForCausalLM(small).save_pretrained(tmp_path / "hf")
    error = written(capsys, tmp_path / "hf", "--prompt", "az", "--tokenizer", "bytes", status=1)
    assert "the prompt has token 122, but the model's vocabulary has 90  -> the tokenizer that the model was" in error
    for words in (("--tokens", "0"), ("--temperature", "hot"), ("--top-k", "-1")):
        with pytest.raises(SystemExit):
            main(["sample", str(checkpoint), *words])
