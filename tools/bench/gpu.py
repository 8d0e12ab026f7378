#!/usr/bin/env python3
"""Throughput on one GPU: megascale, torchtitan and megatron-core on the same models, alternating, in bf16 and fp8.

The result of a run is stored in a file at once, and later calls add runs to the file, to build the table in parts.
`--small` replaces every case by a tiny model on the CPU, to test the tool.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gpu_table
from gpu_systems import CASES, FIT, SYSTEMS, Job, Record, agree, gemm_rates, measure, python_of
from peer_install import install_beside
from peer_run import Failure, progress
from peer_systems import OURS, ROOT

from megascale.bench.mfu import MIN_TIMED_STEPS, WARM_UP_STEPS
from megascale.catalog.precisions import PRECISIONS
from megascale.cli.parsing import CommandParser
from megascale.core.files import write_text
from megascale.device import gpu_count
from results import check_region, fill

PRECISIONS_COMPARED = ("bf16", "fp8")


def main(words: Sequence[str] | None = None) -> int:
    """Run the tool. Exit status: 0, 1 if a run of megascale failed, 2 if nothing could be measured."""
    options = arguments().parse_args(words)
    if options.results is None:
        options.results = ROOT / "build" / ("bench-gpu-small.json" if options.small else "bench-gpu.json")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # like Ctrl-C: end the current run first
    if options.small:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    try:
        results = Results([Path(path) for path in options.merge], options.results)
        if options.markdown:
            check_region(options.markdown, gpu_table.REGION)  # fail before the measurements, not after
        if not options.table:
            Bench(options, results).run()
        elif not results.runs:
            raise ValueError(f"{options.results} holds no runs to show: leave out --table to measure some")
        if options.markdown and all("failure" in run for run in results.runs):
            raise ValueError(f"{options.results} holds no successful run: {options.markdown} is unchanged")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    show(options, results)
    return int(any(run["system"] == OURS and "failure" in run for run in results.made))


def arguments() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = CommandParser(
        "tools/bench/gpu.py", __doc__ or "", "python tools/bench/gpu.py --small --rounds 1", "docs/performance.md"
    )
    add = parser.add_argument
    add("--cases", nargs="+", choices=CASES, default=CASES, metavar="CASE", help=f"any of {' '.join(CASES)}")
    add("--systems", nargs="+", choices=SYSTEMS, default=[], metavar="SYSTEM",
        help=f"any of {' '.join(SYSTEMS)}; default all that are installed")  # fmt: skip
    add("--precisions", nargs="+", default=PRECISIONS_COMPARED, metavar="NAME", help="default bf16 fp8")
    add("--rounds", type=int, default=2, help="runs per system and case; default %(default)s")
    add("--steps", type=int, default=MIN_TIMED_STEPS, help="timed steps per run; default %(default)s")
    add("--warm-up", type=int, default=WARM_UP_STEPS, help="untimed steps first; default %(default)s")
    add("--layers", action="append", default=[], metavar="CASE=N",
        help="override the layers of a case; CASE=fit: as many as fit with megascale")  # fmt: skip
    add("--timeout", type=float, default=300, metavar="SECONDS", help="limit for one run; default %(default)s")
    add("--no-gemm", action="store_true", help="do not run `megascale bench gemm` first")
    add(
        "--results",
        type=Path,
        metavar="FILE",
        help="file that runs are added to; default build/bench-gpu.json, with --small bench-gpu-small.json",
    )
    add("--merge", nargs="+", default=[], metavar="FILE", help="add the runs of other results files")
    add("--table", action="store_true", help="run nothing, show the stored runs")
    add("--markdown", type=Path, metavar="FILE", help="write the tables between the markers of a Markdown file")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    add("--install", nargs="*", choices=SYSTEMS[1:], metavar="SYSTEM",
        help="first install peers from PyPI in build/gpu-peers; default all")  # fmt: skip
    add("--python", action="append", default=[], metavar="SYSTEM=PATH", help="run a system with another Python")
    add("--small", action="store_true", help="tiny models on the CPU, to test the tool")
    add("--peers", type=Path, default=Path(os.environ.get("MEGASCALE_PEERS", ROOT.parent / "shared" / "peers")),
        metavar="DIR", help="with --small: folder of the peers' CPU patches")  # fmt: skip
    return parser


class Results:
    """Runs and GEMM rates stored in a file. `made`: the runs of this call.

    Raises: ValueError for a file that is not a results file
    """

    def __init__(self, merged: Sequence[Path], path: Path) -> None:
        self.path = path
        self.runs: list[Record] = []
        self.made: list[Record] = []
        self.gemm: dict[str, Any] | None = None
        for file in [*([path] if path.exists() else []), *merged]:
            try:
                stored = json.loads(file.read_text(encoding="utf-8"))
                ids = {run["id"] for run in self.runs}
                self.runs += [run for run in stored["runs"] if run["id"] not in ids]
                self.gemm = self.gemm or stored["gemm"]
            except OSError as error:
                raise ValueError(f"{file}: {error.strerror}") from None
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{file} is not a results file of this tool: {error!r}") from None

    def add(self, record: Record) -> None:
        self.runs.append(record)
        self.made.append(record)
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, json.dumps({"runs": self.runs, "gemm": self.gemm}, indent=1) + "\n")


class Bench:
    """The systems, cases and options of a comparison.

    Raises: ValueError if there is nothing to run
    """

    def __init__(self, options: argparse.Namespace, results: Results) -> None:
        self.options = options
        self.results = results
        if options.steps < MIN_TIMED_STEPS:
            raise ValueError(f"--steps {options.steps}: the median needs {MIN_TIMED_STEPS} or more")
        if options.rounds < 1 or options.warm_up < 1:
            raise ValueError("--rounds and --warm-up: give at least one")
        if not (options.small or gpu_count()):
            raise ValueError("torch finds no GPU, and the cases need one: give --small for tiny cases")
        self.layers = pairs(options.layers, CASES, "--layers", layers)
        if options.install is not None:
            install(options.install or SYSTEMS[1:], small=options.small)
        given = pairs(options.python, SYSTEMS, "--python", program)
        self.pythons = {OURS: Path(sys.executable)} | given
        for system in SYSTEMS:
            if system not in self.pythons and (python := python_of(system, small=options.small)):
                self.pythons[system] = python
        self.systems = choose(options.systems, self.pythons)
        if FIT in self.layers.values() and OURS not in self.systems:
            raise ValueError(f"--layers CASE={FIT} needs {OURS} among --systems")
        unknown = [name for name in options.precisions if name not in PRECISIONS.cards]
        if unknown:
            raise ValueError(f"--precisions: unknown {', '.join(unknown)}; choose from {', '.join(PRECISIONS.cards)}")

    def run(self) -> None:
        """Measure all cases in all precisions."""
        options = self.options
        with tempfile.TemporaryDirectory() as scratch:
            if OURS in self.systems and not options.no_gemm and self.results.gemm is None:
                rates = gemm_rates(self.pythons[OURS], options.timeout, scratch, small=options.small)
                if isinstance(rates, Failure):
                    progress(f"megascale bench gemm failed: {rates.why}")
                else:
                    self.results.gemm = rates
                    self.results.write()
            for case in options.cases:
                for precision in options.precisions:
                    self.compare(case, precision, scratch)

    def compare(self, case: str, precision: str, scratch: str) -> None:
        """Run all rounds of one case in one precision. A failed system is left out of further rounds."""
        o = self.options
        failed: set[str] = set()
        for number in range(1, o.rounds + 1):
            for system in self.systems:
                if system in failed:
                    continue
                job = Job(case, precision, o.steps, o.warm_up, self.layers.get(case), o.small, o.peers)
                measured = measure(system, job, self.pythons[system], o.timeout, scratch)
                record = agree(measured, self.results.runs)
                self.results.add(record)
                progress(f"{case} {precision}, round {number} of {o.rounds}, {system}: {brief(record)}")
                if "failure" in record:
                    failed.add(system)
                elif self.layers.get(case) == FIT:
                    self.layers[case] = record["layers"]  # the same for all systems


def install(systems: Sequence[str], *, small: bool) -> None:
    """Install the missing peers. A peer that cannot be installed is reported and left out."""
    for system in systems:
        try:
            if python_of(system, small=small) is None:
                install_beside(system)
        except OSError as error:
            progress(f"{system} cannot be installed: {error}")


def pairs(words: Sequence[str], names: Sequence[str], option: str, read: Callable[[str], Any]) -> dict[str, Any]:
    """Parse NAME=VALUE words, with NAME among `names` and VALUE parsed by `read`.

    Raises: ValueError for a malformed word
    """
    values = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            values[name] = read(value)
        except ValueError as error:
            raise ValueError(f"{option} {word}: {error}") from None
        if name not in names:
            raise ValueError(f"{option} {word}: give NAME=VALUE with a NAME of {', '.join(names)}")
    return values


def layers(text: str) -> int | str:
    """Parse an integer of 1 or more, or FIT. Raises: ValueError"""
    if text == FIT:
        return text
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(f"{text!r} is not an integer of 1 or more")
    return int(text)


def program(text: str) -> Path:
    """Parse the path of an existing file. Raises: ValueError"""
    if not Path(text).is_file():
        raise ValueError(f"there is no file {text!r}")
    return Path(text)


def choose(names: Sequence[str], pythons: dict[str, Path]) -> list[str]:
    """Select the systems to run: `names`, or all that are installed.

    Raises: ValueError for a system that is not installed
    """
    absent = [name for name in names or SYSTEMS if name not in pythons]
    message = f"not installed: {', '.join(absent)}; --install {' '.join(absent)} installs to build/gpu-peers"
    if absent and names:
        raise ValueError(message)
    if absent:
        progress(message)
    return [name for name in SYSTEMS if name in (names or pythons) and name in pythons]


def show(options: argparse.Namespace, results: Results) -> None:
    """Print and write the tables of the stored runs."""
    tables = gpu_table.tables(results.runs)
    if options.json:
        print(json.dumps({"runs": results.runs, "gemm": results.gemm, "goals": gpu_table.goals(tables)}))
    else:
        print(gpu_table.text(tables))
    if options.markdown:
        fill(options.markdown, gpu_table.REGION, gpu_table.markdown(tables, results.runs, results.gemm))


def brief(record: Record) -> str:
    """Summarise a run in a few words."""
    if "failure" in record:
        return f"n/a: {record['failure']}"
    step = record["step_s"]
    return f"{record['tokens_per_s']:,.0f} tokens/s, {step['median'] * 1e3:,.1f} ms per step"


if __name__ == "__main__":
    sys.exit(main())
