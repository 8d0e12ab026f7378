"""An MLP that runs on one tile of a micro-batch's tokens at a time (`TiledMLP`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from megascale.layout.parts.elementwise import ActivationSpec
from megascale.layout.parts.linear import ColumnParallel, RowParallel, branch_gradient
from megascale.layout.parts.microbatch_sizes import CommOp, MicroBatchSizes, UnitBytes, walk
from megascale.layout.parts.part import LinearSpec, Part, Surroundings
from megascale.layout.parts.times import OperationTimes, PassTimes, Seconds
from megascale.layout.pieces import split_rows


@dataclass(frozen=True)
class TiledMLP(Part):
    """An MLP in `tiles` of tokens, each with the collectives of its linear layers. `after_norm`: a norm is directly
    before it. `shares_input`: attention's layers have the same input, which is saved once; `shares_gradient`: its last
    layer has the same output gradient. `stored`: tiles that save what their backward needs, which recomputes the
    others.
    """

    columns: ColumnParallel
    activation: ActivationSpec
    rows: RowParallel
    tiles: int
    after_norm: bool
    shares_input: bool
    shares_gradient: bool
    stored: int = 0

    enters: ClassVar[bool] = True

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        return self.columns.layers + self.rows.layers

    @property
    def results(self) -> tuple[LinearSpec, ...]:
        return self.rows.layers

    @property
    def adds_gradient(self) -> bool:
        return self.shares_input

    def recomputed_weights(self, full: bool, skipped: bool) -> int:
        """Count the elements whose GEMMs backward repeats: of the first layers by the tiles, and of the whole MLP by a
        full recomputation that does not skip it.
        """
        first = sum(layer.weight_numel for layer in self.columns.layers)
        return first * (self.tiles - self.stored) // self.tiles + super().recomputed_weights(full, skipped)

    def traffic(self, sizes: MicroBatchSizes, backward: bool = False) -> Iterator[CommOp]:
        """List the collectives of the tiles; the backward of a recomputed tile repeats the first layers."""
        for number, tile in enumerate(split_rows(sizes.rows // sizes.parts, self.tiles)):
            of_tile = replace(sizes, rows=(tile.stop - tile.start) * sizes.parts)
            yield from self.columns.traffic(of_tile)
            yield from self.rows.traffic(of_tile, backward)
            yield from self.columns.traffic(of_tile, backward) if backward and number >= self.stored else ()

    def recomputed_traffic(self, sizes: MicroBatchSizes, skipped: bool) -> list[CommOp]:
        return [] if skipped else super().recomputed_traffic(sizes, skipped)

    def memory(self, sizes: MicroBatchSizes, at: Surroundings) -> UnitBytes:
        """Account for the tiles: the input is saved, unless a norm recomputes it, and the result and the input's
        gradient are whole. The backward of a tile begins with its recomputation. Stored tiles save the rest as well.
        What tiles leave of the saved input and of the result's gradient are rows of the whole tensors.
        """
        tile, recomputed = sizes.of_tile(self.tiles), self.after_norm and sizes.recompute.norm
        activation = self.activation.memory(tile, at)
        columns, rows = (
            self.columns.layer_bytes(tile, after_norm=True),
            self.rows.layer_bytes(tile, [self.activation], 0),
        )
        copies = recomputed or columns.saved < tile.stream
        columns = columns._replace(left=columns.left - (0 if copies else tile.stream))
        of_tile = walk([columns, activation, rows], 0, sizes.split)
        saved, forward, others = of_tile.saved, of_tile.forward, (self.tiles - 1) * of_tile.left
        stored = self.stored * (saved - tile.stream)
        again = saved + max(forward, of_tile.backward) + (tile.stream if recomputed else 0) + others
        kept = 0 if recomputed or self.shares_input else sizes.stream
        result = 0 if self.shares_gradient else branch_gradient(sizes, at)
        gradient = (sizes.stream if self.after_norm else 0) - result
        left, wgrad = others + of_tile.left + (0 if copies else kept) + result, of_tile.wgrad
        return UnitBytes(
            kept + stored, sizes.stream + saved + forward, sizes.stream + again, gradient, left=left, wgrad=wgrad
        )

    def seconds(self, times: OperationTimes, fp8: bool) -> PassTimes:
        """Time the tiles. The backward of a tile repeats its forward, or where a stack stops early all of it but the
        last GEMM.
        """
        tile = times.in_tiles(self.tiles)
        first, last = self.columns.seconds(tile, fp8) + self.activation.seconds(tile, fp8), self.rows.seconds(tile, fp8)
        again = first.forward + (Seconds() if times.stops_early else last.forward)
        repeated = Seconds(recompute=again.total - again.tp, tp=again.tp)
        return (first + last) * self.tiles + PassTimes(Seconds(), repeated) * (self.tiles - self.stored)
