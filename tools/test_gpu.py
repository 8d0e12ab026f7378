#!/usr/bin/env python3
"""Runs the GPU suite and prints a table of passes, failures and figures; the same as JSON goes into a file to send.

`--gpus 1` runs what needs one GPU, `--gpus 2` what needs two, `--gpus 8` what needs three to eight. `--rehearse` runs
on CPU processes what does not need a GPU: it shows that the tests run, and nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megascale.cli.doctor import described, machine
from megascale.core.files import write_text
from megascale.device import detect

ROOT = Path(__file__).parents[1]
REHEARSAL = "MEGASCALE_REHEARSE_GPU_TESTS"
LISTS = (1, 2, 8)
"""GPUs for which there is a list of tests."""

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
    """A pytest plugin that keeps the tests of one list and gathers their results."""

    def __init__(self, gpus: int) -> None:
        self.least = max((count for count in (0, *LISTS) if count < gpus), default=0)
        self.most = gpus
        self.results: dict[str, Result] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        counts = {item: marker.args[0] for item in items if (marker := item.get_closest_marker("gpu"))}
        kept = [item for item in items if self.least < counts.get(item, 0) <= self.most]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        result = self.results.setdefault(report.nodeid, Result(report.nodeid.removeprefix("tests/gpu/")))
        result.seconds += report.duration
        result.figures.update((name, values) for name, values in report.user_properties if isinstance(values, dict))
        if report.skipped:
            result.outcome, result.reason = "skipped", str(report.longrepr[2]).removeprefix("Skipped: ")  # type: ignore[index]
        elif report.failed:
            result.outcome, result.reason = "failed", report.longreprtext


def main(words: Sequence[str] | None = None) -> int:
    """Run the tool. 0 if nothing failed, 1 if something did, 2 if there was nothing to run."""
    options, others = arguments().parse_known_args(words)
    if options.rehearse:
        os.environ[REHEARSAL] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.chdir(ROOT)
    facts = machine(detect(), [])
    print("\n".join(described(facts)), end="\n\n", flush=True)
    collector, begun = Collector(options.gpus), time.time()
    pytest.main(["tests/gpu", "-m", "gpu", "-p", "no:cacheprovider", *others], plugins=[collector])
    results = list(collector.results.values())
    print("\n" + table(results))
    found = {"gpus": options.gpus, "rehearsal": options.rehearse, "began": begun, "machine": facts,
             "results": [asdict(result) for result in results]}  # fmt: skip
    options.json.parent.mkdir(parents=True, exist_ok=True)
    write_text(options.json, json.dumps(found, indent=1) + "\n")
    print(f"\nall of it, to send: {options.json}")
    if not results:
        return 2
    return int(any(result.outcome == "failed" for result in results))


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--gpus", type=int, default=1, metavar="N", help=f"the list for so many GPUs, of {LISTS}; default %(default)s")
    add("--rehearse", action="store_true", help="run on CPU processes what does not need a GPU")
    add(
        "--json",
        type=Path,
        default=ROOT / "build" / "test-gpu.json",
        metavar="FILE",
        help="default build/test-gpu.json",
    )
    return parser


def table(results: Sequence[Result]) -> str:
    """One line for each test, its figures below it, and a count of outcomes."""
    width = max((len(result.name) for result in results), default=0)
    lines = []
    for result in results:
        lines.append(f"{result.outcome.upper():8}{result.name:{width}}  {result.seconds:7.1f} s")
        lines += [f"{'':10}{text}" for text in (figure(name, **values) for name, values in result.figures.items())]
        if result.outcome != "passed":
            shown = [line for line in result.reason.splitlines() if line.strip()][-LINES:]
            lines += [f"{'':10}{line[:140]}" for line in shown]
    outcomes = [result.outcome for result in results]
    counts = ", ".join(f"{outcomes.count(each)} {each}" for each in ("passed", "failed", "skipped"))
    return "\n".join([*lines, "", counts])


def figure(name: str, value: float, unit: str, least: float | None, most: float | None) -> str:
    """A figure with the range that is expected of it."""
    expected = [f"{word} {bound:g}" for word, bound in (("at least", least), ("at most", most)) if bound is not None]
    off = (least is not None and value < least) or (most is not None and value > most)
    note = f"  (expected {' and '.join(expected)}{': OUT OF RANGE' if off else ''})" if expected else ""
    return f"{name}: {value:.4g} {unit}".rstrip() + note


if __name__ == "__main__":
    sys.exit(main())
