"""Counts of a rank's FLOPs, communications and memory, taken at every operator of the running program.

Bytes are counted per storage, from allocation until the last reference is dropped. A caching allocator's rounding and
kernels' workspaces come on top. FLOPs are those of GEMMs and attention in torch's convention: 2 per multiply-add, all
attention scores (no causal saving), and five GEMMs in the backward of attention.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from megascale.record.events import OPTIMIZER_ACTIONS
from megascale.record.label import Label, LabelLike
from megascale.record.recorder import EventRecord, MemoryKind, Recorder

BytesByKind = Counter[str]
"""Bytes by kind, one of MEMORY_KINDS."""

MEMORY_KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)


class CommCall(NamedTuple):
    """A communication. `bytes`: size of the full tensor; `peer`: global rank of a point-to-point message, else -1."""

    group: str
    operation: str
    label: Label
    bytes: int
    peer: int

    @property
    def text(self) -> str:
        return self.label.text()


@dataclass
class ResourceCounts:
    """Counts: `live_bytes` by kind and their `total`, the highest total (`peak`) and bytes by kind then (`at_peak`),
    `flops` by operator, and `calls` in order of issue.
    """

    live_bytes: BytesByKind = field(default_factory=Counter)
    total: int = 0
    peak: int = 0
    at_peak: BytesByKind = field(default_factory=Counter)
    flops: Counter[str] = field(default_factory=Counter)
    calls: list[CommCall] = field(default_factory=list)

    def add_bytes(self, kind: str, nbytes: int) -> None:
        """Add `nbytes` (negative for freed bytes) of a kind."""
        self.live_bytes[kind] += nbytes
        self.total += nbytes
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, Counter(self.live_bytes)

    def add_transient(self, kinds: BytesByKind) -> None:
        """Count bytes that are allocated and freed at once, which only raise the peak."""
        total = self.total + kinds.total()
        if total > self.peak:
            self.peak, self.at_peak = total, self.live_bytes + kinds


class CountingRecorder(Recorder):
    """A recorder that also adds communications to `counts`, and knows the memory `kind` of new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = ResourceCounts()
        self.kind: MemoryKind = "activations"

    @contextmanager
    def memory_kind(self, kind: MemoryKind) -> Iterator[None]:
        outer, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = outer

    @contextmanager
    def action(self, name: str, chunk: int = -1, microbatch: int = -1) -> Iterator[None]:
        kind = "optimizer" if name in OPTIMIZER_ACTIONS else self.kind
        with super().action(name, chunk, microbatch), self.memory_kind(kind):
            yield

    def record_communication(
        self, axis: str, group: str, name: str, label: LabelLike, nbytes: int, peer: int = -1
    ) -> EventRecord:
        if self.step:
            self.counts.calls.append(CommCall(group, name, Label.from_part(label), nbytes, peer))
        return super().record_communication(axis, group, name, label, nbytes, peer)


class ResourceCounterMode(TorchDispatchMode):
    """A dispatch mode that counts every operator in `recorder.counts`."""

    def __init__(self, recorder: CountingRecorder) -> None:
        super().__init__()
        self.recorder = recorder
        self._alive: dict[int, tuple[Any, TrackedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        count = FLOPS.get(func._overloadpacket)
        if count is not None:
            self.recorder.counts.flops[func._overloadpacket.__name__] += count(*args, **kwargs, out_val=out)
        for result in tree_leaves(out):
            if isinstance(result, Tensor):
                self.track(result)
        if torch.Tag.pointwise in func.tags:
            self.recorder.counts.add_transient(Counter({self.recorder.kind: _cast_bytes(args)}))
        return out

    def track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        nbytes = 0 if tensor.device.type == "meta" else storage.nbytes()  # in host memory
        tracked = TrackedStorage(self.recorder.counts, self.recorder.kind, nbytes)
        tracked.counts.add_bytes(tracked.kind, tracked.nbytes)
        self._alive[key] = weakref.ref(storage, partial(self._on_free, key, tracked)), tracked

    def set_kind(self, tensor: Tensor, kind: MemoryKind) -> None:
        tracked = self.storage(tensor)
        tracked.counts.live_bytes[tracked.kind] -= tracked.nbytes
        tracked.counts.live_bytes[kind] += tracked.nbytes
        tracked.kind = kind

    def drop(self, tensor: Tensor) -> None:
        """Count a tensor as freed, which autograd holds until its function ends."""
        tracked = self.storage(tensor)
        tracked.counts.add_bytes(tracked.kind, -tracked.nbytes)
        tracked.nbytes = 0

    def storage(self, tensor: Tensor) -> TrackedStorage:
        return self._alive[tensor.untyped_storage()._cdata][1]

    def _on_free(self, key: int, tracked: TrackedStorage, _: object) -> None:
        del self._alive[key]
        tracked.alive = False
        tracked.counts.add_bytes(tracked.kind, -tracked.nbytes)


@dataclass
class TrackedStorage:
    """A counted storage: its counts, memory kind and bytes, and whether anything refers to it."""

    counts: ResourceCounts
    kind: str
    nbytes: int
    alive: bool = True


def _cast_bytes(args: Any) -> int:
    """Temporary bytes of an operator on a CPU with operands of several dtypes, all cast to the common dtype."""
    operands = [x for x in tree_leaves(args) if isinstance(x, Tensor) and x.is_cpu and x.dtype != torch.bool]
    dtypes = {x.dtype for x in operands if x.dim()}  # scalars do not take part in promotion
    if len(dtypes) < 2:
        return 0
    common = functools.reduce(torch.promote_types, dtypes)
    cast_bytes = {id(x): x.numel() * common.itemsize for x in operands if x.dtype != common}
    return sum(cast_bytes.values())


aten = torch.ops.aten
FLOPS = {
    **flop_registry,
    aten.addmm_: flop_registry[aten.addmm],
    aten.baddbmm_: flop_registry[aten.baddbmm],
    aten._int_mm: flop_registry[aten.mm],
    aten._scaled_dot_product_flash_attention_for_cpu: lambda query, key, value, *_, **__: sdpa_flop_count(
        query.shape, key.shape, value.shape
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, query, key, value, *_, **__: (
        sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)
    ),
}
"""Functions from an operator's arguments to FLOPs: torch's, and those for operators that torch does not count."""
