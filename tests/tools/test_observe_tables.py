"""The tables about runs leave nothing out; tests/tools/test_results.py holds the pages current."""

from __future__ import annotations

import ast
from dataclasses import fields

from megascale.operate.store.schema import TABLES as STORE_TABLES
from megascale.record import metrics
from tools.observe_tables import RECORDS, ROOT, event_store, prometheus_metrics, record_fields


def test_every_key_of_a_record_has_a_meaning() -> None:
    nodes = ast.parse((ROOT / "megascale/record/metrics.py").read_text(encoding="utf-8")).body
    records = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    assert records.keys() == RECORDS.keys()
    for name, node in records.items():
        described = dict(record_fields(node))
        assert list(described) == [field.name for field in fields(getattr(metrics, name))]
        assert all(described.values())


def test_every_column_and_metric_is_there() -> None:
    store, series = "\n".join(event_store()), "\n".join(prometheus_metrics())
    assert all(f"`{column.name}`" in store for columns in STORE_TABLES.values() for column in columns)
    assert "| `megascale_rank_info` | gauge | rank, tp, cp, dp, pp, ep, dp_shard | " in series
    assert "| `megascale_gpu_xid_errors_total` | counter | gpu | " in series
