#!/usr/bin/env python3
"""Write the reference tables of hand-written pages, between markers, from the code that they describe.

A page marks the place of a table with two comments: `<!-- NAME: begin -->` and `<!-- NAME: end -->`. `make docs` fills
the tables of all pages. `--check` writes nothing, and exits with status 1 if a page is out of date.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from megascale.core.files import write_text  # noqa: E402
from megascale.operate.store.families import PREFIX, MetricFamily  # noqa: E402
from megascale.operate.store.host_families import HOST_METRICS  # noqa: E402
from megascale.operate.store.ready_queries import READY_QUERIES  # noqa: E402
from megascale.operate.store.schema import schema_page  # noqa: E402
from tools.config_reference import rendered  # noqa: E402

MARKED = re.compile(r"(<!-- ([\w-]+): begin -->\n).*?(<!-- \2: end -->\n)", re.DOTALL)

RECORDS = {
    "StepMetrics": "a logged step",
    "EvaluationMetrics": "an evaluation",
    "Alert": "a spike",
    "MixtureUpdate": "new weights of a blend",
}
"""Kinds of lines of metrics.jsonl by the class that defines their keys."""

COMMON_LABELS = frozenset({"run", "node"})


def main() -> int:
    """Run the tool."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if a page is out of date")
    options = parser.parse_args()
    old = [page for page in pages() if page.read_text(encoding="utf-8") != filled(page)]
    for page in old:
        if options.check:
            print(f"{page.relative_to(ROOT)} is out of date  -> make docs", file=sys.stderr)
        else:
            write_text(page, filled(page))
    return int(options.check and bool(old))


def pages() -> list[Path]:
    """List the pages with tables."""
    return [page for page in sorted((ROOT / "docs").glob("*.md")) if tables_of(page.read_text(encoding="utf-8"))]


def tables_of(text: str) -> list[str]:
    """List the tables of a page's text; other tools have marks of other names."""
    return [name for _, name, _ in MARKED.findall(text) if name in TABLES]


def filled(page: Path) -> str:
    """Return the text of a page with current tables."""

    def current(marked: re.Match[str]) -> str:
        return f"{marked[1]}{TABLES[marked[2]]().strip()}\n{marked[3]}" if marked[2] in TABLES else marked[0]

    return MARKED.sub(current, page.read_text(encoding="utf-8"))


def ready_queries() -> str:
    """Tabulate the ready queries of the event store."""
    return "\n".join(rendered(["query", "answer"], [[f"`{name}`", each.help] for name, each in READY_QUERIES.items()]))


def metrics_keys() -> str:
    """Tabulate the keys of metrics.jsonl: fields of the records' classes, with their docstrings."""
    path = ROOT / "megascale/record/metrics.py"
    classes = {node.name: node for node in ast.parse(path.read_text(encoding="utf-8")).body if _is_record(node)}
    lines = list[str]()
    for name, title in RECORDS.items():
        rows = [[f"`{key}`", meaning] for key, meaning in fields(classes[name])]
        lines += rendered([f"key of {title}", "meaning"], rows)
    return "\n".join(lines)


def _is_record(node: ast.stmt) -> bool:
    return isinstance(node, ast.ClassDef) and node.name in RECORDS


def fields(record: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield the fields of a class that have docstrings, with these."""
    for field, text in pairwise(record.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            yield field.target.id, ast.literal_eval(text.value)


def prometheus_metrics() -> str:
    """Tabulate all metrics: of hosts from their catalog, of ranks and the job from a played run."""
    sys.path.insert(0, str(ROOT / "tools"))
    played = importlib.import_module("tests.operate.store.every_metric")  # tests are not type-checked
    with tempfile.TemporaryDirectory() as folder:
        found = {family.name: family for family in played.every_family(Path(folder))}
    hosts = {metric.family: metric for metric in HOST_METRICS.values()}
    rows = [_metric_row(family) for name, family in sorted(found.items()) if name not in hosts]
    labels = {"gpu": "gpu", "infiniband": "device, port", "disk": "filesystem"}
    for name, metric in HOST_METRICS.items():
        suffix = "_total" if metric.counter else ""
        kind, label = "counter" if metric.counter else "gauge", labels.get(name.partition(".")[0], "")
        label = "" if name in ("disk.read", "disk.written") else label
        rows.append([f"`{PREFIX}{metric.family}{suffix}`", kind, label, metric.help])
    return "\n".join(rendered(["metric", "type", "labels", "meaning"], rows))


def _metric_row(family: MetricFamily) -> list[str]:
    labels = dict.fromkeys(label for each, _ in family.samples for label in each if label not in COMMON_LABELS)
    suffix = "_total" if family.kind == "counter" else ""
    return [f"`{PREFIX}{family.name}{suffix}`", family.kind, ", ".join(labels), family.help]


def alert_rules() -> str:
    """Tabulate the alerts of the example rules for Prometheus."""
    path = ROOT / "configs/observe/alerts.yml"
    groups = yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    rules = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    rows = [
        [f"`{rule['alert']}`", rule["labels"]["severity"], rule.get("for", "at once"), _summary(rule)] for rule in rules
    ]
    return "\n".join(rendered(["alert", "severity", "after", "condition"], rows))


def _summary(rule: Mapping[str, Mapping[str, str]]) -> str:
    """Return the summary of an alert without the run, with the names of its other labels in capitals."""
    text = rule["annotations"]["summary"].removeprefix("{{ $labels.run }}: ")
    text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda label: label[1].upper(), text)
    return re.sub(r"\{\{.*?\}\}", "N", text)


TABLES: Mapping[str, Callable[[], str]] = {
    "alert-rules": alert_rules,
    "event-store": schema_page,
    "metrics-keys": metrics_keys,
    "prometheus-metrics": prometheus_metrics,
    "ready-queries": ready_queries,
}
"""Writers of the tables, by name."""


if __name__ == "__main__":
    sys.exit(main())
