"""A chart of curves over the steps of a run, with marks for incidents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megascale.operate.show.charts.shapes import BLUE, RED, document, line, nice_ticks, text

WIDTH, HEIGHT = 520, 220
LEFT, RIGHT, TOP, BOTTOM = 64, WIDTH - 12, 26, HEIGHT - 24
"""Pixels: size of the chart, and edges of the drawing in it."""

SIDE_MARGIN = 1e-9


class Series(NamedTuple):
    """A curve: its name, points and colour."""

    name: str
    x: np.ndarray
    y: np.ndarray
    colour: str = BLUE


class Mark(NamedTuple):
    """A vertical line at a step: its short label, and the text beside the pointer."""

    step: int
    label: str
    note: str


@dataclass(frozen=True)
class _Scale:
    """A linear map from values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def line_chart(title: str, series: Sequence[Series], marks: Sequence[Mark], tick: Callable[[float], str]) -> str:
    """Draw curves. `tick`: formats a value of the vertical axis."""
    drawn = [each for each in series if len(each.x)]
    if not drawn:
        return document(WIDTH, 60, title, [text(WIDTH / 2, 40, "no data", "middle")])
    x = _scale(np.concatenate([each.x for each in drawn]), LEFT, RIGHT)
    y = _scale(np.concatenate([each.y for each in drawn]), BOTTOM, TOP)
    body = [*_grid(x, y, tick), *_marks(marks, x)]
    for each in drawn:
        points = " ".join(f"{x(step):.1f} {y(value):.1f}" for step, value in zip(each.x, each.y, strict=True))
        body.append(f"<polyline points='{points}' fill='none' stroke='{each.colour}' stroke-width='1.5'/>")
    return document(WIDTH, HEIGHT, title, [*body, *(_legend(drawn) if len(drawn) > 1 else ())])


def _grid(x: _Scale, y: _Scale, tick: Callable[[float], str]) -> Iterator[str]:
    for value in nice_ticks(y.low, y.high, 5):
        yield line(LEFT, y(value), f"H{RIGHT}", "#e5e5e5")
        yield text(LEFT - 6, y(value) + 4, tick(value), "right")
    for value in nice_ticks(x.low, x.high, 6):
        yield text(x(value), HEIGHT - 8, f"{value:,.0f}", "middle")


def _marks(marks: Sequence[Mark], x: _Scale) -> Iterator[str]:
    for mark in marks:
        if x.low <= mark.step <= x.high:
            yield line(x(mark.step), TOP, f"V{BOTTOM}", RED, " stroke-dasharray='3 2'", mark.note)
            yield text(x(mark.step) + 2, TOP + 9, mark.label)


def _legend(series: Sequence[Series]) -> Iterator[str]:
    x = LEFT + 8
    for each in series:
        yield line(x, BOTTOM - 8, "h14", each.colour, " stroke-width='3'")
        yield text(x + 18, BOTTOM - 4, each.name)
        x += 30 + 7 * len(each.name)


def _scale(values: np.ndarray, start: float, end: float) -> _Scale:
    low, high = float(values.min()), float(values.max())
    if high - low <= SIDE_MARGIN * max(abs(low), abs(high), 1.0):
        margin = max(abs(low) / 10, SIDE_MARGIN)
        low, high = low - margin, high + margin
    return _Scale(low, high, start, end)
