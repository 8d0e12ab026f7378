"""A ring of keys and values gives torch's ring attention (`torch.distributed.tensor.experimental`), and its gradients,
with torch's kernel for CPUs and its head-tail chunks. torch's dispatcher has no entry for that kernel, but its ring
takes any.
"""

from __future__ import annotations

from typing import Any

import pytest

from megascale.core.rank import Rank
from megascale.ops.core_attention import AttentionMask
from tests.worlds import run_world

TOKENS = 12  # of a rank


def both(rank: Rank) -> list[float]:
    """Return the largest differences of output and gradients, and that of the output from attention to all keys."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

    from megascale.comm.open_group import open_group
    from megascale.layout.sequence_shard import shard_sequence
    from megascale.ops.partial_attention import TorchPartialAttention
    from megascale.parallel.kv_exchange import RingKV, VisibleScores, attend_to_all
    from megascale.record.recorder import Recorder

    aten, world = torch.ops.aten, rank.world_size
    shard = shard_sequence(TOKENS * world, world, 1, rank.rank)
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(4, 2, 3, TOKENS * world, 8, generator=generator, dtype=torch.float64)
    q, k, v, grad = torch.cat([whole[..., slice(*span), :] for span in shard.spans], -2).unbind()

    group = open_group("cp.keys", range(world), rank.rank, Recorder(), messages=True)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    ring = RingKV(group, VisibleScores(shard, AttentionMask()), 0)
    out = attend_to_all(leaves[0], leaves[1], leaves[2], ring, TorchPartialAttention())
    ours = [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    theirs._cp_options.convert_to_f32 = False  # these tensors are in fp64

    def forward(query: Any, key: Any, value: Any, **given: Any) -> Any:
        return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, given["is_causal"])

    def backward(query: Any, key: Any, value: Any, **given: Any) -> Any:
        given |= {"query": query, "key": key, "value": value}
        names = ("grad_out", "query", "key", "value", "out", "logsumexp")
        operands = (given[name] for name in names)
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(*operands, 0.0, given["is_causal"])

    everyone = dist.group.WORLD
    assert everyone is not None
    found, lse = theirs._templated_ring_attention(everyone, 2, forward, q, k, v, True)
    grads = theirs._templated_ring_attention_backward(
        everyone, 2, backward, grad, "grad_out", q, k, v, found, lse.contiguous(), True
    )
    differences = [float((a - b).abs().max()) for a, b in zip(ours, (found, *grads), strict=True)]
    visible = aten._scaled_dot_product_flash_attention_for_cpu(q, whole[1], whole[2], 0.0, False)[0]
    return [*differences, float((out - visible).abs().max())]


@pytest.mark.parametrize("world", [2, 3])
def test_a_ring_is_torchs_ring(world: int) -> None:
    for *differences, from_all in run_world(world, both):
        assert max(differences) < 1e-12
        assert from_all > 0.1
