"""Faults of nodes, links and the driver: every kind has an effect, and a full disk is one of its own."""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.link_faults import LINK_FAULTS
from lab.namespaces import TestbedError
from lab.outside_faults import CHECKPOINTS, OutsideFaults, process_fault
from lab.small_disk import FILLER, empty_disk, fill_disk, small_disk
from megascale.config.injection import KINDS, Fault
from tests.marks import needs_mount

OUTSIDE = [name for name, kind in KINDS.items() if kind.target != "rank" and name not in LINK_FAULTS]


def until(question: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not question():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("kind", [name for name in OUTSIDE if name != "throttle_cpu"])  # a quota needs a control group
def test_every_kind_that_is_no_links_has_an_effect(kind: str, tmp_path: Path) -> None:
    assert len(process_fault(Fault(kind, 1, node=0), tmp_path)) == 2


def test_a_link_needs_a_testbed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cut_link needs hosts of a testbed"):
        process_fault(Fault("cut_link", 1, node=0), tmp_path)


def test_the_disk_of_a_host_is_not_filled(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no file system of its own"):
        fill_disk(tmp_path)
    assert list(tmp_path.iterdir()) == []


@needs_mount
def test_a_small_disk_is_full_then_empty_then_gone(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    with small_disk(folder, 1 << 20):
        fill_disk(folder)
        with pytest.raises(OSError, match="No space left") as error:
            (folder / "more").write_bytes(bytes(8192))
        assert error.value.errno == errno.ENOSPC
        empty_disk(folder)
        (folder / "more").write_bytes(bytes(8192))
    assert list(folder.iterdir()) == []


@needs_mount
def test_a_disk_is_full_for_steps_of_the_run(tmp_path: Path) -> None:
    filler = tmp_path / CHECKPOINTS / FILLER

    def finish(step: int) -> None:
        with open(tmp_path / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "loss": 1.0}) + "\n")

    with small_disk(tmp_path / CHECKPOINTS, 1 << 20):
        faults = OutsideFaults("fill_disk node=0 step=3 steps=2", tmp_path)
        faults.start()
        try:
            finish(1)
            assert not filler.exists()
            finish(2)
            until(filler.exists)
            finish(3)
            assert filler.exists()
            finish(4)
            until(lambda: not filler.exists())
        finally:
            faults.end()


def test_without_the_privilege_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TestbedError, match="mount: no such program"), small_disk(tmp_path / "disk", 1 << 20):
        pass
