"""A rank of a world of tools/bench/checkpoint.py: saves and resumes of megascale, and saves of
torch.distributed.checkpoint, in turns. Rank 0 prints what was found.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peer_run import busy_seconds
from peer_systems import OURS, Layout, Size
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from megascale.checkpoint import manifest
from megascale.checkpoint.saving import Saved
from megascale.checkpoint.storage import Location
from megascale.checkpoint.store import complete
from megascale.comm import init
from megascale.comm.group import Group
from megascale.config.explain import load_tree
from megascale.config.run import RunConfig
from megascale.core.rank import Rank, from_environment
from megascale.device import detect
from megascale.train.build import Run, build, mesh_of
from megascale.train.gc import ScheduledCollection
from megascale.train.guard import check_state
from megascale.train.step import StepResult, train_step
from megascale.train.stop import Stop

T = TypeVar("T")
Record = dict[str, Any]

PEER = "torch dcp"
ALONE = 2
"""Steps in which nothing is written, before each measurement."""


@dataclass(frozen=True)
class Task:
    """What a world does: so many turns of saves, then so many resumes; with a `checkpoint`'s folder, resumes from that
    alone. What it writes goes to `folder`.
    """

    layout: str
    size: Size
    turns: int
    folder: str
    checkpoint: str = ""

    @staticmethod
    def parse(text: str) -> Task:
        tree = json.loads(text)
        return Task(**tree | {"size": Size(**tree["size"])})


def rank_main(task: Task) -> None:
    """A rank of a world: do what the task says; rank 0 prints what was found, a JSON object on one line."""
    rank = from_environment() or Rank(0, 1, 0, "localhost")
    device = detect(rank.local, allow_gpu=False)
    init.start(rank, device)
    config = configuration(task)
    run = build(config, mesh_of(config, rank, device), device, Stop())
    watch = Stopwatch(run.mesh.world)
    found = {} if task.checkpoint else saves(run, task, watch)
    checkpoint = Path(task.checkpoint or found["checkpoint"])
    found |= {"read": resumes(run, checkpoint, task.turns, watch), "one copy": stored_bytes(checkpoint)}
    found["seconds"] = watch.slowest()
    if rank.rank == 0:
        print(json.dumps(found), flush=True)
    init.stop()


def configuration(task: Task) -> RunConfig:
    """The run of a world: a llama on random tokens, with AdamW in fp32.

    Raises: ConfigError if there is no such model in this layout
    """
    size, layout = task.size, Layout.parse(task.layout)
    tree = {
        "name": "resumed" if task.checkpoint else "saved",
        "model": {
            "num_layers": size.layers, "hidden_size": size.hidden, "num_heads": size.heads, "ffn_size": size.ffn,
            "vocab_size": size.vocab, "seq_length": size.seq, "norm": "rmsnorm", "activation": "swiglu",
            "position": "rope", "bias": False, "tie_embeddings": False,
        },
        "parallel": {"tp": layout.tp, "sp": layout.sp, "pp": layout.pp, "vpp": layout.vpp, "dp": layout.dp},
        "batch": {"micro": size.micro_batch, "global": size.global_batch},
        "train": {"steps": 1_000_000, "precision": "fp32"},
        "optimizer": {"lr": 1e-4, "decay": "constant"},
        "data": {"mock": True},
        "checkpoint": {"every": 0 if task.checkpoint else 1, "keep": 1, "resume": task.checkpoint or "auto"},
        "observe": {"dir": task.folder},
    }  # fmt: skip
    return load_tree(tree, f"layout {task.layout}")


class Stopwatch:
    """What takes how many seconds, by name, on this rank; all ranks time the same, and begin together."""

    def __init__(self, world: Group) -> None:
        self._world = world
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def note(self, name: str, seconds: float) -> None:
        self.seconds[name].append(seconds)

    def time(self, name: str, action: Callable[[], T]) -> T:
        """What an action returns."""
        self._world.control.barrier("a measurement")
        start = time.perf_counter()
        result = action()
        self.note(name, time.perf_counter() - start)
        return result

    def slowest(self) -> dict[str, list[float]]:
        """Of each time that of the slowest rank."""
        ranks = self._world.control.gather(dict(self.seconds), "seconds")
        return {name: [max(each) for each in zip(*(r[name] for r in ranks), strict=True)] for name in self.seconds}


def saves(run: Run, task: Task, watch: Stopwatch) -> Record:
    """All turns of saves. Returns the bytes of each rank's state, the share of the machine that others used, and the
    folder of the last checkpoint.
    """
    saver = Saver(run, Path(task.folder), watch)
    run.train.prepare(0)
    with ScheduledCollection():
        saver.turn()
        watch.seconds.clear()
        start, busy, own = time.monotonic(), busy_seconds(), saver.cpu_seconds()
        for _ in range(task.turns):
            saver.turn()
            gc.collect()
        passed = (time.monotonic() - start) * (os.cpu_count() or 1)
        others = (busy_seconds() - busy) - (saver.cpu_seconds() - own)
    run.gradients.finish_gather()
    run.pipeline.finish_sends()
    state = run.mesh.world.control.gather(saver.bytes, "bytes")
    path = str(complete(run.checkpoints.folder)[-1].path)
    return {"state": list(state), "others": max(0.0, others) / passed, "checkpoint": path}


class Saver:
    """Saves a run that trains, and by torch.distributed.checkpoint flat tensors of the same sizes. That one has room
    for its copies that it keeps, as ours does, and a process group of its own.
    """

    def __init__(self, run: Run, folder: Path, watch: Stopwatch) -> None:
        self._run = run
        self._watch = watch
        self._folder = folder / "peer"
        held = [tensor for shard in run.optimizer.shards for tensor in (shard.master, *shard.state.values())]
        self._pairs = [(tensor.clone(), tensor) for tensor in held if tensor.numel()]
        self._state = {f"rank-{run.mesh.rank}.{i}": copy for i, (copy, _) in enumerate(self._pairs)}
        self._group = dist.new_group()
        self._stager = DefaultStager(StagingOptions(False, False, False, False))
        self.bytes = sum(copy.nbytes for copy, _ in self._pairs)

    def turn(self) -> None:
        """Each measurement once, with steps before it."""
        for measurement in (self._copy, self._background, self._blocking, self._peer_background, self._peer_blocking):
            for _ in range(ALONE):
                self._watch.time("step", self._step)
            measurement()

    def cpu_seconds(self) -> float:
        """CPU seconds of all ranks and of the processes that write for them."""
        saving = self._run.checkpoints.saving
        assert saving is not None
        own = sum(map(cpu_seconds, (os.getpid(), saving.writer)))
        return sum(self._run.mesh.world.control.gather(own, "CPU seconds"))

    def _step(self) -> StepResult:
        return train_step(self._run, self._run.train.batch(self._run.progress.samples))

    def _copy(self) -> None:
        def copy() -> None:
            for target, tensor in self._pairs:
                target.copy_(tensor)

        self._watch.time("copy", copy)

    def _background(self) -> None:
        """Beside the save itself, what else training stands for: the look for numbers that are not finite, and at the
        end the completion.
        """
        checkpoints, watch = self._run.checkpoints, self._watch
        watch.time(f"{OURS} check", lambda: check_state(self._run))
        watch.time(f"{OURS} begin", lambda: checkpoints.begin(self._run.progress))
        saved: Saved | None = None
        while saved is None:
            result = watch.time(f"{OURS} step", self._step)
            self._run.mesh.world.control.barrier("a step")
            start = time.perf_counter()
            saved = checkpoints.settle(result.written, result.failed)
            passed = time.perf_counter() - start
        if saved.error is not None:
            raise saved.error
        watch.note(f"{OURS} complete", passed)
        watch.note(f"{OURS} stall", saved.stalled)
        watch.note(f"{OURS} written", saved.written)
        checkpoints.remove_old()
        checkpoints.removed()

    def _blocking(self) -> None:
        checkpoints = self._run.checkpoints
        self._watch.time(f"{OURS} blocking", lambda: checkpoints.save(self._run.progress))
        checkpoints.remove_old()
        checkpoints.removed()

    def _peer_background(self) -> None:
        ended: list[float] = []

        def save() -> Future[Any]:
            found = dcp.async_save(
                self._state,
                storage_writer=dcp.FileSystemWriter(self._folder),
                process_group=self._group,
                async_stager=self._stager,
            )
            assert isinstance(found, Future)
            return found

        future = self._watch.time(f"{PEER} stall", save)
        start = time.perf_counter()
        future.add_done_callback(lambda _: ended.append(time.perf_counter()))
        under_way = True
        while under_way:
            self._watch.time(f"{PEER} step", self._step)
            under_way = any(self._run.mesh.world.control.gather(not ended, "who writes"))
        future.result()
        self._watch.note(f"{PEER} written", ended[0] - start)
        self._remove_peers()

    def _peer_blocking(self) -> None:
        def save() -> None:
            dcp.save(self._state, storage_writer=dcp.FileSystemWriter(self._folder), process_group=self._group)

        self._watch.time(f"{PEER} blocking", save)
        self._remove_peers()

    def _remove_peers(self) -> None:
        self._run.mesh.world.control.barrier("what the peer has written")
        if self._run.mesh.rank == 0:
            shutil.rmtree(self._folder)


def cpu_seconds(process: int) -> float:
    """CPU seconds of a process so far."""
    after_name = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return sum(map(int, after_name[11:13])) / os.sysconf("SC_CLK_TCK")


def resumes(run: Run, checkpoint: Path, count: int, watch: Stopwatch) -> int:
    """Resume so often from files that are on storage alone, not in memory. Returns the bytes that all ranks read."""
    read = 0
    for _ in range(count):
        if run.mesh.rank == 0:
            for path in checkpoint.iterdir():
                forget(path)
        resumed = watch.time("resume", run.checkpoints.resume)
        assert resumed is not None and not run.checkpoints.warnings
        read = resumed.bytes
    return read


def forget(path: Path) -> None:
    """Have the kernel drop what it keeps in memory of a file that is on storage."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def stored_bytes(checkpoint: Path) -> int:
    """Bytes of all files that a checkpoint's manifest names."""
    return sum(file.bytes for file in manifest.read(Location(str(checkpoint))).files.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", type=Task.parse, help="what to do, a JSON object")
    rank_main(parser.parse_args().task)
