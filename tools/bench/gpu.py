#!/usr/bin/env python3
"""Speed on one GPU: megascale, torchtitan and megatron-core on the same models, in turns, in bf16 and fp8.

Each run's result is kept in a file as soon as it is there; runs of other calls add to it, so that the table can be made
in parts. `--small` makes every case a tiny one for a CPU, to see that all of it runs.
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
from gpu_systems import CASES, FIT, SYSTEMS, Job, Record, agree, measure, products, python_of
from peer_install import install_beside
from peer_run import Failure, progress
from peer_systems import OURS, ROOT
from peer_table import replace, surroundings

from megascale.bench.mfu import LEAST_STEPS, WARM_UP
from megascale.catalog.precisions import PRECISIONS
from megascale.core.files import write_text
from megascale.device import gpus

PRECISIONS_COMPARED = ("bf16", "fp8")


def main(words: Sequence[str] | None = None) -> int:
    """Run the tool. 0, or 1 if a run of megascale failed, 2 if nothing could be measured."""
    options = arguments().parse_args(words)
    if options.results is None:
        options.results = ROOT / "build" / ("bench-gpu-small.json" if options.small else "bench-gpu.json")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: what runs is ended first
    if options.small:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    try:
        results = Results([Path(path) for path in options.merge], options.results)
        if options.markdown:
            surroundings(options.markdown, gpu_table.MARKS)  # better now than after an hour
        if not options.table:
            Bench(options, results).run()
        elif not results.runs:
            raise ValueError(f"{options.results} holds no runs to show: leave --table out to measure some")
        if options.markdown and all("failure" in run for run in results.runs):
            raise ValueError(f"{options.results} holds no run that was measured: {options.markdown} stays as it is")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    show(options, results)
    return int(any(run["system"] == OURS and "failure" in run for run in results.made))


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--cases", nargs="+", choices=CASES, default=CASES, metavar="CASE", help=f"of {' '.join(CASES)}")
    add("--systems", nargs="+", choices=SYSTEMS, default=[], metavar="SYSTEM",
        help=f"of {' '.join(SYSTEMS)}; default all that are installed")  # fmt: skip
    add("--precisions", nargs="+", default=PRECISIONS_COMPARED, metavar="NAME", help="default bf16 fp8")
    add("--rounds", type=int, default=2, help="runs of each system in each case; default %(default)s")
    add("--steps", type=int, default=LEAST_STEPS, help="timed steps of a run; default %(default)s")
    add("--warm-up", type=int, default=WARM_UP, help="steps at the start that are not timed; default %(default)s")
    add("--layers", action="append", default=[], metavar="CASE=N",
        help="layers of a case, instead of its file's; CASE=fit: as many as megascale finds to fit")  # fmt: skip
    add("--timeout", type=float, default=300, metavar="SECONDS", help="for one run; default %(default)s")
    add("--no-products", action="store_true", help="do not run `megascale bench gemm` first")
    add(
        "--results",
        type=Path,
        metavar="FILE",
        help="where runs are kept and added to; default build/bench-gpu.json, with --small bench-gpu-small.json",
    )
    add("--merge", nargs="+", default=[], metavar="FILE", help="take over the runs of other such files")
    add("--table", action="store_true", help="run nothing: show what is kept")
    add("--markdown", type=Path, metavar="FILE", help="write the tables between the two markers of a Markdown file")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    add("--install", nargs="*", choices=SYSTEMS[1:], metavar="SYSTEM",
        help="first install peers from PyPI beside this Python, in build/gpu-peers; default all")  # fmt: skip
    add("--python", action="append", default=[], metavar="SYSTEM=PATH", help="run a system with another Python")
    add("--small", action="store_true", help="tiny models on the CPU: figures that mean nothing")
    add("--peers", type=Path, default=Path(os.environ.get("MEGASCALE_PEERS", ROOT.parent / "shared" / "peers")),
        metavar="DIR", help="with --small: the scripts that let peers run on a CPU")  # fmt: skip
    return parser


class Results:
    """Runs that are kept in a file, those of others among them, and the rates of products. `made`: in this call.

    Raises: ValueError for a file that is none of ours
    """

    def __init__(self, others: Sequence[Path], path: Path) -> None:
        self.path = path
        self.runs: list[Record] = []
        self.made: list[Record] = []
        self.gemm: dict[str, Any] | None = None
        for each in [*([path] if path.exists() else []), *others]:
            try:
                kept = json.loads(each.read_text(encoding="utf-8"))
                known = {run["id"] for run in self.runs}
                self.runs += [run for run in kept["runs"] if run["id"] not in known]
                self.gemm = self.gemm or kept["gemm"]
            except OSError as error:
                raise ValueError(f"{each}: {error.strerror}") from None
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{each} holds no results of this tool: {error!r}") from None

    def keep(self, record: Record) -> None:
        self.runs.append(record)
        self.made.append(record)
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, json.dumps({"runs": self.runs, "gemm": self.gemm}, indent=1) + "\n")


class Bench:
    """Which systems run what.

    Raises: ValueError if there is nothing to run
    """

    def __init__(self, options: argparse.Namespace, results: Results) -> None:
        self.options = options
        self.results = results
        if options.steps < LEAST_STEPS:
            raise ValueError(f"--steps {options.steps}: a median is taken of {LEAST_STEPS} or more")
        if options.rounds < 1 or options.warm_up < 1:
            raise ValueError("--rounds and --warm-up: at least one")
        if not (options.small or gpus()):
            raise ValueError("torch finds no GPU here: the cases are sized for one; --small makes them tiny")
        self.layers = pairs(options.layers, CASES, "--layers", layers)
        if options.install is not None:
            install(options.install or SYSTEMS[1:], small=options.small)
        given = pairs(options.python, SYSTEMS, "--python", program)
        self.pythons = {OURS: Path(sys.executable)} | given
        for system in SYSTEMS:
            if system not in self.pythons and (found := python_of(system, small=options.small)):
                self.pythons[system] = found
        self.systems = choose(options.systems, self.pythons)
        if FIT in self.layers.values() and OURS not in self.systems:
            raise ValueError(f"--layers CASE={FIT} asks {OURS}, which is not among --systems")
        unknown = [name for name in options.precisions if name not in PRECISIONS.cards]
        if unknown:
            raise ValueError(f"--precisions: there is no {', '.join(unknown)}; there are {', '.join(PRECISIONS.cards)}")

    def run(self) -> None:
        """Measure everything that was asked for."""
        options = self.options
        with tempfile.TemporaryDirectory() as scratch:
            if OURS in self.systems and not options.no_products and self.results.gemm is None:
                found = products(self.pythons[OURS], options.timeout, scratch, small=options.small)
                if isinstance(found, Failure):
                    progress(f"megascale bench gemm failed: {found.why}")
                else:
                    self.results.gemm = found
                    self.results.write()
            for case in options.cases:
                for precision in options.precisions:
                    self.compare(case, precision, scratch)

    def compare(self, case: str, precision: str, scratch: str) -> None:
        """All rounds of one case in one precision. A system that failed is not run again in it."""
        o = self.options
        out: set[str] = set()
        for number in range(1, o.rounds + 1):
            for system in self.systems:
                if system in out:
                    continue
                job = Job(case, precision, o.steps, o.warm_up, self.layers.get(case), o.small, o.peers)
                found = measure(system, job, self.pythons[system], o.timeout, scratch)
                record = agree(found, self.results.runs)
                self.results.keep(record)
                progress(f"{case} {precision}, round {number} of {o.rounds}, {system}: {brief(record)}")
                if "failure" in record:
                    out.add(system)
                elif self.layers.get(case) == FIT:
                    self.layers[case] = record["layers"]  # of everything that is compared with it


def install(systems: Sequence[str], *, small: bool) -> None:
    """Install peers that are not. One that cannot be is left out, and said."""
    for system in systems:
        try:
            if python_of(system, small=small) is None:
                install_beside(system)
        except OSError as error:
            progress(f"{system} cannot be installed: {error}")


def pairs(words: Sequence[str], names: Sequence[str], option: str, read: Callable[[str], Any]) -> dict[str, Any]:
    """NAME=VALUE, each NAME one of `names`, each VALUE one that `read` takes.

    Raises: ValueError for what is none
    """
    found = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            found[name] = read(value)
        except ValueError as error:
            raise ValueError(f"{option} {word}: {error}") from None
        if name not in names:
            raise ValueError(f"{option} {word}: NAME=VALUE with one of {', '.join(names)}")
    return found


def layers(text: str) -> int | str:
    """A number of one or more, or FIT. Raises: ValueError"""
    if text == FIT:
        return text
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(f"{text!r} is not a number of 1 or more")
    return int(text)


def program(text: str) -> Path:
    """A file that is there. Raises: ValueError"""
    if not Path(text).is_file():
        raise ValueError(f"there is no file {text!r}")
    return Path(text)


def choose(names: Sequence[str], pythons: dict[str, Path]) -> list[str]:
    """The systems to run, in our order; without names all that are installed.

    Raises: ValueError for one that is not installed
    """
    absent = [name for name in names or SYSTEMS if name not in pythons]
    message = f"not installed: {', '.join(absent)}; --install {' '.join(absent)} puts it into build/gpu-peers"
    if absent and names:
        raise ValueError(message)
    if absent:
        progress(message)
    return [name for name in SYSTEMS if name in (names or pythons) and name in pythons]


def show(options: argparse.Namespace, results: Results) -> None:
    """All tables of what is kept."""
    found = gpu_table.tables(results.runs)
    if options.json:
        print(json.dumps({"runs": results.runs, "gemm": results.gemm, "goals": gpu_table.goals(found)}))
    else:
        print(gpu_table.text(found))
    if options.markdown:
        replace(options.markdown, gpu_table.markdown(found, results.runs, results.gemm), gpu_table.MARKS)


def brief(record: Record) -> str:
    """A run in a few words."""
    if "failure" in record:
        return f"n/a: {record['failure']}"
    step = record["step_s"]
    return f"{record['tokens_per_s']:,.0f} tokens/s, {step['median'] * 1e3:,.1f} ms a step"


if __name__ == "__main__":
    sys.exit(main())
