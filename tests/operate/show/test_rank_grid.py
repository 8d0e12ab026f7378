"""The grid of ranks: every rank once and in order, within the lines and characters that there are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megascale.layout.topology import Topology
from megascale.operate.show.rank_grid import cell_grid

SIZES = st.integers(1, 12)


@given(SIZES, SIZES, st.integers(1, 40), st.integers(8, 200), st.integers(1, 60))
def test_every_rank_has_one_cell_in_a_grid_that_fits(tp: int, pp: int, dp: int, width: int, height: int) -> None:
    topology = Topology(tp=tp, pp=pp, dp=dp)
    grid = cell_grid(topology, width, height)
    assert [rank for row in grid.rows for cell in row.cells for rank in cell] == list(range(topology.world_size))
    assert len(grid.rows) <= max(height, 1)
    for row in grid.rows:
        gaps = (len(row.cells) - 1) // grid.gap if grid.gap else 0
        assert len(row.cells) + gaps <= width
        assert all(len(cell) <= grid.ranks_per_cell for cell in row.cells)


def test_a_small_job_has_a_cell_for_each_rank_and_a_gap_between_tp_groups() -> None:
    grid = cell_grid(Topology(tp=2, pp=2, dp=2), 60, 10)
    assert [row.label for row in grid.rows] == ["pp 0", "pp 1"]
    assert (grid.ranks_per_cell, grid.gap) == (1, 2)


def test_a_job_of_12288_ranks_has_cells_of_whole_tp_groups() -> None:
    grid = cell_grid(Topology(tp=8, pp=8, dp=192), 68, 8)
    assert [row.label for row in grid.rows] == [f"pp {stage}" for stage in range(8)]
    assert grid.ranks_per_cell == 24
    narrow = cell_grid(Topology(tp=8, pp=8, dp=192), 68, 4)
    assert [row.label for row in narrow.rows] == ["pp 0-1", "pp 2-3", "pp 4-5", "pp 6-7"]
