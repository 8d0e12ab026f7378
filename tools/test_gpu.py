#!/usr/bin/env python3
"""Run the GPU test suite; print a table of passes, failures and figures, and write the table as JSON.

`--gpus 1` runs the tests for one GPU, `--gpus 2` for two, `--gpus 8` for three to eight. `--rehearse` runs the tests
that work on CPU processes, to test the suite itself. Table and file are updated after every test, and survive an
interrupted run. Further options go to pytest.
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

from megascale.cli.doctor import describe_machine, machine_facts
from megascale.cli.parsing import CommandParser
from megascale.core.files import write_text
from megascale.device import detect_device, gpu_count, no_gpu_reason

ROOT = Path(__file__).parents[1]
REHEARSAL = "MEGASCALE_REHEARSE_GPU_TESTS"
LISTS = (1, 2, 8)
"""Numbers of GPUs with a list of tests."""

SECONDS = 120
"""Time limit of a test on GPUs without a marker `timeout`."""

TERMINATED = 128 + signal.SIGTERM

LINES = 3
"""Lines of a failure in the table; the JSON file has all lines."""


@dataclass
class Result:
    """A test's outcome ('passed', 'failed' or 'skipped') with the reason, and its figures by name."""

    name: str
    outcome: str = "passed"
    seconds: float = 0.0
    reason: str = ""
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)


class Collector:
    """pytest plugin that selects the tests of one list, and prints and collects results. `keep` is called with all
    results after every test.
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
        """Report outcomes to pytest without its progress letters, which would break the table."""
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
    """Return a test's name in the table."""
    return test.removeprefix("tests/gpu/")


def main(words: Sequence[str] | None = None) -> int:
    """Run the tool. Exit status: 0, 1 if a test failed, 2 if none ran or pytest was interrupted, 143 after SIGTERM."""
    options, others = arguments().parse_known_args(words)
    if options.rehearse:
        os.environ[REHEARSAL] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.chdir(ROOT)
    facts = machine_facts(detect_device(), [])
    print("\n".join(describe_machine(facts)), end="\n\n", flush=True)
    path = options.json or ROOT / "build" / f"{'rehearsal' if options.rehearse else 'test-gpu'}-{options.gpus}.json"
    record = {"gpus": options.gpus, "rehearsal": options.rehearse, "began": time.time(), "machine": facts}

    def keep(results: Sequence[Result], complete: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        results_json = [asdict(result) for result in results]
        write_text(path, json.dumps(record | {"complete": complete, "results": results_json}, indent=1) + "\n")

    collector = Collector(options.gpus, keep)
    signal.signal(signal.SIGTERM, lambda *_: pytest.exit("SIGTERM", returncode=TERMINATED))
    limit = [] if options.rehearse else ["-o", f"timeout={SECONDS}"]
    status = pytest.main(["tests/gpu", "-m", "gpu", "-p", "no:cacheprovider", *limit, *others], plugins=[collector])
    results = collector.results
    print("\n" + counts(results))
    complete = status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    if results:
        keep(results, complete)
        print(f"\nfull results, to send: {path}")
    if all(result.outcome == "skipped" for result in results):
        if not options.rehearse:
            print(no_gpu_reason() or f"torch finds too few GPUs for this list: {gpu_count()}", file=sys.stderr)
        return 2
    return int(any(result.outcome == "failed" for result in results)) if complete else int(status)


def arguments() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = CommandParser(
        "tools/test_gpu.py", __doc__ or "", "python tools/test_gpu.py --gpus 2 --rehearse", "docs/gpu.md"
    )
    add = parser.add_argument
    add("--gpus", type=int, default=1, metavar="N", help=f"list of tests to run, one of {LISTS}; default %(default)s")
    add("--rehearse", action="store_true", help="run on CPU processes the tests that need no GPU")
    add(
        "--json",
        type=Path,
        metavar="FILE",
        help="results; default build/test-gpu-N.json, with --rehearse build/rehearsal-N.json",
    )
    return parser


def rows(result: Result, width: int) -> list[str]:
    """Format a test's line, then its figures and the end of its reason. `width`: of the longest name."""
    lines = [f"{result.outcome.upper():8}{result.name:{width}}  {result.seconds:7.1f} s"]
    lines += [f"{'':10}{figure(name, **values)}" for name, values in result.figures.items()]
    if result.outcome != "passed":
        reason = [line for line in result.reason.splitlines() if line.strip()][-LINES:]
        lines += [f"{'':10}{line[:140]}" for line in reason]
    return lines


def counts(results: Sequence[Result]) -> str:
    """Format the number of tests by outcome."""
    outcomes = [result.outcome for result in results]
    return ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in ("passed", "failed", "skipped"))


def figure(name: str, value: float, unit: str, least: float | None, most: float | None) -> str:
    """Format a figure with its expected range."""
    expected = [f"{word} {bound:g}" for word, bound in (("at least", least), ("at most", most)) if bound is not None]
    off = (least is not None and value < least) or (most is not None and value > most)
    note = f"  (expected {' and '.join(expected)}{': OUT OF RANGE' if off else ''})" if expected else ""
    return f"{name}: {value:.4g} {unit}".rstrip() + note


if __name__ == "__main__":
    sys.exit(main())
