"""Calls of Apex's kernels, checked by stand-ins with the declared arguments, which compute the sources' formulas."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megascale.config.backends import BackendsConfig
from megascale.config.model import ModelConfig
from megascale.config.train import OptimizerConfig
from megascale.core.errors import MegascaleError
from megascale.device import Device, detect_device
from megascale.ops.apex import ApexLamb
from megascale.ops.library import error_of_import
from megascale.ops.optimizer import Segment
from megascale.ops.select import OpContext, build_op, select_backend
from megascale.optim.lamb import Lamb
from tests.runs import GPT

Lists = list[list[Tensor]]
GO, SKIP = torch.zeros(()), torch.ones(())


def scalar(tensor: Tensor, dtype: torch.dtype) -> float:
    """Read a scalar as a kernel does through a typed pointer."""
    assert tensor.numel() == 1 and tensor.dtype == dtype
    return tensor.item()


def checked(noop: Tensor, lists: Lists, depth: int) -> bool:
    """Return the inverse of the no-op flag; `multi_tensor_apply` requires non-empty lists of one length."""
    assert len(lists) == depth and lists[0] and len({len(tensors) for tensors in lists}) == 1
    for tensors in zip(*lists, strict=True):
        assert all(t.is_contiguous() and t.dtype == torch.float32 and t.shape == tensors[0].shape for t in tensors)
    return scalar(noop, torch.int32) != 1


def multi_tensor_lamb_compute_update_term(  # apex/contrib/csrc/optimizers/multi_tensor_distopt_lamb_kernel.cu
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor_beta1: Tensor, per_tensor_beta2: Tensor,
    per_tensor_beta3: Tensor, per_tensor_bias_correction: Tensor, step: Tensor, per_tensor_epsilon: Tensor, mode: int,
    per_tensor_decay: Tensor, global_scale: Tensor, global_grad_norm: Tensor, max_grad_norm: float,
) -> None:  # fmt: skip
    assert chunk_size == 2048 * 32 and mode == 1 and max_grad_norm == 0.0
    t, scale = scalar(step, torch.int32), scalar(global_scale, torch.float32)
    scalar(global_grad_norm, torch.float32)
    lists = [per_tensor_beta1, per_tensor_beta2, per_tensor_epsilon, per_tensor_decay, per_tensor_beta3]
    assert all(values.dtype == torch.float32 and len(values) == len(tensor_lists[0]) for values in lists)
    assert per_tensor_bias_correction.dtype == torch.int32
    if not checked(noop_flag, tensor_lists, 5):
        return
    for index, (g, p, m, v, u) in enumerate(zip(*tensor_lists, strict=True)):
        beta1, beta2, eps, decay, _ = (float(values[index]) for values in lists)
        low, high = (1 - beta1**t, 1 - beta2**t) if per_tensor_bias_correction[index] == 1 else (1.0, 1.0)
        scaled = g / scale
        m.copy_(beta1 * m + (1 - beta1) * scaled)
        v.copy_(beta2 * v + (1 - beta2) * scaled * scaled)
        u.copy_((m / low) / ((v / high).sqrt() + eps) + decay * p)


def multi_tensor_lamb_update_weights(  # the same file
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor_param_norm: Tensor,
    per_tensor_update_norm: Tensor, update_norm_offset: Tensor, learning_rate: Tensor, per_tensor_decay: Tensor,
    global_grad_norm: Tensor, use_nvlamb: bool,
) -> None:  # fmt: skip
    assert chunk_size == 2048 * 32
    rate = scalar(learning_rate, torch.float32)
    scalar(global_grad_norm, torch.float32)
    for values in (per_tensor_param_norm, per_tensor_update_norm, per_tensor_decay):
        assert values.is_contiguous() and values.dtype == torch.float32 and len(values) == len(tensor_lists[0])
    assert update_norm_offset.dtype == torch.int64
    if not checked(noop_flag, tensor_lists, 3):
        return
    for index, (u, p, copy) in enumerate(zip(*tensor_lists, strict=True)):
        weight, update = per_tensor_param_norm[index], per_tensor_update_norm[update_norm_offset[index]]
        scales = (use_nvlamb or per_tensor_decay[index] != 0) and weight != 0 and update != 0
        p.copy_(p - rate * (weight / update if scales else 1.0) * u)
        copy.copy_(p)


@pytest.fixture(params=["", "apex._extensions."], ids=["before", "since 2026"])
def apex(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the stand-ins under the old or the new names of Apex's modules."""
    lamb = SimpleNamespace(
        multi_tensor_lamb_compute_update_term=multi_tensor_lamb_compute_update_term,
        multi_tensor_lamb_update_weights=multi_tensor_lamb_update_weights,
    )
    monkeypatch.setitem(sys.modules, f"{request.param}distributed_lamb_cuda", lamb)
    error_of_import.cache_clear()
    yield
    error_of_import.cache_clear()  # the cache remembers the stand-ins


def segments() -> list[Segment]:
    draw = torch.Generator().manual_seed(1)
    segments = []
    sizes, scales = (200, 50, 64, 77, 3, 60, 40), (2.0, 1.0, 0.5, 0.0, 0.0, 1.0, 1.0)
    matrices, decays = (1, 0, 1, 1, 0, 1, 0), (1, 0, 1, 1, 0, 0, 1)
    for size, scale, *flags in zip(sizes, scales, matrices, decays, strict=True):
        state = {name: torch.zeros(size) for name in Lamb.state_names}
        segments.append(Segment(scale * torch.randn(size, generator=draw), torch.zeros(size), state, *map(bool, flags)))
    return segments


def matrix_norms(parts: list[Segment]) -> Tensor:
    pairs = [(part.weight.double().norm(), part.grad.double().norm()) for part in parts if part.is_matrix]
    return torch.tensor(pairs, dtype=torch.float64).T


@pytest.mark.usefixtures("apex")
@pytest.mark.parametrize("weight_decay", [0.2, 0.0])
@pytest.mark.parametrize("bias_correction", [True, False])
def test_lamb_equals_torchs(bias_correction: bool, weight_decay: float) -> None:
    config = OptimizerConfig(lr=1e-2, weight_decay=weight_decay, eps=1e-6, bias_correction=bias_correction)
    theirs, ours = segments(), segments()
    rules: list[tuple[Lamb | ApexLamb, list[Segment]]] = [
        (Lamb(theirs, config), theirs),
        (ApexLamb(ours, config), ours),
    ]
    before = [part.weight.clone() for part in ours]
    for step, (lr, skip) in enumerate([(1e-2, GO), (2e-2, SKIP), (2e-2, GO), (1e-3, GO)], 1):
        for rule, parts in rules:
            for part in parts:
                noise = torch.randn(len(part.grad), generator=torch.Generator().manual_seed(step))
                part.grad.copy_(noise)
            rule.compute_updates(step, skip)
            rule.apply_updates(lr, matrix_norms(parts), skip)
        for expected, actual in zip(theirs, ours, strict=True):
            torch.testing.assert_close(expected.weight, actual.weight, rtol=1e-5, atol=1e-6)
            for key in expected.state:
                torch.testing.assert_close(expected.state[key], actual.state[key], rtol=1e-5, atol=1e-7)
    assert all(not torch.equal(old, part.weight) for old, part in zip(before, ours, strict=True))


@pytest.mark.usefixtures("apex")
def test_a_shard_may_be_empty() -> None:
    config = OptimizerConfig(lr=1e-2)
    rule = ApexLamb([], config)
    rule.compute_updates(1, GO)
    rule.apply_updates(1e-2, torch.zeros(2, 0, dtype=torch.float64), GO)


def setting(name: str, requested: str = "auto", dtype: torch.dtype = torch.bfloat16, gpu: bool = True) -> OpContext:
    device = Device(torch.device("meta"), "nccl") if gpu else detect_device(allow_gpu=False)
    return OpContext(
        ModelConfig.model_validate(GPT), BackendsConfig(optimizer=requested), dtype, device, optimizer=name
    )


@pytest.mark.usefixtures("apex")
def test_apex_is_selected_where_supported() -> None:
    assert build_op("optimizer", setting("lamb")) is ApexLamb
    assert build_op("optimizer", setting("lamb", "torch")) is Lamb
    rejected = {"apex": "needs an NVIDIA GPU", "triton": "has no lamb"}
    assert select_backend("optimizer", setting("lamb", gpu=False)).rejected == rejected
    fp64 = select_backend("optimizer", setting("lamb", dtype=torch.float64))
    assert fp64.rejected == {"apex": "has no float64", "triton": "has no lamb"}


def test_the_reason_names_the_missing_build_flag() -> None:
    choice = select_backend("optimizer", setting("lamb"))
    assert choice.backend == "torch" and "built with --distributed_lamb is not installed" in choice.rejected["apex"]
    with pytest.raises(MegascaleError, match=r"backends\.optimizer = 'apex' cannot serve: apex: .*--distributed_lamb"):
        select_backend("optimizer", setting("lamb", "apex"))


def test_other_optimizers_use_torch() -> None:
    rejected = select_backend("optimizer", setting("lion")).rejected
    assert rejected == {"apex": "has no lion", "triton": "has no lion"}


@pytest.mark.usefixtures("apex")
def test_more_elements_than_the_kernels_index_are_refused() -> None:
    huge = torch.empty(2**31, device="meta")
    part = Segment(huge, huge, dict.fromkeys(Lamb.state_names, huge), True, True)
    with pytest.raises(MegascaleError, match="cannot index 2147483648 elements"):
        ApexLamb([part], OptimizerConfig(lr=1e-2))
