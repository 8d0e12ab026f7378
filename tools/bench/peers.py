#!/usr/bin/env python3
"""Throughput, CPU time and memory compared with the peers on this machine's CPUs, on the same model and tokens.

The systems alternate, one run of every system per round, to spread other load evenly; medians over rounds are compared.
Every run must print the losses that megascale computes from the same weights and tokens. All layouts take about an hour
on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from peer_install import install_torchtitan, python_of
from peer_run import Failure, Measurement, Result, agree, execute, progress
from peer_systems import (
    COMPARED,
    OURS,
    ROOT,
    SYSTEMS,
    Cluster,
    Layout,
    Size,
    System,
    Task,
    check_command,
    command,
    with_experts,
)
from peer_table import EXPERTS_REGION, REGION, SHARDED_REGION, Failed, Rows, markdown, rows, text

from megascale.cli.parsing import CommandParser
from megascale.device import detect_device
from results import check_region, fill

LAYOUTS = "1,tp2,tp2 sp,pp2,pp2 vpp2,dp2,tp2 pp2,tp2 pp2 dp2"

QUIET = 0.05
"""Machine share of other processes above which the tool warns."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the tool. Exit status: 0, 1 if megascale failed or a system trained another task, 2 for wrong options."""
    options = arguments().parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # like Ctrl-C: end the current run first
    if options.install:
        install_torchtitan()
        return 0
    try:
        bench = Bench(options)
        if options.markdown:
            check_region(options.markdown, region_of(options))  # fail before the measurements, not after
        return bench.run(options)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


def region_of(options: argparse.Namespace) -> str:
    """Return the markers of the table."""
    sharded = all("zero3" in name for name in options.layouts.split(","))
    return EXPERTS_REGION if options.experts else SHARDED_REGION if sharded else REGION


def arguments() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = CommandParser(
        "tools/bench/peers.py",
        __doc__ or "",
        "python tools/bench/peers.py --layouts 1,tp2 --rounds 1",
        "docs/performance.md",
    )
    add = parser.add_argument
    add("--peers", type=Path, default=Path(os.environ.get("MEGASCALE_PEERS", ROOT.parent / "shared" / "peers")),
        metavar="DIR", help="folder of the peers' scripts; default MEGASCALE_PEERS or ../shared/peers")  # fmt: skip
    add("--systems", default="", help=f"any of {','.join(SYSTEMS)}; default all that are installed")
    add("--layouts", default=LAYOUTS, help="comma-separated; default '%(default)s'")
    add("--rounds", type=int, default=3, help="runs per system and layout; default %(default)s")
    add("--steps", type=int, default=8, help="steps per run, warm-up included; default %(default)s")
    add("--warmup", type=int, default=2, help="untimed steps first; default %(default)s")
    add("--timeout", type=float, default=900, metavar="SECONDS", help="limit for one run; default %(default)s")
    add("--python", action="append", default=[], metavar="SYSTEM=PATH", help="run a system with another Python")
    add("--install", choices=["torchtitan"], help="make a peer's environment in build/peers and exit")
    add("--rate", help="run one rank per host of a testbed with links of this bandwidth, such as 300mbit (needs root)")
    add("--cores", type=float, help="with --rate: processor time of a host, such as 0.25 of a core")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    add("--markdown", type=Path, metavar="FILE", help="write the table between the markers of a Markdown file")
    for field in fields(Size):
        add(f"--{field.name.replace('_', '-')}", type=int, default=field.default, help="default %(default)s")
    return parser


class Bench:
    """The systems, layouts and task of a comparison.

    Raises: ValueError if there is nothing to run.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.peers: Path = options.peers
        self.seconds: float = options.timeout
        self.layouts = [Layout.parse(name.strip()) for name in options.layouts.split(",")]
        size = Size(**{field.name: getattr(options, field.name) for field in fields(Size)})
        if options.steps < max(options.warmup + 1, COMPARED):
            raise ValueError(f"--steps {options.steps} leaves no step to time after --warmup {options.warmup}")
        if options.rounds < 1:
            raise ValueError("--rounds: give at least one")
        if options.cores and not options.rate:
            raise ValueError("--cores limits a testbed's hosts: give --rate too")
        self.cluster = Cluster(options.rate, options.cores) if options.rate else None
        self.task = Task(size, options.steps, options.warmup)
        self.pythons = find_pythons(options.python)
        self.systems = choose(options.systems, self.pythons, with_experts() if size.experts else SYSTEMS)
        for system in self.systems:
            if system.name != OURS and not (self.peers / system.script).is_file():
                raise ValueError(
                    f"{self.peers / system.script} is missing: give the folder of the peers' scripts with --peers or "
                    f"MEGASCALE_PEERS, or measure megascale alone with --systems {OURS}"
                )

    def run(self, options: argparse.Namespace) -> int:
        """Measure all layouts and print the tables."""
        runs: list[Measurement] = []
        tables: dict[str, Rows] = {}
        with tempfile.TemporaryDirectory() as scratch:
            expected = self.expect(scratch)
            for layout in self.layouts:
                results = self.measure(layout, options.rounds, expected, scratch)
                runs += [run for rounds in results.values() for run in rounds if isinstance(run, Measurement)]
                tables[layout.name] = rows(results)
                if not options.json:
                    print(text(layout.name, tables[layout.name]), end="\n\n", flush=True)
        caption = self.caption(options.rounds, runs)
        if options.json:
            layouts = {name: [asdict(row) for row in table] for name, table in tables.items()}
            print(json.dumps({"caption": caption, "loss_difference": worst(runs), "layouts": layouts}))
        else:
            print(f"{caption}\nx: megascale / the peer")
        if options.markdown:
            fill(options.markdown, region_of(options), markdown(tables, caption))
        return int(any(isinstance(row, Failed) and counts(row) for table in tables.values() for row in table))

    def expect(self, scratch: str) -> dict[str, tuple[float, ...]]:
        """Compute the expected first losses for every family of initial weights, by megascale on one process."""
        expected = {}
        for family in sorted({system.weights for system in self.systems}):
            result = execute(check_command(family, self.task, self.pythons[OURS]), self.seconds, scratch)
            if isinstance(result, Failure):
                raise ValueError(f"megascale could not train from the weights of {family}: {result.why}")
            expected[family] = result.losses
            progress(f"losses from the weights of {family}: {', '.join(f'{loss:.5f}' for loss in result.losses)}")
        return expected

    def measure(
        self, layout: Layout, rounds: int, expected: dict[str, tuple[float, ...]], scratch: str
    ) -> dict[str, list[Result]]:
        """Run all rounds of one layout. A failed system is left out of further rounds."""
        systems = [system for system in self.systems if system.trains_in(layout)]
        results: dict[str, list[Result]] = {system.name: [] for system in systems}
        for number in range(1, rounds + 1):
            for system in systems:
                if any(isinstance(result, Failure) for result in results[system.name]):
                    continue
                words = command(system, layout, self.task, self.pythons[system.name], self.peers, self.cluster)
                result = agree(execute(words, self.seconds, scratch), expected[system.weights])
                results[system.name].append(result)
                progress(f"layout {layout.name}, round {number} of {rounds}, {system.name}: {brief(result)}")
        return results

    def where(self) -> str:
        """Describe the testbed; "" for ranks on this machine's loopback."""
        if self.cluster is None:
            return ""
        cores = f" with {self.cluster.cores:g} cores" if self.cluster.cores else ""
        return f", one rank per host{cores}, links of {self.cluster.rate}"

    def caption(self, rounds: int, runs: Sequence[Measurement]) -> str:
        """Describe the model, the machine and the method."""
        size, task = self.task.size, self.task
        experts = f"{size.experts} experts of which a token has {size.topk}, " if size.experts else ""
        load = max((run.others for run in runs), default=0.0)
        noise = f" Other processes used up to {load:.0%} of the machine: measure again when it is idle."
        versions = ", ".join(sorted({run.torch for run in runs}))
        return (
            f"hidden {size.hidden}, {size.layers} layers, {size.heads} heads, {experts}SwiGLU {size.ffn}, "
            f"sequence {size.seq}, "
            f"vocabulary {size.vocab}, micro batch {size.micro_batch}, global batch {size.global_batch}, fp32, "
            f"one thread per process{self.where()}. Medians over {rounds} rounds of {task.steps - task.warmup} timed "
            f"steps, alternating, on {processor()}, {os.cpu_count()} CPUs; torch {versions}. "
            f"Same tokens: the first {COMPARED} losses differ by {worst(runs):.0e} at most from megascale's on one "
            "process, started from the same weights." + (noise if load > QUIET else "")
        )


def find_pythons(given: Sequence[str]) -> dict[str, Path]:
    """Find the Python of every installed system, overridden by SYSTEM=PATH words.

    Raises: ValueError for a malformed word.
    """
    pythons = {name: path for name in SYSTEMS if (path := python_of(name)) is not None}
    for pair in given:
        name, _, python = pair.partition("=")
        if name not in SYSTEMS or not Path(python).is_file():
            raise ValueError(f"--python {pair}: give SYSTEM=PATH with a SYSTEM of {', '.join(SYSTEMS)} and a Python")
        pythons[name] = Path(python)
    return pythons


def choose(names: str, pythons: dict[str, Path], systems: dict[str, System]) -> list[System]:
    """Select the systems to run: `names`, or all that are installed (missing systems are reported).

    Raises: ValueError for an unknown name or a system that is not installed.
    """
    wanted = [name.strip() for name in names.split(",")] if names else list(systems)
    unknown = [name for name in wanted if name not in systems]
    if unknown:
        raise ValueError(f"--systems: unknown {', '.join(unknown)}; choose from {', '.join(systems)}")
    absent = [name for name in wanted if name not in pythons]
    message = f"not installed: {', '.join(absent)}; --install {' '.join(absent)} installs to build/peers"
    if absent and names:
        raise ValueError(message)
    if absent:
        progress(message)
    return [system for name, system in systems.items() if name in wanted and name in pythons]


def worst(runs: Sequence[Measurement]) -> float:
    """Return the largest difference between first losses and expected losses."""
    return max((run.difference for run in runs), default=0.0)


def counts(row: Failed) -> bool:
    """Return True if a failure fails the tool; a peer that cannot run on this machine is only reported."""
    return row.system == OURS or row.why.startswith("not the same task")


def brief(result: Result) -> str:
    """Summarise a run in a few words."""
    if isinstance(result, Failure):
        return f"failed: {result.why}"
    speed = f"{result.tokens_per_s:,.0f} tokens/s, {result.cpu_s:.3f} CPU s/step, {result.rss_mib:,.0f} MiB"
    return f"{speed}; other processes used {result.others:.0%} of the machine" if result.others > QUIET else speed


def processor() -> str:
    """Return the processor's name as megascale reports it."""
    return detect_device(allow_gpu=False).name


if __name__ == "__main__":
    sys.exit(main())
