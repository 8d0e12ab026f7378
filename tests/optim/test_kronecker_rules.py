"""SOAP and Shampoo against independent references, and their limits."""

from __future__ import annotations

import pytest
import torch

from megascale.ops.optimizer import UpdateInput
from megascale.optim.shampoo import inverse_root
from megascale.optim.soap import next_basis, soap
from tests.optim.test_update_rules import SHAPES, adam, close, gradient, walk


@pytest.mark.parametrize("shape", SHAPES)
def test_soap_by_its_formula(shape: tuple[int, int]) -> None:
    """After the authors' code: moments are rotated into new bases, with V's rows and columns sorted along."""
    b, weight = 0.95, gradient(shape, 0)
    g = gradient(shape, 1)
    left, right = (1 - b) * (g @ g.T), (1 - b) * (g.T @ g)  # with these bits: they leave eigenvectors of 0 open
    ql, qr = (torch.linalg.eigh(x).eigenvectors.flip(1) for x in (left, right))
    m = v = torch.zeros(shape, dtype=torch.float64)  # m in the bases
    for step in range(1, 8):
        g = gradient(shape, step + 1)
        projected = ql.T @ g @ qr
        m, v = b * m + (1 - b) * projected, b * v + (1 - b) * projected**2
        rate = 0.01 * (1 - b**step) ** 0.5 / (1 - b**step)
        weight = weight - rate * ql @ (m / (v.sqrt() + 1e-8)) @ qr.T
        m = ql @ m @ qr.T
        left, right = b * left + (1 - b) * g @ g.T, b * right + (1 - b) * g.T @ g
        if step % 3 == 0:
            order = torch.diag(ql.T @ left @ ql).argsort(descending=True)
            v, ql = v[order], torch.linalg.qr(left @ ql[:, order]).Q
            order = torch.diag(qr.T @ right @ qr).argsort(descending=True)
            v, qr = v[:, order], torch.linalg.qr(right @ qr[:, order]).Q
        m = ql.T @ m @ qr
    ours, state = walk("soap", shape, 8, update_gap=3)
    assert close(ours, weight) and close(state["exp_avg_sq"], v)


def test_soap_without_bases_is_adam() -> None:
    """Both sides are longer than `max_size`; the first gradient moves nothing."""
    shape = (12, 20)
    weight = torch.nn.Parameter(gradient(shape, 0))
    theirs = torch.optim.AdamW([weight], lr=0.01, betas=(0.95, 0.95), eps=1e-8, weight_decay=0.0)
    for step in range(2, 7):
        weight.grad = gradient(shape, step)
        theirs.step()
    ours, state = walk("soap", shape, 6, max_size=8)
    assert state["left"].shape == state["right"].shape == (1, 1)
    assert torch.allclose(ours, weight.detach(), rtol=0, atol=1e-6)  # torch adds eps after the correction


def test_a_new_basis_tends_to_the_eigenvectors() -> None:
    x = gradient((10, 40), 1)
    factor, basis = x @ x.T, torch.eye(10, dtype=torch.float64)
    for _ in range(400):
        basis, _ = next_basis(factor, basis)
    rotated = basis.T @ factor @ basis
    assert float((rotated - torch.diag(rotated.diag())).abs().max()) < 1e-6 * float(factor.abs().max())
    assert bool((rotated.diag().diff() < 0).all())


@pytest.mark.parametrize("shape", SHAPES)
def test_shampoo_by_its_formula(shape: tuple[int, int]) -> None:
    weight, m, v = gradient(shape, 0), torch.zeros(()), torch.zeros(())
    left = right = a = b = torch.zeros(())
    for step in range(1, 7):
        g = gradient(shape, step)
        left, right = 0.999 * left + 0.001 * g @ g.T, 0.999 * right + 0.001 * g.T @ g
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        if step in (1, 4):
            corrected = (x / (1 - 0.999**step) for x in (left, right))
            a, b = (torch.linalg.inv(_root(_root(x, 1e-4), 0.0)) for x in corrected)
        graft = (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-4)
        x = a @ m @ b
        weight = weight - 0.01 * x * graft.norm() / x.norm()
    ours, _ = walk("shampoo", shape, update_gap=3, eps=1e-4)
    assert torch.allclose(ours, weight, rtol=0, atol=1e-8)


def _root(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the square root of x + eps I by Newton's iteration (Denman and Beavers 1976)."""
    y, z = x + eps * torch.eye(len(x), dtype=x.dtype), torch.eye(len(x), dtype=x.dtype)
    for _ in range(40):
        y, z = (y + torch.linalg.inv(z)) / 2, (z + torch.linalg.inv(y)) / 2
    return y


def test_an_inverse_root() -> None:
    x = gradient((8, 12), 3)
    factor = x @ x.T
    root = inverse_root(factor, 0.0)
    assert close(torch.linalg.matrix_power(root, 4) @ factor, torch.eye(8, dtype=torch.float64))


@pytest.mark.parametrize("max_size", [4, 6, 8])
def test_shampoo_s_step_has_the_norm_of_adam_s(max_size: int) -> None:
    """With a factor of both sides, of one, and of none."""
    before, (ours, _) = gradient((6, 8), 0), walk("shampoo", (6, 8), 1, eps=1e-8, max_size=max_size)
    assert float((ours - before).norm()) == pytest.approx(float((adam((6, 8), 1, 0.01) - before).norm()), rel=1e-6)


def test_soap_begins_with_the_bases_of_the_first_gradient_it_sees() -> None:
    """Also in a later step, after another rule."""
    grad, step = gradient((6, 8), 9), 5001
    _, state = walk("soap", (6, 8), 0)
    direction, begun = soap(UpdateInput(grad, state, step, OPTIONS, first=True))
    assert not direction.any() and bool(begun["left_basis"].any())
    direction, _ = soap(UpdateInput(gradient((6, 8), 10), begun, step + 1, OPTIONS))
    assert float(direction.norm()) > 1


OPTIONS = {"beta1": 0.95, "beta2": 0.95, "eps": 1e-8, "update_gap": 10, "max_size": 10_000}
