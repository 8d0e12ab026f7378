"""The place of a rank: its group on each axis as a row of cells, and the data that flow over the pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from megascale.operate.show.neighbours import RankPlace
from megascale.operate.show.signs import SIGNS
from megascale.operate.show.web.figures import blank_figure

NUMBERED = 24  # most cells of a row that show their rank's number; others show it beside the pointer

FLOW_COLOURS = {"activations": "#0072b2", "gradients of activations": "#d55e00"}


def place_figure(place: RankPlace, letters: Sequence[str]) -> go.Figure:
    """Return the figure. `letters`: the signs of all ranks; a click on a cell has its rank as customdata."""
    figure = blank_figure(f"rank {place.rank} in its groups", 100 + 70 * max(1, len(place.groups)))
    rows = {axis: row for row, axis in enumerate(reversed(place.groups))}
    for axis, row in rows.items():
        _add_group(figure, place, axis, row, letters)
    pipeline, row = place.groups.get("pp", ()), rows.get("pp", 0)
    for flow in place.flows:
        ends = (place.rank, flow.rank) if flow.direction == "to" else (flow.rank, place.rank)
        tail, head = (pipeline.index(rank) * _spacing(pipeline) for rank in ends)
        lift = 0.3 if flow.what == "activations" else -0.3
        figure.add_annotation(
            x=head, y=row + lift, ax=tail, ay=row + lift, xref="x", yref="y", axref="x", ayref="y", text="",
            arrowhead=2, arrowwidth=2, arrowcolor=FLOW_COLOURS[flow.what], standoff=14, startstandoff=14,
            hovertext=f"{flow.what} from rank {ends[0]} to rank {ends[1]}",
        )  # fmt: skip
    for number, (what, colour) in enumerate(FLOW_COLOURS.items() if place.flows else ()):
        words = f"<b style='color:{colour}'>\u2192 {what}</b>"
        at = {"x": len(pipeline) * _spacing(pipeline) - 0.8, "y": row + 0.2 - 0.4 * number}
        figure.add_annotation(**at, text=words, showarrow=False, xanchor="left")
    figure.update_layout(showlegend=False)
    figure.update_xaxes(visible=False, range=[-0.7, NUMBERED])
    ticks = [f"{axis} group" for axis in rows]
    figure.update_yaxes(
        tickvals=list(rows.values()), ticktext=ticks, showgrid=False, zeroline=False, range=[-0.6, len(rows) - 0.4]
    )
    return figure


def _add_group(figure: go.Figure, place: RankPlace, axis: str, row: int, letters: Sequence[str]) -> None:
    group = place.groups[axis]
    signs = [SIGNS[letters[rank]] for rank in group]
    numbered = len(group) <= NUMBERED
    figure.add_scatter(
        x=[number * _spacing(group) for number in range(len(group))],
        y=[row] * len(group),
        mode="markers+text" if numbered else "markers",
        text=[str(rank) for rank in group] if numbered else None,
        textfont={"size": 10, "color": "white"},
        customdata=list(group),
        hovertext=[f"rank {rank}: {sign.meaning}" for rank, sign in zip(group, signs, strict=True)],
        hoverinfo="text",
        marker={
            "symbol": "square",
            "size": 32 if numbered else 8,
            "color": [sign.colour for sign in signs],
            "line": {
                "color": ["black" if rank == place.rank else "white" for rank in group],
                "width": [3 if rank == place.rank else 0 for rank in group],
            },
        },
    )


def _spacing(group: Sequence[int]) -> float:
    """Return the distance of a row's cells: a row holds NUMBERED cells of full size side by side."""
    return min(2.0, NUMBERED / len(group))
