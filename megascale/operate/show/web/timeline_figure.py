"""The timeline of chosen ranks and steps: bars of compute, waits and communication, with arrows for messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import plotly.graph_objects as go

from megascale.operate.show.charts.timeline import COLOURS, OTHER_COLOUR, merge_thin_spans, ordered_kinds, slice_kind
from megascale.operate.show.chrome_trace import (
    TICKS_PER_SECOND,
    Row,
    first_start,
    matched_messages,
    rank_label,
    rank_rows,
)
from megascale.operate.show.web.figures import blank_figure
from megascale.record.events import COMPUTE, RankEvents

MOST_BARS = 12_000  # most bars of a figure; thinner ones are merged until there are no more
MOST_ARROWS = 1500  # most arrows of a figure

ROW_PIXELS = 18


def timeline_figure(title: str, ranks: Sequence[RankEvents]) -> go.Figure:
    """Return the figure, with the time in ms from the first event. Ranks stand below each other, in their order."""
    origin = first_start(ranks)
    rows_by_rank = [(events, rank_rows(events, origin)) for events in ranks]
    names = [(events, row) for events, rows in rows_by_rank for row in rows]
    figure = blank_figure(title, 120 + ROW_PIXELS * len(names))
    for kind, bars in _bars([row for _, row in names]).items():
        figure.add_bar(
            orientation="h",
            name=kind,
            base=[start for start, *_ in bars],
            x=[end - start for start, end, *_ in bars],
            y=[row for *_, row, _ in bars],
            marker={"color": COLOURS.get(kind, OTHER_COLOUR), "line": {"width": 0}},
            hovertemplate="%{customdata}<br>%{base:.3f} ms, for %{x:.3f} ms<extra></extra>",
            customdata=[text for *_, text in bars],
            width=0.85,
        )
    _add_arrows(figure, rows_by_rank)
    labels = [
        f"rank {events.rank} ({rank_label(events)}) {COMPUTE}" if row.name == COMPUTE else row.name
        for events, row in names
    ]
    downward = [len(names) - 0.5, -0.5]
    figure.update_yaxes(
        range=downward, tickvals=list(range(len(names))), ticktext=labels, showgrid=False, zeroline=False
    )
    figure.update_xaxes(title="ms", title_standoff=4)
    figure.update_layout(barmode="overlay", bargap=0.15, margin={"l": 190}, hovermode="closest", uirevision=title)
    return figure


def _bars(rows: Sequence[Row]) -> dict[str, list[tuple[float, float, int, str]]]:
    """Return (start, end, row, text) of all bars by kind, in ms; thin ones beside each other are one."""
    spans: dict[str, list[list[tuple[float, float, str]]]] = defaultdict(lambda: [[] for _ in rows])
    last = 0.0
    for at, row in enumerate(rows):
        for each in row.slices:
            start, end = (1e3 * tick / TICKS_PER_SECOND for tick in (each.start, each.end))
            spans[slice_kind(each)][at].append((start, end, each.name))
            last = max(last, end)
    thin = last / 4000
    while True:
        bars: dict[str, list[tuple[float, float, int, str]]] = {kind: [] for kind in ordered_kinds(spans)}
        for kind, found in bars.items():
            for at, row_spans in enumerate(spans[kind]):
                names = {(start, end): name for start, end, name in row_spans}
                merged = merge_thin_spans([(start, end) for start, end, _ in row_spans], thin)
                found += [(start, end, at, names.get((start, end), "several")) for start, end in merged]
        if sum(map(len, bars.values())) <= MOST_BARS:
            return bars
        thin *= 2


def _add_arrows(figure: go.Figure, rows_by_rank: Sequence[tuple[RankEvents, list[Row]]]) -> None:
    """Draw a line from each send to its receive, with a point where it arrives."""
    numbers = [(events.rank, number) for events, rows in rows_by_rank for number in range(len(rows))]
    place = {number: at for at, number in enumerate(numbers)}
    x: list[float | None] = []
    y: list[float | None] = []
    for send, receive in matched_messages(rows_by_rank)[:MOST_ARROWS]:
        for end, tick in ((send, send.start), (receive, max(send.start, receive.end))):
            x.append(1e3 * tick / TICKS_PER_SECOND)
            y.append(place[end.rank, end.row])
        x.append(None)
        y.append(None)
    if x:
        figure.add_scatter(
            x=x, y=y, mode="lines+markers", name="messages", hoverinfo="skip",
            line={"color": "#333", "width": 1}, marker={"symbol": "arrow", "angleref": "previous", "size": 7},
        )  # fmt: skip
