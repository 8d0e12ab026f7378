"""A picture of a run for a terminal: header, curves, the grid of ranks, the verdict and the last incidents.

A frame needs neither colours nor any character beyond ASCII. It fits `width` x `height`; what there is no place for is
counted.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from rich.text import Text

from megascale.core.units import format_duration
from megascale.operate.driver.incidents import describe_recovery
from megascale.operate.show.curves import CURVES
from megascale.operate.show.rank_grid import cell_grid
from megascale.operate.show.run_view import RunView, Tone
from megascale.operate.show.signs import SIGNS, gravest
from megascale.operate.show.sparkline import ASCII_LEVELS, BLOCKS, bars

LABEL = 12  # characters of a curve's label, and of the label of a row of ranks
VALUE = 14  # characters of a curve's last value

MOST_VERDICT_LINES = 6
MOST_NOTE_LINES = 2
MOST_INCIDENTS = 4
MIN_GRID_ROWS = 2

_STYLES: dict[Tone, str] = {"good": "bold green", "quiet": "bold", "warning": "bold yellow", "bad": "bold red"}


@dataclass(frozen=True)
class FrameSize:
    """Characters and lines of a frame. `blocks`: draw curves with block characters, beyond ASCII. `fill`: the lines for
    which nothing else has a use make the curves higher.
    """

    width: int = 80
    height: int = 24
    blocks: bool = True
    fill: bool = False


def frame(
    view: RunView,
    slowness: Sequence[float] | np.ndarray,
    findings: Sequence[str] | None,
    size: FrameSize,
    note: str = "",
) -> list[Text]:
    """Return the lines of a frame. `slowness`: by rank, excess over its peers' compute time, or empty; `findings`: the
    gravest first, None without analyses; `note`: about the analyses.
    """
    head = [*_header(view, size.width), Text()]
    letters = view.letters(slowness)
    style = "red" if view.is_ill(findings, letters) else ""
    verdict = [
        *_labelled("verdict", view.verdict(findings, letters), MOST_VERDICT_LINES, size.width, style),
        *_labelled("analyses", note, MOST_NOTE_LINES, size.width),
    ]
    incidents = list(_incidents(view, size.width))
    rest = size.height - len(head) - len(CURVES) - 1 - len(verdict) - 2  # heading and legend of the ranks
    grid_rows = max(MIN_GRID_ROWS, rest - len(incidents))
    ranks = [*_ranks(view, letters, grid_rows, size.width), *verdict, *incidents]
    spare = size.height - len(head) - len(CURVES) - 1 - len(ranks)
    curves = _curves(view, size, max(0, spare) if size.fill else 0)
    return [*head, *curves, Text(), *ranks][: max(size.height, 1)]


def _header(view: RunView, width: int) -> Iterator[Text]:
    left = Text(f"{view.name}  ", style="bold") + Text(view.state, style=_STYLES[view.tone])
    if view.attempt:
        left.append(f", attempt {view.attempt}")
    share = f" ({view.step / view.steps:.0%})" if view.steps else ""
    known = view.is_live and math.isfinite(view.left_s) and view.left_s > 0
    left_text = f", {format_duration(view.left_s)} left" if known else ""
    yield _sides(left, f"step {view.progress}{share}{left_text}", width)
    if view.model:
        yield _cut(view.model, width)
    yield _cut(view.layout, width)


def _curves(view: RunView, size: FrameSize, spare: int) -> Iterator[Text]:
    """Yield the lines of the curves: of each its last value at the top, and if there is room its range below. `spare`:
    lines more than one for each, which those curves share that are not flat.
    """
    levels, width = BLOCKS if size.blocks else ASCII_LEVELS, size.width - LABEL - VALUE
    finite = {metric: values[np.isfinite(values)] for metric, values in view.curves.values.items()}
    high = [metric for metric in CURVES if len(finite[metric]) and np.ptp(finite[metric]) > 0]
    for metric, kind in CURVES.items():
        known, rows = finite[metric], 1 + spare // len(high) if metric in high else 1
        last = kind.text(view.curves.last[metric]) if view.curves.last else "-"
        labels = [(kind.label, last), *[("", "")] * (rows - 1)]
        if rows > 2:
            labels[1], labels[-1] = ("  most", kind.text(known.max())), ("  least", kind.text(known.min()))
        drawn = bars(known, width if rows > 1 else min(width, len(known)), rows, levels)
        for number, ((label, value), line) in enumerate(zip(labels, drawn, strict=True)):
            text = Text(f"{label:<{LABEL}}") + Text(f"{value:<{VALUE}}", style="" if number else "bold")
            yield text.append(line, style="cyan")


def _ranks(view: RunView, letters: Sequence[str], rows: int, width: int) -> Iterator[Text]:
    grid = cell_grid(view.topology, width - LABEL, rows)
    count = grid.ranks_per_cell
    per_cell = "a cell is a rank" if count == 1 else f"a cell is {count} ranks, the worst shown"
    age = f", {view.states.age_s:.0f} s ago" if view.is_live and view.states.age_s >= 2 else ""
    yield _sides(Text("ranks", style="bold"), f"{per_cell}{age}", width)
    for row in grid.rows:
        text = Text(f"{row.label:<{LABEL}}")
        for place, cell in enumerate(row.cells):
            if grid.gap and place and place % grid.gap == 0:
                text.append(" ")
            letter = gravest(letters[cell.start : cell.stop])
            text.append(letter, style=f"black on {SIGNS[letter].colour}")
        yield text
    counts = Counter(letters)
    parts = (f"{letter} {sign.meaning} {counts[letter]}" for letter, sign in SIGNS.items() if counts[letter])
    yield _cut("  ".join(parts), width)


def _labelled(label: str, words: str, most: int, width: int, style: str = "") -> Iterator[Text]:
    """Yield a label and words beside it, over at most `most` lines."""
    for number, line in enumerate(textwrap.wrap(words, width - LABEL, max_lines=most, placeholder=" ...")):
        yield Text.assemble(Text(f"{'' if number else label:<{LABEL}}", style="bold"), Text(line, style=style))


def _incidents(view: RunView, width: int) -> Iterator[Text]:
    """Yield the last incidents: time, step, what happened, what was done, how long it took."""
    shown = view.incidents[-MOST_INCIDENTS:]
    more = f" (the last {len(shown)} of {len(view.incidents)})" if len(view.incidents) > len(shown) else ""
    if shown:
        yield Text(f"incidents{more}", style="bold")
    for incident in shown:
        clock = time.strftime("%H:%M:%S", time.localtime(incident.since))
        recovered = f"; {describe_recovery(incident).partition(': ')[2]}" if incident.recovered is not None else ""
        what = f"{incident.class_}: {incident.what}; {incident.action.reason}{recovered}"
        yield _cut(f"{clock} step {incident.step} {what}", width)


def _sides(left: Text, right: str, width: int) -> Text:
    """Return `left`, and `right` at the right edge."""
    space = max(2, width - left.cell_len - len(right))
    text = left + Text(" " * space + right)
    text.truncate(width)
    return text


def _cut(text: str, width: int) -> Text:
    return Text(text if len(text) <= width else f"{text[: width - 3]}...")
