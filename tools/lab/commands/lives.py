"""Lives of a job: break a running `megascale launch` from outside at a random moment, and check what becomes of it.

A scenario is a function of `SCENARIOS`. A round launches a small job in a folder of its own, breaks it, waits for its
end, and adds a row to the table: what was done, after which step, and what differs from what must come of it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lab.outside_faults import CHECKPOINTS, RUN_VARIABLE, job_processes, last_step, loss_curve
from lab.small_disk import small_disk
from megascale.core.errors import ConfigError, Exit, Problem
from megascale.core.process import die_with_parent
from megascale.operate.driver.incidents import LOG_FILE, Incident, read_history

LIMIT_S = 400.0
"""Longest time of a job, in seconds."""

POLL_S = 0.05

DISK_BYTES = 64 << 20
"""Size of a file system that a run's folder has to itself."""

CONFIG = """
[model]
num_layers = 2
hidden_size = 64
num_heads = 4
vocab_size = 256
seq_length = 64
[parallel]
dp = 2
[batch]
micro = 2
global = 8
[train]
steps = 120
log_every = 1
[optimizer]
lr = 1e-3
warmup_steps = 2
decay = "constant"
[data]
mock = true
[checkpoint]
every = 20
in_memory_every = 1
retry_timeout_s = 15
[observe]
tensorboard = false
"""
"""The configuration of the jobs, without name and folder: two nodes with a rank each."""


@dataclass
class Job:
    """A job in `folder`, which `launch` has started. `random`: the round's own, for moments and choices."""

    folder: Path
    random: random.Random
    launcher: subprocess.Popen[bytes]

    def processes(self, command: str = "", node: str = "") -> list[int]:
        """Return the job's processes: of a command of megascale ("train" for ranks), of a node; all if empty."""
        return job_processes(self.folder, node, command)

    def await_step(self, step: int) -> int:
        """Wait until the job has finished a step, and return its last step then."""
        end = time.monotonic() + LIMIT_S
        while (last := last_step(self.folder)) < step:
            if self.launcher.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{self.folder}: the job has not reached step {step}, but {last}")
            time.sleep(POLL_S)
        return last

    def await_moment(self, first: int = 5, last: int = 60) -> int:
        """Wait for a random moment after one of these steps, and return the last step then."""
        self.await_step(self.random.randint(first, last))
        time.sleep(self.random.uniform(0, 1.0))
        return last_step(self.folder)

    def end(self) -> int:
        """Wait for the end of the job, and return its exit status."""
        return self.launcher.wait(LIMIT_S)

    @property
    def output(self) -> str:
        """Return what the launcher has printed so far."""
        return self.folder.with_suffix(".log").read_text(encoding="utf-8", errors="replace")

    def incidents(self, folder: Path | None = None) -> list[Incident]:
        """Return the incidents in the log of the run's folder, or of another."""
        return list(read_history((folder or self.folder) / LOG_FILE).incidents.values())


@dataclass(frozen=True)
class Row:
    """A round's result. `what`: was done; `step`: the last step then; `came`: what came of it; `problems`: what differs
    from what must come of it.
    """

    what: str
    step: int
    came: str
    problems: list[str] = field(default_factory=list)


@contextlib.contextmanager
def launch(folder: Path, chance: random.Random, *settings: str) -> Iterator[Job]:
    """Launch a job of two nodes in `folder`, and kill at the end what is left of it."""
    config = folder.with_suffix(".toml")
    config.write_text(CONFIG, encoding="utf-8")
    command = [sys.executable, "-m", "megascale", "launch", str(config), f"name={folder.name}"]
    command += [f"output_dir={folder.parent}", *settings, "--nodes", "2"]
    parent = os.getpid()
    with open(folder.with_suffix(".log"), "wb") as log:
        launcher = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", RUN_VARIABLE: str(folder)},
            preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509
        )  # fmt: skip
    job = Job(folder, chance, launcher)
    try:
        yield job
    finally:
        for pid in job.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launcher.wait()


def kill_rank(job: Job) -> str:
    """Kill a random rank of the job, and say which process."""
    pid = job.random.choice(job.processes("train"))
    os.kill(pid, signal.SIGKILL)
    return f"SIGKILL of a rank, process {pid}"


def check_curve(found: Mapping[int, float], undisturbed: Mapping[int, float], unknown: range) -> Iterator[str]:
    """Yield what differs between the losses of a job and those of the undisturbed job, by step. `unknown`: steps whose
    losses may be lost.
    """
    missing = sorted(undisturbed.keys() - found.keys() - set(unknown))
    if missing:
        yield f"{len(missing)} steps are missing, from {missing[0]}"
    wrong = sorted(step for step in found if found[step] != undisturbed.get(step))
    if wrong:
        yield f"the losses of {len(wrong)} steps differ, from step {wrong[0]}"


Undisturbed = Mapping[int, float]
"""Losses by step of a job that nothing breaks."""


def lose_folder(folder: Path, chance: random.Random, undisturbed: Undisturbed) -> Row:
    """Take the run's folder away, or what it holds, and kill a rank. Copies in memory must serve; without any, the job
    must end with 93 for storage, and the empty place must stay empty.
    """
    how = chance.choice(["renamed", "unmounted", "removed", "checkpoints removed"])
    copies = chance.random() < 0.5
    kept, mounted = folder.with_name(f"{folder.name}-kept"), how == "unmounted"
    settings = [] if copies else ["checkpoint.in_memory_every=0"]
    disk = small_disk(folder, DISK_BYTES) if mounted else contextlib.nullcontext()
    with disk, launch(folder, chance, *settings) as job:
        step = job.await_moment(22, 60)  # after the first checkpoint
        shutil.copytree(folder, kept, ignore=shutil.ignore_patterns(".*.tmp"))
        if how == "renamed":
            folder.rename(folder.with_name(f"{folder.name}-away"))
        elif how == "unmounted":
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
        else:
            shutil.rmtree(folder if how == "removed" else folder / CHECKPOINTS, ignore_errors=True)
        kill_rank(job)
        status = job.end()
    what = f"folder {how}" if how != "checkpoints removed" else how
    before, after = dict(loss_curve(kept)), dict(loss_curve(folder))
    first = min(after.keys() - before.keys(), default=0)
    came = f"status {status}, new steps from {first}" if first else f"status {status}"
    problems = []
    if copies:
        problems += [f"status {status} instead of 0"] if status else []
        problems += check_curve(before | after, undisturbed, range(max(before) + 1, first))
    else:
        problems += [f"status {status} instead of 93"] if status != Exit.DO_NOT_REQUEUE else []
        problems += [] if "(storage)" in job.output else ["no incident of class storage"]
        left = sorted(os.listdir(folder)) if folder.exists() and how != "checkpoints removed" else []
        problems += [f"made in the empty place: {', '.join(left)}"] if left else []
    if after and min(after) == 1 and how != "checkpoints removed":
        problems.append("training began at step 1 again")
    return Row(f"{what}, {'with' if copies else 'without'} copies in memory; SIGKILL of a rank", step, came, problems)


WATCH_S = 20.0
"""Seconds for which the steps of a job are watched, before and after a fault."""

SAVE_S = 5.0
"""Most seconds that a lost writer may cost a save."""


def standstill(job: Job, until: Callable[[], bool] = lambda: False) -> float:
    """Return the longest time between two new steps of a job within WATCH_S, or until a condition is true."""
    begun = changed = time.monotonic()
    longest, last = 0.0, last_step(job.folder)
    while (now := time.monotonic()) - begun < WATCH_S and not until():
        if (step := last_step(job.folder)) != last:
            last, changed = step, now
        longest = max(longest, now - changed)
        time.sleep(POLL_S)
    return longest


def writers(job: Job) -> dict[int, int]:
    """Return the processes that write checkpoints, by rank."""
    found = {}
    for pid in job.processes():
        with contextlib.suppress(OSError):
            if b"megascale.checkpoint.save.writer" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                found[next(int(one[5:]) for one in variables if one.startswith(b"RANK="))] = pid
    return found


def writer_is_named(job: Job, rank: int, how: str) -> bool:
    """Return True if the job has said of a rank that its writer has ended, and how."""
    text = f"the process that writes checkpoints has ended: {how}"
    logs = job.folder.glob(f"logs/**/rank-{rank}.log")
    return f"rank {rank}: {text}" in job.output or any(text in log.read_text(errors="replace") for log in logs)


def lose_writer(folder: Path, chance: random.Random, undisturbed: Undisturbed) -> Row:
    """Kill or stop the process that writes a rank's checkpoints and receives another rank's copies. Steps must go on,
    the writer must be named, and copies must be made again.
    """
    number, how = chance.choice([(signal.SIGKILL, "signal 9"), (signal.SIGSTOP, "it was stopped by a signal")])
    with launch(folder, chance, "checkpoint.replicate=true", "train.steps=1000000") as job:
        job.await_moment(41, 80)  # the first saves import much
        before = standstill(job)
        rank, pid = chance.choice(sorted(writers(job).items()))
        time.sleep(chance.uniform(0, 1.0))
        step = last_step(folder)
        os.kill(pid, number)
        named: list[float] = []
        struck = time.monotonic()

        def look() -> bool:
            if not named and writer_is_named(job, rank, how):
                named.append(time.monotonic() - struck)
            return False

        after, again = standstill(job, look), writers(job).get(rank, pid) != pid
        job.launcher.terminate()
        status = job.end()
    came = f"standstill {after:.1f} s ({before:.1f} s before), named after {named[0]:.1f} s" if named else "not named"
    problems = [] if after <= before + SAVE_S else [f"no new step for {after:.1f} s"]
    problems += [] if named else [f"rank {rank} is not named within {WATCH_S:g} s"]
    problems += [] if again else ["the writer has not been replaced"]
    problems += [f"status {status} instead of {Exit.STOPPED:d}"] if status != Exit.STOPPED else []
    losses = dict(loss_curve(folder))
    both = undisturbed.keys() & range(max(losses) + 1)  # the job was stopped before the last step, or after it
    problems += check_curve({s: losses[s] for s in losses.keys() & both}, {s: undisturbed[s] for s in both}, range(0))
    return Row(f"{signal.Signals(number).name} of the writer of rank {rank}", step, came, problems)


def sigterm(folder: Path, chance: random.Random, undisturbed: Undisturbed) -> Row:
    """Send SIGTERM to a random rank: one incident that names the rank, and training goes on to the end. The job is long
    enough for the seconds in which the rank waits for an order to stop.
    """
    with launch(folder, chance, "train.steps=300") as job:
        step = job.await_moment(5, 40)
        pid = chance.choice(job.processes("train"))
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        rank = next(int(text.removeprefix(b"RANK=")) for text in variables if text.startswith(b"RANK="))
        os.kill(pid, signal.SIGTERM)
        status = job.end()
    found = dict(loss_curve(folder))
    incidents = [(one.class_, one.culprit.ranks) for one in job.incidents() if one.class_ != "alert"]
    problems = [f"status {status} instead of 0"] if status else []
    problems += [] if incidents == [("process", (rank,))] else [f"incidents {incidents}, not of rank {rank} alone"]
    problems += [] if "received SIGTERM, which nobody of this job sent" in job.output else ["the cause is not said"]
    problems += [f"the last step is {max(found, default=0)}"] if max(found, default=0) != 300 else []
    problems += check_curve({at: loss for at, loss in found.items() if at in undisturbed}, undisturbed, range(0))
    return Row(f"SIGTERM to rank {rank}", step, f"status {status}, {len(incidents)} incident", problems)


SCENARIOS: dict[str, Callable[[Path, random.Random, Undisturbed], Row]] = {
    "folder": lose_folder,
    "writer": lose_writer,
    "sigterm": sigterm,
}
"""Scenarios by name: function (folder of the run, chance, losses of the undisturbed job)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("scenarios", nargs="*", default=list(SCENARIOS), help=f"of {', '.join(SCENARIOS)} (all)")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of each scenario (10)")
    parser.add_argument("--seed", type=int, default=1, help="of moments and choices (1)")
    parser.add_argument("--folder", type=Path, help="folder of the runs, which stay (default: a temporary one)")


def run(options: argparse.Namespace) -> int:
    """Run the scenarios, print the table, and return 1 if a round has a problem."""
    if unknown := set(options.scenarios) - SCENARIOS.keys():
        what = f"no scenario {', '.join(sorted(unknown))}"
        raise ConfigError([Problem("command line", "SCENARIO", what, f"one of {', '.join(SCENARIOS)}")])
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="lives-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with launch(folder / "undisturbed", random.Random(options.seed)) as job:
        if job.end() != Exit.OK:
            raise SystemExit(f"the undisturbed job has failed: {folder / 'undisturbed.log'}")
        undisturbed = dict(loss_curve(job.folder))
    print("| scenario | round | what was done | after step | what came of it | problems |\n|---|---|---|---|---|---|")
    failed = 0
    for name in options.scenarios:
        for number in range(1, options.rounds + 1):
            chance = random.Random(f"{options.seed} {name} {number}")
            row = SCENARIOS[name](folder / f"{name}-{number}", chance, undisturbed)
            failed += bool(row.problems)
            cells = name, number, row.what, row.step, row.came, "; ".join(row.problems) or "none"
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
    if not options.folder and not failed:
        shutil.rmtree(folder)
    return 1 if failed else 0
