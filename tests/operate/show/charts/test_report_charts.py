"""The charts of a report: well-formed, complete, and small whatever the number of ranks."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.operate.show.charts.report_charts import Bar, CellLevel, Mark, Series, bar_chart, grid_chart, line_chart
from megascale.operate.show.charts.shapes import nice_ticks

LEVELS = (
    CellLevel(-math.inf, "#aaaaaa", "low"),
    CellLevel(0.1, "#bbbbbb", "middle"),
    CellLevel(0.3, "#cccccc", "high"),
)


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")]


def test_curves_with_marks_and_a_legend() -> None:
    steps = np.arange(1, 11)
    series = [Series("loss", steps, 5.0 - steps / 10), Series("valid <&>", steps[::5], steps[::5] / 2, "#123456")]
    svg = line_chart("loss", series, [Mark(4, "1", "rank 1 <died>"), Mark(99, "2", "later")], "{:.2f}".format)
    found = texts(svg)
    assert {"loss", "1", "valid <&>", "2", "10"} <= set(found)
    assert svg.count("<polyline") == 2
    assert svg.count("stroke-dasharray") == 1, "what lies outside is not drawn"
    assert "<title>rank 1 &lt;died&gt;</title>" in svg


def test_curves_without_points_or_height() -> None:
    empty = line_chart("MFU", [Series("MFU", np.array([]), np.array([]))], [], str)
    assert "no data" in texts(empty)
    for value in (0.0, 3.0, -1e9):
        flat = line_chart("x", [Series("x", np.array([7]), np.array([value]))], [], str)
        assert "nan" not in flat
        assert "inf" not in flat


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 10))
def test_ticks_are_round_and_within(low: float, span: float, count: int) -> None:
    high = low + span
    if high <= low:
        return
    ticks = nice_ticks(low, high, count)
    assert len(ticks) <= count + 1
    assert all(low - 1e-6 * span <= tick <= high + 1e-6 * span for tick in ticks)


def test_a_grid_has_a_cell_for_each_rank_above_the_first_level() -> None:
    values = np.array([[0.0, 0.2, np.nan], [0.4, 0.05, 0.1]])
    svg = grid_chart("ranks", values, LEVELS, ("pp 0", "pp 1"), lambda row, column: f"cell {row},{column}")
    root = ElementTree.fromstring(svg)
    cells = {group.get("fill"): [title.text for title in group.iter() if title.tag.endswith("title")] for group in root
             if group.tag.endswith("}g")}  # fmt: skip
    assert cells == {"#bbbbbb": ["cell 0,1", "cell 1,2"], "#8c8c8c": ["cell 0,2"], "#cccccc": ["cell 1,0"]}
    assert {"pp 0", "pp 1", "low", "middle", "high"} <= set(texts(svg))


@pytest.mark.parametrize("value", [0.0, 0.2])
def test_a_grid_of_12288_ranks_is_small(value: float) -> None:
    svg = grid_chart("ranks", np.full((64, 192), value), LEVELS, [""] * 64, lambda row, column: "x" * 40)
    assert len(svg) < 600_000
    ElementTree.fromstring(svg)


def test_bars_begin_where_the_last_has_ended() -> None:
    bars = [Bar("peak", 0, 1, "100.0", "#000000"), Bar("dp", 1, 0.75, "-25.0", "#111111")]
    svg = bar_chart("MFU", bars)
    x, width = (float(re.search(rf"{name}='([\d.]+)'[^>]*#111111", svg)[1]) for name in ("x", " width"))
    peak_width = float(re.search(r" width='([\d.]+)'[^>]*#000000", svg)[1])
    assert width == pytest.approx(peak_width / 4)
    assert x - 190 == pytest.approx(peak_width * 0.75)
