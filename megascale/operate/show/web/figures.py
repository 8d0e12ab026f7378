"""The figures of the dashboard, each from the model of a run: curves, heat maps, waterfall."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from megascale.core.units import format_bytes
from megascale.operate.diagnose.slow.expert_loads import MOST_LOAD, ExpertLoads
from megascale.operate.diagnose.slow.mfu_breakdown import MfuBreakdown
from megascale.operate.show.charts.shapes import RED
from megascale.operate.show.curves import CURVES, CastRecords
from megascale.operate.show.rank_grid import RankMatrix
from megascale.operate.show.run_view import RunView

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
"""Colours of runs, from Okabe and Ito's palette for colour-blind readers."""

HEAT_SCALE = ((0.0, "#eef5f0"), (0.1, "#fdd0a2"), (0.35, "#fd8d3c"), (0.7, "#d94801"), (1.0, "#7f2704"))
MEMORY_SCALE = "Blues"
LOAD_SCALE = "RdBu_r"  # white at the mean
GREY = "#d9d9d9"

LEAST_HEAT, MOST_HEAT = 0.1, 0.5  # excess over the peers at the dark end of the scale, at least and at most
CURVE_HEIGHT, WATERFALL_HEIGHT = 270, 420  # pixels of a curve and of a waterfall

MOST_NUMBERED, MOST_LINED, MOST_TICKS = 256, 2048, 32
"""Most cells of a heat map with their rank's number, and with lines between them; most columns with a number each."""

LEAST_SHOWN = 5e-4  # smallest part of a waterfall, as a share of 1


def curve_figure(metric: str, views: Mapping[str, RunView]) -> go.Figure:
    """Return the curves of a metric of several runs, with the incidents of each as marks."""
    figure = blank_figure(CURVES[metric].title, CURVE_HEIGHT)
    for (name, view), colour in zip(views.items(), itertools.cycle(COLOURS), strict=False):
        steps, values = view.curves.drawn(metric)
        figure.add_scatter(x=steps, y=values, mode="lines", name=name, line={"color": colour, "width": 1.5})
        if metric == "loss" and view.curves.valid:
            x, y = zip(*view.curves.valid, strict=True)
            dots = {"color": colour, "symbol": "diamond", "size": 7}
            figure.add_scatter(x=x, y=y, mode="markers", name=f"{name}, validation", marker=dots)
        _mark_incidents(figure, view, steps, values)
    figure.update_yaxes(tickformat=CURVES[metric].d3)
    figure.update_xaxes(title="step", title_standoff=4, tickformat=",d")
    figure.update_layout(showlegend=len(views) > 1 or any(view.curves.valid for view in views.values()))
    return figure


def _mark_incidents(figure: go.Figure, view: RunView, steps: np.ndarray, values: np.ndarray) -> None:
    """Draw a line at the step of each incident, and a point on the curve that says what happened."""
    incidents = [incident for incident in view.incidents if len(steps) and steps[0] <= incident.step <= steps[-1]]
    for incident in incidents:
        figure.add_vline(x=incident.step, line={"color": RED, "width": 1, "dash": "dot"})
    if incidents:
        at = [incident.step for incident in incidents]
        figure.add_scatter(
            x=at, y=np.interp(at, steps, values), mode="markers", hoverinfo="text", showlegend=False,
            marker={"color": RED, "symbol": "x", "size": 9},
            text=[f"incident {incident.id}, step {incident.step}: {incident.what}" for incident in incidents],
        )  # fmt: skip


def excess_figure(title: str, matrix: RankMatrix, excess: np.ndarray, nodes: Sequence[str]) -> go.Figure:
    """Return the heat map of each rank's excess over its peers, such as 0.1."""
    values = matrix.of(excess)
    most = float(np.nanmax(values, initial=0.0))
    figure = _heat_map(title, matrix, values, HEAT_SCALE, (0.0, min(MOST_HEAT, max(LEAST_HEAT, most))))
    figure.update_traces(hovertemplate="%{customdata}<br>%{z:+.1%} beside its peers<extra></extra>")
    figure.update_traces(customdata=matrix.names(nodes), colorbar={"tickformat": ".0%", "title": "excess"})
    return figure


def memory_figure(matrix: RankMatrix, memory: np.ndarray, nodes: Sequence[str]) -> go.Figure:
    """Return the heat map of each rank's peak memory, in bytes."""
    gib = matrix.of(memory) / 1024**3
    low, high = (float(f(gib)) for f in (np.nanmin, np.nanmax)) if np.isfinite(gib).any() else (0.0, 1.0)
    least = min(low - (high - low) / 4, (1 - LEAST_HEAT) * high)  # ranks that hardly differ look alike
    figure = _heat_map("peak memory by rank", matrix, gib, MEMORY_SCALE, (least, high))
    texts = np.vectorize(lambda value: format_bytes(value * 1024**3) if math.isfinite(value) else "unknown")(gib)
    figure.update_traces(customdata=np.char.add(np.char.add(matrix.names(nodes), ": "), texts))
    figure.update_traces(hovertemplate="%{customdata}<extra></extra>", colorbar={"title": "GiB"})
    return figure


def _heat_map(
    title: str, matrix: RankMatrix, values: np.ndarray, scale: object, limits: tuple[float, float]
) -> go.Figure:
    rows, _ = values.shape
    figure = blank_figure(title, height=90 + max(130, rows * (14 if rows <= 32 else 9)))
    low, high = limits
    gap = 1 if values.size <= MOST_LINED else 0
    figure.add_trace(go.Heatmap(z=values, colorscale=scale, zmin=low, zmax=max(high, low + 1e-9), xgap=gap, ygap=gap))
    if values.size <= MOST_NUMBERED:
        figure.update_traces(text=matrix.ranks, texttemplate="%{text}")
    ticks = [row for row, label in enumerate(matrix.labels) if label]
    figure.update_yaxes(
        autorange="reversed", tickvals=ticks, ticktext=[matrix.labels[row] for row in ticks], showgrid=False
    )
    figure.update_xaxes(title="replica (dp)", showgrid=False, title_standoff=4, tickformat="d", minallowed=-0.5)
    figure.update_xaxes(dtick=1 if matrix.ranks.shape[1] <= MOST_TICKS else None)
    figure.update_layout(plot_bgcolor=GREY)
    return figure


def expert_figure(found: ExpertLoads) -> go.Figure:
    """Return the heat map of experts' loads: means over the steps, relative to the mean of their layer."""
    loads, title = np.nanmean(found.loads, 0), f"loads of experts, steps {found.steps[0]} to {found.steps[-1]}"
    figure = blank_figure(title, height=90 + max(130, 14 * len(loads)))
    figure.add_heatmap(z=loads, y=found.layers, colorscale=LOAD_SCALE, zmin=0, zmax=MOST_LOAD)
    figure.update_traces(hovertemplate="layer %{y}, expert %{x}: %{z:.2f} times the mean<extra></extra>")
    figure.update_yaxes(title="layer", autorange="reversed", type="category", showgrid=False)
    figure.update_xaxes(title="expert", showgrid=False, title_standoff=4, tickformat="d")
    figure.update_layout(plot_bgcolor=GREY)
    return figure


def cast_figure(casts: CastRecords, statistic: str) -> go.Figure:
    """Return the heat map of a statistic of FP8 casts, by operand and logged step."""
    names = sorted({name for _, stats in casts for name in stats}, key=natural_order)
    values = [[stats.get(name, {}).get(statistic, math.nan) for _, stats in casts] for name in names]
    title = f"{statistic} of FP8 operands, steps {casts[0][0]} to {casts[-1][0]}"
    figure = blank_figure(title, height=90 + max(130, 14 * len(names)))
    figure.add_heatmap(z=values, y=names, x=[f"{step}" for step, _ in casts], colorscale=MEMORY_SCALE)
    figure.update_traces(hovertemplate="%{y}, step %{x}: %{z:.3g}<extra></extra>")
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    figure.update_xaxes(title="step", type="category", showgrid=False, title_standoff=4)
    figure.update_layout(plot_bgcolor=GREY)
    return figure


def natural_order(operand: str) -> tuple[int, str]:
    """Return a key that sorts operands, such as layers.10.mlp.up.input, by layer and then by name."""
    _, layer, rest = operand.split(".", 2)
    return int(layer), rest


def sharpness_figure(sharpness: Sequence[tuple[int, float]]) -> go.Figure:
    """Return the curve of the sharpness of logits, in percent."""
    steps, values = zip(*sharpness, strict=True)
    figure = blank_figure("sharpness of logits", CURVE_HEIGHT)
    figure.add_scatter(x=steps, y=values, mode="lines+markers", line={"color": COLOURS[0], "width": 1.5})
    figure.update_yaxes(ticksuffix="%")
    figure.update_xaxes(title="step", title_standoff=4, tickformat=",d")
    return figure


def waterfall_figure(breakdown: MfuBreakdown) -> go.Figure:
    """Return the waterfall from the peak to the achieved MFU."""
    whole = ("peak", "achieved")
    levels = [each for each in breakdown.waterfall if each.name in whole or abs(each.points) >= LEAST_SHOWN]
    figure = blank_figure(f"MFU points, steps {breakdown.first_step} to {breakdown.last_step}", WATERFALL_HEIGHT)
    figure.add_trace(
        go.Waterfall(
            x=[level.name for level in levels],
            y=[100 * level.points for level in levels],
            measure=["absolute" if level.name in whole else "relative" for level in levels],
            text=[f"{100 * level.points:.1f}" for level in levels],
            textposition="outside",
            decreasing={"marker": {"color": COLOURS[1]}},
            totals={"marker": {"color": COLOURS[2]}},
            connector={"line": {"color": "#bbb", "width": 1}},
        )
    )
    figure.update_yaxes(title="points", rangemode="tozero")
    return figure


def blank_figure(title: str, height: int) -> go.Figure:
    """Return a figure in the style of the dashboard, without content."""
    return go.Figure(
        layout={
            "title": {"text": title, "font": {"size": 14}, "x": 0.01, "y": 1, "yanchor": "top", "pad": {"t": 10}},
            "template": "plotly_white",
            "height": height,
            "margin": {"l": 56, "r": 16, "t": 40, "b": 40},
            "legend": {"orientation": "h", "y": 1.02, "x": 1, "xanchor": "right", "yanchor": "bottom"},
            "uirevision": "keep",  # zoom and selection outlive the refresh
            "font": {"family": "sans-serif", "size": 12},
        }
    )


def empty_figure() -> go.Figure:
    """Return an empty figure, a placeholder."""
    figure = blank_figure("", 60)
    figure.update_layout(uirevision="empty")
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    return figure
