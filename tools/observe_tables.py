"""Tables of the pages about runs: the event store, the keys of metrics.jsonl, Prometheus' metrics and alerts."""

from __future__ import annotations

import ast
import importlib
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import yaml

from megascale.operate.store.families import PREFIX, MetricFamily
from megascale.operate.store.host_families import HOST_METRICS
from megascale.operate.store.ready_queries import READY_QUERIES
from megascale.operate.store.schema import schema_page
from results import pipes

ROOT = Path(__file__).parents[1]

RECORDS = {
    "StepMetrics": "a logged step",
    "EvaluationMetrics": "an evaluation",
    "SharpnessMetrics": "a measurement of sharpness",
    "Alert": "a spike",
    "MixtureUpdate": "new weights of a blend",
    "RebuiltStages": "a start with rebuilt stages",
}
"""Kinds of lines of metrics.jsonl by the class that defines their keys."""

COMMON_LABELS = frozenset({"run", "node"})


def event_store() -> list[str]:
    """Tabulate the tables of the event store and their columns."""
    return schema_page().splitlines()


def ready_queries() -> list[str]:
    """Tabulate the ready queries of the event store."""
    return pipes(["query", "answer"], *([f"`{name}`", each.help] for name, each in READY_QUERIES.items()))


def metrics_keys() -> list[str]:
    """Tabulate the keys of metrics.jsonl: fields of the records' classes, with their docstrings."""
    path = ROOT / "megascale/record/metrics.py"
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    lines = list[str]()
    for name, title in RECORDS.items():
        rows = [[f"`{key}`", meaning] for key, meaning in record_fields(classes[name])]
        lines += [*pipes([f"key of {title}", "meaning"], *rows), ""]
    return lines[:-1]


def record_fields(record: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield the fields of a class that have docstrings, with these."""
    for field, text in pairwise(record.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            yield field.target.id, " ".join(ast.literal_eval(text.value).split())


def prometheus_metrics() -> list[str]:
    """Tabulate all metrics: of hosts from their catalog, of ranks and the job from a played run."""
    sys.path.insert(0, str(ROOT))
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
    return pipes(["metric", "type", "labels", "meaning"], *rows)


def _metric_row(family: MetricFamily) -> list[str]:
    labels = dict.fromkeys(label for each, _ in family.samples for label in each if label not in COMMON_LABELS)
    suffix = "_total" if family.kind == "counter" else ""
    return [f"`{PREFIX}{family.name}{suffix}`", family.kind, ", ".join(labels), family.help]


def alert_rules() -> list[str]:
    """Tabulate the alerts of the example rules for Prometheus."""
    path = ROOT / "configs/observe/alerts.yml"
    groups = yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    rules = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    rows = [
        [f"`{rule['alert']}`", rule["labels"]["severity"], rule.get("for", "at once"), _summary(rule)] for rule in rules
    ]
    return pipes(["alert", "severity", "after", "condition"], *rows)


def _summary(rule: Mapping[str, Mapping[str, str]]) -> str:
    """Return the summary of an alert without the run, with the names of its other labels in capitals."""
    text = rule["annotations"]["summary"].removeprefix("{{ $labels.run }}: ")
    text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda label: label[1].upper(), text)
    return re.sub(r"\{\{.*?\}\}", "N", text)
