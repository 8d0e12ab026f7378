"""The rows of a few ranks as an SVG picture for documents.

A picture is a thousand pixels wide. Slices that would be too thin to see are drawn together, or not at all.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from megascale.core.events import COMPUTE, RankEvents
from megascale.core.files import write_text
from megascale.observe.timeline import TICKS, Row, Slice, begins, place, rows

COLOURS = {
    "other compute": "#8c8c8c",
    "forward": "#0072b2",
    "backward": "#009e73",
    "wait": "#d55e00",
    "tp": "#56b4e9",
    "pp": "#cc79a7",
    "dp": "#e69f00",
    "tied": "#f0e442",
    "world": "#4d4d4d",
}
"""After Okabe and Ito, whom also colour-blind people tell apart. Later ones are drawn over earlier ones."""

OTHER = "#a08060"
"""The colour of an axis that has none of its own."""

START = b"<svg xmlns='http://www.w3.org/2000/svg'"
"""What a file of a picture begins with."""

WIDTH = 1000
LEFT = 150
RIGHT = 15
TOP = 34
BAR = 13
STEP = 16
GAP = 8
BOTTOM = 30
"""Pixels: of the picture, beside and above its rows, of a bar, from row to row, between ranks, below the rows."""

STYLE = ".head{font-weight:bold}.right{text-anchor:end}.middle,.bar{text-anchor:middle}.bar{fill:white}"

THIN = 0.3
"""Pixels below which a slice, or the gap between two of one colour, is not drawn."""

LARGEST = 200_000
"""Bytes of a picture. One that would be larger is drawn more coarsely."""

LETTER = 7
"""Pixels of a letter, at most."""


def write(path: Path, ranks: Sequence[RankEvents]) -> None:
    """Draw all events of some ranks and write the file, at once or not at all.

    Raises: OSError
    """
    write_text(path, picture(ranks))


def picture(ranks: Sequence[RankEvents]) -> str:
    """All events of some ranks as an SVG document."""
    origin = min((time for events in ranks for time in begins(events).values()), default=0.0)
    found = [(events, rows(events, origin)) for events in ranks]
    end = max((slice.end for _, rank in found for row in rank for slice in row.slices), default=1)
    scale = (WIDTH - LEFT - RIGHT) / max(end, 1)
    thin = THIN
    while len((text := _document(found, scale, thin)).encode()) > LARGEST and thin < WIDTH:
        thin *= 2
    return text


def _document(ranks: Sequence[tuple[RankEvents, list[Row]]], scale: float, thin: float) -> str:
    """`scale`: pixels of a tick; `thin`: pixels of what is not drawn."""
    body: list[str] = []
    y = TOP
    for events, found in ranks:
        body.append(_text(4, y + BAR - 3, f"rank {events.rank}", "head"))
        body.append(_text(4, y + STEP + BAR - 3, place(events)))
        for row in found:
            body.append(_text(LEFT - 6, y + BAR - 3, row.name, "right"))
            body += _bars(row, y, scale, thin)
            y += STEP
        y += GAP + (STEP if len(found) == 1 else 0)
    kinds = {kind(slice) for _, found in ranks for row in found for slice in row.slices}
    height = y + BOTTOM
    title = "Compute and communication of " + ", ".join(f"rank {events.rank}" for events, _ in ranks)
    head = (
        f"{START.decode()} viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' height='{height}' "
        f"font-family='sans-serif' font-size='11' role='img'>\n<title>{title}</title>\n<style>{STYLE}</style>\n"
        f"<rect width='{WIDTH}' height='{height}' fill='white'/>"
    )
    return "\n".join([head, *_legend(kinds), *_axis(scale, y), *body, "</svg>"]) + "\n"


def kind(slice: Slice) -> str:
    """What decides the colour of a slice: a key of COLOURS, or another axis."""
    if slice.wait:
        return "wait"
    if slice.event.axis != COMPUTE:
        return slice.event.axis
    return {"F": "forward", "B": "backward"}.get(slice.event.name, "other compute")


def _order(kinds: Iterable[str]) -> list[str]:
    known = list(COLOURS)
    return sorted(kinds, key=lambda kind: (known.index(kind) if kind in COLOURS else len(known), kind))


def _bars(row: Row, y: int, scale: float, thin: float) -> Iterator[str]:
    """A path for each colour of a row, then the names of the wide bars of compute."""
    kinds: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for slice in row.slices:
        kinds[kind(slice)].append((LEFT + slice.start * scale, LEFT + slice.end * scale))
    for name in _order(kinds):
        if path := "".join(_bar(left, right, y) for left, right in joined(kinds[name], thin)):
            yield f"<path fill='{COLOURS.get(name, OTHER)}' d='{path}'/>"
    if row.name == COMPUTE:
        yield from _labels(row, y, scale, thin)


def _labels(row: Row, y: int, scale: float, thin: float) -> Iterator[str]:
    """Where there is room for it, the name of an action in its bar, else the number of its micro-batch."""
    for slice in row.slices:
        width = (slice.end - slice.start) * scale
        if slice.wait or width < thin:
            continue
        number = slice.event.microbatch
        texts = (slice.name, str(number) if number >= 0 else "")
        fitting = next((text for text in texts if LETTER * len(text) <= width), "")
        if fitting:
            yield _text(LEFT + slice.start * scale + width / 2, y + BAR - 3, fitting, "bar")


def joined(spans: Iterable[tuple[float, float]], thin: float) -> Iterator[tuple[float, float]]:
    """The spans, in order of their start, that are to be drawn: thin ones become one where hardly anything parts them,
    and are left out where that is still thin.
    """
    run: tuple[float, float] | None = None  # of thin spans
    for left, right in spans:
        if run and (right - left >= thin or left - run[1] >= thin):
            if run[1] - run[0] >= thin:
                yield run
            run = None
        if right - left >= thin:
            yield left, right
        else:
            run = (run[0], max(run[1], right)) if run else (left, right)
    if run and run[1] - run[0] >= thin:
        yield run


def _bar(left: float, right: float, y: int) -> str:
    width = right - left
    if width > 2:  # a gap of half a pixel parts neighbours
        width -= 0.5
    return f"M{left:.2f} {y}h{width:.2f}v{BAR}h{-width:.2f}z"


def _legend(kinds: Iterable[str]) -> Iterator[str]:
    x = LEFT
    for name in _order(kinds):
        yield f"<rect x='{x}' y='8' width='{BAR}' height='{BAR}' fill='{COLOURS.get(name, OTHER)}'/>"
        yield _text(x + BAR + 4, 8 + BAR - 3, name)
        x += BAR + 4 + LETTER * len(name) + 14


def _axis(scale: float, y: int) -> Iterator[str]:
    """Lines down to `y` at round times, with their milliseconds below."""
    millisecond = scale * TICKS / 1e3  # in pixels
    span = (WIDTH - LEFT - RIGHT) / millisecond
    power = 10.0 ** math.floor(math.log10(span / 5))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power * 10 >= span)
    for number in range(math.floor(span / step) + 1):
        x = LEFT + number * step * millisecond
        yield f"<path stroke='#ddd' d='M{x:.1f} {TOP - 6}V{y}'/>"
        yield _text(x, y + 14, f"{number * step:.6g}", "middle")
    yield _text(LEFT - 12, y + 14, "ms", "right")


def _text(x: float, y: float, text: str, look: str = "left") -> str:
    return f"<text class='{look}' x='{x:.1f}' y='{y:.1f}'>{escape(text)}</text>"
