"""Saved tensors of blocks, kept elsewhere behind compute (MEMO, Zhao et al. 2024; ALST, Bekman et al. 2025; vDNN, Rhu
et al. 2016): a block's input, with full recomputation, or all tensors that its forward saves.

A block's tensors leave while the next block computes, an input while its own does; they come back while the next
block's backward runs, one block ahead:

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

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megascale.layout.recompute_policy import STAYS
from megascale.parallel.activation_media import Loaded, Medium, TensorCopy


class MovedTensor:
    """A tensor with a copy elsewhere. `x`: the tensor on the device, until it has left, and once it is back."""

    def __init__(self, x: Tensor, copy: TensorCopy) -> None:
        self.x: Tensor | None = x
        self._copy = copy
        self._loading: Callable[[], Loaded] | None = None

    def leave(self) -> None:
        """Free the tensor on the device."""
        if self.x is not None:
            self._copy.leave()
            self.x = None

    def fetch(self) -> None:
        """Start to load the tensor, unless it is on the device."""
        if self.x is None and self._loading is None:
            self._loading = self._copy.load()

    def take(self) -> Tensor:
        """Return the tensor on the device."""
        self.fetch()
        if self._loading is not None:
            self.x, copied = self._loading()
            self._loading = None
            copied()
        assert self.x is not None, "a fetched tensor is on the device, or on its way"
        return self.x

    def __del__(self) -> None:
        self._copy.free()


@dataclass(eq=False)
class MovedBlock:
    """The tensors of a block, which live until its backward has used them. `before`: the block before it, in the same
    micro-batch and chunk.
    """

    before: MovedBlock | None
    _refs: list[weakref.ref[MovedTensor]] = field(default_factory=list)

    @property
    def tensors(self) -> list[MovedTensor]:
        return [tensor for ref in self._refs if (tensor := ref()) is not None]

    def add(self, tensor: MovedTensor) -> None:
        self._refs.append(weakref.ref(tensor))

    def fetch(self) -> None:
        """Start to load what is not on the device, in the order of the backward."""
        for tensor in reversed(self.tensors):
            tensor.fetch()


@dataclass
class _View:
    """A saved tensor: a view of stored memory, of a block that needs it."""

    stored: MovedTensor
    block: MovedBlock
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class ActivationStore:
    """The tensors that a rank's blocks save for backward, in one of `media` by its name."""

    def __init__(self, media: Mapping[str, Medium]) -> None:
        self.media = media
        self._leaving: MovedBlock | None = None
        self._last: MovedBlock | None = None
        self._seen = weakref.WeakValueDictionary[tuple[int, int], MovedTensor]()  # of this forward, by memory

    def store(self, x: Tensor) -> Callable[[], Tensor]:
        """Start to save a block's input; the returned function, for the block's backward, gives it back once."""
        x = x.detach()
        block = self._begin()
        self._leave_to(block)  # the block before it has been issued, and hides its save
        stored = [MovedTensor(x, self.media["host"].save(x))]
        block.add(stored[0])
        return lambda: self._restore(stored.pop(), block)

    @contextmanager
    def moving(self, medium: str, x: Tensor, weights: Iterable[Tensor]) -> Iterator[None]:
        """Move what a block in a `with` statement saves. `x`, `weights`: as in `moved_tensors`."""
        block, moves = self._begin(), moved_tensors(x, weights)

        def pack(tensor: Tensor) -> Tensor | _View:
            if tensor.is_leaf and tensor.requires_grad:  # a weight itself: its memory changes if it is sharded
                return tensor
            if not moves(tensor):
                return tensor.detach()
            stored = self._stored(tensor.detach(), medium)
            block.add(stored)
            return _View(stored, block, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

        with saved_tensors_hooks(pack, self._unpack):
            yield
        self._leave_to(block)

    def end_forward(self) -> MovedBlock | None:
        """Return the last block stored since the forward before this one, for `fetch`; None if there is none."""
        last, self._last = self._last, None
        self._seen.clear()
        return last

    def _begin(self) -> MovedBlock:
        self._last = MovedBlock(self._last)
        return self._last

    def _leave_to(self, block: MovedBlock) -> None:
        """Free what has left of the block before `block`, but for tensors that both have."""
        if self._leaving is not None:
            both = {id(tensor) for tensor in block.tensors}
            for tensor in self._leaving.tensors:
                if id(tensor) not in both:
                    tensor.leave()
        self._leaving = block

    def _stored(self, tensor: Tensor, medium: str) -> MovedTensor:
        """Store the memory of which a tensor is a view, once for all of this forward that share it unchanged."""
        memory = tensor.untyped_storage()
        key = memory._cdata, tensor._version
        known = self._seen.get(key)
        if known is not None and known.x is not None and known.x.untyped_storage()._cdata == memory._cdata:
            return known
        flat = tensor.as_strided((memory.nbytes() // tensor.itemsize,), (1,), 0)
        self._seen[key] = stored = MovedTensor(flat, self.media[medium].save(flat))
        return stored

    def _unpack(self, packed: Tensor | _View) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        memory = self._restore(packed.stored, packed.block)
        return memory.view(packed.dtype).as_strided(packed.shape, packed.stride, packed.offset)

    def _restore(self, stored: MovedTensor, block: MovedBlock) -> Tensor:
        """Return a tensor of a block; the first one starts to load the block before it."""
        if block is self._leaving:
            self._leaving = None
        block.fetch()
        x = stored.take()
        before, block.before = block.before, None
        if before is not None:
            before.fetch()
        return x


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
