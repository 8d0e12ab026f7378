"""The ranks of a job as grids: a matrix for heat maps, and rows of cells that fit a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megascale.layout.topology import Topology


@dataclass(frozen=True)
class RankMatrix:
    """`ranks` [pp x tp, dp x cp]: the rank in each cell. `labels`: of the rows, "" but for the first of a stage."""

    ranks: np.ndarray
    labels: tuple[str, ...]

    def of(self, values: np.ndarray) -> np.ndarray:
        """Return the values of the ranks, NaN for a rank beyond them, in the shape of the matrix."""
        padded = np.full(self.ranks.size, np.nan)
        padded[: min(len(values), len(padded))] = values[: len(padded)]
        return padded[self.ranks]

    def names(self, nodes: Sequence[str]) -> np.ndarray:
        """Return the names of the ranks in the shape of the matrix: 'rank 3 on n0'. `nodes`: by rank, "" if unknown."""
        known = dict(enumerate(nodes))
        names = [f"rank {rank}" + (f" on {known[rank]}" if known.get(rank) else "") for rank in range(self.ranks.size)]
        return np.array(names)[self.ranks]


def rank_matrix(topology: Topology) -> RankMatrix:
    """Return the matrix of a topology."""
    shape = (topology.pp, topology.dp, topology.cp, topology.tp)
    ranks = np.arange(topology.world_size).reshape(shape).transpose(0, 3, 1, 2)
    labels = tuple(f"pp {stage}" if tp == 0 else "" for stage in range(topology.pp) for tp in range(topology.tp))
    return RankMatrix(ranks.reshape(topology.pp * topology.tp, topology.dp * topology.cp), labels)


@dataclass(frozen=True)
class CellRow:
    """A row of cells. `stages`: its first and last pipeline stage; `cells`: the ranks of each; `starts`: True for the
    first row of its stages.
    """

    stages: tuple[int, int]
    cells: tuple[range, ...]
    starts: bool

    @property
    def label(self) -> str:
        """The label of the first row of stages: 'pp 3' or 'pp 0-3'."""
        first, last = self.stages
        return "" if not self.starts else f"pp {first}" if first == last else f"pp {first}-{last}"


@dataclass(frozen=True)
class CellGrid:
    """All ranks. `ranks_per_cell`: of a cell of ordinary size; the last cell of a stage may have fewer. `gap`: cells
    after which a space follows, a tp group; 0: no spaces.
    """

    rows: tuple[CellRow, ...]
    ranks_per_cell: int
    gap: int = 0


def cell_grid(topology: Topology, width: int, height: int) -> CellGrid:
    """Lay out all ranks in at most `height` rows of `width` characters. Ranks of a stage are contiguous, tp fastest; a
    cell of several ranks holds whole tp groups where it can.
    """
    height = max(1, height)
    stages_per_row = -(-topology.pp // height)
    bands = -(-topology.pp // stages_per_row)
    band_ranks = topology.world_size // topology.pp * stages_per_row
    most_lines = height // bands
    spaced = topology.tp * ((width + 1) // (topology.tp + 1))
    if topology.tp > 1 and spaced and band_ranks <= most_lines * spaced:
        return CellGrid(tuple(_rows(topology, stages_per_row, 1, spaced)), 1, topology.tp)
    per_cell = -(-band_ranks // (most_lines * width))
    if per_cell > 1:
        per_cell = -(-per_cell // topology.tp) * topology.tp
    return CellGrid(tuple(_rows(topology, stages_per_row, per_cell, width)), per_cell)


def _rows(topology: Topology, stages_per_row: int, per_cell: int, width: int) -> Iterator[CellRow]:
    stage_ranks = topology.world_size // topology.pp
    for first in range(0, topology.pp, stages_per_row):
        last = min(topology.pp, first + stages_per_row) - 1
        ranks = range(first * stage_ranks, (last + 1) * stage_ranks)
        cells = [ranks[start : start + per_cell] for start in range(0, len(ranks), per_cell)]
        lines = -(-len(cells) // width)
        each = -(-len(cells) // lines)  # lines of equal length
        if per_cell == 1:
            each = min(width, -(-each // topology.tp) * topology.tp)
        for start in range(0, len(cells), each):
            yield CellRow((first, last), tuple(cells[start : start + each]), start == 0)
