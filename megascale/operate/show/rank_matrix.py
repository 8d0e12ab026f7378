"""The ranks of a job as a matrix for heat maps: a row a stage and tp index, a column a replica."""

from __future__ import annotations

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


def rank_matrix(topology: Topology) -> RankMatrix:
    """Return the matrix of a topology."""
    shape = (topology.pp, topology.dp, topology.cp, topology.tp)
    ranks = np.arange(topology.world_size).reshape(shape).transpose(0, 3, 1, 2)
    labels = tuple(f"pp {stage}" if tp == 0 else "" for stage in range(topology.pp) for tp in range(topology.tp))
    return RankMatrix(ranks.reshape(topology.pp * topology.tp, topology.dp * topology.cp), labels)
