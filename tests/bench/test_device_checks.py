"""Checks of devices: a wrong GEMM, a wrong sum and a wrong weight are seen to the bit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.bench.checks import device as device_checks
from megascale.bench.checks import tiny_step
from megascale.bench.checks.device import PRIME, wrong_elements
from megascale.core.rank import Rank
from megascale.device import Device
from megascale.layout.topology import topology_of
from megascale.operate.channel.secret import SECRET_VARIABLE, new_secret
from megascale.operate.health.checks.result import CheckResult
from megascale.operate.health.checks.runner import run_check
from tests.worlds import run_world

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("blocks", [1, 7, 20])
def test_a_right_gemm_has_no_wrong_element(dtype: torch.dtype, blocks: int) -> None:
    assert wrong_elements(torch.mm, blocks, dtype, CPU) == 0


def flip(bit: int) -> Callable[[Tensor, Tensor], Tensor]:
    def matmul(a: Tensor, b: Tensor) -> Tensor:
        out = torch.mm(a, b)
        out.view(torch.int32 if out.dtype == torch.float32 else torch.int16)[3, 5] ^= 1 << bit
        return out

    return matmul


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 31), (torch.bfloat16, 15)])
def test_any_flipped_bit_of_a_gemm_is_seen(dtype: torch.dtype, bits: int) -> None:
    for bit in range(bits):
        assert wrong_elements(flip(bit), 4, dtype, CPU) == 1


def test_one_wrong_operand_spoils_a_column() -> None:
    def matmul(a: Tensor, b: Tensor) -> Tensor:
        b = b.clone()
        b[2, 4] += 1
        return torch.mm(a, b)

    wrong = wrong_elements(matmul, 2, torch.float32, CPU)
    assert 2 * PRIME >= wrong >= 2 * PRIME - 2  # rows whose element of `a` is zero stay right


def test_the_check_names_the_wrong_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_checks, "CPU_BLOCKS", 4)
    right = device_checks.check_known_gemm({"known_gemm_s": 0.0})
    assert (right.value, right.problem, right.details["gemms"]) == (0.0, "", 2)
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b: mm(a, b) * 0 - 1)
    wrong = device_checks.check_known_gemm({"known_gemm_s": 0.0})
    assert wrong.value == 2 * (4 * PRIME) ** 2
    assert "elements of 2 GEMMs have wrong bits" in wrong.problem


def test_the_gemm_rate_has_its_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_checks, "GEMM_CPU_SIZE", 64)
    measured = device_checks.check_gemm({"gemm_s": 0.01})
    assert measured.value is not None and measured.value > 0
    assert measured.details["shape"] == "64x64x64"


@pytest.mark.parametrize(
    ("world", "layout"), [(1, (1, 1, 1)), (2, (2, 1, 1)), (4, (2, 1, 2)), (6, (2, 3, 1)), (8, (2, 2, 2))]
)
def test_the_tiny_step_splits_the_model_over_all_slots(world: int, layout: tuple[int, int, int]) -> None:
    config = tiny_step.tiny_config(world, "fp32")
    topology = topology_of(config.parallel)
    assert (topology.tp, topology.dp, topology.pp) == layout


def digests(rank: Rank) -> list[str]:
    """Train the tiny steps three times on a rank; the third time the lowest bit of a weight flips between the steps."""
    train = tiny_step.time_steps

    def corrupted(run: Any, count: int) -> Any:
        first = train(run, 1)
        bucket = run.buffers.buckets[0]
        bucket.storage.acquire_weights()
        bucket.weights.view(torch.int32)[5] ^= 1
        rest = train(run, count - 1)
        return first[0] + rest[0], first[1] + rest[1]

    config = tiny_step.tiny_config(rank.world_size, "fp32")
    build = partial(tiny_step.build_run, config, Device(CPU, "gloo"), rank)
    right = [tiny_step.train_and_digest(build()) for _ in range(2)]
    tiny_step.time_steps = corrupted  # type: ignore[assignment]
    return [*right, tiny_step.train_and_digest(build())]


@pytest.mark.slow
def test_a_weight_that_flips_its_lowest_bit_changes_the_digest() -> None:
    (first, second, wrong), _ = run_world(2, digests)
    assert first == second != wrong


def run(name: str, slots: int) -> CheckResult:
    return asyncio.run(run_check(name, {"slots": slots}, 120.0))


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 2])
def test_a_tiny_step_is_the_same_to_the_bit_each_time(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, new_secret())
    first, second = (run("tiny_step", slots) for _ in range(2))
    assert first.problem == second.problem == ""
    assert first.digest == second.digest
    assert len(first.digest.split()) == slots
    assert tiny_step.REPEATED not in first.digest
    assert first.platform == second.platform


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all_to_all", "all_reduce"])
def test_collectives_among_the_slots_of_a_node(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)  # a node alone needs none
    result = run(name, 2)
    assert result.problem == ""
    assert result.value is not None and result.value > 0
    assert len(result.details["devices"]) == 2
    assert run(name, 1).skipped == "1 rank"
