#!/usr/bin/env python3
"""Checkpoint benchmark on this machine's CPUs: the pause of training at a save, compared with a plain copy of the same
memory, a blocking save, and torch.distributed.checkpoint with equal bytes; and the bytes that a resume reads.

Every layout is a job of the trainer itself. The measurements alternate, and the first turn is a warm-up. All layouts
take about a quarter of an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path

import torch
from checkpoint_rank import PEER, Record, Task, configuration
from peer_run import Failure, output, progress
from peer_systems import OURS, ROOT, Layout, Size, on_this_host
from peer_table import pipes
from peers import QUIET, processor

from megascale.bench.quartiles import Quartiles
from megascale.core.errors import ConfigError
from megascale.core.files import write_text
from megascale.core.process import exit_on_stop_signals
from megascale.core.units import MIB

LAYOUTS = "1,tp2,dp2,tp2 pp2"
SIZE = Size(hidden=512, layers=8, heads=8, ffn=1536, seq=128, vocab=8192, micro_batch=1, global_batch=4)
SCRIPT = Path(__file__).with_name("checkpoint_rank.py")


def main(words: Sequence[str] | None = None) -> int:
    """Run the tool. Exit status: 0, 1 if a job failed, 2 if the options are wrong."""
    options = arguments().parse_args(words)
    try:
        layouts = [Layout.parse(name.strip()) for name in options.layouts.split(",")]
        if options.saves < 1:
            raise ValueError("--saves: give at least one")
        size = Size(**{field.name: getattr(options, field.name) for field in fields(Size)})
        for layout in layouts:
            configuration(Task(layout.name, size, options.saves, ""))
    except (ValueError, ConfigError) as error:
        print(error, file=sys.stderr)
        return 2
    with exit_on_stop_signals():
        return measure(layouts, size, options)


def arguments() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--layouts", default=LAYOUTS, help="comma-separated; default '%(default)s'")
    add("--saves", type=int, default=7, help="timed saves of each kind per layout; default %(default)s")
    add("--timeout", type=float, default=1800, metavar="SECONDS", help="limit for one job; default %(default)s")
    add("--folder", type=Path, default=ROOT / "build" / "bench-checkpoint", metavar="DIR",
        help="scratch folder on the file system to measure; default build/bench-checkpoint")  # fmt: skip
    add("--output", type=Path, default=ROOT / "build" / "bench-checkpoint.json", metavar="FILE",
        help="results; default build/bench-checkpoint.json")  # fmt: skip
    for field in fields(Size):
        name, default = field.name.replace("_", "-"), getattr(SIZE, field.name)
        add(f"--{name}", type=int, default=default, help="default %(default)s")
    return parser


def measure(layouts: Sequence[Layout], size: Size, options: argparse.Namespace) -> int:
    """Measure all layouts and print the tables. Return 1 if a job failed."""
    record: Record = {
        "size": asdict(size), "saves": options.saves, "layouts": {},
        "machine": processor(), "cpus": os.cpu_count(), "torch": torch.__version__,
    }  # fmt: skip
    options.folder.mkdir(parents=True, exist_ok=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    for layout in layouts:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            task = Task(layout.name, size, options.saves, str(Path(folder).absolute()))
            result = measure_layout(task, partner(layout, layouts), options.timeout)
        if isinstance(result, Failure):
            progress(f"layout {layout.name} failed: {result.why}")
            continue
        record["layouts"][layout.name] = result
        write_text(options.output, json.dumps(record, indent=1) + "\n")
        progress(f"layout {layout.name}: stall {ratio(result['seconds'], OURS, 'copy'):.2f} x a copy")
    if record["layouts"]:
        print(f"{caption(record)}\n\n{saves_table(record['layouts'])}\n\n{loads_table(record['layouts'])}")
    return int(len(record["layouts"]) < len(layouts))


def partner(layout: Layout, layouts: Sequence[Layout]) -> Layout:
    """Return a second layout to resume in: the next of the list, or another world size if the list has only one."""
    following = layouts[(layouts.index(layout) + 1) % len(layouts)]
    return following if following != layout else Layout.parse("1" if layout.world > 1 else "tp2")


def measure_layout(task: Task, other: Layout, seconds: float) -> Record | Failure:
    """Measure saves and resumes of one layout, and resumes of its checkpoint in another."""
    record = run_world(task, seconds)
    if isinstance(record, Failure):
        return record
    elsewhere = run_world(Task(other.name, task.size, task.turns, task.folder, record["checkpoint"]), seconds)
    if isinstance(elsewhere, Failure):
        return elsewhere
    return record | {"elsewhere": elsewhere | {"layout": other.name}}


def run_world(task: Task, seconds: float) -> Record | Failure:
    """Run a job for at most `seconds`, and parse the output of rank 0."""
    world = Layout.parse(task.layout).world
    launcher = ["-m", "torch.distributed.run", *on_this_host(world)] if world > 1 else []
    script = [str(SCRIPT), json.dumps(asdict(task))]
    out = output([sys.executable, "-W", "ignore", *launcher, *script], seconds, task.folder)
    if isinstance(out, Failure):
        return out
    record: Record = json.loads(out.splitlines()[-1])
    return record


Seconds = Mapping[str, Sequence[float]]


def ratio(seconds: Seconds, system: str, name: str) -> float:
    """Divide the median stall of a system by the median of the timing `name`."""
    return Quartiles.from_values(seconds[f"{system} stall"]).median / Quartiles.from_values(seconds[name]).median


def saves_table(layouts: Mapping[str, Record]) -> str:
    """Format the saves of both systems as a Markdown table."""
    head = ["layout", "system", "MiB a rank", "copy s", "stall s", "/ copy", "all stalls s", "blocking s",
            "stall / blocking", "written s", "step s", "step s, writing", "/ step"]  # fmt: skip
    lines = [pipes(head), pipes(["---", "---", *["---:"] * (len(head) - 2)])]
    for layout, record in layouts.items():
        size = f"{max(record['state']) / MIB:,.0f}"
        lines += [pipes([layout, system, size, *_cells(record["seconds"], system)]) for system in (OURS, PEER)]
    return "\n".join(lines)


def _cells(seconds: Seconds, system: str) -> list[str]:
    parts = ("check", "begin", "complete") if system == OURS else ("stall",)
    stalls = [sum(turn) for turn in zip(*(seconds[f"{system} {part}"] for part in parts), strict=True)]
    slower = Quartiles.from_values(seconds[f"{system} step"]).median / Quartiles.from_values(seconds["step"]).median
    return [
        _spread(seconds["copy"]),
        _spread(seconds[f"{system} stall"]),
        f"{ratio(seconds, system, 'copy'):.2f}",
        _spread(stalls),
        _spread(seconds[f"{system} blocking"]),
        f"{ratio(seconds, system, f'{system} blocking'):.3f}",
        _spread(seconds[f"{system} written"]),
        _spread(seconds["step"]),
        _spread(seconds[f"{system} step"]),
        f"{slower:.2f}",
    ]


def loads_table(layouts: Mapping[str, Record]) -> str:
    """Format megascale's resumes, in the same and in another layout, as a Markdown table."""
    lines = [pipes(["saved in", "resumed in", "s", "MiB read", "MiB stored", "copies read"])]
    lines.append(pipes(["---", "---", *["---:"] * 4]))
    for layout, record in layouts.items():
        for name, resumed in ((layout, record), (record["elsewhere"]["layout"], record["elsewhere"])):
            read, stored = resumed["read"], resumed["one copy"]
            sizes = [f"{read / MIB:,.1f}", f"{stored / MIB:,.1f}", f"{read / stored:.3f}"]
            lines.append(pipes([layout, name, _spread(resumed["seconds"]["resume"]), *sizes]))
    return "\n".join(lines)


def caption(record: Record) -> str:
    """Describe the model, the machine and the method."""
    size = Size(**record["size"])
    load = max(layout["others"] for layout in record["layouts"].values())
    noise = f" Other processes used up to {load:.0%} of the machine: measure again when it is idle."
    return (
        f"hidden {size.hidden}, {size.layers} layers, SwiGLU {size.ffn}, vocabulary {size.vocab}, AdamW in fp32; steps "
        f"of {size.global_batch} x {size.seq} tokens. Medians (quartiles) of {record['saves']} turns, of the slowest "
        f"rank, on {record['machine']}, {record['cpus']} CPUs, one thread per process; torch {record['torch']}. "
        "*All stalls* adds the check for non-finite elements and the completion to the save. torch's async_save reuses "
        "the memory of its copies. Resumes read files outside the page cache. Goals: a stall of at most 1.2 x a copy "
        "and 0.1 x a blocking save." + (noise if load > QUIET else "")
    )


def _spread(values: Sequence[float]) -> str:
    quartiles = Quartiles.from_values(values)
    return f"{quartiles.median:.3f} ({quartiles.low:.3f}..{quartiles.high:.3f})"


if __name__ == "__main__":
    sys.exit(main())
