"""Sinks of attention take their part of every query's softmax once, wherever heads, queries and keys are."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.ops.core_attention import AttentionMask
from megascale.ops.partial_attention import TorchPartialAttention
from megascale.parallel.kv_exchange import attend_to_all, whole_keys
from tests.runs import LLAMA, config_of, curve_of, settings
from tests.thread_world import run_threads

GPT_OSS = LLAMA | {
    "attention_sinks": True, "window": [5, 0], "bias": True, "activation": "clamped_swiglu", "router_bias": True,
    "experts": 4, "experts_per_token": 2, "init_std": 0.3,
}  # fmt: skip
DOCUMENTS = {"data__attention_mask": "document"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "cp2 ring": {"parallel__cp": 2},
    "cp4 usp": {"parallel__cp": 4, "parallel__cp_mode": "usp", "parallel__cp_a2a_size": 2},
    "tp2 sp cp2 ulysses ep2": {
        "parallel__tp": 2, "parallel__sp": True, "parallel__cp": 2, "parallel__cp_mode": "ulysses", "parallel__ep": 2
    },
    "cp2 allgather": {"parallel__cp": 2, "parallel__cp_mode": "allgather"},
    "dp2 ep2 zero2": {"parallel__dp": 2, "parallel__ep": 2, "parallel__zero": 2},
    "chunks": {"data__sequence_chunk_tokens": 4},
    "recompute": {"train__recompute": "full"},
    "recompute attention": {"train__recompute": "selective"},
    "pp2 vpp2": {"parallel__pp": 2, "parallel__vpp": 2},
    "documents": DOCUMENTS,
    "documents cp2 ring": DOCUMENTS | {"parallel__cp": 2},
    "documents cp2 ulysses": DOCUMENTS | {"parallel__cp": 2, "parallel__cp_mode": "ulysses"},
}  # fmt: skip
QUICK = ("cp2 ring", "tp2 sp cp2 ulysses ep2", "chunks")


def curves(folder: Path, **changes: Any) -> list[list[tuple[float, float]]]:
    config = config_of(settings(GPT_OSS, folder, train__steps=3, batch__global=4, **changes), folder)
    return run_threads(config, lambda run: curve_of(run, 3))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[tuple[float, float]]]:
    """A function that returns the curve of one process."""
    return cache(lambda **changes: curves(tmp_path_factory.mktemp("alone"), **changes)[0])


@pytest.mark.parametrize("name", [pytest.param(it, marks=() if it in QUICK else pytest.mark.slow) for it in LAYOUTS])
def test_layouts_are_the_same_run(name: str, alone: Any, tmp_path: Path) -> None:
    expected = alone(**(DOCUMENTS if name.startswith("documents") else {}))
    for curve in curves(tmp_path, **LAYOUTS[name]):
        assert sum(curve, ()) == pytest.approx(sum(expected, ()), rel=1e-10)


def attention_with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int) -> Tensor:
    """Attention with a column of sinks beside all scores."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    past = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    scores = (q @ k.mT / math.sqrt(q.shape[3])).masked_fill((past < 0) | (past >= window), -math.inf)
    column = sinks.view(-1, 1, 1).expand(*q.shape[:3], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v


def test_gradients_are_those_of_a_column_of_scores() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8), (4,), (2, 4, 9, 8))
    *leaves, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    exchange = whole_keys(9, AttentionMask(4), 0)
    ours = attend_to_all(*leaves[:3], exchange, TorchPartialAttention(), leaves[3])
    found = torch.autograd.grad(ours, leaves, grad)
    theirs = attention_with_sinks(*leaves, window=4)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    for ours_of, theirs_of in zip(found, torch.autograd.grad(theirs, leaves, grad), strict=True):
        torch.testing.assert_close(ours_of, theirs_of, rtol=1e-12, atol=1e-13)
