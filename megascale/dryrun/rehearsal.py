"""Modules that are like others are not run again: what the first of them did is done once more.

A module is rehearsed once, forward and backward, on an account of its own. In its place comes a `StandIn`: it issues
the same communications, counts the same FLOPs, rises to the same peak and holds the same bytes from forward to
backward.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megascale.dryrun.account import Account, Accountant, Call, Kinds


@dataclass(frozen=True)
class Course:
    """What a forward or a backward does. `rise`: the most bytes beyond those at its start."""

    rise: Kinds
    flops: Counter[str]
    calls: list[Call]


@dataclass(frozen=True)
class Part:
    """What a module does. `held`: bytes from its forward to its backward, `stays`: of these for ever, beside its input
    if it `keeps` that. `backward` is None if no gradient is wanted.
    """

    shape: torch.Size
    dtype: torch.dtype
    forward: Course
    backward: Course | None
    held: Kinds
    stays: Kinds
    keeps: bool


@dataclass
class Rehearsals:
    """Where rehearsals are held, and what has been rehearsed. `actors`: of modules that are alike the one that
    rehearses for all, and its index: what only a first call does, such as to cast weights, only that one has done.
    """

    accountant: Accountant
    accumulate: torch.dtype
    parts: dict[Hashable, Part] = field(default_factory=dict)
    actors: dict[Hashable, tuple[nn.Module, str]] = field(default_factory=dict)

    @property
    def account(self) -> Account:
        return self.accountant.ledger.account

    def rehearse(self, module: nn.Module, x: Tensor, call: Callable[[Tensor], Tensor], again: bool = False) -> Part:
        """Run `call` on a tensor like x, and its backward if gradients are enabled. `again`: who computes it again
        keeps the gradient of its result until the backward is done.
        """
        ledger, wanted = self.accountant.ledger, torch.is_grad_enabled()
        outer, ledger.account = ledger.account, Account()
        try:
            with _gradients(module, self.accumulate):
                return self._rehearse(x, call, wanted, again)
        finally:
            ledger.account = outer

    def _rehearse(self, x: Tensor, call: Callable[[Tensor], Tensor], wanted: bool, again: bool) -> Part:
        account, seen = self.account, self.accountant
        leaf = torch.empty_like(x).requires_grad_(x.requires_grad and wanted)
        outside = Counter(account.live)  # what only the rehearsal holds
        entering = leaf.clone()
        key, start = seen.key(entering), self._start()
        out = call(entering)
        forward = self._course(start)
        shape, dtype = out.shape, out.dtype
        backward: Course | None = None
        edge, started, given = None, [start], list[Tensor]()

        def begin(grad: Tensor) -> None:
            started.append(self._start())
            given.extend([grad] if again else [])

        if wanted:
            edge = get_gradient_edge(_Source.apply(out, begin))
        del out, entering
        keeps = seen.has(key)
        held = account.live - outside
        if keeps:
            held -= Counter({"activations": x.nbytes})
        if edge is not None:
            self._run_backward(edge)
            backward = self._course(started[-1])
            leaf.grad = None
        del edge
        given.clear()
        return Part(shape, dtype, forward, backward, held, account.live - outside, keeps)

    def _run_backward(self, edge: GradientEdge) -> None:
        torch.autograd.backward((edge,), (torch.ones((), dtype=self.accumulate),))

    def _start(self) -> Kinds:
        """A course begins: what is there."""
        account = self.account
        account.peak, account.at_peak = account.total, Counter(account.live)
        account.flops, account.calls = Counter(), []
        return Counter(account.live)

    def _course(self, start: Kinds) -> Course:
        account, rise = self.account, Counter(self.account.at_peak)
        rise.subtract(start)
        return Course(rise, account.flops, account.calls)


class StandIn(nn.Module):
    """In the place of `module`. Modules of one `like` do the same, but for their first call in a step: then weights are
    cast. `index`: of a layer, which the names of its communications have; `again`: whether it is computed again.
    """

    def __init__(
        self, module: nn.Module, like: Hashable, index: str, rehearsals: Rehearsals, anchor: Tensor, again: bool
    ) -> None:
        super().__init__()
        self._module = [module]  # whose parameters are not this one's
        self._like = like
        self._index = index
        self._rehearsals = rehearsals
        self._anchor = anchor
        self._again = again
        self._first = True

    def forward(self, x: Tensor, *arguments: Any, **named: Any) -> Tensor:
        key = (self._like, self._first, tuple(named.items()), x.shape, x.requires_grad, torch.is_grad_enabled())
        self._first = False
        if key not in self._rehearsals.parts:
            module, index = self._rehearsals.actors.setdefault(self._like, (self._module[0], self._index))
            part = self._rehearsals.rehearse(module, x, lambda x: module(x, *arguments, **named), self._again)
            self._rehearsals.parts[key] = _anonymous(part, index)
        return _Act.apply(x, self._anchor, self._rehearsals, self._rehearsals.parts[key], self._index)


class _Act(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, rehearsals: Rehearsals, part: Part, index: str) -> Tensor:
        ctx.rehearsals, ctx.part, ctx.index = rehearsals, part, index
        ctx.like = x.shape, x.dtype, x.requires_grad
        if part.keeps:
            ctx.save_for_backward(x)
        _play(rehearsals, part.forward, index)
        for kind, nbytes in part.held.items():
            rehearsals.account.add(kind, nbytes)
        return torch.empty(part.shape, dtype=part.dtype, device=x.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rehearsals, part = ctx.rehearsals, ctx.part
        assert part.backward is not None
        _play(rehearsals, part.backward, ctx.index)
        for kind, nbytes in (part.held - part.stays).items():
            rehearsals.account.add(kind, -nbytes)
        shape, dtype, wanted = ctx.like
        grad = torch.empty(shape, dtype=dtype, device=grads[0].device) if wanted else None
        return grad, None, None, None, None


class _Source(torch.autograd.Function):
    """A scalar from a tensor. In the backward the tensor's gradient, which nobody else holds but `begin`."""

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


_ANY = "\0"
"""In the place of a layer's number."""


def _play(rehearsals: Rehearsals, course: Course, index: str) -> None:
    ledger = rehearsals.accountant.ledger
    ledger.account.rise(course.rise)
    ledger.account.flops.update(course.flops)
    for call in course.calls:
        axis = call.group.partition(".")[0]
        ledger.communication(axis, call.group, call.operation, call.what.replace(_ANY, index), call.bytes, call.peer)


def _anonymous(part: Part, index: str) -> Part:
    """The part without the number of its layer in the names of its communications."""
    if not index:
        return part
    number = re.compile(rf"(?<=\blayer |ayers\.){index}\b")

    def of(course: Course) -> Course:
        return replace(course, calls=[call._replace(what=number.sub(_ANY, call.what)) for call in course.calls])

    return replace(part, forward=of(part.forward), backward=part.backward and of(part.backward))


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
