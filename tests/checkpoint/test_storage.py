"""Files on a disk, and on storage that has no folders, is far away, and fails for a while."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from megascale.checkpoint import storage
from megascale.checkpoint.storage import Location


class Flaky(MemoryFileSystem):
    """Fails as often as `failures` says, with the `error`."""

    protocol = "flaky"
    store: dict = {}
    pseudo_dirs = [""]
    failures = 0
    error: Exception = OSError("the network is down")

    def _fail(self) -> None:
        if Flaky.failures:
            Flaky.failures -= 1
            raise Flaky.error

    def _open(self, *args: Any, **kwargs: Any) -> Any:
        self._fail()
        return super()._open(*args, **kwargs)

    def cat_file(self, *args: Any, **kwargs: Any) -> Any:
        self._fail()
        return super().cat_file(*args, **kwargs)

    def info(self, *args: Any, **kwargs: Any) -> Any:
        self._fail()
        return super().info(*args, **kwargs)

    def ls(self, *args: Any, **kwargs: Any) -> Any:
        self._fail()
        return super().ls(*args, **kwargs)


fsspec.register_implementation("flaky", Flaky, clobber=True)


@pytest.fixture(params=["", "file://", "chained::", "memory:/", "flaky:/"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Location]:
    """A folder that is not there yet; of flaky storage every third call fails."""
    monkeypatch.setattr(storage, "PAUSES", (0.001, 0.001))
    monkeypatch.setattr(Flaky, "failures", 2)
    monkeypatch.setattr(Flaky, "error", OSError("the network is down"))
    if request.param == "chained::":  # in a local path it means nothing
        yield Location(str(tmp_path / "a::b" / "folder"))
        return
    yield Location(f"{request.param}{tmp_path / 'folder'}")


def test_what_is_written_is_read(place: Location) -> None:
    assert place.names() == [] and not place.exists() and not place.is_folder()
    place.make()
    with pytest.raises(FileExistsError):
        place.make()
    (place / "a").write(b"0123456789")
    (place / "b").write_parts(lambda: iter([b"01", memoryview(b"234")]))
    assert place.names() == ["a", "b"] and place.is_folder() and place.name == "folder" and place.size() == 15
    assert (place / "a").read() == b"0123456789" and (place / "b").read() == b"01234"
    room = bytearray(4)
    assert (place / "a").read_into(memoryview(room), 3) == 4 and room == b"3456"
    assert (place / "a").read_into(memoryview(room), 8) == 2 and room[:2] == b"89"
    assert (place / "a").read_into(memoryview(room)[:0], 5) == 0
    (place / "a").write(b"new")
    assert (place / "a").read() == b"new"
    (place / "a").remove()
    (place / "a").remove()
    assert place.names() == ["b"]
    place.remove()
    assert not place.exists()


def test_what_is_missing_is_said_at_once(place: Location) -> None:
    with pytest.raises(FileNotFoundError) as failed:
        (place / "none").read()
    assert failed.value.filename == f"{place}/none" and failed.value.errno == errno.ENOENT


def flaky(patience: float) -> Location:
    return Location("flaky://folder/file", patience)


def test_what_fails_for_a_while_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PAUSES", (0.001, 0.002))
    begun = 0

    def parts() -> Iterator[bytes]:
        nonlocal begun
        begun += 1
        yield b"01"
        if begun < 3:
            raise ConnectionResetError(errno.ECONNRESET, "reset")
        yield b"23"

    flaky(5.0).write_parts(parts)
    assert begun == 3 and flaky(5.0).read() == b"0123"
    monkeypatch.setattr(Flaky, "failures", 10**9)
    with pytest.raises(OSError, match="the network is down"):
        flaky(0.05).read()


def test_what_cannot_be_asked_for_is_not_taken_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PAUSES", (0.001, 0.002))
    flaky(1.0).write(b"here")
    monkeypatch.setattr(Flaky, "failures", 1)
    assert flaky(1.0).exists() and not Flaky.failures
    monkeypatch.setattr(Flaky, "failures", 10**9)
    for ask in (flaky(0.01).exists, flaky(0.01).is_folder, flaky(0.01).remove):
        with pytest.raises(OSError, match="the network is down"):
            ask()


class SlowDown(Exception):
    """As an object store's own library says it."""


@pytest.mark.parametrize(
    ("error", "tried"),
    [
        (SlowDown("please"), True),
        (TimeoutError(errno.ETIMEDOUT, "timed out"), True),
        (KeyError("Body"), True),
        (AttributeError("the session is closed"), True),
        (TypeError("no length"), True),
        (OSError(errno.EINVAL, "BadDigest"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (PermissionError("denied"), False),
    ],
    ids=str,
)
def test_only_what_may_pass_is_tried_again(error: Exception, tried: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PAUSES", (0.001, 0.002))
    flaky(1.0).write(b"here")
    monkeypatch.setattr(Flaky, "failures", 1)
    monkeypatch.setattr(Flaky, "error", error)
    if tried:
        assert flaky(1.0).read() == b"here"
        return
    with pytest.raises(OSError, match=r"No space|denied") as failed:
        flaky(1.0).read()
    assert failed.value.filename == "flaky://folder/file" and Flaky.failures == 0


def test_a_file_system_that_is_not_there_is_named() -> None:
    with pytest.raises(OSError, match="nowhere"):
        Location("nowhere://folder").names()


def test_a_url_of_this_host_is_a_path(tmp_path: Path) -> None:
    assert Location(f"file://{tmp_path}").local == Location(f"local://{tmp_path}").local == tmp_path
    assert Location("s3://bucket/x").local is None


def test_what_storage_does_not_delete_is_no_success(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Flaky, "rm", lambda *_, **__: None)
    place = Location(f"flaky:/{tmp_path / 'kept'}", patience=0)
    place.write(b"0")
    with pytest.raises(OSError, match="it is still there"):
        place.remove()
