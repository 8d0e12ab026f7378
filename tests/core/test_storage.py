"""Files on a disk, and on remote storage without folders and with transient errors."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from megascale.core import storage
from megascale.core.limits import os_error_hint
from megascale.core.storage import Location


class Flaky(MemoryFileSystem):
    """Storage whose next `failures` calls raise `error`."""

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
    """A folder that does not exist yet; the first two calls of flaky storage fail."""
    monkeypatch.setattr(storage, "PAUSES", (0.001, 0.001))
    monkeypatch.setattr(Flaky, "failures", 2)
    monkeypatch.setattr(Flaky, "error", OSError("the network is down"))
    if request.param == "chained::":  # no chain of file systems in a local path
        yield Location(str(tmp_path / "a::b" / "folder"))
        return
    yield Location(f"{request.param}{tmp_path / 'folder'}")


def test_files_are_read_as_written(place: Location) -> None:
    assert place.list_names() == [] and not place.exists() and not place.is_folder()
    place.make_folder()
    with pytest.raises(FileExistsError):
        place.make_folder()
    (place / "a").write(b"0123456789")
    (place / "b").write_chunks(lambda: iter([b"01", memoryview(b"234")]))
    assert place.list_names() == ["a", "b"] and place.is_folder() and place.name == "folder" and place.size() == 15
    assert (place / "a").read() == b"0123456789" and (place / "b").read() == b"01234"
    room = bytearray(4)
    assert (place / "a").read_into(memoryview(room), 3) == 4 and room == b"3456"
    assert (place / "a").read_into(memoryview(room), 8) == 2 and room[:2] == b"89"
    assert (place / "a").read_into(memoryview(room)[:0], 5) == 0
    (place / "a").write(b"new")
    assert (place / "a").read() == b"new"
    (place / "a").remove()
    (place / "a").remove()
    assert place.list_names() == ["b"]
    place.remove()
    assert not place.exists()


def test_a_missing_file_is_not_retried(place: Location) -> None:
    with pytest.raises(FileNotFoundError) as failed:
        (place / "none").read()
    assert failed.value.filename == f"{place}/none" and failed.value.errno == errno.ENOENT


def flaky(retry_s: float) -> Location:
    return Location("flaky://folder/file", retry_s)


def test_transient_errors_are_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PAUSES", (0.001, 0.002))
    begun = 0

    def parts() -> Iterator[bytes]:
        nonlocal begun
        begun += 1
        yield b"01"
        if begun < 3:
            raise ConnectionResetError(errno.ECONNRESET, "reset")
        yield b"23"

    flaky(5.0).write_chunks(parts)
    assert begun == 3 and flaky(5.0).read() == b"0123"
    monkeypatch.setattr(Flaky, "failures", 10**9)
    with pytest.raises(OSError, match="the network is down"):
        flaky(0.05).read()


def test_an_error_is_not_taken_for_a_missing_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PAUSES", (0.001, 0.002))
    flaky(1.0).write(b"here")
    monkeypatch.setattr(Flaky, "failures", 1)
    assert flaky(1.0).exists() and not Flaky.failures
    monkeypatch.setattr(Flaky, "failures", 10**9)
    for ask in (flaky(0.01).exists, flaky(0.01).is_folder, flaky(0.01).remove):
        with pytest.raises(OSError, match="the network is down"):
            ask()


class SlowDown(Exception):
    """Error class of an object store's own client."""


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
def test_only_transient_errors_are_retried(error: Exception, tried: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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


class NoCredentialsError(Exception):
    """As botocore's."""


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (ImportError("Please install gcsfs to access Google Storage"), "install that package on every host"),
        (NoCredentialsError("Unable to locate credentials"), "give this process credentials"),
        (ValueError("Protocol not known: foo"), "a URL of a file system that fsspec knows"),
        (SlowDown("please"), "the operation's own"),
        (ValueError("odd"), "the operation's own"),
        (OSError("no number"), "the operation's own"),
        (OSError(errno.EIO, "InternalError"), "the operation's own"),
    ],
    ids=str,
)
def test_an_error_of_remote_storage_has_its_own_hint(
    error: Exception, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flaky(1.0).write(b"here")
    monkeypatch.setattr(Flaky, "failures", 1)
    monkeypatch.setattr(Flaky, "error", error)
    seconds = 0.0 if hint == "the operation's own" else 60.0
    with pytest.raises(OSError, match=error.args[-1]) as failed:
        flaky(seconds).read()
    assert Flaky.failures == 0, "it is not tried again"
    assert os_error_hint(failed.value, "the operation's own").startswith(hint)


def test_an_unknown_file_system_is_named() -> None:
    with pytest.raises(OSError, match="nowhere") as failed:
        Location("nowhere://folder").list_names()
    assert "fsspec knows" in os_error_hint(failed.value, "")


def test_a_local_url_is_a_path(tmp_path: Path) -> None:
    assert Location(f"file://{tmp_path}").local_path == Location(f"local://{tmp_path}").local_path == tmp_path
    assert Location("s3://bucket/x").local_path is None


def test_a_failed_bulk_delete_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Flaky, "rm", lambda *_, **__: None)
    place = Location(f"flaky:/{tmp_path / 'kept'}", retry_s=0)
    place.write(b"0")
    with pytest.raises(OSError, match="it is still there"):
        place.remove()
