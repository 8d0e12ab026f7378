#!/usr/bin/env python3
"""The cost of the flight record: nanoseconds of a write, and the share of a training step, with the record on and off
in turn (on, off, off, on, ...) in one job, so that both meet the same machine.

The job trains the quickstart's model on random tokens, by default with one rank for each of two cores. A write's time
is the best of several rounds; the share is a median of differences of CPU time, which does not count the other
processes of a busy machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peer_run import Failure, output
from peer_systems import ROOT, Layout, on_this_host

from megascale.comm import init
from megascale.config.loading import load_config_tree
from megascale.config.run import RunConfig
from megascale.core.rank import Rank, rank_from_environment
from megascale.core.units import format_bytes
from megascale.record.label import Label
from megascale.record.layout import CAPACITY, Phase, log_bytes
from megascale.record.log import Handle, LogIdentity, RankLog, open_log
from megascale.record.log_reader import read_state

ROUNDS, WRITES = 50, 200
ON_OFF = (True, False, False, True)


def main(words: Sequence[str] | None = None) -> int:
    """Run the tool. Exit status: 0, or 1 if the job failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="tp2", help="such as 'tp2' or 'tp2 pp2'; default %(default)s")
    parser.add_argument("--steps", type=int, default=60, help="timed steps; default %(default)s")
    parser.add_argument("--timeout", type=float, default=1800, metavar="SECONDS", help="default %(default)s")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    layout = Layout.parse(options.layout)
    if options.rank:
        rank_main(layout, options.steps)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        print(writes_table(Path(folder)), flush=True)
        launcher = ["-m", "torch.distributed.run", *on_this_host(layout.world)] if layout.world > 1 else []
        script = [__file__, "--rank", "--layout", options.layout, "--steps", str(options.steps)]
        out = output([sys.executable, "-W", "ignore", *launcher, *script], options.timeout, folder)
    if isinstance(out, Failure):
        print(f"the job failed: {out.why}", file=sys.stderr)
        return 1
    print(steps_table(json.loads(out.splitlines()[-1])))
    return 0


def writes_table(folder: Path) -> str:
    """Measure the writer and the reader, and return a Markdown table."""
    path = folder / "rank-0.flight"
    writer = open_log(LogIdentity("bench"), path)
    writer.open_group("dp", range(4))
    handle = writer.enter("dp", "all_reduce")
    label, place = Label("qkv", 3), (1, 0, 2)

    def communication() -> None:
        one = writer.enter("dp", "all_reduce", label, 64, -1, place)
        writer.issued(one)
        writer.begin_wait(one)
        writer.complete(one)

    cases: dict[str, Callable[[], object]] = {
        "a communication: all four writes": communication,
        "- entered": lambda: writer.enter("dp", "all_reduce", label, 64, -1, place),
        "- issued": lambda: writer.issued(handle),
        "- waited for": lambda: writer.begin_wait(handle),
        "- completed": lambda: writer.complete(handle),
        "its times": lambda: writer.write_times(handle[2], 1.0, 1.0, 2.0, 0.5),
        "an action: start and end": lambda: writer.end_action(writer.begin_action("F", place)),
        "a phase": lambda: writer.set_phase(Phase.STEP),
        "a heartbeat": writer.beat,
        "a read of the whole record": lambda: read_state(path),
    }
    lines = [f"| {name} | {seconds(case) * 1e9:,.0f} |" for name, case in cases.items()]
    return "\n".join(
        [f"A record has {format_bytes(log_bytes(CAPACITY))}.", "", "| write | ns |", "|---|---:|", *lines, ""]
    )


def seconds(case: Callable[[], object]) -> float:
    """Return the seconds of a call: the best mean of several rounds."""
    means = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(WRITES):
            case()
        means.append((time.perf_counter() - start) / WRITES)
    return min(means)


class NoRecord(RankLog):
    """A flight record that is off: calls do nothing."""

    def enter(self, *_: Any, **__: Any) -> Handle:
        return (0, 0, 0)

    def issued(self, handle: Handle) -> None:
        pass

    def begin_wait(self, handle: Handle) -> None:
        pass

    def complete(self, handle: Handle) -> None:
        pass

    def end_wait(self) -> None:
        pass

    def begin_action(self, name: str, place: tuple[int, int, int]) -> int:
        return 0

    def end_action(self, number: int) -> None:
        pass

    def write_times(self, number: int, issue: float, start: float, end: float, exposed: float) -> None:
        pass

    def set_phase(self, phase: Phase) -> None:
        pass

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        yield

    @contextmanager
    def device_wait(self) -> Iterator[None]:
        yield

    def begin_step(self, step: int) -> None:
        pass

    def end_step(self, seconds: float, totals: Mapping[str, float]) -> None:
        pass


class CountingRecord(RankLog):
    """A flight record that counts its writes, by version."""

    @property
    def writes(self) -> int:
        return self._version // 2


def configuration(layout: Layout, folder: str) -> RunConfig:
    """Return the configuration of the quickstart with random tokens, in a layout."""
    tree = tomllib.loads((ROOT / "configs" / "quickstart.toml").read_text(encoding="utf-8"))
    tree |= {
        "parallel": {"tp": layout.tp, "pp": layout.pp, "vpp": layout.vpp, "dp": layout.dp},
        "data": {"mock": True},
        "train": {"steps": 10**6, "precision": "fp32"},
        "checkpoint": {"every": 0},
        "output_dir": folder,
    }
    return load_config_tree(tree, f"layout {layout.name}")


def rank_main(layout: Layout, steps: int) -> None:
    """Train with the record on and off in turn; rank 0 prints the times of all steps as one line of JSON."""
    from megascale.device import detect_device
    from megascale.train.build import build_mesh, build_rank_run
    from megascale.train.scheduled_gc import without_automatic_gc
    from megascale.train.step import train_step
    from megascale.train.stop import StopRequest

    rank = rank_from_environment() or Rank(0, 1, 0, "localhost")
    device = detect_device(rank.local_rank, allow_gpu=False)
    init.init_distributed(rank, device)
    folder = tempfile.mkdtemp()
    on, off = CountingRecord(), NoRecord()
    config = configuration(layout, folder)
    run = build_rank_run(config, build_mesh(config, rank, device, on), device, StopRequest())
    times: dict[str, list[float]] = {"on": [], "off": []}
    writes = 0
    with without_automatic_gc():  # as in training: a collection would count in whichever step it hits
        for step in range(-4, 4 * -(-steps // 4)):
            recorded = ON_OFF[step % 4]
            run.mesh.recorder.log = on if recorded else off
            before, start = on.writes, time.process_time()
            batch = run.train_loader.batch(run.progress.samples)
            train_step(run, batch)
            run.buffers.finish_param_gather()  # no communication crosses the end of the step
            run.pipeline.finish_sends()
            if step >= 0:
                times["on" if recorded else "off"].append(time.process_time() - start)
                writes = max(writes, on.writes - before)
    found = run.mesh.world.control.gather({"times": times, "writes": writes}, "times")
    if rank.rank == 0:
        print(json.dumps(found), flush=True)
    Path(folder).rmdir()
    init.shutdown_distributed()


def steps_table(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Format the times of steps by rank as a Markdown table."""
    lines = ["| rank | writes a step | CPU ms of a step, off | on - off, ms | share |", "|---:|---:|---:|---:|---:|"]
    for number, rank in enumerate(ranks):
        on, off = rank["times"]["on"], rank["times"]["off"]
        # the two steps with the record and the two without of a turn
        pairs = [(sum(on[i : i + 2]) - sum(off[i : i + 2])) / 2 for i in range(0, len(on), 2)]
        base, more = statistics.median(off), statistics.median(pairs)
        lines.append(f"| {number} | {rank['writes']} | {base * 1e3:.1f} | {more * 1e3:+.2f} | {more / base:+.2%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
