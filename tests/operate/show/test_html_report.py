"""The report: one file, complete, and without anything that could reach out of it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from megascale.operate.show.charts.shapes import REPORT_START
from megascale.operate.show.html_report import render_report
from megascale.operate.show.run_reader import RunReader
from megascale.operate.show.store_view import read_store_view
from tests.operate.show.folders import incident, make_run, write_incidents
from tests.operate.show.stores import make_stored_run, store_host_metrics, store_loads

NOTHING_OUTSIDE = re.compile(r"<script|<link|<img|<iframe|@import|url\(|src=|href=|https?://(?!www\.w3\.org/2000/svg)")


def test_everything_that_is_known(tmp_path: Path) -> None:
    run, _ = make_stored_run(tmp_path)
    store_host_metrics(run, hosts=5, low=2)
    write_incidents(run, [incident(1, step=30, recovered=1010.0, steps_lost=2)], status=0)
    view, store = RunReader(run).read(), read_store_view(run)
    assert store is not None
    report = render_report(view, store, "<svg>timeline</svg>")
    assert report.encode().startswith(REPORT_START)
    assert not NOTHING_OUTSIDE.search(report)
    for words in (
        "<h1>test</h1>", "8 ranks: tp 2, pp 2, dp 2",
        f"<td>{view.curves.last['loss']:.4f}</td>", str(store.findings[0]),
        "rank 1 was killed by SIGKILL", "<svg>timeline</svg>", f"+{store.heat.outliers[0].ratio - 1:.1%}", "bubble",
        f"{100 * store.breakdown.mfu:.1f}", "compared 5 hosts", "n2: gpu.power_w of gpu0",
    ):  # fmt: skip
        assert words in report, words
    assert report.count("<polyline") == 4
    assert f"rank 5 on n0001: {store.slowness[5]:+.1%} beside its peers" in report


def test_a_rank_that_is_not_compared(tmp_path: Path) -> None:
    run, _ = make_stored_run(tmp_path, steps=20)
    store = read_store_view(run)
    assert store is not None
    slowness = np.where(np.arange(8) == 6, np.nan, store.slowness)
    report = render_report(RunReader(run).read(), replace(store, slowness=slowness), "")
    assert "rank 6 on n0001: not compared" in report and "nan%" not in report


def test_the_loads_of_experts(tmp_path: Path) -> None:
    run, _ = make_stored_run(tmp_path, steps=20)
    loads = np.ones((4, 3, 8))
    loads[:, 1, 5], loads[:, 1, 2] = 4.0, 0.0
    without = render_report(RunReader(run).read(), read_store_view(run), "")
    store_loads(run, loads)
    report = render_report(RunReader(run).read(), read_store_view(run), "")
    assert "<h2>Experts</h2>" in report and "<h2>Experts</h2>" not in without
    assert "layer 1, expert 5: 4.00 times the mean" in report
    assert "<td>1</td><td>5</td><td>4.00</td><td>0.00</td><td>1</td>" in report


def test_a_run_without_a_store_says_what_is_missing(tmp_path: Path) -> None:
    report = render_report(RunReader(make_run(tmp_path)).read(), None, "", ["without the analyses of events"])
    assert "without the analyses of events" in report
    assert "<h2>Incidents</h2><p>None is recorded.</p>" in report


def test_text_of_a_run_is_no_markup(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    write_incidents(folder, [incident(1, what="<script>alert(1)</script>")])
    report = render_report(RunReader(folder).read(), None, "")
    assert "<script" not in report
    assert "&lt;script&gt;alert(1)" in report
