"""What a rank computes, communicates and holds, counted operator by operator as its program runs.

Bytes are those of storages, each from the operator that makes it until nothing refers to it: what a caching allocator
rounds up, and what kernels take while they run, come on top. FLOPs are those of matrix products and attention, in
torch's convention: a multiplication and an addition are two, attention counts all scores, its backward five products.
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

from megascale.core.events import OPTIMIZER_ACTIONS
from megascale.core.label import Label, What
from megascale.trace.recorder import MemoryKind, Record, Recorder

Kinds = Counter[str]
"""Bytes by what they are for: one of KINDS."""

KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)


class Call(NamedTuple):
    """A communication. `bytes`: of the whole tensor concerned."""

    group: str
    operation: str
    label: Label
    bytes: int
    peer: int

    @property
    def what(self) -> str:
        """What it concerns, for people."""
        return self.label.text()


@dataclass
class Account:
    """`live`: bytes there are now; `peak`: when they were most; `flops` by operator; `calls` in their order."""

    live: Kinds = field(default_factory=Counter)
    total: int = 0
    peak: int = 0
    at_peak: Kinds = field(default_factory=Counter)
    flops: Counter[str] = field(default_factory=Counter)
    calls: list[Call] = field(default_factory=list)

    def add(self, kind: str, nbytes: int) -> None:
        """Bytes more, or fewer."""
        self.live[kind] += nbytes
        self.total += nbytes
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, Counter(self.live)

    def rise(self, kinds: Kinds) -> None:
        """Bytes more for a moment."""
        total = self.total + kinds.total()
        if total > self.peak:
            self.peak, self.at_peak = total, self.live + kinds


class Ledger(Recorder):
    """A recorder that keeps what is called in `account` as well, and says of which `kind` is what is made now."""

    def __init__(self) -> None:
        super().__init__(capacity=1)
        self.account = Account()
        self.kind: MemoryKind = "activations"

    @contextmanager
    def memory(self, kind: MemoryKind) -> Iterator[None]:
        outer, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = outer

    @contextmanager
    def action(self, name: str, chunk: int = -1, microbatch: int = -1) -> Iterator[None]:
        kind = "optimizer" if name in OPTIMIZER_ACTIONS else self.kind
        with super().action(name, chunk, microbatch), self.memory(kind):
            yield

    def communication(self, axis: str, group: str, name: str, what: What, nbytes: int, peer: int = -1) -> Record:
        if self.step:
            self.account.calls.append(Call(group, name, Label.of(what), nbytes, peer))
        return super().communication(axis, group, name, what, nbytes, peer)


class Accountant(TorchDispatchMode):
    """While it is entered, every operator is counted in `ledger.account`."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger
        self._alive: dict[int, tuple[Any, _Held]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        count = FLOPS.get(func._overloadpacket)
        if count is not None:
            self.ledger.account.flops[func._overloadpacket.__name__] += count(*args, **kwargs, out_val=out)
        for made in tree_leaves(out):
            if isinstance(made, Tensor):
                self.see(made)
        if torch.Tag.pointwise in func.tags:
            self.ledger.account.rise(Counter({self.ledger.kind: _casts(args)}))
        return out

    def see(self, tensor: Tensor) -> None:
        """Count a tensor's storage, unless it is counted already."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        held = _Held(self.ledger.account, self.ledger.kind, storage.nbytes())
        held.account.add(held.kind, held.nbytes)
        self._alive[key] = weakref.ref(storage, partial(self._gone, key, held)), held

    def name(self, tensor: Tensor, kind: MemoryKind) -> None:
        """Say what a tensor that is counted is for."""
        held = self._alive[tensor.untyped_storage()._cdata][1]
        held.account.live[held.kind] -= held.nbytes
        held.account.live[kind] += held.nbytes
        held.kind = kind

    def key(self, tensor: Tensor) -> int:
        """Stands for a tensor's storage as long as that lives."""
        return tensor.untyped_storage()._cdata

    def has(self, key: int) -> bool:
        """Whether the storage lives."""
        return key in self._alive

    def _gone(self, key: int, held: _Held, _: object) -> None:
        del self._alive[key]
        held.account.add(held.kind, -held.nbytes)


@dataclass
class _Held:
    """A storage, and where it is counted."""

    account: Account
    kind: str
    nbytes: int


def _casts(args: Any) -> int:
    """Bytes that a CPU needs while an operator runs whose operands have several formats: it casts them all to one."""
    operands = [x for x in tree_leaves(args) if isinstance(x, Tensor) and x.is_cpu and x.dtype != torch.bool]
    formats = {x.dtype for x in operands if x.dim()}  # a scalar follows
    if len(formats) < 2:
        return 0
    common = functools.reduce(torch.promote_types, formats)
    different = {id(x): x.numel() * common.itemsize for x in operands if x.dtype != common}
    return sum(different.values())


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, out_val: Any = None, **__: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, out_val: Any = None, **__: Any
) -> int:
    return sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)


aten = torch.ops.aten
FLOPS = {
    **flop_registry,
    aten.addmm_: flop_registry[aten.addmm],
    aten.baddbmm_: flop_registry[aten.baddbmm],
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
"""FLOPs of an operator, from its arguments: torch's counts, and those of what torch does not count."""
