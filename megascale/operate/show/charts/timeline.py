"""Pictures of the timelines of a few ranks, for documents.

A picture is WIDTH pixels wide. Slices too thin to see are merged, or left out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from megascale.operate.show.charts.shapes import FILE_START, rect, text
from megascale.operate.show.chrome_trace import TICKS_PER_SECOND, Row, Slice, first_start, rank_label, rank_rows
from megascale.record.events import COMPUTE, RankEvents
from megascale.schedule.ir import COMPUTE_KINDS

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
"""Colours of slice kinds, from Okabe and Ito's palette for colour-blind readers. Later kinds are drawn over earlier."""

OTHER_COLOUR = "#a08060"
"""The colour of all other axes."""

WIDTH = 1000
LEFT = 150
RIGHT = 15
TOP = 34
BAR_HEIGHT = 13
ROW_PITCH = 16
RANK_GAP = 8
BOTTOM = 30
"""Pixels: picture width; margins left, right and above; bar height; row pitch; gap between ranks; margin below."""

STYLE = ".head{font-weight:bold}.right{text-anchor:end}.middle,.bar{text-anchor:middle}.bar{fill:white}"

MIN_WIDTH = 0.3  # minimum pixels of a slice, or of a gap between slices of the same colour, that is drawn
MAX_BYTES = 200_000  # maximum bytes of a picture. A larger picture is drawn more coarsely
LETTER_WIDTH = 7  # maximum pixels of a letter


RankRows = tuple[RankEvents, list[Row]]
"""A rank's events, and the rows that show them."""


def render_svg(ranks: Sequence[RankEvents]) -> str:
    """All events of some ranks as an SVG document."""
    return render_runs({"": ranks})


def render_runs(runs: Mapping[str, Sequence[RankEvents]]) -> str:
    """Events of runs below each other, by title, at one time scale; time begins with the first event of a run."""
    rows_by_run = {
        title: [(events, rank_rows(events, origin)) for events in ranks]
        for title, ranks in runs.items()
        for origin in [first_start(ranks)]
    }
    ends = (slice.end for ranks in rows_by_run.values() for _, rows in ranks for row in rows for slice in row.slices)
    scale = (WIDTH - LEFT - RIGHT) / max(max(ends, default=1), 1)
    thin = MIN_WIDTH
    while len((picture := _document(rows_by_run, scale, thin)).encode()) > MAX_BYTES and thin < WIDTH:
        thin *= 2
    return picture


def _document(runs: Mapping[str, Sequence[RankRows]], scale: float, thin: float) -> str:
    """The SVG text. `scale`: pixels per tick; `thin`: minimum pixels of a slice that is drawn."""
    body: list[str] = []
    y = TOP
    for title, ranks in runs.items():
        if title:
            body.append(text(LEFT, y + BAR_HEIGHT - 3, title, "head"))
            y += ROW_PITCH
        for events, rows_of_rank in ranks:
            body.append(text(4, y + BAR_HEIGHT - 3, f"rank {events.rank}", "head"))
            body.append(text(4, y + ROW_PITCH + BAR_HEIGHT - 3, rank_label(events)))
            for row in rows_of_rank:
                body.append(text(LEFT - 6, y + BAR_HEIGHT - 3, row.name, "right"))
                body += _bars(row, y, scale, thin)
                y += ROW_PITCH
            y += RANK_GAP + (ROW_PITCH if len(rows_of_rank) == 1 else 0)
    shown = [each for ranks in runs.values() for each in ranks]
    legend, x = list[str](), LEFT
    for name in ordered_kinds({slice_kind(slice) for _, rows in shown for row in rows for slice in row.slices}):
        legend.append(rect(x, 8, BAR_HEIGHT, BAR_HEIGHT, COLOURS.get(name, OTHER_COLOUR)))
        legend.append(text(x + BAR_HEIGHT + 4, 8 + BAR_HEIGHT - 3, name))
        x += BAR_HEIGHT + 4 + LETTER_WIDTH * len(name) + 14
    height = y + BOTTOM
    title = "Compute and communication of " + ", ".join(dict.fromkeys(f"rank {events.rank}" for events, _ in shown))
    head = (
        f"{FILE_START.decode()} viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' height='{height}' "
        f"font-family='sans-serif' font-size='11' role='img'>\n<title>{title}</title>\n<style>{STYLE}</style>\n"
        f"<rect width='{WIDTH}' height='{height}' fill='white'/>"
    )
    return "\n".join([head, *legend, *_axis(scale, y), *body, "</svg>"]) + "\n"


def slice_kind(slice: Slice) -> str:
    """The kind of a slice, which determines its colour: a key of COLOURS, or another axis."""
    if slice.wait:
        return "wait"
    if slice.event.axis != COMPUTE:
        return slice.event.axis
    kind = COMPUTE_KINDS.get(slice.event.name)
    return kind.runs if kind is not None else "other compute"


def ordered_kinds(kinds: Iterable[str]) -> list[str]:
    """Return kinds in the order in which they are drawn."""
    known = list(COLOURS)
    return sorted(kinds, key=lambda kind: (known.index(kind) if kind in COLOURS else len(known), kind))


def _bars(row: Row, y: int, scale: float, thin: float) -> Iterator[str]:
    """The bars of a row, a path per colour; then the labels of wide compute bars: the action's name if it fits, else
    the micro-batch number if that fits.
    """
    kinds: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for slice in row.slices:
        kinds[slice_kind(slice)].append((LEFT + slice.start * scale, LEFT + slice.end * scale))
    for name in ordered_kinds(kinds):
        path = ""
        for left, right in merge_thin_spans(kinds[name], thin):
            width = right - left - (0.5 if right - left > 2 else 0)  # half a pixel separates neighbours
            path += f"M{left:.2f} {y}h{width:.2f}v{BAR_HEIGHT}h{-width:.2f}z"
        if path:
            yield f"<path fill='{COLOURS.get(name, OTHER_COLOUR)}' d='{path}'/>"
    for slice in row.slices if row.name == COMPUTE else ():
        width = (slice.end - slice.start) * scale
        if slice.wait or width < thin:
            continue
        number = slice.event.microbatch
        texts = (slice.name, str(number) if number >= 0 else "")
        fitting = next((words for words in texts if LETTER_WIDTH * len(words) <= width), "")
        if fitting:
            yield text(LEFT + slice.start * scale + width / 2, y + BAR_HEIGHT - 3, fitting, "bar")


def merge_thin_spans(spans: Iterable[tuple[float, float]], thin: float) -> Iterator[tuple[float, float]]:
    """The spans to draw, in order of their start. Thin spans with thin gaps between them are merged; a merged span that
    is still thin is left out.
    """
    run: tuple[float, float] | None = None  # the merged thin spans
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


def _axis(scale: float, y: int) -> Iterator[str]:
    """The time axis: vertical lines down to `y` at round times, labelled in milliseconds."""
    millisecond = scale * TICKS_PER_SECOND / 1e3  # in pixels
    span = (WIDTH - LEFT - RIGHT) / millisecond
    power = 10.0 ** math.floor(math.log10(span / 5))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power * 10 >= span)
    for number in range(math.floor(span / step) + 1):
        x = LEFT + number * step * millisecond
        yield f"<path stroke='#ddd' d='M{x:.1f} {TOP - 6}V{y}'/>"
        yield text(x, y + 14, f"{number * step:.6g}", "middle")
    yield text(LEFT - 12, y + 14, "time in ms", "right")
