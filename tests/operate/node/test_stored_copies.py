"""Copies in memory of runs that have ended: found, told of, and removed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from megascale.checkpoint.memory.copies import CopyFolder
from megascale.cli.main import main
from megascale.core.errors import CheckpointError
from megascale.core.rank import NODE_VARIABLE
from megascale.core.run_folder import TOKEN
from megascale.operate.node.stored_copies import copies_notice, hold_copies, stored_copies


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir()
    return folder


def make_copies(memory: Path, run: Path, node: str = "") -> CopyFolder:
    """Make the copies of a rank as it does. They are in use as long as the returned object is."""
    run.mkdir(exist_ok=True)
    (run / TOKEN).write_text(f"id of {run.name}\n\n")
    folder = CopyFolder(memory, f"id of {run.name}", run / TOKEN, {NODE_VARIABLE: node} if node else {})
    folder.create()
    for slot in (0, 1):
        folder.copy_path(3, slot).write_bytes(bytes(4096))
    return folder


def listed(memory: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[tuple[str, str]]:
    """What `megascale ckpt copies` says: names and states."""
    main(["ckpt", "copies", *arguments, "--memory-dir", str(memory), "--json"])
    rows = json.loads(capsys.readouterr().out)["copies"]
    return sorted((Path(row["run"]).name, row["state"]) for row in rows)


def test_copies_of_vanished_runs_are_removed_and_no_others(
    memory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running = make_copies(memory, tmp_path / "running")
    shutil.rmtree(tmp_path / "running")  # a fault of storage: its ranks go on
    for name in ("gone", "anew", "kept"):
        make_copies(memory, tmp_path / name)
    shutil.rmtree(tmp_path / "gone")
    (tmp_path / "anew" / TOKEN).write_text("another id\n\n")
    gone, resumes = "its folder is gone, or not mounted", "a start of the run resumes from them"
    states = [("anew", gone), ("gone", gone), ("kept", resumes), ("running", "in use by the run")]
    assert listed(memory, capsys) == states
    removed = [(name, "removed" if state == gone else state) for name, state in states]
    assert listed(memory, capsys, "--remove") == removed
    assert listed(memory, capsys) == [("kept", resumes), ("running", "in use by the run")]
    del running
    assert listed(memory, capsys) == [("kept", resumes), ("running", gone)]


def test_copies_of_one_run_are_removed_unless_it_trains(
    memory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [make_copies(memory, tmp_path / "one", node) for node in ("n0", "n1")]
    make_copies(memory, tmp_path / "other")
    arguments = ["ckpt", "copies", str(tmp_path / "one"), "--remove", "--memory-dir", str(memory)]
    assert main(arguments) == 1
    assert capsys.readouterr().out.count("in use by the run") == 2
    nodes.clear()
    assert main(arguments) == 0
    assert [line.rpartition(": ")[2] for line in capsys.readouterr().out.splitlines()] == ["removed"] * 2
    assert [one.run.name for one in stored_copies(memory)] == ["other"]
    assert main(["ckpt", "copies", str(tmp_path / "other"), "--remove", "--memory-dir", str(memory)]) == 0
    assert list(memory.iterdir()) == []


def test_the_notice_has_place_size_and_command(memory: Path, tmp_path: Path) -> None:
    run = tmp_path / "one"
    assert copies_notice(memory, run) == ""
    folder = make_copies(memory, run, "n0").path
    where = f"on n0, n7, here in {folder} (8.00 KiB)"
    command = f"`megascale ckpt copies {run} --remove --memory-dir {memory}` on each host removes them"
    found = copies_notice(memory, run, "n0, n7")
    assert found == f"copies of the state stay in memory {where}: {command}"
    assert copies_notice(memory, tmp_path / "another") == ""
    assert copies_notice(memory, tmp_path / "another", "n0").startswith("copies of the state stay in memory on n0: `")


def test_a_place_where_nothing_can_be_made_is_one_error(tmp_path: Path) -> None:
    """/proc says that what one makes there does not exist."""
    with pytest.raises(CheckpointError, match="cannot make /proc/none/megascale-"):
        hold_copies(Path(f"/proc/none/megascale-{os.geteuid()}/run"), tmp_path)
