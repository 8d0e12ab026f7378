"""One run of a system: its command, what it printed, and how busy others kept the machine meanwhile."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Measurement:
    """tokens/s and CPU seconds of all processes, both of the median step; the largest process in MiB; the loss of each
    step; the share of the machine that other processes used; torch's version; and by how much the first losses differ
    from what they should be.
    """

    tokens_per_s: float
    cpu_s: float
    rss_mib: float
    losses: tuple[float, ...]
    others: float
    torch: str
    difference: float = math.nan


@dataclass(frozen=True)
class Failure:
    """A run that came to nothing: why, in a line."""

    why: str


Result = Measurement | Failure

TOLERANCE = 1e-4
"""By how much losses of the same tokens and weights may differ."""


MARK = "MEGASCALE_PEER_RUN"
"""In the environment of every process of a run."""


def execute(command: Sequence[str], seconds: float, scratch: str) -> Result:
    """Run a command, for at most `seconds`. Nothing of it is left when this returns."""
    start, busy, own = time.monotonic(), busy_seconds(), children_seconds()
    out = output(command, seconds, scratch)
    if isinstance(out, Failure):
        return out
    others = (busy_seconds() - busy) - (children_seconds() - own)
    return read(out, max(0.0, others) / (time.monotonic() - start) / (os.cpu_count() or 1))


def output(command: Sequence[str], seconds: float, scratch: str) -> str | Failure:
    """What a command prints in at most `seconds`. Nothing of it is left when this returns."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    process = subprocess.Popen(
        command, env=environment(mark, scratch), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return Failure(f"was not done after {seconds:g} s")
    finally:
        end(mark)
        process.wait()
    if process.returncode < 0:  # the last thing that it said is not why
        why = ", as where memory is full" if -process.returncode == signal.SIGKILL else ""
        return Failure(f"was ended by signal {-process.returncode}{why}")
    if process.returncode:
        return Failure(error_line(err) or f"ended with status {process.returncode}")
    return out


def environment(mark: str, scratch: str) -> dict[str, str]:
    """A run's environment: one thread a process, loopback, and temporary files in `scratch`."""
    ours = {
        MARK: mark, "TMPDIR": scratch, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }  # fmt: skip
    placed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return {key: value for key, value in os.environ.items() if key not in placed} | ours


def end(mark: str) -> None:
    """Kill what is left of a run. Its processes are known by their environment: torchrun's workers have sessions of
    their own, and outlive it when it is killed.
    """
    wanted = f"{MARK}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # ended, or another user's
            if wanted in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)


def read(out: str, others: float) -> Result:
    """A run from what it printed: a line a step, and a JSON object at the end."""
    out = re.sub(r"^\[host \d+\] ", "", out, flags=re.MULTILINE)  # in front of what the hosts of a testbed print
    objects = [line for line in out.splitlines() if line.startswith("{")]
    losses = [float(loss) for loss in re.findall(r"^step +\d+ +loss +(\S+)", out, re.MULTILINE)]
    if not objects or not losses:
        return Failure("printed no losses or no JSON object")
    summary = json.loads(objects[-1])
    cpu_ms = _either(summary, "cpu_ms_per_step", "cpu_ms_step_all_ranks")
    rss = _either(summary, "rss_mb_max", "max_rss_mb")
    return Measurement(summary["tokens_per_s"], cpu_ms / 1e3, rss, tuple(losses), others, summary["torch"])


def agree(result: Result, expected: Sequence[float]) -> Result:
    """The result, or a failure if its first losses are not those of the same tokens and weights."""
    if isinstance(result, Failure):
        return result
    pairs = list(zip(result.losses[: len(expected)], expected, strict=True))
    for step, (found, wanted) in enumerate(pairs, 1):
        if not abs(found - wanted) <= TOLERANCE:
            return Failure(f"not the same task: the loss of step {step} is {found:.5f}, not {wanted:.5f}")
    return replace(result, difference=max(abs(found - wanted) for found, wanted in pairs))


def error_line(err: str) -> str:
    """The first error that was raised, without the rank in front; else the last line."""
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line).rstrip() for line in err.splitlines()]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return raised[0] if raised else next((line for line in reversed(lines) if line), "")


def busy_seconds() -> float:
    """CPU seconds that the whole machine has worked, for anyone."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _, _, irq, softirq = map(int, file.readline().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def children_seconds() -> float:
    """CPU seconds of this process's children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _either(summary: dict[str, Any], *keys: str) -> float:
    """The scripts name the same figure differently."""
    return float(next(summary[key] for key in keys if key in summary))


def progress(line: str) -> None:
    """A line on stderr: stdout is for the tables."""
    print(line, file=sys.stderr, flush=True)
