"""The wait graph of a hang as a picture: a panel for each data-parallel replica, its ranks as cells, and arrows from
waiting ranks to the ranks that they wait for.

In a panel a row is a pipeline stage, and a column a rank of the tensor- and context-parallel groups.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from megascale.layout.topology import Topology
from megascale.observe.svg import FILE_START, WIDTH
from megascale.observe.waits import WaitGraph

RankSign = Literal["culprit", "collective", "message", "device", "other", "unknown"]

COLOURS: dict[RankSign, str] = {
    "culprit": "#d55e00", "collective": "#e69f00", "message": "#56b4e9", "device": "#cc79a7", "other": "#009e73",
    "unknown": "#bbbbbb",
}  # fmt: skip
"""Colours by Okabe and Ito, for colour-blind readers."""

MEANINGS: dict[RankSign, str] = {
    "culprit": "culprit", "collective": "waits in a collective", "message": "waits for a message",
    "device": "waits for its device", "other": "waits for no rank", "unknown": "no flight record",
}  # fmt: skip

MARGIN, TOP, GAP = 44, 62, 10
"""Pixels: around the panels, above them, and between them."""

LARGEST_CELL, SMALLEST_LABELLED = 26, 17
"""Pixels of a cell: at most, and at least for its rank to stand in it."""

MOST_ARROWS = 150
"""Most arrows: those nearest to the culprits."""


@dataclass(frozen=True)
class _Grid:
    """The places of ranks. `columns`: panels in a row; `cell`: pixels of a cell."""

    topology: Topology
    columns: int
    cell: float

    @property
    def panel_width(self) -> float:
        return self.topology.tp * self.topology.cp * self.cell

    @property
    def panel_height(self) -> float:
        return self.topology.pp * self.cell

    @property
    def height(self) -> float:
        rows = math.ceil(self.topology.dp / self.columns)
        return TOP + rows * (self.panel_height + GAP) + MARGIN

    def panel(self, dp: int) -> tuple[float, float]:
        """Return the upper left corner of a replica's panel."""
        row, column = divmod(dp, self.columns)
        return MARGIN + column * (self.panel_width + GAP), TOP + row * (self.panel_height + GAP)

    def corner(self, rank: int) -> tuple[float, float]:
        """Return the upper left corner of a rank's cell."""
        coord = self.topology.coord(rank)
        x, y = self.panel(coord.dp)
        return x + (coord.cp * self.topology.tp + coord.tp) * self.cell, y + coord.pp * self.cell


def _grid(topology: Topology) -> _Grid:
    """Choose the panels in a row: as many as give the largest cells in a picture that is no higher than wide."""
    room = WIDTH - 2 * MARGIN
    best = _Grid(topology, 1, 0.0)
    for columns in range(1, topology.dp + 1):
        rows = math.ceil(topology.dp / columns)
        wide = (room - GAP * (columns - 1)) / (columns * topology.tp * topology.cp)
        high = (room - GAP * (rows - 1)) / (rows * topology.pp)
        cell = min(wide, high, LARGEST_CELL)
        if cell > best.cell:
            best = _Grid(topology, columns, cell)
    return best if best.cell > 0 else _Grid(topology, topology.dp, room / (topology.dp * topology.tp * topology.cp))


def rank_signs(graph: WaitGraph, culprits: Sequence[int], world: int) -> list[RankSign]:
    """Return the sign of each rank."""
    signs: list[RankSign] = []
    for rank in range(world):
        if rank in culprits:
            signs.append("culprit")
        elif rank not in graph.records:
            signs.append("unknown")
        elif rank in graph.places:
            signs.append("message" if graph.places[rank].is_message else "collective")
        elif rank in graph.on_device:
            signs.append("device")
        else:
            signs.append("other")
    return signs


def render_waits(
    graph: WaitGraph, culprits: Sequence[int], routes: Mapping[int, int], topology: Topology, title: str
) -> str:
    """Return the picture as an SVG document. `routes`: of `observe.wait_chain.routes_to`; `title`: the verdict."""
    grid = _grid(topology)
    signs = rank_signs(graph, culprits, topology.world_size)
    height = math.ceil(grid.height)
    head = (
        f"{FILE_START.decode()} viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' height='{height}' "
        f"font-family='sans-serif' font-size='11' role='img'>\n<title>{escape(title)}</title>\n"
        f"<rect width='{WIDTH}' height='{height}' fill='white'/>"
    )
    body = [*_legend(signs, title), *_cells(grid, signs), *_names(grid), *_arrows(grid, routes)]
    return "\n".join([head, *body, "</svg>"]) + "\n"


def _legend(signs: Sequence[RankSign], title: str) -> Iterator[str]:
    yield f"<text x='{MARGIN}' y='18' font-size='13' font-weight='bold'>{escape(title[:150])}</text>"
    x = float(MARGIN)
    for sign, colour in COLOURS.items():
        if sign in signs:
            text = f"{MEANINGS[sign]} ({signs.count(sign)})"
            yield f"<rect x='{x:.0f}' y='28' width='11' height='11' fill='{colour}'/>"
            yield f"<text x='{x + 16:.0f}' y='38'>{text}</text>"
            x += 30 + 6.2 * len(text)


def _cells(grid: _Grid, signs: Sequence[RankSign]) -> Iterator[str]:
    """Yield a path for each colour, and the ranks where they have space."""
    size = grid.cell - (1 if grid.cell > 4 else 0)
    paths: defaultdict[RankSign, list[str]] = defaultdict(list)
    for rank, sign in enumerate(signs):
        x, y = grid.corner(rank)
        paths[sign].append(f"M{x:.1f} {y:.1f}h{size:.1f}v{size:.1f}h{-size:.1f}z")
    for sign, shapes in paths.items():
        yield f"<path fill='{COLOURS[sign]}' d='{''.join(shapes)}'/>"
    if grid.cell >= SMALLEST_LABELLED:
        for rank in range(len(signs)):
            x, y = grid.corner(rank)
            middle = size / 2
            yield f"<text x='{x + middle:.1f}' y='{y + middle + 4:.1f}' text-anchor='middle'>{rank}</text>"


def _names(grid: _Grid) -> Iterator[str]:
    """Yield the names of replicas above their panels, and of stages beside the first."""
    if grid.panel_width >= 34 and grid.topology.dp > 1:
        for dp in range(min(grid.columns, grid.topology.dp)):
            x, y = grid.panel(dp)
            yield f"<text x='{x:.1f}' y='{y - 4:.1f}' fill='#555'>dp {dp}</text>"
    if grid.cell >= SMALLEST_LABELLED:
        x, y = grid.panel(0)
        for pp in range(grid.topology.pp):
            row = y + (pp + 0.5) * grid.cell + 3
            yield f"<text x='{x - 6:.1f}' y='{row:.1f}' text-anchor='end' fill='#555'>pp {pp}</text>"


def _arrows(grid: _Grid, routes: Mapping[int, int]) -> Iterator[str]:
    """Yield the arrows of the first routes, each from the middle of a cell to the edge of another."""
    if not routes:
        return
    yield "<defs><marker id='tip' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='6' markerHeight='6' orient='auto'>"
    yield "<path d='M0 0L8 4L0 8z' fill='#222'/></marker></defs>"
    middle = (grid.cell - 1) / 2
    for rank, target in list(routes.items())[:MOST_ARROWS]:
        (x0, y0), (x1, y1) = grid.corner(rank), grid.corner(target)
        length = math.hypot(x1 - x0, y1 - y0) or 1.0
        short = max(0.0, length - middle) / length
        x, y = x0 + middle, y0 + middle
        end_x, end_y = x + (x1 - x0) * short, y + (y1 - y0) * short
        bend_x, bend_y = (x + end_x) / 2 - (end_y - y) * 0.15, (y + end_y) / 2 + (end_x - x) * 0.15
        path = f"M{x:.1f} {y:.1f}Q{bend_x:.1f} {bend_y:.1f} {end_x:.1f} {end_y:.1f}"
        yield f"<path d='{path}' fill='none' stroke='#222' stroke-opacity='0.7' marker-end='url(#tip)'/>"
