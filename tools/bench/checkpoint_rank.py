"""One rank of a job of tools/bench/checkpoint.py: alternating saves by megascale and torch.distributed.checkpoint, and
resumes by megascale. Rank 0 prints the result.
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

from megascale.checkpoint.folders import complete_checkpoints
from megascale.checkpoint.format import manifest
from megascale.checkpoint.save.saver import SaveResult
from megascale.comm import init
from megascale.comm.group import Group
from megascale.config.loading import load_config_tree
from megascale.config.run import RunConfig
from megascale.core.rank import Rank, rank_from_environment
from megascale.core.storage import Location
from megascale.device import detect_device
from megascale.train.build import build_mesh, build_rank_run
from megascale.train.finite_check import check_state_finite
from megascale.train.run import Run, StepResult
from megascale.train.scheduled_gc import without_automatic_gc
from megascale.train.step import train_step
from megascale.train.stop import StopRequest

T = TypeVar("T")
Record = dict[str, Any]

PEER = "torch dcp"
ALONE = 2
"""Steps without a write before every measurement."""


@dataclass(frozen=True)
class Task:
    """Task of a job: `turns` saves of every kind, then as many resumes; with the folder of a `checkpoint`, only resumes
    from there. Files are written to `folder`.
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
    """Carry out the task as one rank; rank 0 prints the result as one line of JSON."""
    rank = rank_from_environment() or Rank(0, 1, 0, "localhost")
    device = detect_device(rank.local_rank, allow_gpu=False)
    init.init_distributed(rank, device)
    config = configuration(task)
    run = build_rank_run(config, build_mesh(config, rank, device), device, StopRequest())
    watch = Stopwatch(run.mesh.world)
    record = {} if task.checkpoint else saves(run, task, watch)
    checkpoint = Path(task.checkpoint or record["checkpoint"])
    record |= {"read": resumes(run, checkpoint, task.turns, watch), "one copy": stored_bytes(checkpoint)}
    record["seconds"] = watch.slowest()
    if rank.rank == 0:
        print(json.dumps(record), flush=True)
    init.shutdown_distributed()


def configuration(task: Task) -> RunConfig:
    """Build the configuration of a job: a Llama on random tokens, with AdamW in fp32.

    Raises: ConfigError if the layout does not suit the model
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
        "output_dir": task.folder,
    }  # fmt: skip
    return load_config_tree(tree, f"layout {task.layout}")


class Stopwatch:
    """Timings by name on this rank. All ranks time the same actions and start together."""

    def __init__(self, world: Group) -> None:
        self._world = world
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def note(self, name: str, seconds: float) -> None:
        self.seconds[name].append(seconds)

    def time(self, name: str, action: Callable[[], T]) -> T:
        """Time an action; return its result."""
        self._world.control.barrier("measurement")
        start = time.perf_counter()
        result = action()
        self.note(name, time.perf_counter() - start)
        return result

    def slowest(self) -> dict[str, list[float]]:
        """Return every timing of the slowest rank."""
        ranks = self._world.control.all_gather(dict(self.seconds), "seconds")
        return {name: [max(values) for values in zip(*(r[name] for r in ranks), strict=True)] for name in self.seconds}


def saves(run: Run, task: Task, watch: Stopwatch) -> Record:
    """Run all turns of saves. Return the state bytes per rank, the load by other processes, and the last checkpoint."""
    saver = Saver(run, Path(task.folder), watch)
    with without_automatic_gc():
        saver.turn()
        watch.seconds.clear()
        start, busy, job = time.monotonic(), busy_seconds(), saver.cpu_seconds()
        for _ in range(task.turns):
            saver.turn()
            gc.collect()
        passed = (time.monotonic() - start) * (os.cpu_count() or 1)
        load = (busy_seconds() - busy) - (saver.cpu_seconds() - job)
    run.buffers.finish_param_gather()
    run.pipeline.finish_sends()
    state = run.mesh.world.control.all_gather(saver.bytes, "bytes")
    path = str(complete_checkpoints(run.checkpoints.folder)[-1].path)
    return {"state": list(state), "others": max(0.0, load) / passed, "checkpoint": path}


class Saver:
    """Saves a training run, and by torch.distributed.checkpoint flat tensors of the same sizes, with reused memory for
    its copies and a separate process group.
    """

    def __init__(self, run: Run, folder: Path, watch: Stopwatch) -> None:
        self._run = run
        self._watch = watch
        self._folder = folder / "peer"
        state = [tensor for shard in run.optimizer.shards for tensor in (shard.master, *shard.state.values())]
        self._pairs = [(tensor.clone(), tensor) for tensor in state if tensor.numel()]
        self._state = {f"rank-{run.mesh.rank}.{i}": copy for i, (copy, _) in enumerate(self._pairs)}
        self._group = dist.new_group()
        self._stager = DefaultStager(StagingOptions(False, False, False, False))
        self.bytes = sum(copy.nbytes for copy, _ in self._pairs)

    def turn(self) -> None:
        """Take every measurement once, with training steps in between."""
        for measurement in (self._copy, self._background, self._blocking, self._peer_background, self._peer_blocking):
            for _ in range(ALONE):
                self._watch.time("step", self._step)
            measurement()

    def cpu_seconds(self) -> float:
        """Sum the CPU seconds of all ranks and their writer processes."""
        saving = self._run.checkpoints.saver
        assert saving is not None
        local = sum(map(cpu_seconds, (os.getpid(), saving.writer_pid)))
        return sum(self._run.mesh.world.control.all_gather(local, "CPU seconds"))

    def _step(self) -> StepResult:
        return train_step(self._run, self._run.train_loader.batch(self._run.progress.samples))

    def _copy(self) -> None:
        def copy() -> None:
            for target, tensor in self._pairs:
                target.copy_(tensor)

        self._watch.time("copy", copy)

    def _background(self) -> None:
        """Time a background save: the check for non-finite elements, the stall, and the completion at the end."""
        checkpoints, watch = self._run.checkpoints, self._watch
        watch.time(f"{OURS} check", lambda: check_state_finite(self._run))
        watch.time(f"{OURS} begin", lambda: checkpoints.start_save(self._run.progress))
        saved: SaveResult | None = None
        while saved is None:
            result = watch.time(f"{OURS} step", self._step)
            self._run.mesh.world.control.barrier("step")
            start = time.perf_counter()
            saved = checkpoints.complete_save(result.totals["ranks_written"], result.totals["ranks_failed"])
            passed = time.perf_counter() - start
        if saved.error is not None:
            raise saved.error
        watch.note(f"{OURS} complete", passed)
        watch.note(f"{OURS} stall", saved.stalled_s)
        watch.note(f"{OURS} written", saved.write_s)
        checkpoints.prune()
        checkpoints.wait_for_prune()

    def _blocking(self) -> None:
        checkpoints = self._run.checkpoints
        self._watch.time(f"{OURS} blocking", lambda: checkpoints.save(self._run.progress))
        checkpoints.prune()
        checkpoints.wait_for_prune()

    def _peer_background(self) -> None:
        ended: list[float] = []

        def save() -> Future[Any]:
            future = dcp.async_save(
                self._state,
                storage_writer=dcp.FileSystemWriter(self._folder),
                process_group=self._group,
                async_stager=self._stager,
            )
            assert isinstance(future, Future)
            return future

        future = self._watch.time(f"{PEER} stall", save)
        start = time.perf_counter()
        future.add_done_callback(lambda _: ended.append(time.perf_counter()))
        under_way = True
        while under_way:
            self._watch.time(f"{PEER} step", self._step)
            under_way = any(self._run.mesh.world.control.all_gather(not ended, "writers"))
        future.result()
        self._watch.note(f"{PEER} written", ended[0] - start)
        self._remove_peers()

    def _peer_blocking(self) -> None:
        def save() -> None:
            dcp.save(self._state, storage_writer=dcp.FileSystemWriter(self._folder), process_group=self._group)

        self._watch.time(f"{PEER} blocking", save)
        self._remove_peers()

    def _remove_peers(self) -> None:
        self._run.mesh.world.control.barrier("peer's files")
        if self._run.mesh.rank == 0:
            shutil.rmtree(self._folder)


def cpu_seconds(process: int) -> float:
    """Return the CPU seconds of a process."""
    after_name = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return sum(map(int, after_name[11:13])) / os.sysconf("SC_CLK_TCK")


def resumes(run: Run, checkpoint: Path, count: int, watch: Stopwatch) -> int:
    """Resume `count` times from files outside the page cache. Return the bytes that all ranks read."""
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
    """Drop a file from the page cache."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def stored_bytes(checkpoint: Path) -> int:
    """Sum the bytes of all files in a checkpoint's manifest."""
    return sum(file.bytes for file in manifest.read(Location(str(checkpoint))).files.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", type=Task.parse, help="a Task as a JSON object")
    rank_main(parser.parse_args().task)
