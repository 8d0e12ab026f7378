"""A chart of the ranks as a grid of coloured cells."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from megascale.operate.show.charts.shapes import GREY, document, line, rect, text

WIDTH = 970
LEFT, TOP, BOTTOM = 64, 26, 30
"""Pixels: width of the cells, and what is left of them, above and below."""

MIN_SIDE, MAX_SIDE, MIN_LINED = 2.0, 36.0, 5.0
"""Pixels of a cell's side, and of the smallest cells with lines between them."""

MOST_NOTES = 2000
"""Most cells that have a text beside the pointer."""


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
    side = max(MIN_SIDE, min(MAX_SIDE, WIDTH / columns))
    height = TOP + BOTTOM + side * rows
    body = [rect(LEFT, TOP, side * columns, side * rows, levels[0].colour)]
    found = np.argwhere(~(values < levels[1].least)).tolist()  # NaN too
    cells: defaultdict[str, list[str]] = defaultdict(list)
    for row, column in found:
        level = next((each.colour for each in reversed(levels) if values[row, column] >= each.least), GREY)
        x, y = LEFT + column * side, TOP + row * side
        many = len(found) > MOST_NOTES
        cells[level].append(_small_cell(x, y, side) if many else rect(x, y, side, side, note=note(row, column)))
    body += [f"<g fill='{colour}'>{''.join(shapes)}</g>" for colour, shapes in cells.items()]
    body += _lines(rows, columns, side) if side >= MIN_LINED else ()
    body += [text(LEFT - 6, TOP + row * side + min(side, 12), name, "right") for row, name in enumerate(labels) if name]
    legend = list(_legend(levels, height))
    return document(LEFT + max(WIDTH, side * columns) + 10, height, title, [*body, *legend])


def _small_cell(x: float, y: float, side: float) -> str:
    return f"<path d='M{x:.1f} {y:.1f}h{side:.1f}v{side:.1f}h{-side:.1f}'/>"


def _lines(rows: int, columns: int, side: float) -> Iterator[str]:
    for column in range(1, columns):
        yield line(LEFT + column * side, TOP, f"v{rows * side:.1f}", "white")
    for row in range(1, rows):
        yield line(LEFT, TOP + row * side, f"h{columns * side:.1f}", "white")


def _legend(levels: Sequence[CellLevel], height: float) -> Iterator[str]:
    x = LEFT
    for level in levels:
        yield rect(x, height - 18, 10, 10, level.colour)
        yield text(x + 14, height - 9, level.meaning)
        x += 32 + 7 * len(level.meaning)
