"""Tiles of tokens: a block's MLP runs on one tile of a micro-batch at a time (TiledMLP of ALST, Bekman et al. 2025;
MsT, Luo et al. 2024).

    forward   Y[rows] = f(X[rows])                            saves X alone
    backward  f(X[rows]) again, then dX[rows] and the weights' gradients of the tile

At most one tile's intermediates exist at a time, but for tiles that save them for `train.memory` to move. With sequence
parallelism a tile is the same rows of every rank's shard, and has the collectives of f. Gradients of weights are sums
over tiles, in the main gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megascale.layout.pieces import split_rows
from megascale.parallel.recompute import Recomputation, backward_of_recomputed, run_backward
from megascale.parallel.segments import InputGradient, graph_input

TokenFunction = Callable[[Tensor, bool], Tensor]
"""A function of x [rows, b, h], token by token, to the same shape. False as its second argument: only the tensors saved
for backward are wanted, and the result may be a placeholder.
"""


def run_in_tiles(
    function: TokenFunction, x: Tensor, tiles: int, recompute_input: Recomputation | None = None,
    compute_output: bool = True, saving: int = 0,
) -> Tensor:  # fmt: skip
    """Compute function(x, True) for x [s, b, h] in at most `tiles` tiles of rows, which backward recomputes.

    `recompute_input` recomputes rows of x from rows of a saved tensor; without it x is saved. Without `compute_output`
    nothing is computed: the result is a zero placeholder that stays connected to autograd. The first `saving` tiles
    save what their backward needs, and are not recomputed.
    """
    saving = saving if torch.is_grad_enabled() else 0
    return _Tiled.apply(x, function, tiles, recompute_input, compute_output, saving)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, function: TokenFunction, tiles: int, recompute_input: Recomputation | None,
        compute_output: bool, saving: int,
    ) -> Tensor:  # fmt: skip
        ctx.function, ctx.rows = function, split_rows(x.shape[0], tiles)
        ctx.saved_tiles = deque[tuple[GradientEdge, InputGradient]]()
        ctx.restore = recompute_input and recompute_input.function
        ctx.save_for_backward(x if recompute_input is None else recompute_input.x)
        if not compute_output:
            return x.new_zeros(()).expand(x.shape)
        out = torch.empty_like(x)
        for at, rows in enumerate(ctx.rows):
            if at < saving:
                with torch.enable_grad():
                    tile, gradient = graph_input(x[rows])
                    tile = function(tile, True)
                ctx.saved_tiles.append((get_gradient_edge(tile), gradient))
                out[rows] = tile.detach()
            else:
                out[rows] = function(x[rows], True)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (saved,) = ctx.saved_tensors
        grad_x, function, restore = torch.empty_like(saved), ctx.function, ctx.restore or (lambda tile: tile)
        for rows in ctx.rows:
            if ctx.saved_tiles:
                edge, gradient = ctx.saved_tiles.popleft()
                run_backward([edge], [grads[0][rows]])
                grad_x[rows] = gradient.grad
            else:
                grad_x[rows] = backward_of_recomputed(
                    lambda tile: function(tile, False), restore(saved[rows]), [grads[0][rows]]
                )
        return grad_x, None, None, None, None, None
