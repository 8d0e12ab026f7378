"""The five commands of docs/models.md, as they stand, on tiny random models of every family."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.convert.tiny import TINY, make_tiny
from tests.data.prepare.tokenizer_shapes import SHAPES, save_shape
from tests.docs.test_documents import bash_lines

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
SHAPE_OF = {"llama": "llama3", "smollm": "gpt_neox", "mistral": "llama2", "qwen": "qwen", "gemma": "gemma",
            "olmo": "gpt_neox", "pythia": "gpt_neox", "phi": "llama2", "mixtral": "llama2",
            "olmoe": "gpt_neox", "glm": "qwen", "deepseek": "llama3", "gpt-oss": "llama3"}  # fmt: skip
"""Tokenizer of a family, by the first word of its name."""

FAMILIES = (
    "llama 3", "smollm", "mistral nemo", "qwen 2.5", "qwen 3", "gemma 2", "gemma 3", "olmo 2", "pythia", "phi 3",
    "mixtral", "qwen 2 mixture", "qwen 3 mixture", "olmoe", "glm 4 mixture", "deepseek 3", "gpt-oss",
)  # fmt: skip
SMALLER = ("train.steps=2", "optimizer.warmup_steps=1", "batch.global=2", "model.seq_length=16", "train.precision=fp32")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_five_commands_train_foreign_weights(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights, tuned = tmp_path / "build" / "weights", tmp_path / "build" / "tuned"
    net = make_tiny(name, vocab_size=400, max_position_embeddings=64)
    net.save_pretrained(weights)
    save_shape(SHAPE_OF[name.partition(" ")[0]], weights)
    (tmp_path / "build" / "texts.jsonl").write_text('{"text": "' + "Once upon a time, 12 tokens. " * 60 + '"}\n')
    tuned.mkdir()
    (toml,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tuned / "run.toml").write_text(toml)
    commands = [words for words in bash_lines(PAGE) if words[0].endswith("megascale")]
    assert len(commands) == 5
    for words in commands:
        extra = SMALLER if words[1] == "train" else ("--tokens", "4") if words[1] == "sample" else ()
        command = [sys.executable, "-m", "megascale", *words[1:], *extra]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 0, (shlex.join(words), done.stderr)
    assert done.stdout.startswith("Once upon a time")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "build" / "tuned-hf")
    assert type(again) is type(net) and again.dtype == torch.bfloat16
    for folder in ("weights", "tuned-hf"):
        assert AutoTokenizer.from_pretrained(tmp_path / "build" / folder).eos_token
    before, after = (load_file(tmp_path / f"build/{folder}/model.safetensors") for folder in ("weights", "tuned-hf"))
    assert before.keys() == after.keys()
    moved = [key for key in before if not torch.equal(before[key].bfloat16(), after[key])]
    assert moved  # bf16 hides the smallest updates


def test_the_commands_are_run_for_every_family() -> None:
    first = {name.partition(" ")[0] for name in TINY} - {"gpt-neox"}  # Pythia's family
    assert {name.partition(" ")[0] for name in FAMILIES} == first == SHAPE_OF.keys()
    assert set(SHAPE_OF.values()) < set(SHAPES)
