"""Sparse and linear attention, which no other system has: `ckpt convert` refuses them by name and writes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megascale.cli.main import main
from tests.convert.megatron_lm.test_folders import write_checkpoint
from tests.runs import LLAMA, settings, write_config

MODELS: dict[str, tuple[str, Any]] = {
    "sparse": ("sparse_attention", {"local_blocks": 1, "stride": 2, "block": 2}),
    "linear": ("attention_pattern", "L"),
    "hybrid": ("attention_pattern", "LLS"),
}
SYSTEMS = ("", "megatron:", "torchtitan:")


def refused(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> str:
    """Convert; return the only line of the refusal, which leaves what the folder had."""
    before = sorted(folder.rglob("*"))
    assert main(["ckpt", "convert", *words]) == 4
    out, err = capsys.readouterr()
    assert sorted(folder.rglob("*")) == before and (out + err).count("\n") == 1
    return out + err


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system or "hf")
def test_no_system_gets_them(name: str, system: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key, value = MODELS[name]
    write_checkpoint(tmp_path / "ours", LLAMA | {key: value}, trained=False)
    told = refused(capsys, tmp_path, str(tmp_path / "ours"), f"{system}{tmp_path / 'theirs'}")
    assert f"{key} = None" in told and "window" not in told


@pytest.fixture(scope="module", params=SYSTEMS[1:])
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of another system, with softmax attention."""
    folder = tmp_path_factory.mktemp("made")
    write_checkpoint(folder / "ours", LLAMA)
    assert main(["ckpt", "convert", str(folder / "ours"), f"{request.param}{folder / 'theirs'}"]) == 0
    return f"{request.param}{folder / 'theirs'}"


@pytest.mark.parametrize("name", MODELS)
def test_no_system_has_them(name: str, theirs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run with them cannot go on with a checkpoint of another system as one of its own."""
    key, value = MODELS[name]
    config = write_config(settings(LLAMA | {key: value}, tmp_path), tmp_path / "run.toml")
    capsys.readouterr()
    told = refused(capsys, tmp_path, theirs, str(tmp_path / "ours"), "--config", str(config))
    assert f"{key} None there" in told or f"{key} = None" in told
