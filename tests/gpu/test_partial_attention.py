"""Parts of attention on a GPU: the kernel that merges them, and the sum of parts."""

from __future__ import annotations

import pytest
import torch

from megascale.layout.mask_blocks import mask_blocks
from megascale.layout.sequence_shard import shard_sequence
from megascale.ops.core_attention import AttentionMask, torch_attend
from megascale.ops.partial_attention import Accumulator, PartialAttention
from megascale.ops.select import build_op
from megascale.parallel.kv_exchange import attend_to_all, whole_keys
from tests.ops.settings import GPU, setting
from tests.parallel.test_attention_sinks import attention_with_sinks

pytestmark = pytest.mark.gpu(1, only=True)

S, D = 2048, 128


@pytest.mark.parametrize("run", [True, False])
def test_the_kernel_merges_as_torchs_operators(run: bool) -> None:
    from megascale.ops.merge_parts import merge_part

    q = torch.empty(1, 8, S, D, device="cuda", dtype=torch.bfloat16)
    places = torch.randperm(S, device="cuda")[: S // 2]
    at = (slice(0, 1), slice(0, S // 2)) if run else (torch.zeros_like(places), places)
    ours, theirs = Accumulator(q), Accumulator(q)
    for _ in range(3):
        out, lse = torch.randn(S // 2, 8, D, device="cuda").bfloat16(), torch.randn(8, S // 2, device="cuda")
        merge_part((ours.out, ours.lse), *at, out, lse)
        theirs.add_at(*at, out, lse)
    torch.testing.assert_close(ours.out, theirs.out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.lse, theirs.lse, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 128])
def test_sinks_take_their_part(window: int | None) -> None:
    """As a column beside all scores, forward and backward."""
    attend: PartialAttention = build_op("partial_attention", setting(torch.bfloat16, GPU, head_dim=64))
    shapes = ((1, 8, 512, 64), (1, 2, 512, 64), (1, 2, 512, 64), (8,), (1, 8, 512, 64))
    *leaves, grad = (torch.randn(shape, device="cuda").bfloat16() for shape in shapes)
    ours = [leaf.requires_grad_() for leaf in leaves]
    exchange = whole_keys(512, AttentionMask(window), 0)
    out = attend_to_all(*ours[:3], exchange, attend, ours[3])
    exact = [leaf.detach().double().cpu().requires_grad_() for leaf in leaves]
    expected = attention_with_sinks(*exact, window or 512)
    found_all = (out, *torch.autograd.grad(out, ours, grad))
    expected_all = (expected, *torch.autograd.grad(expected, exact, grad.double().cpu()))
    for found, wanted in zip(found_all, expected_all, strict=True):
        assert float((found.double().cpu() - wanted).norm() / wanted.norm()) < 2e-2


@pytest.mark.parametrize("keys", [1, 2, 4])
def test_parts_add_up_to_the_whole(keys: int) -> None:
    """As the ranks of a ring see them, in whole rows."""
    attend: PartialAttention = build_op("partial_attention", setting(torch.bfloat16, GPU, head_dim=D))
    q, k, v = (torch.randn(1, 8, S, D, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    expected = torch_attend(None)(q.double(), k.double(), v.double(), AttentionMask(None, None))
    parts = shard_sequence(S, keys, 1, 0).parts
    for mine in parts:
        own = torch.cat([torch.arange(*span) for span in mine])
        total = Accumulator(q[:, :, own])
        for theirs in parts:
            there = torch.cat([torch.arange(*span) for span in theirs])
            attend.add_forward(total, q[:, :, own], k[:, :, there], v[:, :, there], mask_blocks(mine, theirs, None))
        torch.testing.assert_close(total.out.double(), expected[:, :, own], rtol=2e-2, atol=2e-2)
