"""Records that cannot be written for a while are written later, whole, once and in order."""

from __future__ import annotations

import contextlib
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.core import append_file
from megascale.core.append_file import AppendFile
from megascale.core.outages import Outages
from megascale.record.metrics import EvaluationMetrics
from megascale.record.metrics_writers import JsonLinesWriter, TensorBoardWriter
from tests.record.test_metrics_writers import scalars, step, steps_of


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let no file grow beyond `size` bytes, as on a disk that fills up: a write takes a part, the next fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=40), min_size=3, max_size=12), st.data())
def test_after_an_outage_the_file_has_every_record_once(records: list[bytes], data: st.DataObject) -> None:
    with contextlib.ExitStack() as stack:
        import tempfile

        path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "records"
        file, full = AppendFile(path), data.draw(st.integers(0, sum(map(len, records))))
        with files_of_at_most(full):
            for record in records[:-1]:
                with contextlib.suppress(OSError):
                    file.append(record)
            written = path.read_bytes() if path.exists() else b""
            whole = [b"".join(records[:count]) for count in range(len(records))]
            assert written in whole and len(written) <= full, "no part of a record stays"
        file.append(records[-1])
        assert path.read_bytes() == b"".join(records)
        assert file.pending == file.dropped == 0


def test_a_folder_that_comes_back_gets_all_records(tmp_path: Path) -> None:
    folder = tmp_path / "mount"
    folder.mkdir()
    file = AppendFile(folder / "records")
    file.append(b"a")
    shutil.rmtree(folder)
    for record in (b"b", b"c"):
        with pytest.raises(FileNotFoundError):
            file.append(record)
    assert file.pending == 2
    folder.mkdir()
    file.flush()
    assert (folder / "records").read_bytes() == b"bc"


def test_what_is_pending_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append_file, "MAX_PENDING", 3)
    file = AppendFile(tmp_path / "away" / "records")
    for number in range(5):
        with pytest.raises(OSError, match="No such file"):
            file.append(b"%d" % number)
    (tmp_path / "away").mkdir()
    file.flush()
    assert (tmp_path / "away" / "records").read_bytes() == b"234" and file.dropped == 2


def test_metrics_and_tensorboard_miss_nothing_after_a_full_disk(tmp_path: Path) -> None:
    writers = JsonLinesWriter(tmp_path / "metrics.jsonl", 0), TensorBoardWriter(tmp_path / "tensorboard", 0)
    for writer in writers:
        writer.write(EvaluationMetrics(0, 5.0, 100))
        with files_of_at_most(700):
            for number in (2, 4, 6):
                with contextlib.suppress(OSError):
                    writer.write(step(number))
            with pytest.raises(OSError, match="File too large"):
                writer.close()
        writer.write(step(8))
        writer.close()
    assert steps_of(tmp_path / "metrics.jsonl") == [0, 2, 4, 6, 8]
    assert [number for number, _ in scalars(tmp_path / "tensorboard")["train/loss"]] == [2, 4, 6, 8]


def test_an_outage_is_told_at_its_begin_and_its_end() -> None:
    outages = Outages()
    assert outages.ends("a") == 0
    assert [outages.begins("a"), outages.begins("a"), outages.begins("b")] == [True, False, True]
    assert outages.ends("a") == 2 and outages.ends("a") == 0
    assert outages.begins("a"), "another outage"
