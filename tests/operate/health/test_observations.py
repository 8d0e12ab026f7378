"""Observations in a rank's output, and kills when memory ran out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megascale.operate.health.observations import MAX_LINE_CHARACTERS, OBSERVATIONS, OomKills, observe, read_tail

LINES = {
    "cuda_oom": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of",
    "host_oom": "RuntimeError: [enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory",
    "linux_oom_kill": "kernel: Out of memory: Killed process 71 (python) total-vm:1kB",
    "gpu_ecc": "NVRM: Xid (PCI:0000:3b:00): 48, pid=71, name=python, DBE (double bit error)",
    "gpu_lost": "NVRM: Xid (PCI:0000:3b:00): 79, pid=71, GPU has fallen off the bus.",
    "gpu_hardware_fault": "RuntimeError: CUDA error: unspecified launch failure",
    "gpu_illegal_access": "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    "cuda_assert": "RuntimeError: CUDA error: device-side assert triggered",
    "cuda_error": "RuntimeError: CUDA error: invalid device ordinal",
    "nccl_watchdog": "[rank3]:[E] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)",
    "nccl_network": "NCCL WARN NET/IB : Got completion from peer 10.0.0.2 with status=12 error",
    "nccl_cascade": "ncclRemoteError: A call failed possibly due to a network error.",
    "peer_lost": "RuntimeError: [pair.cc:553] Read error [10.0.0.1]:4711: Connection reset by peer",
    "collective_timeout": "RuntimeError: [unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation",
    "gloo_mismatch": "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
    "disk_full": "OSError: [Errno 28] No space left on device: '/data/ckpt'",
    "io_error": "OSError: [Errno 5] Input/output error",
    "storage_error": "OSError: [Errno 107] Transport endpoint is not connected: '/mnt/data'",
    "disk_failure": "kernel: blk_update_request: I/O error, dev nvme0n1, sector 71",
    "bus_error": "Fatal Python error: Bus error",
    "segmentation_fault": "Fatal Python error: Segmentation fault",
    "native_abort": "terminate called after throwing an instance of 'std::runtime_error'",
    "not_finite": "megascale.core.errors.DivergenceError: step 7: the loss is not finite",
    "too_many_files": "OSError: [Errno 24] Too many open files",
    "no_thread": "RuntimeError: can't start new thread",
    "import_failed": "ModuleNotFoundError: No module named 'apex'",
}


def test_every_observation_has_a_line_that_shows_it() -> None:
    assert list(OBSERVATIONS) == list(LINES)
    for name, line in LINES.items():
        assert name in observe([line]), line


@pytest.mark.parametrize(
    "line",
    [
        "step 48 loss 2.79 grad norm 0.61 tokens/s 13,000",
        "NVRM: Xid (PCI:0000:48:00): 32, pid=71",
        "INFO NCCL version 2.27.3+cuda12.9",
        "reading /data/corpus-79.bin",
    ],
)
def test_ordinary_lines_show_nothing(line: str) -> None:
    assert observe([line]) == ()


def test_the_last_error_of_python_is_named() -> None:
    lines = [
        "Traceback (most recent call last):",
        "KeyError: 'x'",
        "During handling",
        "my.package.FooError: bad",
        "end",
    ]
    assert observe(lines) == ("python:FooError",)
    assert observe(["megascale.core.errors.DataError: no"]) == ("python:DataError",)


def test_the_tail_of_a_log_is_bounded(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"first\n" + b"x" * 300_000 + b"\n\xff\xfelast\n")
    lines = read_tail(log)
    assert lines[-1].endswith("last")
    assert max(map(len, lines)) == MAX_LINE_CHARACTERS
    assert "first" not in lines
    assert read_tail(tmp_path / "absent") == []


GROUPS = {
    2: ("0::/job/rank", "job/rank/memory.events", "low 0\nhigh 0\noom 1\noom_kill {}\n"),
    1: ("7:cpu:/\n4:memory:/job/rank", "memory/job/rank/memory.oom_control", "oom_kill_disable 0\noom_kill {}\n"),
}


@pytest.mark.parametrize("version", GROUPS)
def test_a_kill_for_memory_is_counted_in_the_group_of_the_process(version: int, tmp_path: Path) -> None:
    """Also after the process has gone, and not before it joined the group."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    text, name, content = GROUPS[version]
    (proc / "71").mkdir(parents=True)
    (proc / "71" / "cgroup").write_text(text.replace("/rank", ""))
    (proc / "vmstat").write_text("pgfault 7\noom_kill 3\n")
    kills = OomKills(71, proc, cgroups)
    assert (kills.count, kills.have_risen()) == (3, False)
    group = cgroups / name
    group.parent.mkdir(parents=True)
    group.write_text(content.format(5))
    (proc / "71" / "cgroup").write_text(text)
    kills.follow()
    assert not kills.have_risen()
    (proc / "71" / "cgroup").unlink()
    kills.follow()
    group.write_text(content.format(6))
    assert kills.have_risen()


def test_the_kernel_s_own_files_are_understood() -> None:
    kills = OomKills(1)
    assert re.fullmatch(r"\d+", str(kills.count))
    assert not kills.have_risen()
