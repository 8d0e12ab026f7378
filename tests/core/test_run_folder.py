"""The folder of a run, told from an empty place: read, lost, and made anew where copies in memory are."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from megascale.core.append_file import AppendFile
from megascale.core.run_folder import (
    SAVED_MARKER,
    TOKEN,
    TOKEN_VARIABLE,
    LostFolderError,
    RunFolder,
    check_known,
    read_token,
    write_token,
)
from megascale.record.live_file import LIVE_FILE, LiveFile, LiveState


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder, of whose token a driver knows an earlier state."""
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    write_token(folder, "id", "second")
    return folder


KNOWN = {TOKEN_VARIABLE: "id\nfirst\n"}


def known(run: Path, **more: object) -> RunFolder:
    """What the driver knows of the run's folder."""
    values = {"checkpoints": f"{run}/checkpoints", "memory": f"{run.parent}/memory", "wait_s": 0.0} | more
    return RunFolder(str(run), "id\nfirst\n", **values)  # type: ignore[arg-type]


def empty(place: Path) -> None:
    """Leave a mount point without its file system."""
    shutil.rmtree(place)
    place.mkdir()


def another(place: Path) -> None:
    """Put the folder of another run there."""
    write_token(place, "other", "")


def test_a_token_names_the_folder_and_the_starts_that_the_driver_knows(run: Path) -> None:
    assert read_token(run, KNOWN) == ("id", ["second", "first"])
    assert read_token(run, {}) == ("id", ["second"])
    assert known(run).read_again().token == "id\nsecond"


def test_nobody_but_the_launcher_begins_a_run(tmp_path: Path) -> None:
    run_id, starts = read_token(tmp_path / "new", {})
    assert len(run_id) == 32 and starts == [""] and read_token(tmp_path / "new", {}) == (run_id, starts)
    with pytest.raises(LostFolderError, match=r"the run's folder \S+/other is lost: it was renamed or removed"):
        read_token(tmp_path / "other", KNOWN)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("lose", [shutil.rmtree, empty, another])
def test_a_lost_folder_is_told_from_the_runs(lose: object, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, TOKEN_VARIABLE, KNOWN[TOKEN_VARIABLE])
    check_known(run)
    lose(run)  # type: ignore[operator]
    before = sorted(run.iterdir()) if run.exists() else None
    with pytest.raises(LostFolderError):
        read_token(run)
    with pytest.raises(LostFolderError):
        check_known(run)
    with pytest.raises(LostFolderError):
        known(run).read_again()
    assert not known(run).restore("n0"), "the node has no copies in memory"
    assert (sorted(run.iterdir()) if run.exists() else None) == before, "nothing is made in the empty place"


def test_a_node_with_copies_in_memory_makes_the_folder_anew(run: Path) -> None:
    folder = known(run)
    shutil.rmtree(run)
    folder.copies("n0").mkdir(parents=True)
    (folder.copies("n0") / "rank-00001.a").touch()
    assert not folder.restore("n0"), "a copy without a header is none"
    (folder.copies("n0") / "rank-00001.a.json").touch()
    assert not folder.restore("n1") and folder.restore("n0")
    assert read_token(run, KNOWN) == ("id", ["first"])
    assert (run / SAVED_MARKER).read_text() == f"{run}/checkpoints\n", "no start from scratch"


@pytest.mark.parametrize("lose", [shutil.rmtree, empty])
def test_files_of_a_run_are_not_made_anew_in_an_empty_place(lose: object, run: Path) -> None:
    """What they lack is written once the folder is back. A file that was removed alone is made anew."""
    log, live = AppendFile(run / "log", in_run=True), LiveFile(run / LIVE_FILE)
    log.append(b"a")
    live.write(LiveState(1.0, 0, ()))
    (run / "log").unlink()
    log.append(b"b")
    away = run.with_name("away")
    shutil.copytree(run, away)
    lose(run)  # type: ignore[operator]
    with pytest.raises(FileNotFoundError, match="the run's folder is lost"):
        log.append(b"c")
    with pytest.raises(FileNotFoundError, match="the run's folder is lost"):
        live.write(LiveState(2.0, 0, ()))
    assert not run.exists() or not list(run.iterdir())
    shutil.rmtree(run, ignore_errors=True)
    away.rename(run)
    log.flush()
    live.write(LiveState(3.0, 0, ()))
    assert (run / "log").read_bytes() == b"bc"
    assert (run / TOKEN).exists()
