"""A chart of bars below each other, as of a waterfall."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megascale.operate.show.charts.shapes import document, rect, text

LEFT, WIDTH, TOP, PITCH = 190, 560, 26, 20
"""Pixels left of the bars, of a whole bar, above the bars, and from one bar to the next."""


class Bar(NamedTuple):
    """A bar from `start` to `end`, shares of 1, with its name on the left and a text on the right."""

    name: str
    start: float
    end: float
    text: str
    colour: str


def bar_chart(title: str, bars: Sequence[Bar]) -> str:
    """Draw bars."""
    body = []
    for number, bar in enumerate(bars):
        y, x = TOP + number * PITCH, LEFT + WIDTH * min(bar.start, bar.end)
        width = max(0.5, WIDTH * abs(bar.end - bar.start))
        body.append(text(LEFT - 8, y + 12, bar.name, "right"))
        body.append(rect(x, y, width, PITCH - 5, bar.colour))
        body.append(text(x + width + 6, y + 12, bar.text))
    return document(LEFT + WIDTH + 160, TOP + len(bars) * PITCH + 8, title, body)
