"""What tests do to a running job and its checkpoints, and how they see it: through /proc and the folders alone."""

from __future__ import annotations

import contextlib
import fcntl
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
    """The configuration file of a run whose folder is beside it."""
    return job_config(folder, SIZES, **RUN | overrides)


def start(config: Path, *overrides: str) -> Job:
    """A job whose output nobody needs to read before it has ended."""
    job = Job(config, *overrides)
    assert job.process.stdout is not None
    fcntl.fcntl(job.process.stdout, fcntl.F_SETPIPE_SZ, 1 << 20)
    return job


def wait_until(job: Job, condition: Callable[[], bool]) -> None:
    """Look again and again while a job runs."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert job.process.poll() is None, job.end()
        if time.monotonic() > deadline:
            job.kill()
            raise AssertionError("it never came to that")
        time.sleep(0.001)


# ---- checkpoints on disk


def whole(folder: Path) -> list[str]:
    """The names of the checkpoints that have a manifest, the oldest first."""
    return sorted(name for name in _names(folder) if (folder / name / "manifest.json").exists())


def under_way(folder: Path) -> str:
    """The name of the checkpoint that is being written, "" if none is. Those older than a whole one are being removed,
    not written.
    """
    names = _names(folder)
    done = whole(folder)
    return next((name for name in names if name not in done and (not done or name > done[-1])), "")


def step_of(name: str) -> int:
    """The step of a checkpoint's folder."""
    return int(name.removeprefix("step-").partition(".")[0])


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("step-*")]


# ---- processes


def writers(ranks: dict[int, int]) -> dict[int, int]:
    """The processes that write the checkpoints of these ranks."""
    found = {}
    for rank, pid in ranks.items():
        for child in _children(pid):
            if b"megascale.checkpoint.writer" in _command(child):
                found[rank] = child
    return found


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


# ---- strikes


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
"""The status of a run of which these are killed. Not of "writer" and "writers": without them it goes on."""


class Struck:
    """A run whose processes are killed at random moments of its saves, and which is started again when it has ended.

    `resumed`: how many of its starts have said that they resume from the newest whole checkpoint; `lost`: of how many
    checkpoints the run said that there is none.
    """

    def __init__(self, config: Path, chance: random.Random) -> None:
        self._config, self._chance = config, chance
        self.resumed = self.lost = 0

    def __enter__(self) -> Struck:
        self._begin()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.job.process.poll() is None:
            self.job.kill()

    def strike(self, victim: str, *, slowly: bool) -> None:
        """Kill -9 while a checkpoint is being written. If that is not in ENDS the run must go on, else end and resume.
        `slowly`: those that write stand still, as if the disk did not answer.
        """
        for _ in range(self._chance.randrange(3)):
            self._let_pass()
        name, newest = self._halt(slowly=slowly)
        _signal(self._victims(victim), signal.SIGKILL)
        _signal(self._everyone(), signal.SIGCONT)
        if victim not in ENDS:
            self._interrupted.append(name)
            wait_until(self.job, lambda: under_way(self.folder) != name)
            return
        self._end(ENDS[victim])
        found = whole(self.folder)[-1:]
        assert found >= newest, "a whole checkpoint has gone"
        self._begin(*found)

    def stop(self) -> list[dict[str, Any]]:
        """Let one more save go by and ask the run to stop. Returns its logged steps."""
        self._let_pass()
        self.job.signal(signal.SIGTERM)
        self._end(Exit.STOPPED)
        return self.job.steps()

    def _begin(self, newest: str = "") -> None:
        """Start the run, which has to resume from its newest whole checkpoint."""
        self._newest = newest
        self._interrupted: list[str] = []
        self._writing: set[int] = set()
        self.job = start(self._config)
        self.folder = self.job.folder / "checkpoints"
        left = under_way(self.folder)
        wait_until(self.job, lambda: not left or under_way(self.folder) != left)  # what is not whole is removed
        self._let_pass()
        self._ranks = self.job.ranks()

    def _let_pass(self) -> None:
        """Let a save go by, and learn how long one takes."""
        before = whole(self.folder)[-1:]
        wait_until(self.job, lambda: bool(under_way(self.folder)))
        since = time.monotonic()
        wait_until(self.job, lambda: whole(self.folder)[-1:] > before)
        self._span = time.monotonic() - since

    def _halt(self, *, slowly: bool) -> tuple[str, list[str]]:
        """Halt everyone at a random moment of a save, so that what we see is what there is when some of them die. One
        that is over by then goes on, and the next is halted. Returns its name, and that of the newest whole one.
        """
        while True:
            if slowly and len(writers(self._ranks)) < len(self._ranks):
                self._let_pass()  # it has new ones
            if slowly:
                _signal(writers(self._ranks).values(), signal.SIGSTOP)
            wait_until(self.job, lambda: bool(under_way(self.folder)))
            name, newest = under_way(self.folder), whole(self.folder)[-1:]
            time.sleep(self._chance.random() * self._span)
            wait_until(self.job, lambda: bool(writers(self._ranks)))  # new ones may be starting
            _signal(self._everyone(), signal.SIGSTOP)
            if name and under_way(self.folder) == name:
                return name, newest
            _signal(self._everyone(), signal.SIGCONT)

    def _everyone(self) -> list[int]:
        return [*self._ranks.values(), *writers(self._ranks).values(), self.job.process.pid]

    def _victims(self, victim: str) -> list[int]:
        ranks, writing = list(self._ranks.values()), list(writers(self._ranks).values())
        self._writing.update(writing)
        rank, writer = self._chance.choice(ranks), self._chance.choice(writing)
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
        """Wait until the run has ended, and hold it to what it must have said and done."""
        self._writing.update(writers(self._ranks).values())
        found, out, err = self.job.end()
        assert found == status, (found, out, err)
        assert "Traceback" not in out + err
        if status == Exit.UNCLASSIFIED:
            assert re.match(r"megascale: rank [01] of 2 on \S+ failed: killed by SIGKILL\n", err), err
        else:
            assert err == ""
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
            assert time.monotonic() < deadline, "a process that writes outlives its rank"
            time.sleep(0.01)
