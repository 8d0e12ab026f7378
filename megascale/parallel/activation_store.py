"""Saved tensors of blocks, kept elsewhere behind compute (MEMO, Zhao et al. 2024; ALST, Bekman et al. 2025; vDNN, Rhu
et al. 2016): all that a block's forward saves, which with full recomputation is its input.

A block's tensors leave while the next block computes, and come back while the next block's backward runs, one block
ahead:

    forward   compute  | block 1  | block 2  |             backward  compute  | block 2  | block 1  |
              save                | of 1     | of 2                  load     | of 1     |

Memory is read and freed in the order in which work is issued to the device, and four orderings hold that together:

    a save starts after the work issued before it      which writes X
    later work waits for the save before X is freed    and its memory is reused, for it or another tensor
    a load starts after the work issued before it      which may still use the memory that it fills
    later work waits for the load                      before it reads X, and before another save reuses host memory

On the device are at most the tensors of two blocks in forward, and of three in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megascale.layout.recompute_policy import STAYS
from megascale.parallel.activation_media import HostMemory, MovedTensor


@dataclass(eq=False)
class MovedBlock:
    """The tensors of a block by their ids, which live until its backward has used them. `before`: the block before it,
    in the same micro-batch and chunk.
    """

    before: MovedBlock | None
    tensors: WeakValueDictionary[int, MovedTensor] = field(default_factory=WeakValueDictionary)

    def fetch(self) -> None:
        """Start to load what is not on the device, in the order of the backward."""
        for tensor in reversed([*self.tensors.values()]):
            tensor.fetch()


class ActivationStore:
    """The tensors that a rank's blocks save for backward, in one of `media` by its name."""

    def __init__(self, media: Mapping[str, HostMemory]) -> None:
        self.media = media
        self._leaving: MovedBlock | None = None
        self._last: MovedBlock | None = None
        self._seen = WeakValueDictionary[tuple[int, int], MovedTensor]()  # of this forward, by memory

    @contextmanager
    def moving(self, medium: str, x: Tensor, weights: Iterable[Tensor]) -> Iterator[None]:
        """Move what a block in a `with` statement saves. `x`, `weights`: as in `moved_tensors`."""
        moves, block = moved_tensors(x, weights), MovedBlock(self._last)
        self._last = block

        def pack(tensor: Tensor) -> Callable[[], Tensor]:
            is_weight = tensor.is_leaf and tensor.requires_grad  # its memory changes if it is sharded
            kept = tensor if is_weight else tensor.detach()
            if is_weight or not moves(tensor):
                return lambda: kept
            stored, dtype = self._stored(kept, medium), tensor.dtype
            place = tensor.shape, tensor.stride(), int(tensor.storage_offset())
            block.tensors[id(stored)] = stored

            def restore() -> Tensor:
                """Return the tensor; the first one of a block starts to load the block before it."""
                if block is self._leaving:
                    self._leaving = None
                block.fetch()
                flat, before, block.before = stored.take(), block.before, None
                if before is not None:
                    before.fetch()
                return flat.view(dtype).as_strided(*place)

            return restore

        with saved_tensors_hooks(pack, lambda restore: restore()):
            yield
        for key, tensor in [*self._leaving.tensors.items()] if self._leaving else ():
            if key not in block.tensors:  # what both have stays
                tensor.leave()
        self._leaving = block

    def end_forward(self) -> MovedBlock | None:
        """Return the last block stored since the forward before this one, for `fetch`; None if there is none."""
        last, self._last = self._last, None
        self._seen.clear()
        return last

    def _stored(self, tensor: Tensor, medium: str) -> MovedTensor:
        """Store the memory of which a tensor is a view, once for all of this forward that share it unchanged."""
        memory = tensor.untyped_storage()
        key = memory._cdata, tensor._version
        known = self._seen.get(key)
        if known is None or known.x is None or known.x.untyped_storage()._cdata != memory._cdata:
            flat = tensor.as_strided((memory.nbytes() // tensor.itemsize,), (1,), 0).view(torch.uint8)
            self._seen[key] = known = self.media[medium].save(flat)
        return known


def moved_tensors(x: Tensor, weights: Iterable[Tensor]) -> Callable[[Tensor], bool]:
    """Return a function that says whether a saved tensor moves, for a block with input x. Its `weights` stay, and
    tensors much smaller than x: a statistic for a row is sooner kept than asked for.
    """
    resident, least = {weight.untyped_storage()._cdata for weight in weights}, x.untyped_storage().nbytes() / STAYS
    device = x.device  # autograd holds the function, which must not hold x

    def moves(tensor: Tensor) -> bool:
        memory = tensor.untyped_storage()
        return memory._cdata not in resident and memory.nbytes() >= max(1, least) and tensor.device == device

    return moves
