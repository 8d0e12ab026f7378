#!/usr/bin/env python3
"""The cost of all observation: a training step with and without it in turn (on, off, off, on, ...) in one job, so that
both meet the same machine; and the CPU time of the process that collects, for a job of eight ranks.

"On" is the record of every action and communication in the rank's log, and the step's row. The share is
a median of differences of CPU time, which does not count the other processes of a busy machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from flight_record import ON_OFF, NoRecord, configuration, steps_table
from peer_run import Failure, output
from peer_systems import ROOT, Layout, on_this_host

from megascale.comm import init
from megascale.core.rank import Rank, rank_from_environment
from megascale.operate.store.rank_spread import FOLDER
from megascale.record.layout import CAPACITY
from megascale.record.log import LogIdentity, open_log

COLLECTED_S = 60
"""Seconds in which the CPU time of the collecting process is measured."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the tool. Exit status: 0, or 1 if a job failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="tp2", help="such as 'tp2' or 'tp2 pp2'; default %(default)s")
    parser.add_argument("--steps", type=int, default=60, help="timed steps; default %(default)s")
    parser.add_argument("--timeout", type=float, default=1800, metavar="SECONDS", help="default %(default)s")
    parser.add_argument("--collector", action="store_true", help="also measure the collecting process for eight ranks")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    layout = Layout.parse(options.layout)
    if options.rank:
        rank_main(layout, options.steps)
        return 0
    launcher = ["-m", "torch.distributed.run", *on_this_host(layout.world)] if layout.world > 1 else []
    script = [__file__, "--rank", "--layout", options.layout, "--steps", str(options.steps)]
    with tempfile.TemporaryDirectory() as folder:
        out = output([sys.executable, "-W", "ignore", *launcher, *script], options.timeout, folder)
    if isinstance(out, Failure):
        print(f"the job failed: {out.why}", file=sys.stderr)
        return 1
    print(steps_table(json.loads(out.splitlines()[-1])), flush=True)
    if options.collector:
        print(collector_line())
    return 0


def rank_main(layout: Layout, steps: int) -> None:
    """Train with all observation on and off in turn; rank 0 prints the times of all steps as one line of JSON."""
    from megascale.device import detect_device
    from megascale.train.build import build_mesh, build_rank_run
    from megascale.train.scheduled_gc import without_automatic_gc
    from megascale.train.step import train_step
    from megascale.train.step_rows import StepRows
    from megascale.train.stop import StopRequest

    rank = rank_from_environment() or Rank(0, 1, 0, "localhost")
    device = detect_device(rank.local_rank, allow_gpu=False)
    init.init_distributed(rank, device)
    folder = Path(tempfile.mkdtemp())
    log = open_log(LogIdentity("bench", rank.rank, layout.world), folder / "rank.flight", CAPACITY)
    config = configuration(layout, str(folder))
    run = build_rank_run(config, build_mesh(config, rank, device, log), device, StopRequest())
    recorder, off, mark = run.mesh.recorder, NoRecord(), run.mesh.recorder.mark
    times: dict[str, list[float]] = {"on": [], "off": []}
    writes = 0
    with without_automatic_gc(), StepRows(run) as rows:  # a collection would count in whichever step it hits
        for step in range(-4, 4 * -(-steps // 4)):
            observed = ON_OFF[step % 4]
            recorder.log = log if observed else off
            recorder._enabled, recorder.mark = observed, mark if observed else lambda: 0.0
            before, start = log._count, time.process_time()
            if observed:
                rows.begin(run.progress.step + 1)
            result = train_step(run, run.train_loader.batch(run.progress.samples))
            run.buffers.finish_param_gather()  # no communication crosses the end of the step
            run.pipeline.finish_sends()
            if observed:
                rows.end(result)
                rows._write()
            if step >= 0:
                times["on" if observed else "off"].append(time.process_time() - start)
                writes = max(writes, log._count - before)
    found = run.mesh.world.control.gather({"times": times, "writes": writes}, "times")
    if rank.rank == 0:
        print(json.dumps(found), flush=True)
    init.shutdown_distributed()


def collector_line() -> str:
    """Train on eight ranks, and return the CPU time of the launcher, which collects, in a line."""
    with tempfile.TemporaryDirectory() as scratch:
        settings = ["name=cost", f"output_dir={scratch}", "data.mock=true", "parallel.dp=2", "train.steps=1000000",
                    "train.eval_every=0", "checkpoint.every=0", "batch.global=8", "train.log_every=1"]  # fmt: skip
        config = Path(scratch) / "cost.toml"
        text = (ROOT / "configs/quickstart.toml").read_text(encoding="utf-8")
        before, _, after = text.partition("[data]\n")
        config.write_text(before + after[after.index("\n[") + 1 :], encoding="utf-8")
        command = [sys.executable, "-m", "megascale", "train", str(config), *settings]
        job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            return _measure_collector(job.pid, Path(scratch) / "cost")
        finally:
            job.terminate()
            job.wait()


def _measure_collector(pid: int, run: Path) -> str:
    metrics, spread = run / "metrics.jsonl", run / "tensorboard" / FOLDER
    while not (spread.is_dir() and any(spread.iterdir())):  # until then it imports TensorBoard, once
        time.sleep(1)
    first, cpu, wall = steps_of(metrics), cpu_seconds(pid), time.monotonic()
    time.sleep(COLLECTED_S)
    steps, cpu, wall = steps_of(metrics) - first, cpu_seconds(pid) - cpu, time.monotonic() - wall
    return f"the launcher of eight ranks takes {cpu / wall:.2%} of a core, at {steps / wall:.2f} steps a second"


def steps_of(metrics: Path) -> int:
    """Return the number of lines of a file."""
    return len(metrics.read_text(encoding="utf-8").splitlines()) if metrics.exists() else 0


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and all its threads, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
