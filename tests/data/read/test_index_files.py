"""Index files: built once by the processes that need them, and refused when they are anything else."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megascale.core.errors import DataError, Exit
from megascale.core.files import lock_to_build, temporary_path
from megascale.data.mix.mixture import Mixture
from megascale.data.read import index_builder, index_files
from megascale.data.read.checksum import CHECKSUM_BYTES, with_checksum
from megascale.data.read.epoch_index import EpochIndex, IndexShape
from megascale.data.read.index_files import IndexKey
from tests.data.datasets import ORIGIN, data_config, mixture_of, write_dataset, write_documents
from tests.runs import GPT, settings, write_config


@pytest.fixture(autouse=True)
def files_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a small index is a file."""
    monkeypatch.setattr(index_files, "MEMORY_ENTRIES", 0)


@pytest.fixture
def samples(tmp_path: Path) -> Mixture:
    """Three epochs of 37 samples."""
    write_dataset(tmp_path / "a", [30] * 10)
    return mixture_of(data_config(tmp_path, tmp_path / "a"), "train", 3 * 37)


def index_file(folder: Path, epoch: int = 0) -> Path:
    (path,) = (folder / "cache").glob(f"a-epoch{epoch}-*.index")
    return path


def read(samples: Mixture, start: int = 0, stop: int = 37) -> list[list[int]]:
    return [samples[index].tokens.tolist() for index in range(start, stop)]


def test_a_file_is_built_once_and_read_as_it_was_built(
    samples: Mixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read(samples)
    assert index_file(tmp_path).read_bytes()[:1] == b"{"
    assert not list((tmp_path / "cache").glob("*epoch2*")), "an epoch's index is built while the epoch before is read"
    monkeypatch.setattr(IndexShape, "build", lambda *arguments: pytest.fail("the index was built again"))
    config = data_config(tmp_path, tmp_path / "a")
    assert read(mixture_of(config)) == before
    monkeypatch.undo()
    assert read(mixture_of(config)) == before, "in memory"


def test_what_a_killed_builder_has_left_is_removed(samples: Mixture, tmp_path: Path) -> None:
    [dataset] = samples.datasets
    left = temporary_path(tmp_path / "cache" / dataset.index_key(0).file_name)
    left.parent.mkdir()
    left.write_bytes(b"half")
    os.utime(left, (1, 1))
    read(samples)
    assert not left.exists() and index_file(tmp_path).exists()


@pytest.mark.parametrize("change", [{"train__seed": 5}, {"model__seq_length": 7}, {"data__split": [0.5, 0.5]}])
def test_another_run_has_another_file(samples: Mixture, tmp_path: Path, change: dict[str, object]) -> None:
    read(samples)
    mixture_of(data_config(tmp_path, tmp_path / "a", **change))[0]
    assert len(list((tmp_path / "cache").glob("a-epoch0-*.index"))) == 2


def test_a_dataset_that_was_replaced_has_another_file(samples: Mixture, tmp_path: Path) -> None:
    read(samples)
    write_dataset(tmp_path / "a", [30] * 10, first=1000)
    assert min(map(min, read(mixture_of(data_config(tmp_path, tmp_path / "a"))))) >= 1000


class Poison:
    """An object whose pickle makes the file `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.path),)


def array_file(folder: Path) -> bytes:
    with open(folder / "poison.npy", "wb") as file:
        np.save(file, np.array([Poison(folder / "ran")], dtype=object), allow_pickle=True)
    return (folder / "poison.npy").read_bytes()


ATTACKS: dict[str, tuple[Callable[[bytes, Path], bytes], str]] = {
    "a pickle": (lambda data, folder: pickle.dumps(Poison(folder / "ran")), r"has \d+ bytes, not"),
    "an array of objects": (lambda data, folder: array_file(folder).ljust(len(data), b"\0"), "index of something else"),
    "cut short": (lambda data, _: data[:-1], r"has \d+ bytes, not"),
    "too long": (lambda data, _: data + bytes(64), r"has \d+ bytes, not"),
    "empty": (lambda data, _: b"", "has 0 bytes, not"),
    "zeros": (lambda data, _: bytes(len(data)), "index of something else"),
    "zeros in its arrays": (
        lambda data, _: data[:-400] + bytes(200) + data[-200:],
        "a content that its checksum does not",
    ),
    "another bit": (
        lambda data, _: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
        "a content that its checksum does not",
    ),
    "another epoch": (lambda data, _: data.replace(b'"epoch": 0', b'"epoch": 7', 1), "index of something else"),
    "another dataset": (lambda data, _: data.replace(b"/a", b"/b", 1), "index of something else"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_damaged_or_poisoned_index_is_one_line(attack: str, samples: Mixture, tmp_path: Path) -> None:
    read(samples)
    change, message = ATTACKS[attack]
    path = index_file(tmp_path)
    path.write_bytes(change(path.read_bytes(), tmp_path))
    with pytest.raises(DataError, match=rf"sample indices are damaged: \S+\.index .*{message}") as raised:
        read(mixture_of(data_config(tmp_path, tmp_path / "a")))
    assert "\n" not in str(raised.value) and raised.value.hint == "remove that file"
    assert not (tmp_path / "ran").exists(), "code of the file ran"


@pytest.mark.parametrize("array", ["documents", "starts", "order"])
@pytest.mark.parametrize("entry", [-1, 30_000])
def test_an_entry_out_of_range_is_an_error_of_its_sample(
    array: str, entry: int, samples: Mixture, tmp_path: Path
) -> None:
    read(samples)
    [dataset] = samples.datasets
    places, _ = index_files._layout(dataset.index_key(0))
    start, count, dtype = dict(zip(("documents", "starts", "order"), places, strict=True))[array]
    data = np.fromfile(index_file(tmp_path), dtype=np.uint8)
    data[start : start + count * np.dtype(dtype).itemsize].view(dtype)[-2:] = np.array(entry).astype(dtype)
    index_file(tmp_path).write_bytes(with_checksum(data[:-CHECKSUM_BYTES].tobytes()))  # forged
    message = rf"sample \d+ of \S+/a is not as its index {index_file(tmp_path)} says: "
    with pytest.raises(DataError, match=message) as raised:
        read(mixture_of(data_config(tmp_path, tmp_path / "a")))
    assert raised.value.hint.startswith("remove that file and start again; files of a dataset must stay as they are")


def test_an_index_is_checked_once_and_again_after_a_change(
    samples: Mixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Path] = []
    check_file = index_files.check_file

    def counted(path: Path, size: int) -> None:
        checked.append(path)
        check_file(path, size)

    monkeypatch.setattr(index_files, "check_file", counted)
    before = read(samples)
    assert checked == [index_file(tmp_path)]
    assert read(mixture_of(data_config(tmp_path, tmp_path / "a"))) == before and len(checked) == 1
    index_file(tmp_path).write_bytes(index_file(tmp_path).read_bytes())
    assert read(mixture_of(data_config(tmp_path, tmp_path / "a"))) == before and len(checked) == 2
    monkeypatch.setattr("megascale.core.files.lock_to_build", lambda path: (_ for _ in ()).throw(OSError("read-only")))
    for marker in (tmp_path / "cache").glob(".*.checked"):
        marker.unlink()
    assert read(mixture_of(data_config(tmp_path, tmp_path / "a"))) == before and len(checked) == 3


def test_a_pipe_in_place_of_an_index_does_not_block(samples: Mixture, tmp_path: Path) -> None:
    read(samples)
    path = index_file(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match="is not a regular file"):
        read(mixture_of(data_config(tmp_path, tmp_path / "a")))


def test_a_cache_that_cannot_be_written_is_refused(samples: Mixture, tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(DataError, match=r"indices of \S+ (B|KiB) cannot be kept in .*cache: .*  -> data\.cache = "):
        samples[0]


def test_a_full_disk_of_the_cache_names_both_ways_out(samples: Mixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, key: IndexKey, files: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(index_files, "write_index", full)
    with pytest.raises(DataError, match=r"free some space or inodes there, or data\.cache = another folder"):
        samples[0]


def test_a_folder_that_cannot_be_written_serves_what_is_in_it(
    samples: Mixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read(samples)
    monkeypatch.setattr("megascale.core.files.lock_to_build", lambda path: pytest.fail("a lock is written"))
    assert read(mixture_of(data_config(tmp_path, tmp_path / "a"))) == before


BUILDER = """
import sys
from pathlib import Path
from megascale.core.files import build_once, write_text
def build():
    with open(sys.argv[2], "a") as file:
        file.write("built\\n")
    write_text(path, "index")
path = Path(sys.argv[1])
build_once(path, build)
assert path.read_text() == "index"
"""


def test_of_many_processes_one_builds(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BUILDER, str(tmp_path / "index"), str(tmp_path / "log")]
    processes = [subprocess.Popen(command) for _ in range(5)]
    assert [process.wait() for process in processes] == [0] * 5
    assert (tmp_path / "log").read_text() == "built\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index", "log"]


def test_another_builds_if_the_builder_is_killed(tmp_path: Path) -> None:
    hung = BUILDER.replace("write_text(path", "import time; time.sleep(600)\n    write_text(path")
    arguments = [str(tmp_path / "index"), str(tmp_path / "log")]
    first = subprocess.Popen([sys.executable, "-c", hung, *arguments])
    while not ((log := tmp_path / "log").exists() and log.read_text() == "built\n"):
        time.sleep(0.01)
    second = subprocess.Popen([sys.executable, "-c", BUILDER, *arguments])
    first.kill()
    first.wait()
    assert second.wait() == 0
    assert log.read_text() == "built\nbuilt\n"


def test_the_next_epoch_is_built_in_the_background(samples: Mixture, tmp_path: Path) -> None:
    read(samples)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "cache").glob("a-epoch1-*.index")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    [dataset] = samples.datasets
    assert index_file(tmp_path, 1).read_bytes().startswith(dataset.index_key(1).header)
    assert not list((tmp_path / "cache").glob("*epoch2*"))
    third = read(samples, 74, 111)
    assert not list((tmp_path / "cache").glob("*epoch3*")), "the run ends with the third epoch"
    assert third != read(samples)


def test_no_second_process_builds_what_one_builds(
    samples: Mixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [dataset] = samples.datasets
    key, started = dataset.index_key(1), []
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **options: started.append(arguments))
    with lock_to_build(tmp_path / "cache" / key.file_name) or pytest.fail("locked"):
        index_builder.build_in_background(tmp_path / "cache", key)
    assert started == []
    index_builder.build_in_background(tmp_path / "cache", key)
    assert len(started) == 1


def test_a_key_s_file_differs_in_every_part(samples: Mixture) -> None:
    [dataset] = samples.datasets
    key = dataset.index_key(0)
    others = [replace(key, epoch=1), replace(key, seed=1), replace(key, shape=replace(key.shape, last=9))]
    others.append(IndexKey({**key.dataset, "version": "later"}, key.epoch, key.seed, key.shape))
    assert len({key.file_name, *(other.file_name for other in others)}) == 5


def test_what_is_built_in_memory_is_what_is_built_as_a_file(samples: Mixture, tmp_path: Path) -> None:
    [dataset] = samples.datasets
    files, key = index_files.open_dataset_of(dataset.index_key(0), tmp_path), dataset.index_key(0)
    built: EpochIndex = index_files._build(key, files)
    mapped = index_files.open_index(tmp_path / "cache", key, files)
    for name in ("documents", "starts", "order"):
        assert (getattr(built, name) == getattr(mapped, name)).all()


@pytest.mark.slow
def test_a_job_with_a_poisoned_index_ends_with_status_3(tmp_path: Path) -> None:
    write_documents(tmp_path / "a", [np.zeros(2, dtype=np.int32)] * 70_000, ORIGIN, 101)
    model = GPT | {"seq_length": 16}
    data = {"data__mock": False, "data__train": str(tmp_path / "a"), "data__split": [1.0, 0.0]}
    config = write_config(settings(model, tmp_path / "runs", **data, train__steps=3), tmp_path / "config.toml")
    command = [sys.executable, "-m", "megascale", "train", str(config)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == Exit.OK
    index_file(tmp_path).write_bytes(pickle.dumps(Poison(tmp_path / "ran")))
    result = subprocess.run([*command, "name=again"], capture_output=True, text=True, check=False)
    assert result.returncode == Exit.DATA, result.stderr
    assert "are damaged" in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "ran").exists()
