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
from megascale.core.process import usable_cores


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


def process_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, mounts: list[str], **files: str) -> None:
    """Let this process be in control groups. `files`: content by path below `tmp_path`, with __ for a slash."""
    for name, text in files.items():
        path = tmp_path / "fs" / name.replace("__", "/").replace("_max", ".max").replace("cfs_", "cpu.cfs_")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "cgroup").write_text(group)
    (tmp_path / "mountinfo").write_text("".join(f"31 23 0:28 {mount}\n" for mount in mounts))
    monkeypatch.setattr(limits, "PROCESS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)))


def test_the_quota_of_a_group_or_of_one_above_limits_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = [f"/ {tmp_path}/fs rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"]
    files = {"a__b__cpu_max": "max 100000", "a__cpu_max": "350000 100000"}
    process_in(tmp_path, monkeypatch, "0::/a/b\n", mounts, **files)
    assert limits.cpu_quota() == 3.5 and usable_cores() == 3
    (tmp_path / "fs/a/b/cpu.max").write_text("50000 100000\n")
    assert limits.cpu_quota() == 0.5 and usable_cores() == 1
    (tmp_path / "fs/a/cpu.max").unlink()
    (tmp_path / "fs/a/b/cpu.max").write_text("max 100000\n")
    assert usable_cores() == 32, "no quota"


@pytest.mark.parametrize("root", ["/docker/f00", "/"])
def test_the_quota_of_version_1_in_a_container(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The container sees its own group as the mount, with or without a name space of its own."""
    inside = "/docker/f00" if root != "/" else "/"
    group = f"5:memory:{inside}\n4:cpu,cpuacct:{inside}\n1:name=systemd:/\n"
    mounts = [
        f"{root} {tmp_path}/fs/cpu ro - cgroup cgroup rw,cpu,cpuacct",
        f"{root} {tmp_path}/fs/memory ro - cgroup cgroup rw,memory",
        f"/ {tmp_path}/fs/else rw - ext4 /dev/sda rw",
    ]
    process_in(tmp_path, monkeypatch, group, mounts, cpu__cfs_quota_us="100000", cpu__cfs_period_us="100000")
    assert usable_cores() == 1
    (tmp_path / "fs/cpu/cpu.cfs_quota_us").write_text("-1\n")
    assert usable_cores() == 32


def test_a_group_outside_the_name_space_is_the_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = [f"/ {tmp_path}/fs rw - cgroup2 none rw"]
    process_in(tmp_path, monkeypatch, "0::/../other\n", mounts, cpu_max="200000 100000")
    assert usable_cores() == 2


def test_the_memory_of_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megascale.device import detect_device

    mounts = [f"/ {tmp_path}/fs rw - cgroup2 cgroup2 rw"]
    process_in(tmp_path, monkeypatch, "0::/a/b\n", mounts, a__b__memory_max="max", a__memory_max=str(8 << 20))
    for group, used in (("a/b", 2 << 20), ("a", 5 << 20)):
        (tmp_path / f"fs/{group}/memory.current").write_text(f"{used}\n")
    (tmp_path / "fs/a/memory.stat").write_text(f"anon 1\ninactive_file {1 << 20}\nactive_file 7\n")
    assert limits.memory_limits() == (8 << 20, 4 << 20)
    device = detect_device(allow_gpu=False)
    assert (device.total_memory(), device.free_memory()) == (8 << 20, 4 << 20)
    monkeypatch.setattr(limits, "PROCESS", tmp_path / "none")
    assert limits.memory_limits() == (sys.maxsize, sys.maxsize) and usable_cores() == 32
