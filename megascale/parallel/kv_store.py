"""The store of keys and values that chunks of a sequence share (the state store of ChunkFlow, Yuan et al. 2025).

    forwards, ascending     chunk i stores its keys and values, and attends to those of the chunks 0 to i
    backwards, descending   chunk i adds its part to the gradients of the chunks 0 to i; its own are then complete

A chunk's keys and values, [2, b, kv heads, n, d] in a layer, stay from its first forward to its backward; a recomputed
forward stores the same again. Gradients are sums over the later chunks, in fp32 or wider.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megascale.layout.sequence_shard import SequenceShard
from megascale.ops.core_attention import AttentionMask
from megascale.parallel.kv_exchange import (
    AttendBackward,
    AttendForward,
    KVExchange,
    VisibleScores,
)

Place = tuple[int, int]
"""Layer and chunk."""


@dataclass
class KVStore:
    """Keys and values of a sequence's chunks on this rank, and the gradients that later chunks have left for them."""

    blocks: dict[Place, Tensor] = field(default_factory=dict)
    grads: dict[Place, Tensor] = field(default_factory=dict)

    def exchange(self, chunk: SequenceShard, mask: AttentionMask, layer: int) -> StoredKV:
        """The keys and values that a chunk attends to in a layer: those of its sequence up to there."""
        return StoredKV(self, VisibleScores(chunk, mask), layer)

    def clear(self) -> None:
        """Free the keys and values, after the last forward of an evaluation."""
        self.blocks.clear()


class StoredKV(KVExchange):
    """The keys and values of the chunks up to that of `visible`, from the store."""

    def __init__(self, store: KVStore, visible: VisibleScores, layer: int) -> None:
        self._store = store
        self._visible = visible
        self._index = visible.shard.index
        self._layer = layer

    def forward(self, own: Tensor, attend: AttendForward) -> None:
        self._store.blocks[self._layer, self._index] = own
        for chunk in self._seen():
            attend(self._store.blocks[self._layer, chunk], self._visible.to_rank(chunk))

    def backward(self, own: Tensor, attend: AttendBackward) -> Tensor:
        blocks, grads = self._store.blocks, self._store.grads
        for chunk in self._seen():
            place = self._layer, chunk
            if place not in grads:
                wide = torch.promote_types(own.dtype, torch.float32)
                grads[place] = torch.zeros(own.shape, dtype=wide, device=own.device)
            attend(blocks[place], self._visible.to_rank(chunk), grads[place])
        del blocks[self._layer, self._index]
        return grads.pop((self._layer, self._index))

    def _seen(self) -> list[int]:
        """The chunks of which a key is visible, and this one."""
        index = self._index
        return [chunk for chunk in range(index + 1) if chunk == index or self._visible.to_rank(chunk)]
