#!/usr/bin/env python3
"""Speed, CPU time and memory beside the peers, on the CPUs of this machine: the same model trained on the same tokens.

The systems run in turns, each once before any runs again, so that what else the machine does hits all alike. Compared
are medians over the rounds. Every run must print the losses that megascale computes from the same weights and tokens.
All layouts take about an hour on two cores.
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
from peer_systems import COMPARED, OURS, ROOT, SYSTEMS, Cluster, Layout, Size, System, Task, check_command, command
from peer_table import Failed, Rows, markdown, replace, rows, surroundings, text

from megascale.device import detect

LAYOUTS = "1,tp2,tp2 sp,pp2,pp2 vpp2,dp2,tp2 pp2,tp2 pp2 dp2"

QUIET = 0.05
"""Share of the machine that others may use before the tool says so."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the tool. 0, or 1 if megascale failed or some system did not train on the same task, 2 if nothing could be
    measured.
    """
    options = arguments().parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: what runs is ended first
    if options.install:
        install_torchtitan()
        return 0
    try:
        bench = Bench(options)
        if options.markdown:
            surroundings(options.markdown)  # better now than after an hour
        return bench.run(options)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--peers", type=Path, default=Path(os.environ.get("MEGASCALE_PEERS", ROOT.parent / "shared" / "peers")),
        metavar="DIR", help="folder of the peers' scripts; default MEGASCALE_PEERS or ../shared/peers")  # fmt: skip
    add("--systems", default="", help=f"some of {','.join(SYSTEMS)}; default all that are installed")
    add("--layouts", default=LAYOUTS, help="with commas between; default '%(default)s'")
    add("--rounds", type=int, default=3, help="runs of each system in each layout; default %(default)s")
    add("--steps", type=int, default=8, help="of a run, warm-up included; default %(default)s")
    add("--warmup", type=int, default=2, help="steps at the start of a run that are not timed; default %(default)s")
    add("--timeout", type=float, default=900, metavar="SECONDS", help="for one run; default %(default)s")
    add("--python", action="append", default=[], metavar="SYSTEM=PATH", help="run a system with another Python")
    add("--install", choices=["torchtitan"], help="make a peer's own environment in build/peers, and end")
    add("--rate", help="put every rank on a host of its own, joined by links of this bandwidth, such as 300mbit (root)")
    add("--cores", type=float, help="with --rate: processor time of a host, such as 0.25 of a core")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    add("--markdown", type=Path, metavar="FILE", help="write the table between the two markers of a Markdown file")
    for field in fields(Size):
        add(f"--{field.name.replace('_', '-')}", type=int, default=field.default, help="default %(default)s")
    return parser


class Bench:
    """Which systems run what.

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
            raise ValueError("--rounds: at least one")
        if options.cores and not options.rate:
            raise ValueError("--cores bounds hosts of a testbed: name their --rate too")
        self.cluster = Cluster(options.rate, options.cores) if options.rate else None
        self.task = Task(size, options.steps, options.warmup)
        self.pythons = find_pythons(options.python)
        self.systems = choose(options.systems, self.pythons)
        for system in self.systems:
            if system.name != OURS and not (self.peers / system.script).is_file():
                raise ValueError(
                    f"{self.peers / system.script} is absent: name the folder of the peers' scripts with --peers or "
                    f"MEGASCALE_PEERS, or measure megascale alone with --systems {OURS}"
                )

    def run(self, options: argparse.Namespace) -> int:
        """Measure, and show the tables."""
        runs: list[Measurement] = []
        tables: dict[str, Rows] = {}
        with tempfile.TemporaryDirectory() as scratch:
            expected = self.expect(scratch)
            for layout in self.layouts:
                results = self.measure(layout, options.rounds, expected, scratch)
                runs += [run for found in results.values() for run in found if isinstance(run, Measurement)]
                tables[layout.name] = rows(results)
                if not options.json:
                    print(text(layout.name, tables[layout.name]), end="\n\n", flush=True)
        caption = self.caption(options.rounds, runs)
        if options.json:
            layouts = {name: [asdict(row) for row in found] for name, found in tables.items()}
            print(json.dumps({"caption": caption, "loss_difference": worst(runs), "layouts": layouts}))
        else:
            print(f"{caption}\nx: megascale / the peer")
        if options.markdown:
            replace(options.markdown, markdown(tables, caption))
        return int(any(isinstance(row, Failed) and counts(row) for found in tables.values() for row in found))

    def expect(self, scratch: str) -> dict[str, tuple[float, ...]]:
        """The first losses from the initial weights of each family, by megascale on one process."""
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
        """All rounds of one layout. A system that failed is not run again in it."""
        systems = [system for system in self.systems if layout.dp > 1 or not system.only_dp]
        results: dict[str, list[Result]] = {system.name: [] for system in systems}
        for number in range(1, rounds + 1):
            for system in systems:
                found = results[system.name]
                if any(isinstance(result, Failure) for result in found):
                    continue
                words = command(system, layout, self.task, self.pythons[system.name], self.peers, self.cluster)
                result = agree(execute(words, self.seconds, scratch), expected[system.weights])
                found.append(result)
                progress(f"layout {layout.name}, round {number} of {rounds}, {system.name}: {brief(result)}")
        return results

    def where(self) -> str:
        """Where the ranks are, if not on this machine's loopback."""
        if self.cluster is None:
            return ""
        cores = f" with {self.cluster.cores:g} cores" if self.cluster.cores else ""
        return f", every rank on a host of its own{cores}, links of {self.cluster.rate}"

    def caption(self, rounds: int, runs: Sequence[Measurement]) -> str:
        """What was measured where."""
        size, task = self.task.size, self.task
        others = max((run.others for run in runs), default=0.0)
        noise = f" Other processes used up to {others:.0%} of the machine: measure again when it is quiet."
        versions = ", ".join(sorted({run.torch for run in runs}))
        return (
            f"hidden {size.hidden}, {size.layers} layers, {size.heads} heads, SwiGLU {size.ffn}, sequence {size.seq}, "
            f"vocabulary {size.vocab}, micro batch {size.micro_batch}, global batch {size.global_batch}, fp32, "
            f"a thread a process{self.where()}. Medians over {rounds} rounds of {task.steps - task.warmup} timed "
            f"steps, in turns, on {processor()}, {os.cpu_count()} CPUs; torch {versions}. "
            f"Same tokens: the first {COMPARED} losses differ by {worst(runs):.0e} at most from megascale's on one "
            "process, started from the same weights." + (noise if others > QUIET else "")
        )


def find_pythons(given: Sequence[str]) -> dict[str, Path]:
    """The Python of each system that is installed.

    Raises: ValueError for a pair that makes no sense.
    """
    found = {name: path for name in SYSTEMS if (path := python_of(name)) is not None}
    for pair in given:
        name, _, python = pair.partition("=")
        if name not in SYSTEMS or not Path(python).is_file():
            raise ValueError(f"--python {pair}: SYSTEM=PATH with one of {', '.join(SYSTEMS)} and a Python")
        found[name] = Path(python)
    return found


def choose(names: str, pythons: dict[str, Path]) -> list[System]:
    """The systems to run, in our order. Without names, all that are installed; the others are named.

    Raises: ValueError for a name that is none, or whose system is not installed.
    """
    wanted = [name.strip() for name in names.split(",")] if names else list(SYSTEMS)
    unknown = [name for name in wanted if name not in SYSTEMS]
    if unknown:
        raise ValueError(f"--systems: there is no {', '.join(unknown)}; there are {', '.join(SYSTEMS)}")
    absent = [name for name in wanted if name not in pythons]
    message = f"not installed: {', '.join(absent)}; --install {' '.join(absent)} puts it into build/peers"
    if absent and names:
        raise ValueError(message)
    if absent:
        progress(message)
    return [system for name, system in SYSTEMS.items() if name in wanted and name in pythons]


def worst(runs: Sequence[Measurement]) -> float:
    """The largest difference of first losses from what they should be."""
    return max((run.difference for run in runs), default=0.0)


def counts(row: Failed) -> bool:
    """Whether a failure is ours to mend; a peer that does not run on this machine is only reported."""
    return row.system == OURS or row.why.startswith("not the same task")


def brief(result: Result) -> str:
    """A run in a few words."""
    if isinstance(result, Failure):
        return f"failed: {result.why}"
    speed = f"{result.tokens_per_s:,.0f} tokens/s, {result.cpu_s:.3f} CPU s/step, {result.rss_mib:,.0f} MiB"
    return f"{speed}; others used {result.others:.0%} of the machine" if result.others > QUIET else speed


def processor() -> str:
    """The processor's name, as megascale reports it."""
    return detect(allow_gpu=False).name


if __name__ == "__main__":
    sys.exit(main())
