"""Limits of this process, raised and named in errors."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from megascale.core import limits


def in_process(code: str, soft: int, hard: int) -> str:
    """Run code in a process with these limits of open files."""
    set_limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))  # noqa: E731
    command = [sys.executable, "-c", f"from megascale.core.limits import *\n{code}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, preexec_fn=set_limit).stdout.strip()


@pytest.mark.parametrize(("wanted", "soft"), [(100, 200), (300, 300), (900, 500)])
def test_the_soft_limit_is_raised_up_to_the_hard_limit(wanted: int, soft: int) -> None:
    assert in_process(f"raise_soft_limits({wanted}); print(open_file_limits())", 200, 500) == f"({soft}, 500)"


def test_a_child_inherits_the_raised_limit() -> None:
    code = "import os; raise_soft_limits(300); os.execvp('sh', ['sh', '-c', 'ulimit -n'])"
    assert in_process(code, 200, 500) == "300"


def test_limits_of_the_kernel_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits.memory_map_limit() == int(Path("/proc/sys/vm/max_map_count").read_text())
    monkeypatch.setattr(limits, "MAX_MAP_COUNT", tmp_path / "none")
    assert limits.memory_map_limit() == sys.maxsize


HINTS = [(errno.EMFILE, "ulimit -n"), (errno.ENFILE, "fs.file-max"), (errno.ENOMEM, "vm.max_map_count"),
         (errno.EAGAIN, "ulimit -u"), (errno.ENOSPC, "inodes"), (errno.EDQUOT, "quota"), (errno.EROFS, "read-only"),
         (errno.EACCES, "permissions"), (errno.EFBIG, "ulimit -f")]  # fmt: skip


@pytest.mark.parametrize(("number", "text"), HINTS)
def test_an_error_at_a_limit_has_its_own_hint(number: int, text: str) -> None:
    error = OSError(number, os.strerror(number))
    assert text in limits.os_error_hint(error, "another folder")
    assert sum(text in limits.os_error_hint(OSError(other, ""), "") for other, _ in HINTS) == 1


def test_other_errors_keep_the_hint_of_their_operation() -> None:
    assert limits.os_error_hint(FileExistsError(errno.EEXIST, "File exists"), "another folder") == "another folder"
    assert limits.os_error_hint(OSError("no number"), "another folder") == "another folder"
