"""Run one of several modules that do the same, and replay what it did in the place of each.

A module is rehearsed once, forward and backward, on an account of its own. A `StandIn` takes its place: it issues the
same communications, counts the same FLOPs, reaches the same peak and holds the same bytes from forward to backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from megascale.dryrun.account import Account, Accountant, Call, Kinds


@dataclass(frozen=True)
class PassCost:
    """The cost of a forward or a backward pass. `rise`: the most bytes beyond those at its start."""

    rise: Kinds
    flops: Counter[str]
    calls: list[Call]


@dataclass(frozen=True)
class ModuleCost:
    """The cost of a module, whose result has `shape` and `dtype`. `held`: bytes from its forward to its backward,
    `stays`: those that remain after it; its input, if it `keeps` that, is in neither. `backward` is None if no gradient
    is wanted.
    """

    shape: torch.Size
    dtype: torch.dtype
    forward: PassCost
    backward: PassCost | None
    held: Kinds
    stays: Kinds
    keeps: bool


@dataclass
class Rehearsals:
    """Rehearses modules, and has the `costs` of those it has rehearsed. `representatives`: the one of several equal
    modules that rehearses for all: only that one has done what a first call does, such as to cast weights.
    """

    accountant: Accountant
    accumulate: torch.dtype
    costs: dict[Hashable, ModuleCost] = field(default_factory=dict)
    representatives: dict[Hashable, nn.Module] = field(default_factory=dict)

    @property
    def account(self) -> Account:
        return self.accountant.ledger.account

    def rehearse(
        self, module: nn.Module, x: Tensor, call: Callable[[Tensor], Tensor], recompute: bool = False
    ) -> ModuleCost:
        """Run `call` on a tensor like x, and its backward if gradients are enabled. `recompute`: the module is
        recomputed, which keeps the gradient of its result until the backward is done.
        """
        ledger, wanted = self.accountant.ledger, torch.is_grad_enabled()
        outer, ledger.account = ledger.account, Account()
        try:
            with _gradients(module, self.accumulate):
                return self._rehearse(x, call, wanted, recompute)
        finally:
            ledger.account = outer

    def _rehearse(self, x: Tensor, call: Callable[[Tensor], Tensor], wanted: bool, recompute: bool) -> ModuleCost:
        account, seen = self.account, self.accountant
        leaf = torch.empty_like(x).requires_grad_(x.requires_grad and wanted)
        outside = Counter(account.live)  # what only the rehearsal holds
        entering = leaf.clone()
        key, start = seen.key(entering), self._start()
        out = call(entering)
        forward = self._cost(start)
        shape, dtype = out.shape, out.dtype
        backward: PassCost | None = None
        edge, started, given = None, [start], list[Tensor]()

        def begin(grad: Tensor) -> None:
            started.append(self._start())
            given.extend([grad] if recompute else [])

        if wanted:
            edge = get_gradient_edge(_Source.apply(out, begin))
        del out, entering
        keeps = seen.has(key)
        held = account.live - outside
        if keeps:
            held -= Counter({"activations": x.nbytes})
        if edge is not None:
            torch.autograd.backward((edge,), (torch.ones((), dtype=self.accumulate),))
            backward = self._cost(started[-1])
            leaf.grad = None
        del edge
        given.clear()
        return ModuleCost(shape, dtype, forward, backward, held, account.live - outside, keeps)

    def _start(self) -> Kinds:
        """Begin to count a pass. Returns the bytes that are live."""
        account = self.account
        account.peak, account.at_peak = account.total, Counter(account.live)
        account.flops, account.calls = Counter(), []
        return Counter(account.live)

    def _cost(self, start: Kinds) -> PassCost:
        """Return the cost of the pass that began with `start` live."""
        account, rise = self.account, Counter(self.account.at_peak)
        rise.subtract(start)
        return PassCost(rise, account.flops, account.calls)


class StandIn(nn.Module):
    """Takes the place of `module`. Modules of one `like` do the same, but for a first call in a step: it casts weights,
    and with gradients enabled its backward writes the main gradients to which later ones add. A module that is
    recomputed is called without gradients and later with them, so each of the two has a first call.

    `layer`: the layer that labels of its communications name; `recompute`: whether the module is recomputed.
    """

    def __init__(
        self, module: nn.Module, like: Hashable, layer: int, rehearsals: Rehearsals, anchor: Tensor, recompute: bool
    ) -> None:
        super().__init__()
        self._module = [module]  # whose parameters are not this one's
        self._like = like
        self._layer = layer
        self._rehearsals = rehearsals
        self._anchor = anchor
        self._recompute = recompute
        self._called = set[bool]()  # with gradients enabled, without, or both

    def forward(self, x: Tensor, *arguments: Any, **named: Any) -> Tensor:
        with_gradients = torch.is_grad_enabled()
        first = with_gradients not in self._called
        self._called.add(with_gradients)
        key = (self._like, first, tuple(named.items()), x.shape, x.requires_grad, with_gradients)
        if key not in self._rehearsals.costs:
            module = self._rehearsals.representatives.setdefault(self._like, self._module[0])
            cost = self._rehearsals.rehearse(module, x, lambda x: module(x, *arguments, **named), self._recompute)
            self._rehearsals.costs[key] = cost
        return _Replay.apply(x, self._anchor, self._rehearsals, self._rehearsals.costs[key], self._layer)


class _Replay(torch.autograd.Function):
    """Does in forward and backward what `cost` says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, rehearsals: Rehearsals, cost: ModuleCost, layer: int) -> Tensor:
        ctx.rehearsals, ctx.cost = rehearsals, cost
        ctx.layer, ctx.like = layer, (x.shape, x.dtype, x.requires_grad)
        if cost.keeps:
            ctx.save_for_backward(x)
        _replay(rehearsals, cost.forward, layer)
        for kind, nbytes in cost.held.items():
            rehearsals.account.add(kind, nbytes)
        return torch.empty(cost.shape, dtype=cost.dtype, device=x.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rehearsals, cost = ctx.rehearsals, ctx.cost
        assert cost.backward is not None, "a gradient was wanted when the module was rehearsed"
        _replay(rehearsals, cost.backward, ctx.layer)
        for kind, nbytes in (cost.held - cost.stays).items():
            rehearsals.account.add(kind, -nbytes)
        shape, dtype, wanted = ctx.like
        grad = torch.empty(shape, dtype=dtype, device=grads[0].device) if wanted else None
        return grad, None, None, None, None


class _Source(torch.autograd.Function):
    """Makes a scalar of a tensor, and in the backward the tensor's gradient, which only `begin` may hold as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, begin: Callable[[Tensor], object]) -> Tensor:
        ctx.like, ctx.begin = (x.shape, x.dtype, x.device), begin
        return torch.empty((), device=x.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        shape, dtype, device = ctx.like
        grad = torch.empty(shape, dtype=dtype, device=device)
        ctx.begin(grad)
        return grad, None


def _replay(rehearsals: Rehearsals, cost: PassCost, layer: int) -> None:
    """Count what was rehearsed. Communication that concerned the layer that rehearsed concerns `layer`."""
    ledger = rehearsals.accountant.ledger
    ledger.account.rise(cost.rise)
    ledger.account.flops.update(cost.flops)
    for call in cost.calls:
        axis, label = call.group.partition(".")[0], call.label
        if label.layer >= 0:
            label = label._replace(layer=layer)
        ledger.communication(axis, call.group, call.operation, label, call.bytes, call.peer)


@contextmanager
def _gradients(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Room for gradients where there is none now."""
    lacking = [p for p in module.parameters() if not hasattr(p, "main_grad")]
    for parameter in lacking:
        parameter.main_grad = torch.empty(parameter.shape, dtype=dtype)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for parameter in lacking:
            del parameter.main_grad  # type: ignore[attr-defined]
