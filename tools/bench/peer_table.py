"""Tables of the CPU comparison: medians over rounds, and megascale's ratio to every peer."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from peer_run import Failure, Measurement, Result
from peer_systems import OURS

REGION, EXPERTS_REGION, SHARDED_REGION = "peers", "peers of experts", "peers of sharded weights"
"""Markers of the tables on a page: of dense models, of mixtures of experts, and of weights sharded by zero 3."""

Ratios = tuple[float, float, float]
"""Ratios megascale / peer: tokens/s, CPU seconds per step, memory."""


@dataclass(frozen=True)
class Row:
    """Result of a system in a layout: medians over rounds, and the slowest and fastest round. `ratios`: None for
    megascale itself, and if megascale failed.
    """

    system: str
    tokens_per_s: float
    slowest: float
    fastest: float
    cpu_s: float
    rss_mib: float
    ratios: Ratios | None = None


@dataclass(frozen=True)
class Failed:
    """A system that failed in a layout, and the reason."""

    system: str
    why: str


Rows = list[Row | Failed]


def rows(results: Mapping[str, Sequence[Result]]) -> Rows:
    """Build a row per system of a layout."""
    medians = {name: _row(name, runs) for name, runs in results.items()}
    ours = medians.get(OURS)
    return [row if isinstance(row, Failed) else _with_ratios(row, ours) for row in medians.values()]


def _row(system: str, results: Sequence[Result]) -> Row | Failed:
    failures = [result for result in results if isinstance(result, Failure)]
    if failures:
        return Failed(system, failures[0].why)
    runs = [result for result in results if isinstance(result, Measurement)]
    speeds = [run.tokens_per_s for run in runs]
    return Row(
        system,
        statistics.median(speeds),
        min(speeds),
        max(speeds),
        statistics.median(run.cpu_s for run in runs),
        statistics.median(run.rss_mib for run in runs),
    )


def _with_ratios(row: Row, ours: Row | Failed | None) -> Row:
    if not isinstance(ours, Row) or row.system == OURS:
        return row
    ratios = (ours.tokens_per_s / row.tokens_per_s, ours.cpu_s / row.cpu_s, ours.rss_mib / row.rss_mib)
    return Row(row.system, row.tokens_per_s, row.slowest, row.fastest, row.cpu_s, row.rss_mib, ratios)


def fastest_peer(rows: Rows) -> Row | None:
    """Return the peer with the most tokens/s; None if no peer ran."""
    peers = [row for row in rows if isinstance(row, Row) and row.system != OURS]
    return max(peers, key=lambda row: row.tokens_per_s, default=None)


HEADER = ("system", "tokens/s", "slowest..fastest", "CPU s/step", "max RSS MiB", "tokens/s x", "CPU x", "RSS x")


def text(layout: str, rows: Rows) -> str:
    """Format a layout's table as text for a terminal."""
    lines = [HEADER, *(_cells(row) for row in rows if isinstance(row, Row))]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    table = [
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    ]
    failed = [f"{row.system.ljust(widths[0])}  failed: {row.why}" for row in rows if isinstance(row, Failed)]
    return "\n".join([f"layout {layout}: {verdict(rows)}", *(f"  {line}".rstrip() for line in [*table, *failed])])


def markdown(tables: Mapping[str, Rows], caption: str) -> str:
    """Format all layouts as one Markdown table, with the fastest peer per layout in bold."""
    lines = [caption, "", pipes(("layout", *HEADER)), pipes(("---", "---", *["---:"] * (len(HEADER) - 1)))]
    for layout, rows in tables.items():
        best = fastest_peer(rows)
        for row in rows:
            if isinstance(row, Failed):
                blank = [""] * (len(HEADER) - 2)
                lines.append(pipes((layout, row.system, f"failed: {row.why}".replace("|", "\\|"), *blank)))
            else:
                cells = _cells(row)
                name = f"**{cells[0]}**" if row is best else cells[0]
                lines.append(pipes((layout, name, *cells[1:])))
    return "\n".join(lines)


def verdict(rows: Rows) -> str:
    """Name the fastest peer and megascale's ratio to the peer."""
    best = fastest_peer(rows)
    if best is None:
        return "no peer ran"
    against = f"; megascale has {best.ratios[0]:.3f} x the tokens/s" if best.ratios else ""
    return f"the fastest peer is {best.system}{against}"


def _cells(row: Row) -> tuple[str, ...]:
    ratios = ["", "", ""] if row.ratios is None else [f"{ratio:.3f}" for ratio in row.ratios]
    spread = f"{row.slowest:,.0f}..{row.fastest:,.0f}"
    return (row.system, f"{row.tokens_per_s:,.0f}", spread, f"{row.cpu_s:.3f}", f"{row.rss_mib:,.0f}", *ratios)


def pipes(cells: Sequence[str]) -> str:
    """Format a line of a Markdown table."""
    return f"| {' | '.join(cells)} |"
