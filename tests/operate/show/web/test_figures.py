"""The figures of the dashboard: their numbers are those of the model, and they stay small."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megascale.layout.topology import Topology
from megascale.operate.diagnose.slow.expert_loads import ExpertLoads
from megascale.operate.diagnose.slow.mfu_breakdown import MfuBreakdown
from megascale.operate.show.neighbours import place_of
from megascale.operate.show.rank_grid import rank_matrix
from megascale.operate.show.run_reader import RunReader
from megascale.operate.show.store_view import read_store_view
from megascale.operate.show.web import timeline_figure as timeline
from megascale.operate.show.web.cast_page import rows
from megascale.operate.show.web.figures import (
    cast_figure,
    curve_figure,
    excess_figure,
    expert_figure,
    memory_figure,
    sharpness_figure,
    waterfall_figure,
)
from megascale.operate.show.web.heat_map_pages import long_parts, part_excess
from megascale.operate.show.web.place_figure import place_figure
from megascale.operate.show.web.timeline_figure import timeline_figure
from megascale.record.events import COMPUTE, Event, RankEvents
from tests.operate.show.folders import incident, make_run, write_incidents
from tests.operate.show.stores import make_stored_run


def test_curves_of_several_runs_with_their_incidents(tmp_path: Path) -> None:
    views = {}
    for name, steps in (("a", 10), ("b", 6)):
        folder = make_run(tmp_path / name, steps=steps)
        write_incidents(folder, [incident(1, step=5)] if name == "a" else [])
        views[name] = RunReader(folder).read()
    figure = curve_figure("loss", views)
    a, marks, b = figure.data
    assert (a.name, list(a.x), list(a.y)) == ("a", list(range(1, 11)), [5.0 - step / 10 for step in range(1, 11)])
    assert (list(marks.x), list(marks.y)) == ([5], [4.5])
    assert "rank 1 was killed" in marks.text[0]
    assert (b.name, len(b.x)) == ("b", 6)
    assert len(figure.layout.shapes) == 1


def test_the_heat_map_of_12288_ranks_is_small_and_in_place() -> None:
    topology = Topology(tp=8, pp=8, dp=192)
    matrix, excess = rank_matrix(topology), np.zeros(12288)
    excess[5000] = 0.25
    figure = excess_figure("compute", matrix, excess, ["n"] * 12288)
    coord = topology.coord(5000)
    heat = figure.data[0]
    assert heat.z[coord.pp * 8 + coord.tp][coord.dp] == 0.25
    assert heat.customdata[coord.pp * 8 + coord.tp][coord.dp] == "rank 5000 on n"
    assert heat.zmax == 0.25
    assert len(figure.to_json()) < 1_500_000


def test_memory_in_gib_with_unknown_ranks() -> None:
    figure = memory_figure(rank_matrix(Topology(tp=2, dp=2)), np.array([2.0**30, 2.0**31, np.nan, 2.0**30]), [""] * 4)
    assert figure.data[0].customdata[1][0].endswith("2.00 GiB")
    assert figure.data[0].customdata[0][1].endswith("unknown")


def test_the_waterfall_ends_at_the_achieved_mfu() -> None:
    breakdown = MfuBreakdown(1, 10, 10, 10.0, {"forward": 4.0, "backward": 4.0, "dp": 1.9996, "pp": 0.0004}, 0.4, {})
    bars = waterfall_figure(breakdown).data[0]
    assert list(bars.x) == ["peak", "dp", "compute below the peak", "achieved"]
    assert list(bars.y) == pytest.approx([100, -19.996, -40, 40], abs=0.01)


def test_a_picked_rank_in_its_groups_with_arrows() -> None:
    place = place_of(Topology(tp=2, pp=2, dp=30), 5)
    figure = place_figure(place, ["."] * 120)
    groups = {tuple(trace.customdata): trace for trace in figure.data}
    assert set(groups) == set(place.groups.values())
    widths = groups[place.groups["dp"]].marker.line.width
    assert [rank for rank, width in zip(place.groups["dp"], widths, strict=True) if width] == [5]
    assert groups[place.groups["dp"]].text is None, "more cells than there is room for numbers"
    arrows = [each.hovertext for each in figure.layout.annotations if each.hovertext]
    assert arrows == [
        "activations from rank 5 to rank 65", "gradients of activations from rank 65 to rank 5",
    ]  # fmt: skip


def rank_events(rank: int, actions: int) -> RankEvents:
    """A rank that computes, and sends to or receives from the other rank after every action."""
    events = []
    for at in range(actions):
        start = float(at)
        events.append(Event(COMPUTE, "F", "", 1, 0, at, start, start + 0.5))
        kind = ("send", "receive")[rank]
        lag = 0.1 * rank
        events.append(
            Event("pp", kind, "activation", 1, 0, at, start + 0.5, start + 0.6 + lag, group="pp.up", sequence=at,
                  peer=1 - rank, bytes=8, issue=start + 0.5, stage=1, direction="forward")
        )  # fmt: skip
    return RankEvents(rank, 2, {"tp": 0, "dp": 0, "pp": rank}, "h", (), 0, tuple(events))


def test_the_timeline_has_all_bars_and_arrows_from_sends_to_receives() -> None:
    figure = timeline_figure("step 1", [rank_events(0, 4), rank_events(1, 4)])
    bars = {trace.name: trace for trace in figure.data}
    assert sorted(bars) == ["forward", "messages", "pp"]
    assert list(bars["forward"].base) == [0.0, 1000.0, 2000.0, 3000.0] * 2
    assert list(bars["forward"].y) == [0] * 4 + [2] * 4
    assert list(bars["forward"].customdata[:2]) == ["F m0 c0", "F m1 c0"]
    arrows = bars["messages"]
    assert [y for y in arrows.y if y is not None] == [1, 3] * 4, "from the sender's row to the receiver's"
    assert figure.layout.yaxis.ticktext == (
        "rank 0 (pp 0, dp 0, tp 0) compute",
        "pp",
        "rank 1 (pp 1, dp 0, tp 0) compute",
        "pp",
    )


def test_a_timeline_of_many_events_is_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "MOST_BARS", 300)
    monkeypatch.setattr(timeline, "MOST_ARROWS", 10)
    figure = timeline_figure("step 1", [rank_events(0, 2000), rank_events(1, 2000)])
    assert sum(len(trace.x) for trace in figure.data if trace.type == "bar") <= 300
    assert sum(y is None for trace in figure.data if trace.name == "messages" for y in trace.y) == 10


def test_parts_of_no_length_are_neither_offered_nor_coloured(tmp_path: Path) -> None:
    run, _ = make_stored_run(tmp_path)
    store = read_store_view(run)
    assert store is not None
    heat = store.heat
    seconds, peer_s = np.full((8, 2), 1e-3 * heat.step_s), np.full((8, 2), 1e-3 * heat.step_s)
    seconds[5, 0] = 4e-3 * heat.step_s
    seconds[:, 1] = peer_s[:, 1] = 0.2 * heat.step_s
    seconds[5, 1] = 0.3 * heat.step_s
    store = replace(store, heat=replace(heat, columns=("host gc", "F"), seconds=seconds, peer_s=peer_s))
    assert long_parts(store.heat) == ["F"]
    assert part_excess(store, "host gc").tolist() == [0.0] * 8, "four times as long as the peers', and no cost"
    assert part_excess(store, "F").tolist() == pytest.approx([0, 0, 0, 0, 0, 0.5, 0, 0])


def test_the_heat_map_of_experts_has_their_mean_loads() -> None:
    loads = np.ones((2, 2, 3))
    loads[:, 1] = [[3.0, 0.0, 0.0], [2.0, 1.0, 0.0]]
    (heat,) = expert_figure(ExpertLoads(np.array([5, 10]), np.array([1, 2]), loads)).data
    assert (heat.z.tolist(), heat.y.tolist()) == ([[1, 1, 1], [2.5, 0.5, 0]], [1, 2])


CASTS = tuple(
    (
        step,
        {
            f"layers.{n}.mlp.down.{of}": {"kurtosis": n * step, "rms": 1.0}
            for n in (2, 10)
            for of in ("input", "weight")
        },
    )
    for step in (5, 10)
)


def test_the_heat_map_of_casts_has_a_row_for_each_operand() -> None:
    (heat,) = cast_figure(CASTS, "kurtosis").data
    assert list(heat.y) == [f"layers.{n}.mlp.down.{of}" for n in (2, 10) for of in ("input", "weight")]
    assert [list(row) for row in heat.z] == [[10, 20], [10, 20], [50, 100], [50, 100]] and list(heat.x) == ["5", "10"]
    assert rows(CASTS, "kurtosis")[0] == ("layers.10.mlp.down.input", "100", "nan", "nan", "1", "nan")


def test_the_sharpness_is_a_curve() -> None:
    (curve,) = sharpness_figure(((5, 0.1), (10, 0.2))).data
    assert (list(curve.x), list(curve.y)) == ([5, 10], [0.1, 0.2])


def test_memory_that_hardly_differs_looks_alike() -> None:
    heat = memory_figure(rank_matrix(Topology(tp=2, dp=2)), np.array([1.0, 1.001, 1.002, 1.0]) * 2**30, [""] * 4).data[
        0
    ]
    colours = (np.array([1.0, 1.002]) - heat.zmin) / (heat.zmax - heat.zmin)
    assert colours[1] - colours[0] < 0.03
