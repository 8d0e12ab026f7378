"""GaLore's subspaces and variants, and AdaPM's low-rank momentum."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.ops.optimizer import UpdateInput
from megascale.optim.contrib.ada_pm import ada_pm
from megascale.optim.contrib.galore import LAMBDA, natural_gradient
from megascale.optim.contrib.subspaces import completed, drawn_rows, online_pca
from tests.optim.test_update_rules import SHAPES, adam, close, gradient, walk


@pytest.mark.parametrize("subspace", ["grass_top", "grass_sample"])
@pytest.mark.parametrize("shape", SHAPES)
def test_all_rows_are_adam(subspace: str, shape: tuple[int, int]) -> None:
    ours, _ = walk("galore", shape, scale=1.0, rank=min(shape), update_gap=100, subspace=subspace)
    assert torch.allclose(ours, adam(shape, 6, 0.01), rtol=0, atol=1e-5)  # torch adds eps after the correction


@pytest.mark.parametrize("subspace", ["grass_top", "grass_sample"])
def test_grass_changes_the_chosen_rows_alone(subspace: str) -> None:
    """Of the shorter side; state has their number of rows."""
    ours, state = walk("galore", (8, 20), rank=3, update_gap=100, subspace=subspace)
    changed = (ours != gradient((8, 20), 0)).any(1)
    assert changed.nonzero().view(-1).tolist() == sorted(state["rows"].int().tolist())
    assert state["exp_avg"].shape == (3, 20) and "basis" not in state
    if subspace == "grass_top":
        assert set(state["rows"].int().tolist()) == set(gradient((8, 20), 1).norm(dim=1).topk(3).indices.tolist())


def test_a_completed_basis_is_a_function_of_the_spaces() -> None:
    """Not of signs, nor of the vectors of singular values of 0, which rounding decides."""
    x = gradient((12, 3), 1) @ gradient((3, 20), 2)
    vectors, values, _ = torch.linalg.svd(x, full_matrices=False)
    basis = completed(vectors, values)
    assert close(basis.T @ basis, torch.eye(12, dtype=torch.float64))
    assert close((basis[:, :3] * vectors[:, :3]).sum(0).abs(), torch.ones(3, dtype=torch.float64))
    turned = torch.linalg.qr(gradient((9, 9), 3)).Q
    others = torch.cat([-vectors[:, :3], vectors[:, 3:] @ turned], 1)
    assert close(completed(others, values), basis)
    assert close(completed(others[:, :3], values[:3]), basis), "as of a matrix of 3 columns"


def test_rows_are_drawn_in_proportion_to_their_norms() -> None:
    """By the name and the step: other draws in other steps, the same on every rank."""
    grad = torch.ones(4, 10, dtype=torch.float64) * torch.tensor([[8.0], [1.0], [1.0], [1.0]])
    options = {"update_gap": 1}

    def draw(step: int) -> int:
        given = UpdateInput(grad, {"rows": torch.zeros(1)}, step, options, name="a")
        return int(drawn_rows(grad, given)["rows"])

    found = [draw(step) for step in range(1, 401)]
    assert found == [draw(step) for step in range(1, 401)]
    assert 0.6 < found.count(0) / 400 < 0.85 and len(set(found)) == 4, "8 / 11 of the draws"


def pca_input(grad: Tensor, state: dict[str, Tensor], step: int) -> UpdateInput:
    return UpdateInput(grad, state, step, {"update_gap": 50}, first=step == 1)


@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
def test_online_pca_descends_as_autograd_and_adam_do(shape: tuple[int, int]) -> None:
    """On what the subspace leaves of the gradient, without a decomposition after the first step."""
    state: dict[str, Tensor] = {name: torch.zeros(12, 4, dtype=torch.float64) for name in PCA_STATE}
    first = gradient(shape, 1)
    state = online_pca(short(first), pca_input(first, state, 1))
    basis = torch.nn.Parameter(state["basis"].clone())
    theirs = torch.optim.Adam([basis], lr=1 / 50)
    grad, lost = gradient(shape, 2), []
    for step in range(2, 60):
        unit = short(grad) / grad.norm()
        theirs.zero_grad()
        loss = (unit - basis @ (basis.T @ unit)).square().sum()
        loss.backward()
        theirs.step()
        state = online_pca(short(grad), pca_input(grad, state, step))
        assert torch.allclose(state["basis"], basis.detach(), rtol=0, atol=1e-9)
        lost.append(float(loss))
    values = torch.linalg.svdvals(grad)
    least = float(values[4:].square().sum() / values.square().sum())
    assert lost[-1] < 0.7 * lost[0] and lost[-1] < 1.3 * least


PCA_STATE = ("basis", "basis_avg", "basis_avg_sq")


def short(x: Tensor) -> Tensor:
    return x.T if x.shape[0] >= x.shape[1] else x


def test_galore_by_online_pca_has_one_decomposition(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, svd = list[int](), torch.linalg.svd

    def counted(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        return svd(*arguments, **named)

    monkeypatch.setattr(torch.linalg, "svd", counted)
    walk("galore", (12, 20), rank=4, update_gap=2, subspace="online_pca")
    assert len(calls) == 1
    walk("galore", (12, 20), rank=4, update_gap=2)
    assert len(calls) == 1 + 3


def test_the_natural_gradient_is_the_dense_inverse_s() -> None:
    history = torch.zeros(4, 2, 5, dtype=torch.float64)
    for step in range(1, 7):
        low = gradient((2, 5), step)
        found, history = natural_gradient(low, history, step)
        h = torch.stack([gradient((2, 5), s).view(-1) for s in range(max(1, step - 3), step + 1)])
        dense = torch.linalg.inv(LAMBDA * torch.eye(10, dtype=torch.float64) + h.T @ h)
        torch.testing.assert_close(found.view(-1), dense @ low.view(-1), rtol=1e-7, atol=1e-7)
    ours, state = walk("galore", (12, 20), rank=4, natural=True, history=3)
    assert state["history"].shape == (3, 4, 20) and ours.isfinite().all()


@pytest.mark.parametrize("shape", SHAPES)
def test_adapm_of_full_rank_is_adam_mini(shape: tuple[int, int]) -> None:
    mini, _ = walk("adam_mini", shape)
    for momentum in ("full", "low_rank"):
        ours, state = walk("ada_pm", shape, rank=min(shape), momentum=momentum)
        assert torch.allclose(ours, mini, rtol=0, atol=1e-10)
    assert set(state) == {"basis", "coefficients", "exp_avg_sq"}
    without, state = walk("ada_pm", shape, momentum="none")
    assert close(without, walk("adam_mini", shape, beta1=0.0)[0]) and set(state) == {"exp_avg_sq"}


def test_adapm_s_momentum_has_the_mean_of_the_gradient() -> None:
    """Of a constant gradient of high rank, from the first step on: nothing is lost outside of the subspace."""
    grad, state = gradient((12, 20), 1), walk("ada_pm", (12, 20), 0, rank=2)[1]
    options = {"beta1": 0.9, "beta2": 0.95, "eps": 0.0, "momentum": "low_rank", "rank": 2}
    for step in range(1, 30):
        direction, state = ada_pm(UpdateInput(grad, state, step, options, first=step == 1))
        expected = grad / grad.square().mean(1, keepdim=True).sqrt()
        assert torch.allclose(direction, expected, rtol=1e-6)
    assert math.prod(state["basis"].shape) + math.prod(state["coefficients"].shape) == 2 * (12 + 20)
