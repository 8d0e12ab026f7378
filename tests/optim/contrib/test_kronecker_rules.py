"""SOAP and Shampoo against independent references, and their limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megascale.ops.optimizer import UpdateInput
from megascale.optim.contrib.shampoo import inverse_root
from megascale.optim.contrib.soap import next_basis, soap
from tests.optim.test_update_rules import SHAPES, adam, close, gradient, walk


@pytest.mark.parametrize("shape", SHAPES)
def test_soap_by_its_formula(shape: tuple[int, int]) -> None:
    """After the authors' code: moments are rotated into new bases, with V's rows and columns sorted along."""
    b, weight = 0.95, gradient(shape, 0)
    g = gradient(shape, 1)
    left, right = (1 - b) * (g @ g.T), (1 - b) * (g.T @ g)
    begun = walk("soap", shape, 1)[1]
    ql, qr = (begun[f"{side}_basis"] for side in ("left", "right"))  # they leave eigenvectors of 0 open
    for factor, basis in ((left, ql), (right, qr)):
        values = torch.linalg.eigvalsh(factor).flip(0)
        assert close(basis.T @ basis, torch.eye(len(basis), dtype=torch.float64))
        assert close(basis.T @ factor @ basis, values.diag())
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
            v, ql = v[order], torch.linalg.qr(_shifted(left, ql) @ ql[:, order]).Q
            order = torch.diag(qr.T @ right @ qr).argsort(descending=True)
            v, qr = v[:, order], torch.linalg.qr(_shifted(right, qr) @ qr[:, order]).Q
        m = ql.T @ m @ qr
    ours, state = walk("soap", shape, 8, update_gap=3)
    assert close(ours, weight) and close(state["exp_avg_sq"], v)


def _shifted(factor: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    largest = torch.diag(basis.T @ factor @ basis).max()
    return factor + 1e-6 * largest * torch.eye(len(basis), dtype=torch.float64)


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
    left = right = torch.zeros(())
    a = b = None
    for step in range(1, 7):
        g = gradient(shape, step)
        left, right = 0.999 * left + 0.001 * g @ g.T, 0.999 * right + 0.001 * g.T @ g
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        if step % 2 == 0:
            relative = (x / torch.linalg.matrix_norm(x, 2) for x in (left, right))
            a, b = (torch.linalg.inv(_root(_root(x, 1e-4), 0.0)) for x in relative)
        graft = (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-3)
        x = graft if a is None or b is None else a @ m @ b
        weight = weight - 0.01 * x * graft.norm() / x.norm()
    ours, _ = walk("shampoo", shape, update_gap=2, damping=1e-4, eps=1e-3)
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
    relative = factor / torch.linalg.eigvalsh(factor).max()
    assert close(torch.linalg.matrix_power(root, 4) @ relative, torch.eye(8, dtype=torch.float64))


@pytest.mark.parametrize("max_size", [4, 6, 8])
def test_shampoo_s_step_has_the_norm_of_adam_s(max_size: int) -> None:
    """With a factor of both sides, of one, and of none."""
    before, (ours, _) = gradient((6, 8), 0), walk("shampoo", (6, 8), 1, update_gap=1, max_size=max_size)
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


def test_shampoo_is_adam_until_the_factors_have_filled() -> None:
    ours, state = walk("shampoo", (6, 8), 4, update_gap=5)
    assert torch.allclose(ours, adam((6, 8), 4, 0.01), rtol=0, atol=1e-6) and not state["left_root"].any()
    assert walk("shampoo", (6, 8), 5, update_gap=5)[1]["left_root"].any()


RULES_WITH_BASES: list[tuple[str, dict[str, Any]]] = [
    ("soap", {"update_gap": 3}),
    ("shampoo", {"update_gap": 3}),
    ("conda", {"update_gap": 3}),
    ("galore", {"rank": 12, "update_gap": 3}),
    ("ada_pm", {"rank": 9}),
    ("muon", {}),
]


@pytest.mark.parametrize(("name", "options"), RULES_WITH_BASES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rounding_chooses_no_direction_of_a_singular_gradient(
    name: str, options: dict[str, Any], shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of rank 4 with noise of the last bit: steps differ by no more than the noise that bases enlarge."""
    steps = []
    for noise in (0.0, 1e-15):

        def singular(shape: tuple[int, ...], seed: int, noise: float = noise) -> torch.Tensor:
            rows, columns = shape
            exact = gradient((rows, 4), 2 * seed) @ gradient((4, columns), 2 * seed + 1)
            return exact + noise * gradient(shape, 1000 + seed)

        monkeypatch.setattr("tests.optim.test_update_rules.gradient", singular)
        steps.append(walk(name, shape, 8, **options)[0])
    assert float((steps[0] - steps[1]).norm() / steps[0].norm()) < 1e-10
