"""Gradients that travel as FP8 codes: sums within a bound, what is not finite, and runs that send what is planned."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.comm.mesh import Mesh
from megascale.layout.topology import DATA_AXES, Topology, topology_of
from megascale.parallel.coded_reduction import amax_of, reduce_scatter_codes, shared_scale
from megascale.plan.account.traffic import step_traffic
from tests.parallel.test_hybrid_sharding import MIXTRAL
from tests.runs import GPT, LLAMA, config_of, curve_of, settings, traffic_of
from tests.thread_world import run_threads, simulate

N = 64 * 128
CODED = {"parallel__grad_reduce": "fp8", "train__precision": "bf16", "train__check_replicas_every": 1}


def gradient(rank: int, spread: float = 1.0) -> Tensor:
    """Return gradients of magnitudes from 1e-9 to 1e-3."""
    random = torch.Generator().manual_seed(rank)
    return torch.randn(N, generator=random) * 1e-3 * 10.0 ** (-6 * torch.rand(N, generator=random)) * spread


def summed(mesh: Mesh, full: Tensor) -> Tensor:
    """Return this rank's rows of the sum, which replace its rows of `full`, as in a bucket."""
    group = mesh.group(*DATA_AXES)
    rows = slice(group.index * (N // group.size), (group.index + 1) * (N // group.size))
    reduce_scatter_codes(group, full[rows], full, amax_of(full), label="").wait()
    return full[rows]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_sum_is_within_the_bound_of_its_codes(ranks: int) -> None:
    """Each rank's addend is rounded once: to 2^-4 of it, or half of the smallest code."""
    addends = [gradient(rank, 1 + rank) for rank in range(ranks)]
    found = torch.cat(simulate(Topology(dp=ranks), lambda mesh: summed(mesh, addends[mesh.rank].clone())))
    scale = float(shared_scale(amax_of(torch.stack(addends))))
    bound = sum((addend.abs() / 16).clamp(min=scale / 1024) for addend in addends)
    error = (found.double() - torch.stack(addends).double().sum(0)).abs()
    assert bool((error <= bound).all()) and float(error.max()) > 0
    total = torch.stack(addends).sum(0)
    assert float((found - total).norm() / total.norm()) < 0.035


def test_the_scale_is_the_least_power_of_two_without_overflow() -> None:
    amax = torch.tensor([448.0, 448.1, 449.0, 896.0, 3.5, 1e-38, 0.0, 2.0**-140, math.inf])
    assert shared_scale(amax).tolist() == [1, 2, 2, 2, 2**-7, 2**-126, 1, 2**-126, 1]


def test_ranks_share_a_scale() -> None:
    """A rank of tiny gradients encodes them by the largest of all ranks; with its own scale they would not be zero."""

    def body(mesh: Mesh) -> Tensor:
        return summed(mesh, torch.full((N,), 1.0 if mesh.rank else 1e-9))

    assert all(bool((rows == 1).all()) for rows in simulate(Topology(dp=2), body))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_element_that_is_not_finite_is_none_in_the_sum(bad: float) -> None:
    def body(mesh: Mesh) -> Tensor:
        full = gradient(mesh.rank)
        if mesh.rank == 1:
            full[5] = bad
        return summed(mesh, full)

    found = torch.cat(simulate(Topology(dp=2), body))
    assert found.isnan().nonzero().tolist() == [[5]]


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dp1": (GPT, {"parallel__dp": 1}),
    "dp2 zero1": (GPT, {"parallel__dp": 2}),
    "dp4 zero2": (LLAMA, {"parallel__dp": 4, "parallel__zero": 2, "overlap__bucket_bytes": 20_000}),
    "tp2 sp dp2 zero3": (LLAMA, {"parallel__tp": 2, "parallel__sp": True, "parallel__dp": 2, "parallel__zero": 3}),
    "cp2 dp2, copies": (LLAMA, {"parallel__cp": 2, "parallel__dp": 2, "parallel__dp_shard": 1}),
    "pp2 dp4 ep2 zero2": (MIXTRAL, {"parallel__pp": 2, "parallel__dp": 4, "parallel__ep": 2, "parallel__zero": 2}),
    "vocabulary pp2 dp2": (GPT, {"parallel__pp": 2, "parallel__vocab_pp": 1, "parallel__dp": 2}),
}


def trained(run: Any) -> tuple[Any, dict[str, dict[str, tuple[int, int]]]]:
    curve = curve_of(run, 2)
    return curve, traffic_of(run, step=2)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_is_near_that_with_full_gradients_and_sends_what_is_planned(name: str, tmp_path: Path) -> None:
    model, layout = LAYOUTS[name]
    full, coded = (
        config_of(settings(model, tmp_path, **{**CODED, "parallel__grad_reduce": how, **layout}), tmp_path)
        for how in ("full", "fp8")
    )
    expected, ranks = run_threads(full, trained), run_threads(coded, trained)
    assert all(curve == ranks[0][0] for curve, _ in ranks)
    for (loss, norm), (loss_of_full, norm_of_full) in zip(ranks[0][0], expected[0][0], strict=True):
        assert loss == pytest.approx(loss_of_full, rel=2e-3)
        assert norm == pytest.approx(norm_of_full, rel=0.03)
    assert (ranks[0][0] == expected[0][0]) == (coded.world_size == 1)
    for rank, (_, traffic) in enumerate(ranks):
        planned = step_traffic(coded, topology_of(coded.parallel).coord(rank))
        coded_groups = {group for group, operation in planned if operation == "all_to_all" and group != "ep"}
        assert bool(coded_groups) == (coded.world_size > 1)
        for group in coded_groups:
            sent = {operation: counts for (of, operation), counts in planned.items() if of == group}
            assert traffic[group] == sent, group
    if name == "dp2 zero1":
        assert "reduce_scatter" not in ranks[0][1]["dp"] and ranks[0][1]["dp"]["all_to_all"][1] > 0
