#!/usr/bin/env python3
"""What checkpoints cost, on the CPUs of this machine: how long training stands at a save, beside a plain copy of the
same memory, a save that is waited for, and torch.distributed.checkpoint on as many bytes; and what a resume reads.

Each layout is a real world of `megascale train`'s own parts. Everything is measured in turns, once before anything is
measured again, and the first turn does not count. All layouts take about a quarter of an hour on two cores.
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
from peer_systems import OURS, ROOT, Layout, Size
from peer_table import pipes
from peers import QUIET, processor

from megascale.bench.spread import Spread
from megascale.core.errors import ConfigError
from megascale.core.files import write_text
from megascale.core.process import stopped_in_order
from megascale.core.units import MIB

LAYOUTS = "1,tp2,dp2,tp2 pp2"
SIZE = Size(hidden=512, layers=8, heads=8, ffn=1536, seq=128, vocab=8192, micro_batch=1, global_batch=4)
SCRIPT = Path(__file__).with_name("checkpoint_rank.py")


def main(words: Sequence[str] | None = None) -> int:
    """Run the tool. 0, 1 if a world failed, 2 if nothing could be measured."""
    options = arguments().parse_args(words)
    try:
        layouts = [Layout.parse(name.strip()) for name in options.layouts.split(",")]
        if options.saves < 1:
            raise ValueError("--saves: at least one")
        size = Size(**{field.name: getattr(options, field.name) for field in fields(Size)})
        for layout in layouts:
            configuration(Task(layout.name, size, options.saves, ""))
    except (ValueError, ConfigError) as error:
        print(error, file=sys.stderr)
        return 2
    with stopped_in_order():
        return measure(layouts, size, options)


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--layouts", default=LAYOUTS, help="with commas between; default '%(default)s'")
    add("--saves", type=int, default=7, help="of each kind in each layout, that count; default %(default)s")
    add("--timeout", type=float, default=1800, metavar="SECONDS", help="for one world; default %(default)s")
    add("--folder", type=Path, default=ROOT / "build" / "bench-checkpoint", metavar="DIR",
        help="on the file system to write to; nothing stays there; default build/bench-checkpoint")  # fmt: skip
    add("--output", type=Path, default=ROOT / "build" / "bench-checkpoint.json", metavar="FILE",
        help="where all that was measured is written; default build/bench-checkpoint.json")  # fmt: skip
    for field in fields(Size):
        name, default = field.name.replace("_", "-"), getattr(SIZE, field.name)
        add(f"--{name}", type=int, default=default, help="default %(default)s")
    return parser


def measure(layouts: Sequence[Layout], size: Size, options: argparse.Namespace) -> int:
    """Measure all layouts, and show the tables. 1 if a world failed."""
    found: Record = {
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
        found["layouts"][layout.name] = result
        write_text(options.output, json.dumps(found, indent=1) + "\n")
        progress(f"layout {layout.name}: stall {ratio(result['seconds'], OURS, 'copy'):.2f} x a copy")
    if found["layouts"]:
        print(f"{caption(found)}\n\n{saves_table(found['layouts'])}\n\n{loads_table(found['layouts'])}")
    return int(len(found["layouts"]) < len(layouts))


def partner(layout: Layout, layouts: Sequence[Layout]) -> Layout:
    """The layout after this one, which resumes from its checkpoint too; if there is none, one process or two."""
    other = layouts[(layouts.index(layout) + 1) % len(layouts)]
    return other if other != layout else Layout.parse("1" if layout.world > 1 else "tp2")


def measure_layout(task: Task, other: Layout, seconds: float) -> Record | Failure:
    """Saves and resumes of one layout, and resumes of another from what it saved."""
    record = run_world(task, seconds)
    if isinstance(record, Failure):
        return record
    elsewhere = run_world(Task(other.name, task.size, task.turns, task.folder, record["checkpoint"]), seconds)
    if isinstance(elsewhere, Failure):
        return elsewhere
    return record | {"elsewhere": elsewhere | {"layout": other.name}}


def run_world(task: Task, seconds: float) -> Record | Failure:
    """What rank 0 of a world of processes prints in at most so many seconds."""
    world = Layout.parse(task.layout).world
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)] if world > 1 else []
    script = [str(SCRIPT), json.dumps(asdict(task))]
    out = output([sys.executable, "-W", "ignore", *launcher, *script], seconds, task.folder)
    if isinstance(out, Failure):
        return out
    found: Record = json.loads(out.splitlines()[-1])
    return found


Seconds = Mapping[str, Sequence[float]]


def ratio(seconds: Seconds, system: str, what: str) -> float:
    """The median stall of a system divided by the median of something else."""
    return Spread.of(seconds[f"{system} stall"]).median / Spread.of(seconds[what]).median


def saves_table(layouts: Mapping[str, Record]) -> str:
    """Both systems' saves in Markdown."""
    head = ["layout", "system", "MiB a rank", "copy s", "stall s", "/ copy", "all stalls s", "blocking s",
            "stall / blocking", "written s", "step s", "step s, writing", "/ step"]  # fmt: skip
    lines = [pipes(head), pipes(["---", "---", *["---:"] * (len(head) - 2)])]
    for layout, record in layouts.items():
        size = f"{max(record['state']) / MIB:,.0f}"
        lines += [pipes([layout, system, size, *_cells(record["seconds"], system)]) for system in (OURS, PEER)]
    return "\n".join(lines)


def _cells(seconds: Seconds, system: str) -> list[str]:
    parts = ("check", "begin", "complete") if system == OURS else ("stall",)
    every = [sum(each) for each in zip(*(seconds[f"{system} {part}"] for part in parts), strict=True)]
    slower = Spread.of(seconds[f"{system} step"]).median / Spread.of(seconds["step"]).median
    return [
        _spread(seconds["copy"]),
        _spread(seconds[f"{system} stall"]),
        f"{ratio(seconds, system, 'copy'):.2f}",
        _spread(every),
        _spread(seconds[f"{system} blocking"]),
        f"{ratio(seconds, system, f'{system} blocking'):.3f}",
        _spread(seconds[f"{system} written"]),
        _spread(seconds["step"]),
        _spread(seconds[f"{system} step"]),
        f"{slower:.2f}",
    ]


def loads_table(layouts: Mapping[str, Record]) -> str:
    """Our resumes in Markdown: into the layout that saved, and into another one."""
    lines = [pipes(["saved in", "resumed in", "s", "MiB read", "MiB stored", "copies read"])]
    lines.append(pipes(["---", "---", *["---:"] * 4]))
    for layout, record in layouts.items():
        for name, found in ((layout, record), (record["elsewhere"]["layout"], record["elsewhere"])):
            read, one = found["read"], found["one copy"]
            sizes = [f"{read / MIB:,.1f}", f"{one / MIB:,.1f}", f"{read / one:.3f}"]
            lines.append(pipes([layout, name, _spread(found["seconds"]["resume"]), *sizes]))
    return "\n".join(lines)


def caption(found: Record) -> str:
    """What was measured where."""
    size = Size(**found["size"])
    others = max(record["others"] for record in found["layouts"].values())
    noise = f" Other processes used up to {others:.0%} of the machine: measure again when it is quiet."
    return (
        f"hidden {size.hidden}, {size.layers} layers, SwiGLU {size.ffn}, vocabulary {size.vocab}, AdamW in fp32; steps "
        f"of {size.global_batch} x {size.seq} tokens. Medians (quartiles) of {found['saves']} turns, of the slowest "
        f"rank, on {found['machine']}, {found['cpus']} CPUs, a thread a process; torch {found['torch']}. *All stalls* "
        "has beside the save the look for numbers that are not finite and the completion. torch's async_save keeps the "
        "room for its copies from save to save. Resumes read files that were not in memory. Goals: a stall of at most "
        "1.2 x a copy and 0.1 x a blocking save." + (noise if others > QUIET else "")
    )


def _spread(values: Sequence[float]) -> str:
    found = Spread.of(values)
    return f"{found.median:.3f} ({found.low:.3f}..{found.high:.3f})"


if __name__ == "__main__":
    sys.exit(main())
