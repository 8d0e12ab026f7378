"""Folders that give two answers: another step by name than by manifest, two sets of checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascale.checkpoint.folders import find_checkpoints, name_warning
from megascale.checkpoint.format import manifest
from megascale.core.errors import CheckpointError
from megascale.core.storage import Location


@pytest.mark.parametrize("name", ["step-00000007", "step-7.2", "backup"])
def test_a_name_of_the_same_step_or_of_none(name: str) -> None:
    assert name_warning(Location(f"/runs/a/{name}"), 7) is None


def test_the_manifest_s_step_counts() -> None:
    warning = name_warning(Location("/runs/a/step-00000008"), 7)
    assert warning is not None
    assert warning.startswith("/runs/a/step-00000008 holds step 7 by its manifest, which counts")
    assert warning.endswith("rename it step-00000007")


def test_two_sets_of_checkpoints_are_refused(tmp_path: Path) -> None:
    def save(folder: str) -> None:
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / manifest.NAME).touch()

    save("checkpoints/step-00000002")
    [found] = find_checkpoints(Location(str(tmp_path)))
    assert found.url == str(tmp_path / "checkpoints/step-00000002")
    save("step-00000009")
    with pytest.raises(
        CheckpointError, match=r"has checkpoints, such as step-00000009, and a folder of checkpoints  -> name"
    ):
        find_checkpoints(Location(str(tmp_path)))
