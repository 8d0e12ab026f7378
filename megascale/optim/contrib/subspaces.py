"""Subspaces of GaLore, of the shorter side of a gradient G [s, l] (option `subspace`):

- `svd`: the first singular vectors P [s, r], every `update_gap` steps (Zhao et al. 2024)
- `online_pca`: P by a step of Adam on |G' - P P^T G'|^2 with G' = G / |G| in every step, with the rate 1 / update_gap,
  begun with the singular vectors (online subspace descent, Liang et al. 2024, arXiv:2408.12857)
- `grass_top`: the r rows with the largest norms, every `update_gap` steps (Grass, Muhamed et al. 2024)
- `grass_sample`: r rows drawn in proportion to their norms, by the parameter's name and the step; unscaled

Bases of singular vectors are complete (`completed`): rounding leaves the vectors of a singular matrix open.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megascale.core.seeds import seed_of
from megascale.ops.optimizer import UpdateInput
from megascale.optim.contrib.counter_random import random_integers

State = dict[str, Tensor]

FLOOR = 1e-3
"""Singular values below this share of the largest count as 0, eigenvalues below its square: rounding in fp32 decides
their vectors to a large part.
"""

BETAS, EPS = (0.9, 0.999), 1e-8  # Adam's, of the subspace's own steps


class Subspace(NamedTuple):
    """`update` returns the subspace's state for a gradient [s, l]; `project` maps [s, l] to [r, l], `back` the reverse,
    with s rows.
    """

    update: Callable[[Tensor, UpdateInput], State]
    project: Callable[[State, Tensor], Tensor]
    back: Callable[[State, Tensor, int], Tensor]


def is_due(given: UpdateInput) -> bool:
    """True in the steps that choose a subspace anew."""
    return given.first or (given.step - 1) % int(given.options["update_gap"]) == 0


def completed(vectors: Tensor, values: Tensor) -> Tensor:
    """Return orthonormal vectors [s, k] in order of their singular values [k], completed to a basis [s, s].

    Of the space of singular values below `FLOOR` times the largest any basis is as right as another, and rounding
    would choose it. The one that stands in its place is of fixed random vectors, by a QR decomposition: a function of
    the space alone. So are signs, which matter to moments that outlive a basis: a vector points along a random one.
    Nothing waits for the device.
    """
    size, count = vectors.shape
    known = torch.nn.functional.pad(values > FLOOR * values.max(), (0, size - count))
    vectors = torch.nn.functional.pad(vectors, (0, size - count)) * known
    numbers = random_integers(0, size * size, vectors.device).view(size, size) >> 10  # 53 bits
    random = numbers.to(vectors.dtype) / 2**52 - 1
    vectors = vectors * (vectors * random).sum(0).sign()
    free = torch.where(known, 0.0, random)
    basis, triangle = torch.linalg.qr(vectors + free - vectors @ (vectors.mT @ free))
    return torch.where(known, vectors, basis * triangle.diagonal().sign())


def singular_vectors(grad: Tensor, given: UpdateInput) -> State:
    """Return the basis: with new singular vectors if it is time."""
    basis = given.state["basis"]
    if not is_due(given):
        return {"basis": basis.clone()}
    tall = given.grad.shape[0] >= given.grad.shape[1]
    left, values, right = torch.linalg.svd(given.grad, full_matrices=False)
    return {"basis": completed(right.mT if tall else left, values)[:, : basis.shape[1]].contiguous()}


def online_pca(grad: Tensor, given: UpdateInput) -> State:
    """Return the basis after a step of descent on the part of the gradient that it does not hold."""
    if given.first:
        moments = {name: given.state[name].clone() for name in ("basis_avg", "basis_avg_sq")}
        return {**singular_vectors(grad, given), **moments}
    basis, unit = given.state["basis"], grad / grad.norm().clamp(min=EPS)
    low = basis.mT @ unit
    slope = 2 * (basis @ (low @ low.mT) + (unit @ low.mT) @ (basis.mT @ basis)) - 4 * unit @ low.mT
    average = given.state["basis_avg"].lerp(slope, 1 - BETAS[0])
    square = given.state["basis_avg_sq"].lerp(slope.square(), 1 - BETAS[1])
    root = (square / (1 - BETAS[1] ** (given.step - 1))).sqrt() + EPS
    moved = basis - average / (1 - BETAS[0] ** (given.step - 1)) / root / given.options["update_gap"]
    return {"basis": moved, "basis_avg": average, "basis_avg_sq": square}


def top_rows(grad: Tensor, given: UpdateInput) -> State:
    """Return the numbers of the rows with the largest norms if it is time, else those of before."""
    rows = given.state["rows"]
    return {"rows": grad.norm(dim=1).topk(len(rows)).indices.to(rows.dtype) if is_due(given) else rows.clone()}


def drawn_rows(grad: Tensor, given: UpdateInput) -> State:
    """Return the numbers of rows drawn in proportion to their norms, equal on all ranks that update the parameter."""
    rows = given.state["rows"]
    if not is_due(given):
        return {"rows": rows.clone()}
    generator = torch.Generator().manual_seed(seed_of("grass", given.name, given.step))
    noise = torch.empty(len(grad), dtype=torch.float64).exponential_(generator=generator)
    # the largest of weight / exponential noise are a draw without replacement
    keys = grad.norm(dim=1).double() / noise.to(grad.device)
    return {"rows": keys.topk(len(rows)).indices.to(rows.dtype)}


def _in_basis(state: State, x: Tensor) -> Tensor:
    return state["basis"].mT @ x


def _from_basis(state: State, x: Tensor, rows: int) -> Tensor:
    return state["basis"] @ x


def _chosen(state: State, x: Tensor) -> Tensor:
    return x[state["rows"].long()]


def _spread(state: State, x: Tensor, rows: int) -> Tensor:
    return x.new_zeros(rows, x.shape[1]).index_copy(0, state["rows"].long(), x)


SUBSPACES = {
    "svd": Subspace(singular_vectors, _in_basis, _from_basis),
    "online_pca": Subspace(online_pca, _in_basis, _from_basis),
    "grass_top": Subspace(top_rows, _chosen, _spread),
    "grass_sample": Subspace(drawn_rows, _chosen, _spread),
}
