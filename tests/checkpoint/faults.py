"""Faults for running jobs and their checkpoints, observed through /proc and the folders alone."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from megascale.core.errors import Exit
from tests.jobs import SECONDS, Job, job_config, lives
from tests.runs import GPT

SIZES = GPT | {"num_layers": 2, "hidden_size": 128, "vocab_size": 1009, "dropout": 0.1}
"""6 MB of state: a save takes some steps."""

RUN: dict[str, Any] = {
    "train__steps": 100000,
    "train__precision": "bf16",
    "batch__global": 2,
    "optimizer__lr": 1e-3,
    "optimizer__decay": "constant",  # so that a run of fewer steps is the beginning of one of more
    "checkpoint__every": 4,
}


def config_in(folder: Path, **overrides: Any) -> Path:
    """Write the configuration file of a run whose folder is beside it."""
    return job_config(folder, SIZES, **RUN | overrides)


def poll(job: Job, condition: Callable[[], bool]) -> None:
    """Poll a condition while a job runs."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert job.process.poll() is None, job.end()
        if time.monotonic() > deadline:
            job.kill()
            raise AssertionError("the condition never became true")
        time.sleep(0.001)


# ---- checkpoints on disk


def complete(folder: Path) -> list[str]:
    """Names of the checkpoints with a manifest, oldest first."""
    return sorted(name for name in _names(folder) if (folder / name / "manifest.json").exists())


def in_progress(folder: Path) -> str:
    """Name of the checkpoint in progress, or "". A folder older than a complete one is being removed, not written."""
    names = _names(folder)
    done = complete(folder)
    return next((name for name in names if name not in done and (not done or name > done[-1])), "")


def step_of(name: str) -> int:
    """The step of a checkpoint's folder."""
    return int(name.removeprefix("step-").partition(".")[0])


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("step-*")]


# ---- processes


def writers(ranks: dict[int, int]) -> dict[int, int]:
    """Writer process ids by rank."""
    pids = {}
    for rank, pid in ranks.items():
        for child in _children(pid):
            if b"megascale.checkpoint.save.writer" in _command(child):
                pids[rank] = child
    return pids


def _children(pid: int) -> Iterator[int]:
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            yield from map(int, path.read_text().split())
        except OSError:
            continue


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


# ---- kills


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


LOST = r"^WARNING: no checkpoint of step {step}: rank [01]: the process that writes checkpoints has ended: signal 9$"

ENDS = {
    "rank": Exit.UNCLASSIFIED,
    "ranks": Exit.UNCLASSIFIED,
    "rank and writer": Exit.UNCLASSIFIED,
    "launcher": -signal.SIGKILL,
    "all": -signal.SIGKILL,
}
"""Exit status by victim. A run survives the kill of a "writer" or all "writers"."""


class KilledRun:
    """A run whose processes are killed at random moments of its saves, and restarted after its end.

    `resumed`: starts that resumed from the newest complete checkpoint. `lost`: saves that the run reported as failed.
    """

    def __init__(self, config: Path, chance: random.Random) -> None:
        self._config, self._random = config, chance
        self.resumed = self.lost = 0

    def __enter__(self) -> KilledRun:
        self._start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.job.process.poll() is None:
            self.job.kill()

    def kill_during_save(self, victim: str, *, slowly: bool) -> None:
        """Kill -9 while a checkpoint is being written. The run must continue, or end (`ENDS`) and resume.

        `slowly`: the writers are stopped first, as by a slow disk.
        """
        for _ in range(self._random.randrange(3)):
            self._wait_for_save()
        name, newest = self._stop_in_save(slowly=slowly)
        _signal(self._victims(victim), signal.SIGKILL)
        _signal(self._everyone(), signal.SIGCONT)
        if victim not in ENDS:
            self._interrupted.append(name)
            poll(self.job, lambda: in_progress(self.folder) != name)
            return
        self._end(ENDS[victim])
        after = complete(self.folder)[-1:]
        assert after >= newest, "a complete checkpoint is gone"
        self._start(*after)

    def stop(self) -> list[dict[str, Any]]:
        """Wait for one more save, then ask the run to stop. Returns its logged steps."""
        self._wait_for_save()
        self.job.signal(signal.SIGTERM)
        self._end(Exit.STOPPED)
        return self.job.steps()

    def _start(self, newest: str = "") -> None:
        """Start the run, which must resume from its newest complete checkpoint."""
        self._newest = newest
        self._interrupted: list[str] = []
        self._writing: set[int] = set()
        self.job = Job(self._config)
        self.folder = self.job.folder / "checkpoints"
        attempt = in_progress(self.folder)
        poll(self.job, lambda: not attempt or in_progress(self.folder) != attempt)  # an unfinished one is removed
        self._wait_for_save()
        self._ranks = self.job.ranks()

    def _wait_for_save(self) -> None:
        """Wait for a save, and measure its duration."""
        before = complete(self.folder)[-1:]
        poll(self.job, lambda: bool(in_progress(self.folder)))
        since = time.monotonic()
        poll(self.job, lambda: complete(self.folder)[-1:] > before)
        self._span = time.monotonic() - since

    def _stop_in_save(self, *, slowly: bool) -> tuple[str, list[str]]:
        """Stop all processes at a random moment of a save, so that the folders do not change until some are killed.

        A save that is complete by then is skipped. Returns the name of the save, and of the newest complete one.
        """
        while True:
            if slowly and len(writers(self._ranks)) < len(self._ranks):
                self._wait_for_save()  # until there are new ones
            if slowly:
                _signal(writers(self._ranks).values(), signal.SIGSTOP)
            poll(self.job, lambda: bool(in_progress(self.folder)))
            name, newest = in_progress(self.folder), complete(self.folder)[-1:]
            time.sleep(self._random.random() * self._span)
            poll(self.job, lambda: bool(writers(self._ranks)))  # new ones may be starting
            _signal(self._everyone(), signal.SIGSTOP)
            if name and in_progress(self.folder) == name:
                return name, newest
            _signal(self._everyone(), signal.SIGCONT)

    def _everyone(self) -> list[int]:
        return [*self._ranks.values(), *writers(self._ranks).values(), self.job.process.pid]

    def _victims(self, victim: str) -> list[int]:
        ranks, writing = list(self._ranks.values()), list(writers(self._ranks).values())
        self._writing.update(writing)
        rank, writer = self._random.choice(ranks), self._random.choice(writing)
        return {
            "writer": [writer],
            "writers": writing,
            "rank": [rank],
            "ranks": ranks,
            "rank and writer": [rank, writer],
            "launcher": [self.job.process.pid],
            "all": self._everyone(),
        }[victim]

    def _end(self, status: int) -> None:
        """Wait for the end of the run, and check its status, output and writers."""
        self._writing.update(writers(self._ranks).values())
        ended, out, err = self.job.end()
        assert ended == status, (ended, out, err)
        assert "Traceback" not in out + err
        if status == Exit.UNCLASSIFIED:
            named = r"^megascale: rank [01] of 2 on \S+ failed: killed by SIGKILL \(by .*$"
            assert re.search(named, err, re.MULTILINE), err
        else:
            of_writers = "WARNING: the process that writes checkpoints has ended"
            assert all(line.startswith(of_writers) for line in err.splitlines()), err
        place = self.folder / self._newest
        start = f"resumed from {place}: step {step_of(self._newest)}, " if self._newest else "step 1/"
        first = next(line for line in out.splitlines() if line.startswith(("resumed from", "step 1/")))
        assert first.startswith(start), first
        self.resumed += bool(self._newest)
        for name in self._interrupted:
            saved = out.count(f"saved {self.folder / name}: ")
            lost = len(re.findall(LOST.format(step=step_of(name)), out, re.MULTILINE))
            assert saved + lost == 1, out
            self.lost += lost
        deadline = time.monotonic() + SECONDS
        while any(map(lives, self._writing)):
            assert time.monotonic() < deadline, "a writer outlives its rank"
            time.sleep(0.01)
