"""Attention of chunks through a store of keys and values equals attention of whole sequences, with its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megascale.layout.sequence_shard import sequence_chunk
from megascale.ops.boundaries import Boundaries
from megascale.ops.core_attention import AttentionMask
from megascale.ops.partial_attention import TorchPartialAttention
from megascale.parallel.kv_exchange import VisibleScores, attend_to_all
from megascale.parallel.kv_store import KVStore, StoredKV

B, HEADS, KEYS, D, LENGTH, CHUNK = 2, 4, 2, 8, 24, 6


def whole(q: Tensor, k: Tensor, v: Tensor, window: int | None, boundaries: Boundaries | None) -> Tensor:
    """Attention with a mask of all scores."""
    place = torch.arange(LENGTH)
    seen = (place[:, None] >= place) & (place[:, None] - place < (window or LENGTH))
    mask = seen.expand(B, 1, LENGTH, LENGTH)
    if boundaries is not None:
        documents = boundaries.documents
        mask = mask & (documents[:, :, None] == documents[:, None, :]).unsqueeze(1)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("packed", [False, True])
def test_chunks_attend_as_whole_sequences(window: int | None, packed: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, n, LENGTH, D, dtype=torch.float64, requires_grad=True) for n in (HEADS, KEYS, KEYS))
    boundaries = Boundaries(((0, 4, 17), (0, 12)), LENGTH, torch.device("cpu")) if packed else None
    expected = whole(q, k, v, window, boundaries)
    upstream = torch.randn_like(expected)
    grads = torch.autograd.grad(expected, (q, k, v), upstream)

    store, outs = KVStore(), []
    parts = [
        tuple(t.detach()[..., at : at + CHUNK, :].requires_grad_() for t in (q, k, v)) for at in range(0, LENGTH, CHUNK)
    ]
    for index, own in enumerate(parts):
        shard = sequence_chunk(LENGTH, CHUNK, index)
        visible = VisibleScores(shard, AttentionMask(window, boundaries))
        outs.append(attend_to_all(*own, StoredKV(store, visible, 0), TorchPartialAttention()))
    torch.testing.assert_close(torch.cat(outs, 2), expected, rtol=1e-12, atol=1e-12)
    for out, grad in reversed(list(zip(outs, upstream.split(CHUNK, 2), strict=True))):
        out.backward(grad)
    for number, grad in enumerate(grads):
        mine = torch.cat([own[number].grad for own in parts], 2)
        torch.testing.assert_close(mine, grad, rtol=1e-12, atol=1e-12)
    assert not store.blocks and not store.grads


def test_backwards_that_ascend_miss_gradients_of_later_chunks() -> None:
    torch.manual_seed(0)
    store, parts = KVStore(), []
    for index in range(2):
        own = [torch.randn(1, n, CHUNK, D, dtype=torch.float64, requires_grad=True) for n in (HEADS, KEYS, KEYS)]
        shard = sequence_chunk(2 * CHUNK, CHUNK, index)
        visible = VisibleScores(shard, AttentionMask())
        parts.append(attend_to_all(*own, StoredKV(store, visible, 0), TorchPartialAttention()))
    parts[0].sum().backward()
    with pytest.raises(KeyError):
        parts[1].sum().backward()
