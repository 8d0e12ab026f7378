"""`megascale ckpt` on checkpoints of a real run."""

from __future__ import annotations

import argparse
import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megascale.checkpoint.format.manifest import DamagedError
from megascale.cli.ckpt import _verify
from megascale.cli.main import main
from megascale.core.errors import CheckpointError
from megascale.core.rank import Rank
from tests.convert.tiny import save_tiny
from tests.runs import LLAMA, build_run, config_of, settings
from tests.worlds import run_world


def saved_twice(rank: Rank, config: Any) -> None:
    from megascale.train.step import train_step

    run = build_run(rank, config)
    for _ in range(2):
        train_step(run, run.train_loader.batch(run.progress.samples))
        run.buffers.finish_param_gather()
        run.checkpoints.save(run.progress)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of two ranks with checkpoints of steps 1 and 2, and an unfinished save."""
    folder = tmp_path_factory.mktemp("runs")
    given = config_of(settings(LLAMA, folder, parallel__tp=2, checkpoint__every=1, train__precision="fp32"), folder)
    run_world(2, saved_twice, given)
    (given.folder / "checkpoints/step-00000003").mkdir()
    return given.folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """Copy the checkpoint, to damage the copy."""
    return Path(shutil.copytree(made, tmp_path / "run"))


def asked(capsys: pytest.CaptureFixture[str], *words: str | Path, status: int = 0) -> str:
    assert main(["ckpt", *map(str, words)]) == status
    out, err = capsys.readouterr()
    return out + err


def test_list_names_checkpoints_and_unfinished_saves(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, three = asked(capsys, "list", run).splitlines()
    folder = run / "checkpoints"
    assert one.startswith(f"{folder}/step-00000001  ") and one.endswith("128 tokens, tp2 cp1 dp1 pp1")
    assert two.startswith(f"{folder}/step-00000002  ") and "256 tokens" in two
    assert three == f"{folder}/step-00000003  is unfinished, or being written: the next start of the run removes it"
    report = json.loads(asked(capsys, "list", run, "--json"))
    assert [row["step"] for row in report["checkpoints"]] == [1, 2] and len(report["unfinished"]) == 1
    assert "step-00000001 is itself a checkpoint" in asked(capsys, "list", folder / "step-00000001", status=4)
    (folder / "none").mkdir()
    assert asked(capsys, "list", folder / "none") == f"no checkpoints in {folder}/none\n"
    assert f"{run / 'none'}: no such folder" in asked(capsys, "list", run / "none", status=2)


def test_list_goes_on_after_a_damaged_manifest(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints/step-00000001/manifest.json").write_text("{")
    one, two, _ = asked(capsys, "list", run).splitlines()
    assert "is damaged" in one and "256 tokens" in two


def test_show_describes_a_checkpoint(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = asked(capsys, "show", run)
    assert f"{run}/checkpoints/step-00000002: " in report and "in 2 files" in report
    assert "progress    step 2, 16 samples, 256 tokens" in report
    assert "weights     39 tensors" in report and "exp_avg_sq  39 tensors" in report
    every = asked(capsys, "show", run, "--tensors")
    assert "weights.layers.0.attention.q.weight  float32 [32, 32] in 2 shards" in every
    plain = json.loads(asked(capsys, "show", run / "checkpoints/step-00000001", "--json"))
    assert plain["facts"]["progress"] == {"step": 1, "samples": 8, "tokens": 128}


def test_verify_finds_every_damage(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "checkpoints/step-00000002"
    assert asked(capsys, "verify", run) == f"{path}: 117 tensors in 2 files match their checksums\n"
    file = path / "rank-00001-000.safetensors"
    numbers = bytearray(file.read_bytes())
    numbers[-1] ^= 1
    file.write_bytes(numbers)
    lines = asked(capsys, "verify", run, status=4).splitlines()
    assert len(lines) == 2 and f"{file}: " in lines[0] and "does not match" in lines[0]
    assert lines[1].startswith(f"{path} is damaged: a run resumes from an earlier checkpoint  -> ")
    assert json.loads(asked(capsys, "verify", run, "--json", status=4))["ok"] is False
    numbers[-1] ^= 1
    file.write_bytes(bytes([*numbers, 0]))
    line, last = asked(capsys, "verify", run, status=4).splitlines()
    assert line == f"{file}: its size or CRC-32 does not match, though its tensors are intact"
    assert last.startswith(f"{path} can be loaded: all its tensors are as they were written  -> ")
    file.unlink()
    line, last = asked(capsys, "verify", run, status=4).splitlines()
    assert line == f"{file} cannot be read: No such file or directory; 117 tensors are in it" and "is damaged" in last
    assert f"{path / 'none'}: no such folder" in asked(capsys, "verify", path / "none", status=2)
    assert f"{path / 'manifest.json'}: not a folder" in asked(capsys, "show", path / "manifest.json", status=2)


def test_the_files_that_go_along_are_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny("llama 3", tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer_config.json").write_text("{}")
    asked(capsys, "convert", tmp_path / "hf", tmp_path / "ours")
    assert "in 4 files match" in asked(capsys, "verify", tmp_path / "ours")
    file = tmp_path / "ours" / "tokenizer_config.json"
    file.write_text("[]")
    line, _ = asked(capsys, "verify", tmp_path / "ours", status=4).splitlines()
    assert line == f"{file}: its size or CRC-32 does not match"
    told = asked(capsys, "convert", tmp_path / "ours", tmp_path / "again", status=4)
    assert f"{file} is damaged: its size or CRC-32 does not match" in told and not (tmp_path / "again").exists()
    file.unlink()
    line, _ = asked(capsys, "verify", tmp_path / "ours", status=4).splitlines()
    assert line == f"{file} cannot be read: No such file or directory"


@pytest.mark.parametrize("name", ["manifest.json", "rank-00001-000.safetensors"])
def test_an_unreadable_file_is_not_called_damaged(run: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from megascale.core.storage import Location

    file, read, read_into = run / "checkpoints/step-00000002" / name, Location.read, Location.read_into

    def shut(self: Location) -> None:  # root may read any file
        if self.local_path == file:
            raise PermissionError(errno.EACCES, "Permission denied", self.url)

    monkeypatch.setattr(Location, "read", lambda self: (shut(self), read(self))[1])
    monkeypatch.setattr(Location, "read_into", lambda self, *place: (shut(self), read_into(self, *place))[1])
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied") as raised:
        _verify(argparse.Namespace(checkpoint=str(run), json=False))
    assert not isinstance(raised.value, DamagedError)


def test_diff_describes_the_differences(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (run / f"checkpoints/step-0000000{step}" for step in (1, 2))
    assert asked(capsys, "diff", two, run) == "117 tensors are bit-equal, 0 differ\n"
    lines = asked(capsys, "diff", one, two, status=1).splitlines()
    assert "progress.step: 1 -> 2" in lines
    assert any(line.startswith("weights.head.weight: largest difference ") for line in lines)
    assert lines[-1] == "0 tensors are bit-equal, 117 differ"


def test_convert_goes_both_ways(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(capsys, "convert", run, tmp_path / "hf", "--dtype", "bf16").startswith(f"{tmp_path / 'hf'}: ")
    assert json.loads((tmp_path / "hf/config.json").read_text())["torch_dtype"] == "bfloat16"
    asked(capsys, "convert", tmp_path / "hf", tmp_path / "ours")
    assert (
        asked(capsys, "verify", tmp_path / "ours") == f"{tmp_path}/ours: 39 tensors in 2 files match their checksums\n"
    )
    for output in (tmp_path / "hf", run):
        told = asked(capsys, "convert", run, output, status=2)
        assert told == f"{output} is there already  -> give a new folder for the result\n"
    with pytest.raises(SystemExit):
        main(["ckpt", "convert", str(run), "s3://bucket/x"])
    assert "'s3://bucket/x' is a URL" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert "no complete checkpoint" in asked(capsys, "convert", tmp_path / "empty", tmp_path / "x", status=4)
