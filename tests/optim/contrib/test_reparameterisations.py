"""GradNormLoRP and POET against autograd's gradients of their parameters, and what they keep."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.core.seeds import seed_of
from megascale.ops.optimizer import UpdateInput
from megascale.optim.contrib.counter_random import random_permutation
from megascale.optim.contrib.grad_norm_lorp import grad_norm_lorp
from megascale.optim.contrib.poet import poet
from tests.optim.test_update_rules import SHAPES, close, gradient, walk

EPS = 1e-6


@pytest.mark.parametrize("lr", [0.01, 3.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_grad_norm_lorp_by_autograd(shape: tuple[int, int], lr: float) -> None:
    """With g and V as parameters; the large rate turns the sign of some elements of g."""
    left, weight = shape[0] < shape[1], gradient(shape, 0)
    v, g = (torch.nn.Parameter(x.clone()) for x in (weight, weight.norm(dim=1, keepdim=True)))
    adam = torch.optim.Adam([g], lr=lr, eps=EPS)
    p = m = s = torch.zeros(())
    for step in range(1, 7):
        v.grad = g.grad = None
        (g * v / v.norm(dim=1, keepdim=True)).backward(gradient(shape, step))
        assert v.grad is not None
        if step in (1, 4):
            svd = torch.linalg.svd(v.grad, full_matrices=False)
            p = svd.U[:, :5] if left else svd.Vh[:5].T
            theirs = walk("grad_norm_lorp", shape, step, lr=lr, rank=5, update_gap=3, scale=0.5)[1]["basis"]
            p = p * (p * theirs).sum(0).sign()  # signs are open
        low = p.T @ v.grad if left else v.grad @ p
        m, s = 0.9 * m + 0.1 * low, 0.999 * s + 0.001 * low * low
        n = (1 - 0.999**step) ** 0.5 / (1 - 0.9**step) * m / (s.sqrt() + EPS)
        adam.step()
        v.data -= lr * 0.5 * (p @ n if left else n @ p.T)
    expected = (g * v / v.norm(dim=1, keepdim=True)).detach()
    ours, state = walk("grad_norm_lorp", shape, lr=lr, rank=5, update_gap=3, scale=0.5)
    assert torch.allclose(ours, expected, rtol=1e-8, atol=1e-9)
    length = v.detach().norm(dim=1) * torch.where(g.detach().view(-1) < 0, -1.0, 1.0)
    assert torch.allclose(state["length"], length, rtol=1e-8)
    assert bool((length < 0).any()) == (lr > 1)


def test_the_length_of_v_is_no_direction() -> None:
    """With a tenth of |V| the first step turns the rows ten times as far, and scales dV by ten, which Adam removes."""
    weight, (_, state) = gradient((8, 12), 0), walk("grad_norm_lorp", (8, 12), 0, rank=8)
    options = {"rank": 8, "update_gap": 200, "scale": 1.0, "subspace": "svd", "residual": "none", "natural": False}
    options |= {"history": 20, "beta1": 0.9, "beta2": 0.999, "eps": 0.0}

    def turned(length: Tensor) -> float:
        given = UpdateInput(gradient((8, 12), 1), {**state, "length": length}, 200, options, weight, lr=1e-6)
        basis = torch.linalg.svd(gradient((8, 12), 1), full_matrices=False).U
        direction, _ = grad_norm_lorp(UpdateInput(**{**vars(given), "state": {**given.state, "basis": basis}}))
        unit = weight / weight.norm(dim=1, keepdim=True)
        return float((direction - (direction * unit).sum(1, keepdim=True) * unit).norm())

    size = weight.norm(dim=1)
    assert turned(size / 10) == pytest.approx(10 * turned(size), rel=1e-3)


def rotation(theta: Tensor, order: Tensor, exact: bool) -> Tensor:
    """Return the whole matrix [m, m] that turns rows, of all of the elements [m, m] of which blocks count."""
    block = torch.arange(len(theta)) // 5
    q = theta.triu(1) * (block[:, None] == block)
    q, one = q - q.T, torch.eye(len(theta), dtype=theta.dtype)
    terms = sum((torch.linalg.matrix_power(q, k) for k in range(1, 4)), one)
    k = (one + q) @ (torch.linalg.inv(one - q) if exact else terms)
    return torch.zeros_like(k).index_put((order[:, None], order), k)


@pytest.mark.parametrize("cayley", ["neumann", "exact"])
@pytest.mark.parametrize("shape", SHAPES)
def test_poet_by_autograd(shape: tuple[int, int], cayley: str) -> None:
    """With both rotations as parameters of an initial weight that stays until they are merged into it."""
    weight = gradient(shape, 0)
    for merge, steps in enumerate(([1, 2, 3], [4, 5, 6], [7, 8])):
        sides = [torch.nn.Parameter(torch.zeros(n, n, dtype=torch.float64)) for n in shape]
        adam = torch.optim.Adam(sides, lr=0.1 * 0.5, eps=EPS)
        seeds = [seed_of("poet", side, "a", merge) for side in ("left", "right")]
        orders = [random_permutation(seed, n, torch.device("cpu")) for seed, n in zip(seeds, shape, strict=True)]
        whole = partial(turned, weight, sides, orders, cayley == "exact")
        for step in steps:
            adam.zero_grad()
            whole().backward(gradient(shape, step))
            adam.step()
        weight = whole().detach()
    ours, _ = walk("poet", shape, 8, lr=0.1, tensor="a", block=5, merge_every=3, cayley=cayley)
    assert torch.allclose(ours, weight, rtol=1e-8, atol=1e-9)


def turned(weight: Tensor, sides: Sequence[Tensor], orders: Sequence[Tensor], exact: bool) -> Tensor:
    left, right = (rotation(theta, order, exact) for theta, order in zip(sides, orders, strict=True))
    return left @ weight @ right.T


def drift(shape: tuple[int, int], **options: Any) -> float:
    """Return the largest relative change of a singular value in 9 steps and 3 merges."""
    ours, before = walk("poet", shape, 9, lr=0.05, block=6, merge_every=3, **options)[0], gradient(shape, 0)
    assert float((ours - before).norm()) > 0.3 * float(before.norm())
    return float((torch.linalg.svdvals(ours) / torch.linalg.svdvals(before) - 1).abs().max())


@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
def test_poet_keeps_singular_values(shape: tuple[int, int]) -> None:
    """Exactly, or the better the more terms the series has."""
    exact = drift(shape, cayley="exact")
    assert exact < 1e-12 < drift(shape, neumann_terms=6) < drift(shape, neumann_terms=3) < drift(shape, neumann_terms=1)


def test_poet_rotates_what_a_skipped_merge_left() -> None:
    """In the next step, without generators of other rows."""
    weight, (_, state) = gradient((12, 20), 0), walk("poet", (12, 20), 4, tensor="a", merge_every=4, block=5)
    options = {"block": 5, "merge_every": 4, "scale": 0.5, "cayley": "exact", "neumann_terms": 3, "beta1": 0.9}
    options |= {"beta2": 0.999, "eps": EPS}
    given = UpdateInput(gradient((12, 20), 6), state, 6, options, weight, name="a", lr=0.01)  # step 5 was skipped
    direction, new = poet(given)
    fresh, _ = poet(UpdateInput(**{**vars(given), "state": {name: 0 * x for name, x in state.items()}}))
    assert torch.equal(direction, fresh) and int(new["merges"]) == 1


def test_without_a_rate_nothing_moves() -> None:
    for rule in ("poet", "grad_norm_lorp"):
        assert close(walk(rule, (12, 20), 2, lr=0.0)[0], gradient((12, 20), 0))
