"""The charts of a report: curves over steps, bars of a waterfall, and the ranks as a grid of coloured cells."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megascale.operate.show.charts.shapes import BLUE, GREY, RED, document, line, nice_ticks, rect, text

WIDTH, HEIGHT = 520, 234
LEFT, RIGHT, TOP, BOTTOM = 64, WIDTH - 12, 26, HEIGHT - 38  # pixels: size of the chart, and edges of the drawing in it

SIDE_MARGIN = 1e-9

BAR_LEFT, BAR_WIDTH, PITCH = 190, 560, 20  # pixels left of the bars, of a whole bar, and from one bar to the next
CELLS_WIDTH, BELOW_CELLS = 970, 30  # pixels: width of the cells, and what is below them

MIN_SIDE, MAX_SIDE, MIN_LINED = 2.0, 36.0, 5.0
"""Pixels of a cell's side, and of the smallest cells with lines between them."""

MOST_NOTES = 2000  # most cells that have a text beside the pointer


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
    """A map from values to pixels, linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (math.log(each) if self.log else each for each in (self.low, self.high, value))
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def ticks(self, count: int) -> list[float]:
        """Return about `count` round values; of a logarithmic axis powers of ten."""
        if not self.log:
            return nice_ticks(self.low, self.high, count)
        powers = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
        return [10.0**power for power in powers]


def line_chart(
    title: str, series: Sequence[Series], marks: Sequence[Mark], tick: Callable[[float], str], *, log: bool = False
) -> str:
    """Draw curves over steps. `title`: the quantity of the vertical axis; `tick`: formats a value of it; `log`: on a
    logarithmic axis, of positive values only.
    """
    drawn = [each for each in series if len(each.x)]
    if not drawn:
        return document(WIDTH, 60, title, [text(WIDTH / 2, 40, "no data", "middle")])
    x = _scale(np.concatenate([each.x for each in drawn]), LEFT, RIGHT)
    y = _scale(np.concatenate([each.y for each in drawn]), BOTTOM, TOP, log=log)
    body = []
    for value in y.ticks(5):
        body += [line(LEFT, y(value), f"H{RIGHT}", "#e5e5e5"), text(LEFT - 6, y(value) + 4, tick(value), "right")]
    body += [text(x(value), BOTTOM + 16, f"{value:,.0f}", "middle") for value in x.ticks(6)]
    body.append(text((LEFT + RIGHT) / 2, BOTTOM + 32, "step", "middle"))
    for mark in marks:
        if x.low <= mark.step <= x.high:
            body.append(line(x(mark.step), TOP, f"V{BOTTOM}", RED, " stroke-dasharray='3 2'", mark.note))
            body.append(text(x(mark.step) + 2, TOP + 9, mark.label))
    for each in drawn:
        points = " ".join(f"{x(step):.1f} {y(value):.1f}" for step, value in zip(each.x, each.y, strict=True))
        body.append(f"<polyline points='{points}' fill='none' stroke='{each.colour}' stroke-width='1.5'/>")
    left, below = LEFT, BOTTOM + 50
    for each in drawn if len(drawn) > 1 else ():
        body.append(line(left, below - 4, "h14", each.colour, " stroke-width='3'"))
        body.append(text(left + 18, below, each.name))
        left += 30 + 7 * len(each.name)
    return document(WIDTH, HEIGHT + (18 if len(drawn) > 1 else 0), title, body)


def _scale(values: np.ndarray, start: float, end: float, *, log: bool = False) -> _Scale:
    low, high = float(values.min()), float(values.max())
    if log:
        low, high = 10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high))
    if high - low <= SIDE_MARGIN * max(abs(low), abs(high), 1.0):
        margin = max(abs(low) / 10, SIDE_MARGIN)
        low, high = low - margin, high + margin
    return _Scale(low, high, start, end, log)


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
        y, x = TOP + number * PITCH, BAR_LEFT + BAR_WIDTH * min(bar.start, bar.end)
        width = max(0.5, BAR_WIDTH * abs(bar.end - bar.start))
        body.append(text(BAR_LEFT - 8, y + 12, bar.name, "right"))
        body.append(rect(x, y, width, PITCH - 5, bar.colour))
        body.append(text(x + width + 6, y + 12, bar.text))
    return document(BAR_LEFT + BAR_WIDTH + 160, TOP + len(bars) * PITCH + 8, title, body)


class CellLevel(NamedTuple):
    """A colour, for values from `least` on."""

    least: float
    colour: str
    meaning: str


def grid_chart(
    title: str, values: np.ndarray, levels: Sequence[CellLevel], labels: Sequence[str], note: Callable[[int, int], str]
) -> str:
    """Draw a matrix of values, NaN in grey.

    `levels`: ascending; the first is the background. `labels`: of the rows, "" for none. `note`: of row and column, the
    text beside the pointer, on cells above the first level.
    """
    rows, columns = values.shape
    side = max(MIN_SIDE, min(MAX_SIDE, CELLS_WIDTH / columns))
    height = TOP + BELOW_CELLS + side * rows
    body = [rect(LEFT, TOP, side * columns, side * rows, levels[0].colour)]
    found = np.argwhere(~(values < levels[1].least)).tolist()  # NaN too
    cells: defaultdict[str, list[str]] = defaultdict(list)
    for row, column in found:
        level = next((each.colour for each in reversed(levels) if values[row, column] >= each.least), GREY)
        x, y = LEFT + column * side, TOP + row * side
        many = len(found) > MOST_NOTES
        small = f"<path d='M{x:.1f} {y:.1f}h{side:.1f}v{side:.1f}h{-side:.1f}'/>"
        cells[level].append(small if many else rect(x, y, side, side, note=note(row, column)))
    body += [f"<g fill='{colour}'>{''.join(shapes)}</g>" for colour, shapes in cells.items()]
    if side >= MIN_LINED:
        for column in range(1, columns):
            body.append(line(LEFT + column * side, TOP, f"v{rows * side:.1f}", "white"))
        for row in range(1, rows):
            body.append(line(LEFT, TOP + row * side, f"h{columns * side:.1f}", "white"))
    body += [text(LEFT - 6, TOP + row * side + min(side, 12), name, "right") for row, name in enumerate(labels) if name]
    left = LEFT
    for each in levels:
        body += [rect(left, height - 18, 10, 10, each.colour), text(left + 14, height - 9, each.meaning)]
        left += 32 + 7 * len(each.meaning)
    return document(LEFT + max(CELLS_WIDTH, side * columns) + 10, height, title, body)
