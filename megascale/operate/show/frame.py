"""A picture of a run for a terminal: header, curves, the grid of ranks, the verdict and the last incidents.

A frame needs neither colours nor any character beyond ASCII. It fits `width` x `height`; what there is no place for is
counted.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from rich.text import Text

from megascale.core.rank import format_ranks
from megascale.core.units import format_count, format_duration
from megascale.operate.driver.incidents import Incident, describe_recovery
from megascale.operate.show.rank_grid import CellGrid, CellRow, cell_grid
from megascale.operate.show.run_view import RunView, Tone
from megascale.operate.show.signs import BAD_STATES, SIGNS, gravest, letter_of
from megascale.operate.show.sparkline import ASCII_LEVELS, BLOCKS, bars, sparkline

LABEL = 12
"""Characters of a curve's label, and of the label of a row of ranks."""

VALUE = 14
"""Characters of a curve's last value."""

MOST_VERDICT_LINES = 6
MOST_NOTE_LINES = 2
MOST_INCIDENTS = 4
MIN_GRID_ROWS = 2

CURVES: dict[str, tuple[str, Callable[[float], str]]] = {
    "loss": ("loss", "{:.4f}".format),
    "grad_norm": ("grad norm", "{:.3g}".format),
    "tokens_per_s": ("throughput", lambda speed: f"{format_count(speed)} tok/s" if math.isfinite(speed) else ""),
    "mfu_full": ("MFU", lambda mfu: f"{mfu:.1%}" if math.isfinite(mfu) else "n/a"),
}
"""Label and format of a curve's values, by metric."""

Floats = Sequence[float] | np.ndarray

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
    view: RunView, slowness: Floats, findings: Sequence[str] | None, size: FrameSize, note: str = ""
) -> list[Text]:
    """Return the lines of a frame. `slowness`: by rank, excess over its peers' compute time, or empty; `findings`: the
    gravest first, None without analyses; `note`: about the analyses.
    """
    head = [*_header(view, size.width), Text()]
    letters = letters_of(view, slowness)
    verdict = [*_verdict(view, findings, letters, size.width), *_note(note, size.width)]
    incidents = list(_incidents(view, size.width))
    rest = size.height - len(head) - len(CURVES) - 1 - len(verdict) - 2  # heading and legend of the ranks
    grid_rows = max(MIN_GRID_ROWS, rest - len(incidents))
    ranks = [*_ranks(view, letters, grid_rows, size.width), *verdict, *incidents]
    spare = size.height - len(head) - len(CURVES) - 1 - len(ranks)
    curves = _curves(view, size, max(0, spare) if size.fill else 0)
    return [*head, *curves, Text(), *ranks][: max(size.height, 1)]


def verdict_of(view: RunView, findings: Sequence[str] | None, letters: Sequence[str] = ()) -> str:
    """Return the verdict about a run in a line: why it stands still, what it recovers from, which ranks are in a bad
    state, what was found, or what is known to be well. `findings`: None without analyses; `letters`: of the ranks.
    """
    if view.standstill:
        return view.standstill
    if view.status is None and view.history.open:
        incident = view.history.open[-1]
        return f"recovers from incident {incident.id}: {incident.what}; {incident.action.reason}"
    bad = {letter: [rank for rank, found in enumerate(letters) if found == letter] for letter in BAD_STATES}
    if any(bad.values()):
        return "; ".join(f"{SIGNS[letter].meaning}: {format_ranks(ranks, 8)}" for letter, ranks in bad.items() if ranks)
    if findings:
        more = f" (and {len(findings) - 1} more: megascale report)" if len(findings) > 1 else ""
        return findings[0] + more
    if not view.is_live or view.has_ended:
        return "not analysed" if findings is None else "nothing is known to slow it down"
    silent = [rank for rank, state in enumerate(view.states.ranks) if not state.phase]
    if silent:
        return f"{format_ranks(silent, 8)} of {view.world} not begun"
    return f"all {view.world} ranks make progress" if view.world > 1 else "the rank makes progress"


def is_ill(view: RunView, findings: Sequence[str] | None, letters: Sequence[str] = ()) -> bool:
    """Return True if `verdict_of` tells of something that is not as it should be."""
    recovers = view.status is None and bool(view.history.open)
    return bool(view.tone == "bad" or recovers or findings or set(BAD_STATES) & set(letters))


def _header(view: RunView, width: int) -> Iterator[Text]:
    left = Text(f"{view.name}  ", style="bold") + Text(view.state, style=_STYLES[view.tone])
    if view.attempt:
        left.append(f", attempt {view.attempt}")
    share = f" of {view.steps:,} ({view.step / view.steps:.0%})" if view.steps else ""
    left_s = (view.steps - view.step) * view.step_time_s
    left_text = f", {format_duration(left_s)} left" if view.is_live and math.isfinite(left_s) and left_s > 0 else ""
    yield _sides(left, f"step {view.step:,}{share}{left_text}", width)
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
    for metric, (name, form) in CURVES.items():
        known, rows = finite[metric], 1 + spare // len(high) if metric in high else 1
        labels = [(name, form(view.curves.last[metric]) if view.curves.last else "-"), *[("", "")] * (rows - 1)]
        if rows > 2:
            labels[1], labels[-1] = ("  most", form(known.max())), ("  least", form(known.min()))
        drawn = bars(known, width, rows, levels) if rows > 1 else [sparkline(known, width, levels)]
        for number, ((label, value), line) in enumerate(zip(labels, drawn, strict=True)):
            text = Text(f"{label:<{LABEL}}") + Text(f"{value:<{VALUE}}", style="" if number else "bold")
            yield text.append(line, style="cyan")


def letters_of(view: RunView, slowness: Floats) -> list[str]:
    """Return the letters of all ranks. `slowness`: by rank, excess over its peers' compute time, or empty."""
    known = {
        rank: letter_of(state, _at(slowness, rank), view.step_limit_s) for rank, state in enumerate(view.states.ranks)
    }
    return [known.get(rank, "?") if not view.states.stale else "?" for rank in range(view.world)]


def _at(values: Floats, rank: int) -> float:
    return values[rank] if rank < len(values) else math.nan


def _ranks(view: RunView, letters: Sequence[str], rows: int, width: int) -> Iterator[Text]:
    grid = cell_grid(view.topology, width - LABEL, rows)
    per_cell = (
        "a cell is a rank" if grid.ranks_per_cell == 1 else f"a cell is {grid.ranks_per_cell} ranks, the worst shown"
    )
    age = f", {view.states.age_s:.0f} s ago" if view.is_live and view.states.age_s >= 2 else ""
    yield _sides(Text("ranks", style="bold"), f"{per_cell}{age}", width)
    for row in grid.rows:
        yield _row(row, grid, letters)
    yield _legend(letters, width)


def _row(row: CellRow, grid: CellGrid, letters: Sequence[str]) -> Text:
    text = Text(f"{row.label:<{LABEL}}")
    for place, cell in enumerate(row.cells):
        if grid.gap and place and place % grid.gap == 0:
            text.append(" ")
        letter = gravest(letters[cell.start : cell.stop])
        text.append(letter, style=f"black on {SIGNS[letter].colour}")
    return text


def _legend(letters: Sequence[str], width: int) -> Text:
    counts = Counter(letters)
    parts = [f"{letter} {sign.meaning} {counts[letter]}" for letter, sign in SIGNS.items() if counts[letter]]
    return _cut("  ".join(parts), width)


def _verdict(view: RunView, findings: Sequence[str] | None, letters: Sequence[str], width: int) -> Iterator[Text]:
    text = verdict_of(view, findings, letters)
    ill = is_ill(view, findings, letters)
    lines = textwrap.wrap(text, width - LABEL, max_lines=MOST_VERDICT_LINES, placeholder=" ...")
    for number, line in enumerate(lines):
        label = Text(f"{'' if number else 'verdict':<{LABEL}}", style="bold")
        yield Text.assemble(label, Text(line, style="red" if ill else ""))


def _note(text: str, width: int) -> Iterator[Text]:
    """Yield the lines of a note about the analyses."""
    lines = textwrap.wrap(text, width - LABEL, max_lines=MOST_NOTE_LINES, placeholder=" ...")
    for number, line in enumerate(lines):
        yield Text.assemble(Text(f"{'' if number else 'analyses':<{LABEL}}", style="bold"), line)


def _incidents(view: RunView, width: int) -> Iterator[Text]:
    incidents = view.incidents
    if not incidents:
        return
    shown = incidents[-MOST_INCIDENTS:]
    more = f" (the last {len(shown)} of {len(incidents)})" if len(incidents) > len(shown) else ""
    yield Text(f"incidents{more}", style="bold")
    for incident in shown:
        yield _cut(incident_line(incident), width)


def incident_line(incident: Incident) -> str:
    """Return the line of an incident: time, step, what happened, what was done, how long it took."""
    clock = time.strftime("%H:%M:%S", time.localtime(incident.since))
    recovered = f"; {describe_recovery(incident).partition(': ')[2]}" if incident.recovered is not None else ""
    return f"{clock} step {incident.step} {incident.class_}: {incident.what}; {incident.action.reason}{recovered}"


def _sides(left: Text, right: str, width: int) -> Text:
    """Return `left`, and `right` at the right edge."""
    space = max(2, width - left.cell_len - len(right))
    text = left + Text(" " * space + right)
    text.truncate(width)
    return text


def _cut(text: str, width: int) -> Text:
    return Text(text if len(text) <= width else f"{text[: width - 3]}...")
