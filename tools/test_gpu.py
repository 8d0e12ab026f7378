#!/usr/bin/env python3
"""Runs the GPU suite and prints a table of passes, failures and figures; the same as JSON goes into a file to send.

`--gpus 1` runs what needs one GPU, `--gpus 2` what needs two, `--gpus 8` what needs three to eight. `--rehearse` runs
on CPU processes what does not need a GPU: it shows that the tests run, and nothing about a GPU. Table and file grow
with each test, so that a run that is stopped leaves what it has found. pytest's options may follow.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megascale.cli.doctor import described, machine
from megascale.core.files import write_text
from megascale.device import detect, gpus, missing_gpu

ROOT = Path(__file__).parents[1]
REHEARSAL = "MEGASCALE_REHEARSE_GPU_TESTS"
LISTS = (1, 2, 8)
"""GPUs for which there is a list of tests."""

SECONDS = 120
"""That a test may take on GPUs, unless its marker `timeout` says otherwise."""

TERMINATED = 128 + signal.SIGTERM

LINES = 3
"""Lines of a failure that the table shows; the JSON has all."""


@dataclass
class Result:
    """A test's outcome: 'passed', 'failed' or 'skipped', with the reason, and the figures that it reported by name."""

    name: str
    outcome: str = "passed"
    seconds: float = 0.0
    reason: str = ""
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)


class Collector:
    """A pytest plugin that keeps the tests of one list, and prints and gathers the results of those that have ended.
    `keep` is called with all of them after each.
    """

    def __init__(self, gpus: int, keep: Callable[[Sequence[Result]], None]) -> None:
        self.least = max((count for count in (0, *LISTS) if count < gpus), default=0)
        self.most = gpus
        self.keep = keep
        self.width = 0
        self.results: list[Result] = []
        self._under_way: dict[str, Result] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        counts = {item: marker.args[0] for item in items if (marker := item.get_closest_marker("gpu"))}
        kept = [item for item in items if self.least < counts.get(item, 0) <= self.most]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
        self.width = max((len(_name(item.nodeid)) for item in kept), default=0)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str]:
        """What pytest counts; it prints no letters between the lines of the table."""
        return (report.outcome if report.when == "call" or not report.passed else "", "", "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        result = self._under_way.setdefault(report.nodeid, Result(_name(report.nodeid)))
        result.seconds += report.duration
        result.figures.update((name, values) for name, values in report.user_properties if isinstance(values, dict))
        if report.skipped:
            result.outcome, result.reason = "skipped", str(report.longrepr[2]).removeprefix("Skipped: ")  # type: ignore[index]
        elif report.failed:
            result.outcome, result.reason = "failed", report.longreprtext
        if report.when == "teardown":
            self.results.append(self._under_way.pop(report.nodeid))
            print("\n".join(rows(result, self.width)), flush=True)
            self.keep(self.results)


def _name(test: str) -> str:
    """A test's name in the table."""
    return test.removeprefix("tests/gpu/")


def main(words: Sequence[str] | None = None) -> int:
    """Run the tool. 0 if nothing failed, 1 if something did, 2 if nothing ran or pytest was interrupted, 143 after a
    SIGTERM.
    """
    options, others = arguments().parse_known_args(words)
    if options.rehearse:
        os.environ[REHEARSAL] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.chdir(ROOT)
    facts = machine(detect(), [])
    print("\n".join(described(facts)), end="\n\n", flush=True)
    path = options.json or ROOT / "build" / f"{'rehearsal' if options.rehearse else 'test-gpu'}-{options.gpus}.json"
    found = {"gpus": options.gpus, "rehearsal": options.rehearse, "began": time.time(), "machine": facts}

    def keep(results: Sequence[Result], complete: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = found | {"complete": complete, "results": [asdict(result) for result in results]}
        write_text(path, json.dumps(whole, indent=1) + "\n")

    collector = Collector(options.gpus, keep)
    signal.signal(signal.SIGTERM, lambda *_: pytest.exit("SIGTERM", returncode=TERMINATED))
    limit = [] if options.rehearse else ["-o", f"timeout={SECONDS}"]
    status = pytest.main(["tests/gpu", "-m", "gpu", "-p", "no:cacheprovider", *limit, *others], plugins=[collector])
    results = collector.results
    print("\n" + counts(results))
    complete = status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    if results:
        keep(results, complete)
        print(f"\nall of it, to send: {path}")
    if all(result.outcome == "skipped" for result in results):
        if not options.rehearse:
            print(missing_gpu() or f"torch finds too few GPUs for this list: {gpus()}", file=sys.stderr)
        return 2
    return int(any(result.outcome == "failed" for result in results)) if complete else int(status)


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--gpus", type=int, default=1, metavar="N", help=f"the list for so many GPUs, of {LISTS}; default %(default)s")
    add("--rehearse", action="store_true", help="run on CPU processes what does not need a GPU")
    add(
        "--json",
        type=Path,
        metavar="FILE",
        help="default build/test-gpu-N.json, with --rehearse build/rehearsal-N.json",
    )
    return parser


def rows(result: Result, width: int) -> list[str]:
    """A test's line, its figures and the end of its reason below it. `width`: of the longest name."""
    lines = [f"{result.outcome.upper():8}{result.name:{width}}  {result.seconds:7.1f} s"]
    lines += [f"{'':10}{figure(name, **values)}" for name, values in result.figures.items()]
    if result.outcome != "passed":
        shown = [line for line in result.reason.splitlines() if line.strip()][-LINES:]
        lines += [f"{'':10}{line[:140]}" for line in shown]
    return lines


def counts(results: Sequence[Result]) -> str:
    """How many tests had each outcome."""
    outcomes = [result.outcome for result in results]
    return ", ".join(f"{outcomes.count(each)} {each}" for each in ("passed", "failed", "skipped"))


def figure(name: str, value: float, unit: str, least: float | None, most: float | None) -> str:
    """A figure with the range that is expected of it."""
    expected = [f"{word} {bound:g}" for word, bound in (("at least", least), ("at most", most)) if bound is not None]
    off = (least is not None and value < least) or (most is not None and value > most)
    note = f"  (expected {' and '.join(expected)}{': OUT OF RANGE' if off else ''})" if expected else ""
    return f"{name}: {value:.4g} {unit}".rstrip() + note


if __name__ == "__main__":
    sys.exit(main())
