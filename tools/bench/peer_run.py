"""One run of a system: execution of its command, its output, and the load by other processes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import resource
import secrets
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
    """Median-step tokens/s and CPU seconds (all processes); RSS of the largest process in MiB; the loss of every step;
    `others`: machine share of other processes; torch's version; `difference`: largest error of the first losses.
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
    """A failed run, with the reason in one line."""

    why: str


Result = Measurement | Failure

TOLERANCE = 1e-4
"""Largest difference of losses on the same tokens and weights."""


MARK = "MEGASCALE_PEER_RUN"
"""Environment variable that marks every process of a run."""


def execute(command: Sequence[str], seconds: float, scratch: str) -> Result:
    """Run a command for at most `seconds`, and parse its output. All its processes have ended on return."""
    start, busy, children = time.monotonic(), busy_seconds(), children_seconds()
    out = output(command, seconds, scratch)
    if isinstance(out, Failure):
        return out
    load = (busy_seconds() - busy) - (children_seconds() - children)
    return read(out, max(0.0, load) / (time.monotonic() - start) / (os.cpu_count() or 1))


def output(command: Sequence[str], seconds: float, scratch: str) -> str | Failure:
    """Run a command for at most `seconds` and return its output. All its processes have ended on return."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    process = subprocess.Popen(
        command, env=environment(mark, scratch), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return Failure(f"not finished after {seconds:g} s")
    finally:
        end(mark)
        process.wait()
    if process.returncode < 0:  # the last line of output is not the reason
        why = ", perhaps out of memory" if -process.returncode == signal.SIGKILL else ""
        return Failure(f"killed by signal {-process.returncode}{why}")
    if process.returncode:
        return Failure(error_line(err) or f"exited with status {process.returncode}")
    return out


def environment(mark: str, scratch: str) -> dict[str, str]:
    """Return a run's environment: one thread per process, loopback, and temporary files in `scratch`."""
    ours = {
        MARK: mark, "TMPDIR": scratch, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR", "MEGASCALE_JOB_SECRET": secrets.token_hex(32),
    }  # fmt: skip
    placed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return {key: value for key, value in os.environ.items() if key not in placed} | ours


def end(mark: str) -> None:
    """Kill the remaining processes of a run, found by the mark in their environment: torchrun's workers have separate
    sessions and outlive a killed torchrun.
    """
    marked = f"{MARK}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # ended, or another user's
            if marked in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)


def read(out: str, load: float) -> Result:
    """Parse a run's output: a line per step, and a JSON object at the end."""
    out = re.sub(r"^\[host \d+\] ", "", out, flags=re.MULTILINE)  # prefix of a testbed's hosts
    objects = [line for line in out.splitlines() if line.startswith("{")]
    losses = [float(loss) for loss in re.findall(r"^step +\d+ +loss +(\S+)", out, re.MULTILINE)]
    if not objects or not losses:
        return Failure("printed no losses or no JSON object")
    summary = json.loads(objects[-1])
    cpu_ms = _either(summary, "cpu_ms_per_step", "cpu_ms_step_all_ranks")
    rss = _either(summary, "rss_mb_max", "max_rss_mb")
    return Measurement(summary["tokens_per_s"], cpu_ms / 1e3, rss, tuple(losses), load, summary["torch"])


def agree(result: Result, expected: Sequence[float]) -> Result:
    """Return the result, or a failure if its first losses differ from the expected losses."""
    if isinstance(result, Failure):
        return result
    pairs = list(zip(result.losses[: len(expected)], expected, strict=True))
    for step, (loss, reference) in enumerate(pairs, 1):
        if not abs(loss - reference) <= TOLERANCE:
            return Failure(f"not the same task: the loss of step {step} is {loss:.5f}, not {reference:.5f}")
    return replace(result, difference=max(abs(loss - reference) for loss, reference in pairs))


def error_line(err: str) -> str:
    """Return the first raised error without its rank prefix, or the last line."""
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line).rstrip() for line in err.splitlines()]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return raised[0] if raised else next((line for line in reversed(lines) if line), "")


def busy_seconds() -> float:
    """Return the CPU seconds of all processes of the machine since boot."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _, _, irq, softirq = map(int, file.readline().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def children_seconds() -> float:
    """Return the CPU seconds of this process's ended children."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _either(summary: dict[str, Any], *keys: str) -> float:
    """Return the first available of several names for the same figure."""
    return float(next(summary[key] for key in keys if key in summary))


def progress(line: str) -> None:
    """Print a line to stderr; stdout is for the tables."""
    print(line, file=sys.stderr, flush=True)
