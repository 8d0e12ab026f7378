"""Atomic files and folders, file locks, and what is at a path."""

from __future__ import annotations

import ast
import errno
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import megascale
from megascale.core import files
from megascale.core.errors import Exit
from megascale.core.files import (
    PathError,
    absolute_path,
    atomic_file,
    atomic_folder,
    build_once,
    exists,
    fingerprint,
    is_file,
    is_folder,
    lock_folder,
    remove_leftovers,
    temporary_path,
    why_unreadable,
    write_text,
)


def test_a_write_replaces_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("a longer old text")
    write_text(path, "näw")
    assert path.read_bytes() == "näw".encode()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(error), atomic_file(path) as file:
        file.write(b"half of the new")
        raise error
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_writers_with_the_same_process_id_do_not_share_a_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with atomic_file(path) as first:
        first.write(b"half ")
        with atomic_file(path) as second:
            second.write(b"another")
        assert path.read_bytes() == b"another"
        first.write(b"whole")
    assert path.read_bytes() == b"half whole" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError, match="Directory not empty"), atomic_folder(tmp_path / "folder") as first_folder:
        (first_folder / "a").touch()
        with atomic_folder(tmp_path / "folder") as second_folder:
            (second_folder / "b").touch()
    assert sorted(found.name for found in tmp_path.rglob("*")) == ["b", "file", "folder"]


def test_of_builders_without_locks_one_may_fail_when_the_file_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(file: object, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(files.fcntl, "flock", no_locks)
    path, built = tmp_path / "file", list[str]()

    def build(other_succeeds: bool) -> None:
        built.append("here")
        if other_succeeds:
            build_once(path, lambda: write_text(path, "content"))  # of a process that did not wait
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left"):
        build_once(path, lambda: build(False))
    build_once(path, lambda: build(True))
    assert built == ["here", "here"] and path.read_text() == "content"


def test_temporary_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "a[1]"
    old, new, other = temporary_path(path), temporary_path(path), temporary_path(tmp_path / "a1")
    for found in (old, new, other):
        found.touch()
    for found in (old, other):
        os.utime(found, (1, 1))
    remove_leftovers(path)
    assert {*tmp_path.iterdir()} == {new, other}


def test_a_symbolic_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    path = tmp_path / "link"
    path.symlink_to("far/file")
    for text in ("new", "newer"):
        write_text(path, text)
        assert path.is_symlink() and (tmp_path / "far" / "file").read_text() == text
    assert sorted(entry.name for entry in tmp_path.rglob("*")) == ["far", "file", "link"]


def test_a_device_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="Not a regular file"):
        write_text(pipe, "new")
    assert pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]


def test_the_path_appears_at_the_end_of_the_block(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with atomic_file(path, "w") as file:
        file.write("new")
        file.flush()
        assert not path.exists()
    assert path.read_text() == "new"


def test_a_file_is_flushed_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = tmp_path / "file", []
    monkeypatch.setattr(os, "fsync", lambda handle: seen.append(path.exists()))
    write_text(path, "new")
    assert seen == [False, True]  # the file before the rename, the folder after it


def test_a_fingerprint_is_of_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a\r\nb")
    assert fingerprint(path) == hashlib.sha256(b"a\r\nb").hexdigest()


def test_an_unknown_home_folder_is_an_ordinary_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert absolute_path("~/a") == Path("/home/me/a") and absolute_path("a") == tmp_path / "a"
    assert absolute_path("~no-such-user/a") == tmp_path / "~no-such-user" / "a"


def test_readable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert why_unreadable(tmp_path / "file") == ""
    for absent in (tmp_path / "none", tmp_path / "file" / "below", "nul\0"):
        assert why_unreadable(absent) == f"there is no file {absent}"
    (tmp_path / "pointer").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 9\n")
    why = f"{tmp_path}/pointer is a git-lfs pointer, not the file itself: `git lfs pull` fetches it"
    assert why_unreadable(tmp_path / "pointer") == why
    assert why_unreadable(tmp_path) == f"{tmp_path} is not a regular file"
    long = tmp_path / ("x" * 5000)
    assert why_unreadable(long) == f"{long} cannot be read: File name too long"


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """A file in a folder that this user may not search."""
    folder = tmp_path / "closed"
    folder.mkdir()
    (folder / "file").touch()
    folder.chmod(0)
    user = os.geteuid()
    try:
        if user == 0:  # root reads everything, so become another user
            os.seteuid(65534)
        yield folder / "file"
    finally:
        os.seteuid(user)
        folder.chmod(0o700)


def check_not_looked_up(path: Path, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    for ask in (exists, is_file, is_folder):
        with pytest.raises(PathError, match=f"^{path} cannot be looked up: {reason}  -> ") as caught:
            ask(path)
        assert isinstance(caught.value, OSError) and caught.value.filename == str(path)
        assert caught.value.exit_status == Exit.CONFIG, "a restart finds the same"
        assert not ask(path, optional=True)
    assert capsys.readouterr().err == (
        f"WARNING: {path} cannot be looked up: {reason}; this process goes on without it\n"
    ), "once"
    assert why_unreadable(path) == f"{path} cannot be read: {reason}"


def test_a_path_that_cannot_be_looked_up_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """pathlib raises, or from Python 3.14 on says False."""
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    check_not_looked_up(loop, "Too many levels of symbolic links", capsys)
    check_not_looked_up(tmp_path / ("x" * 300), "File name too long", capsys)


def test_a_file_in_a_closed_folder_is_one_line(closed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_not_looked_up(closed, "Permission denied", capsys)


def test_a_lost_network_file_may_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(path: Path) -> None:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr(Path, "stat", lost)
    with pytest.raises(PathError, match="Stale file handle  -> the network file system has lost the file") as caught:
        exists(tmp_path)
    assert caught.value.exit_status == Exit.UNCLASSIFIED


def test_the_package_asks_the_file_system_here_alone() -> None:
    """`exists`, `is_file` and `is_dir` of pathlib and os.path raise any error, or hide it."""
    questions = {"is_file", "is_dir", "isfile", "isdir"}
    package = Path(megascale.__file__).parent
    found = []
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if (name := node.func.attr) not in {*questions, "exists"}:
                continue
            owner = ast.unparse(node.func.value)
            if name in questions or owner not in LOCATIONS.get(file.name, ()):
                found.append(f"{file.relative_to(package)}:{node.lineno} {owner}.{name}")
    assert not found, "ask exists, is_file or is_folder of core.files"


LOCATIONS = {
    "storage.py": ("self",),
    "companions.py": ("source / manifest.NAME", "source / name"),
    "folders.py": ("folder / name / manifest.NAME", "path / manifest.NAME"),
    "ckpt.py": ("folder / manifest.NAME",),
    "tokenizer_files.py": ("path", "source / manifest.NAME"),
    "query.py": ("given",),
    "reading.py": ("file",),
}
"""Owners of `exists`, by file, that are a Location, which raises a PathError."""


def test_a_lock_is_held_until_the_file_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    first = lock_folder(folder, "process 1 on here")
    with pytest.raises(BlockingIOError, match="process 1 on here"):
        lock_folder(folder, "process 2 on here")
    first.close()
    with lock_folder(folder, "process 2 on here"), pytest.raises(BlockingIOError, match="process 2 on here"):
        lock_folder(folder, "process 3 on here")


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    code = "from pathlib import Path; import megascale.core.files as files; "
    code += f"f = files.lock_folder(Path({str(tmp_path)!r}), 'x'); "
    held = "import os, signal; print('held', flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", code + held], stdout=-1) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(BlockingIOError):
            lock_folder(tmp_path, "me")
        holder.kill()
    lock_folder(tmp_path, "me").close()


def test_a_folder_that_cannot_be_created_is_not_locked(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Not a directory"):
        lock_folder(tmp_path / "file" / "run", "me")
