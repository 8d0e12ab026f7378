"""POET: weights rotated from both sides (Qiu et al. 2025, arXiv:2506.08001), block-stochastic. Experimental.

    W = R W0 S^T
    R = blocks on the diagonal, in an order of the rows that is drawn by the matrix's name: each C(Q), Q = -Q^T [a, a]
    C(Q) = (I + Q) (I + Q + ... + Q^k), k = `neumann_terms`; exact: (I + Q) (I - Q)^-1, a rotation      S: of columns
    Q = Q - lr scale Adam(dQ)                                              with dR = G (R^-1 W)^T,  dS = G^T W S^-T
    every `merge_every` steps:  W0 = W, Q = 0, Adam begins anew, and the rows and columns have another order

W0 is R^-1 W S^-T and not stored; weight decay scales it. The singular values of W are those of the initial weight: to
rounding with `cayley` = "exact", else drifting with k. The authors' code has 2 Q^4 where k = 3 gives Q^4. A side that
is no multiple of `block` has a smaller last block. The authors initialize rows with a norm of 1.
State: 3 (a - 1) / 2 elements for each row, and for each column, and the number of the merge that they belong to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megascale.core.seeds import seed_of
from megascale.ops.optimizer import Update, UpdateInput
from megascale.optim.adam import adam
from megascale.optim.contrib.counter_random import random_permutation
from megascale.optim.contrib.weight_change import direction_of


def poet(given: UpdateInput) -> Update:
    """Return the direction of a matrix [m, n], and for both sides the generators Q and their moments."""
    weight, grad, every = given.weight, given.grad, given.options["merge_every"]
    assert weight is not None, "the card asks for the weight"
    merges = (given.step - 1) // every
    at = replace(given, step=(given.step - 1) % every + 1)
    is_theirs = given.state["merges"] == merges  # not after a merge
    left = turned("left", at, merges, weight, grad, is_theirs)
    right = turned("right", at, merges, weight.mT, grad.mT, is_theirs)
    change = left.apply(weight)
    change = change + right.apply((weight + change).mT).mT
    state = {**left.state, **right.state, "merges": torch.full_like(given.state["merges"], merges)}
    return direction_of(change, given.lr), state


class Rotation(NamedTuple):
    """A step of a side: `blocks` [k, a, a] of the new rotation times the old's inverse, less the identity; the `order`
    of rows in which they are on the diagonal; and the side's state.
    """

    blocks: Tensor
    order: Tensor
    state: dict[str, Tensor]

    def apply(self, x: Tensor) -> Tensor:
        """Return the change of a matrix [m, n] whose rows turn."""
        turned = (self.blocks @ in_blocks(x, self.order, self.blocks.shape[1])).flatten(0, 1)[: len(x)]
        return torch.empty_like(x).index_copy(0, self.order, turned)


def turned(side: str, given: UpdateInput, merges: int, weight: Tensor, grad: Tensor, is_theirs: Tensor) -> Rotation:
    """Step along the gradient of a side's generators; `weight`, `grad` with the side in rows. `given.step` counts from
    the last merge; `is_theirs`: the state belongs to it.
    """
    o, state = given.options, {name: given.state[f"{side}{name}"] * is_theirs for name in ("", "_avg", "_avg_sq")}
    size = max(2, min(len(weight), o["block"]))
    order = random_permutation(seed_of("poet", side, given.name, merges), len(weight), weight.device)
    gram = in_blocks(grad, order, size) @ in_blocks(weight, order, size).mT
    with torch.enable_grad():
        generators = state[""].requires_grad_()
        rotation = cayley(skew(generators, size), o)
    inverse = torch.linalg.inv_ex(rotation.detach()).inverse
    (slope,) = torch.autograd.grad(rotation, generators, gram @ inverse.mT)
    before = {"exp_avg": state["_avg"], "exp_avg_sq": state["_avg_sq"]}
    step, moments = adam(replace(given, grad=slope, state=before))
    new = generators.detach() - given.lr * o["scale"] * step
    blocks = (cayley(skew(new, size), o) - rotation.detach()) @ inverse
    kept = {side: new, f"{side}_avg": moments["exp_avg"], f"{side}_avg_sq": moments["exp_avg_sq"]}
    return Rotation(blocks, order, kept)


def in_blocks(x: Tensor, order: Tensor, size: int) -> Tensor:
    """Return the rows of x [m, n] in an order, in blocks [k, size, n]; the last one has zeros at the end."""
    padded = torch.nn.functional.pad(x[order], (0, 0, 0, -len(x) % size))
    return padded.view(-1, size, x.shape[1])


def skew(upper: Tensor, size: int) -> Tensor:
    """Return skew-symmetric matrices [k, size, size] of the elements above their diagonals [k, size (size - 1) / 2]."""
    row, column = torch.triu_indices(size, size, 1, device=upper.device)
    square = upper.new_zeros(len(upper), size, size)
    square[:, row, column] = upper
    return square - square.mT


def cayley(q: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Return the Cayley transforms of skew-symmetric matrices [k, a, a], by a solve or by a Neumann series."""
    identity = torch.eye(q.shape[1], dtype=q.dtype, device=q.device)
    if options["cayley"] == "exact":
        return torch.linalg.solve_ex(identity - q, identity + q).result
    series = identity + q
    for _ in range(options["neumann_terms"] - 1):
        series = identity + q @ series
    return (identity + q) @ series
