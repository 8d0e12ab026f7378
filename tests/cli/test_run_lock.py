"""The folder of a run: what another user made there is not trusted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megascale.cli.run_lock import lock_run_folder
from megascale.config.loading import load_config
from megascale.core.errors import ConfigError
from megascale.core.files import LOCK_FILE
from tests.jobs import job_config
from tests.runs import GPT

NOBODY = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of this user, to which the other user's link points."""
    path = tmp_path / "victim"
    path.write_text("precious")
    return path


@pytest.mark.parametrize("place", ["run", "link", "checkpoints"])
def test_a_folder_of_another_user_is_refused(place: str, victim: Path, tmp_path: Path) -> None:
    runs, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    folder = elsewhere / "test" if place == "checkpoints" else runs / "test"
    if place == "link":
        folder.parent.mkdir()
        (tmp_path / "own").mkdir()
        folder.symlink_to(tmp_path / "own")
    else:
        folder.mkdir(parents=True)
    os.chown(folder, NOBODY, NOBODY, follow_symlinks=False)
    (folder / LOCK_FILE).symlink_to(victim)
    config = load_config(str(job_config(tmp_path, GPT, checkpoint__every=1, checkpoint__dir=str(elsewhere))))
    with pytest.raises(
        ConfigError, match=rf"{folder}  (output_dir|checkpoint\.dir): belongs to user {NOBODY}, who could replace what"
    ):
        lock_run_folder(config)
    assert victim.read_text() == "precious"


def test_a_file_system_that_gives_files_to_another_user_is_no_stranger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS does with root's: the folder and what this process writes have the same owner."""
    (tmp_path / "runs" / "test").mkdir(parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for path in (tmp_path / "runs" / "test",):
        os.chown(path, NOBODY, NOBODY)
    real = os.fstat

    def squashed(descriptor: int) -> os.stat_result:
        facts = list(real(descriptor))
        facts[4] = NOBODY
        return os.stat_result(facts)

    monkeypatch.setattr(os, "fstat", squashed)
    lock_run_folder(load_config(str(job_config(tmp_path, GPT)))).close()
