"""An SVG picture shows the rows to scale, and stays small."""

from __future__ import annotations

import dataclasses
import itertools
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.operate.show.charts.timeline import (
    COLOURS,
    LEFT,
    MAX_BYTES,
    OTHER_COLOUR,
    RIGHT,
    WIDTH,
    merge_thin_spans,
    render_runs,
    render_svg,
)
from megascale.record.events import COMPUTE, Event, RankEvents
from tests.operate.show.event_files import job, on_own_clock

SVG = "{http://www.w3.org/2000/svg}"
SPAN = WIDTH - LEFT - RIGHT


def texts(root: ET.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def bars(root: ET.Element, colour: str) -> list[tuple[float, float]]:
    """The left end and the width of every bar of a colour."""
    paths = [path.get("d", "") for path in root.iter(f"{SVG}path") if path.get("fill") == colour]
    return [(float(x), float(width)) for path in paths for x, width in re.findall(r"M([\d.]+) \d+h([\d.]+)v", path)]


def draw(*events: Event) -> ET.Element:
    return ET.fromstring(render_svg([RankEvents(0, 1, {"pp": 0, "dp": 0, "tp": 0}, "", (), 0, events)]))


def action(start: float, end: float, name: str = "F", microbatch: int = 0) -> Event:
    return Event(COMPUTE, name, "", 1, 0, microbatch, start, end)


def test_a_picture_shows_every_rank_row_and_kind() -> None:
    root = ET.fromstring(render_svg(job(steps=(2,))))
    shown = texts(root)
    assert [text for text in shown if text.startswith("rank")] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert "pp 1, dp 0, tp 1" in shown
    assert shown.count("compute") == shown.count("dp 2") == 4
    assert {"forward", "other compute", "wait", "tp", "pp", "dp"} <= set(shown)
    assert "backward" not in shown  # the legend has only the kinds of the picture
    assert "time in ms" in shown and "100" in shown and "500" in shown


def test_bars_are_to_scale() -> None:
    root = draw(action(5.0, 6.0), action(6.0, 7.0, "B"), Event("dp", "x", "", 1, 0, 0, 6.5, 9.0))
    (forward,), (backward,), (reduction,) = (bars(root, COLOURS[kind]) for kind in ("forward", "backward", "dp"))
    assert forward == pytest.approx((LEFT, SPAN / 4), abs=0.6)
    assert backward == pytest.approx((LEFT + SPAN / 4, SPAN / 4), abs=0.6)
    assert reduction == pytest.approx((LEFT + SPAN * 3 / 8, SPAN * 5 / 8), abs=0.6)


def test_two_runs_are_drawn_at_one_scale() -> None:
    """The shorter run takes the share of the width that it takes of the longer one's time."""
    runs = {
        title: [RankEvents(0, 1, {"pp": 0, "dp": 0, "tp": 0}, "", (), 0, (action(start, start + seconds),))]
        for title, start, seconds in (("without overlap", 3.0, 4.0), ("with overlap", 9.0, 1.0))
    }
    root = ET.fromstring(render_runs(runs))
    assert [left for left, _ in bars(root, COLOURS["forward"])] == [LEFT, LEFT]
    assert [width for _, width in bars(root, COLOURS["forward"])] == pytest.approx([SPAN, SPAN / 4], abs=0.6)
    shown = texts(root)
    assert shown.index("without overlap") < shown.index("with overlap")
    assert shown.count("time in ms") == 1


def test_an_action_is_labelled_if_its_name_fits() -> None:
    root = draw(
        action(0.0, 90.0), action(90.0, 92.0, "B", 7), action(92.0, 92.1, "B", 8), action(99.0, 100.0, "upd", -1)
    )
    shown = texts(root)
    assert "F m0 c0" in shown and "7" in shown and "8" not in shown
    assert not [text for text in shown if text.startswith("upd")]


def test_thin_slices_are_merged_or_left_out() -> None:
    pixel = 1 / SPAN
    dense = [action(0.1 + n * 0.2 * pixel, 0.1 + (n + 0.7) * 0.2 * pixel) for n in range(100)]
    root = draw(*dense, action(0.5, 0.5 + 0.1 * pixel), action(0.9, 1.0), action(0.0, 0.01, "other"))
    (run, wide) = bars(root, COLOURS["forward"])
    assert run == pytest.approx((LEFT + 0.1 * SPAN, 20), abs=0.6)
    assert wide == pytest.approx((LEFT + 0.9 * SPAN, 0.1 * SPAN), abs=0.6)


lengths = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), max_size=20)


@given(lengths)
def test_merged_slices_are_drawn_in_place(steps: list[tuple[int, int]]) -> None:
    spans, at = [], 0
    for gap, length in steps:
        spans.append((float(at + gap), float(at + gap + length)))
        at += gap + length
    drawn = list(merge_thin_spans(spans, 3.0))
    assert [span for span in spans if span[1] - span[0] >= 3] == [span for span in drawn if span in spans]
    for left, right in drawn:
        assert right - left >= 3
        inside = [span for span in spans if left <= span[0] and span[1] <= right]
        assert (inside[0][0], inside[-1][1]) == (left, right)
        assert all(b[0] - a[1] < 3 for a, b in itertools.pairwise(inside))


def test_a_picture_of_many_slices_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = []
    for rank in range(16):
        starts = [n + 0.3 * ((n * 7919 + rank) % 101) / 101 for n in range(800)]
        gathers = [Event("tp", "x", "", 1, 0, 0, start, start + 0.4) for start in starts]
        events = [*(action(start, start + 0.5) for start in starts), *gathers]
        ranks.append(RankEvents(rank, 16, {}, "", (), 0, tuple(events)))
    text = render_svg(ranks)
    assert len(text.encode()) <= MAX_BYTES
    assert bars(ET.fromstring(text), COLOURS["forward"])
    monkeypatch.setattr("megascale.operate.show.charts.timeline.MAX_BYTES", 10**9)
    assert len(render_svg(ranks).encode()) > MAX_BYTES  # the size without coarser drawing


def test_different_clocks_are_aligned() -> None:
    aligned = job(steps=(1,))
    skewed = [on_own_clock(events, ahead) for events, ahead in zip(aligned, (0.0, 2.0, -2.0, 1.0), strict=True)]
    assert render_svg(skewed) == render_svg(aligned)
    assert render_svg([dataclasses.replace(events, clock=()) for events in skewed]) != render_svg(aligned)


def test_an_axis_of_another_name() -> None:
    root = draw(Event("<cp>", "x", "", 1, 0, 0, 0.0, 1.0))
    assert "<cp>" in texts(root)
    assert bars(root, OTHER_COLOUR)


def test_pictures_of_almost_nothing() -> None:
    for ranks in ([], [RankEvents(0, 1, {}, "", (), 0, ())], [RankEvents(0, 1, {}, "", (), 0, (action(1.0, 1.0),))]):
        assert ET.fromstring(render_svg(ranks)).get("width") == str(WIDTH)
