"""Launches of a GPU, counted without one, with the bytes that each reads and writes: operators of torch on tensors
without data, kernels of Triton that are noted in place of a launch, and functions that a compiler fuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megascale.ops.known_amax import keeping_row_amax, with_row_amax

NO_LAUNCH = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "promote_types")
"""Operators without a kernel, beside views that their schema tells."""


class Launch(NamedTuple):
    """A kernel, and the bytes of its operands: each is read or written once."""

    name: str
    read: int
    written: int


class LaunchCounter(TorchDispatchMode):
    """Notes `launches` in order: of operators but views and allocations, and of what `note` is told."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self._paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, schema = kwargs or {}, func._schema
        out = func(*args, **kwargs)
        name, is_view = func.overloadpacket.__name__, any(_is_view(each) for each in schema.returns)
        if self._paused or is_view or name in NO_LAUNCH:
            return out
        named = dict(zip((each.name for each in schema.arguments), args, strict=False)) | kwargs
        changed = [named.get(each.name) for each in schema.arguments if each.is_write]
        read = [named.get(each.name) for each in schema.arguments if not each.is_out]
        self.note(name, read, changed or out)
        return out

    def note(self, name: str, read: Any, written: Any) -> None:
        """Note a launch. `read`, `written`: tensors, also within lists; anything else is passed over."""
        self.launches.append(Launch(name, _nbytes(read), _nbytes(written)))

    def take(self) -> list[Launch]:
        """Return the launches since the last call."""
        taken, self.launches = self.launches, []
        return taken

    def noted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is one launch, whatever operators it calls."""

        def call(*args: Any) -> Any:
            out = self.unnoted(function, *args)
            self.note(name, args, out)
            return out

        return call

    def unnoted(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function whose operators are not noted."""
        outer, self._paused = self._paused, True
        try:
            return function(*args)
        finally:
            self._paused = outer


def _is_view(result: Any) -> bool:
    return result.alias_info is not None and not result.alias_info.is_write


def _nbytes(tensors: Any) -> int:
    """Sum the bytes of tensors, each once."""
    return sum(t.nbytes for t in {id(t): t for t in tree_leaves(tensors) if isinstance(t, Tensor)}.values())


class TritonKernel(NamedTuple):
    """A kernel of Triton by its name, and the arguments that it reads and writes."""

    name: str
    read: Sequence[str]
    written: Sequence[str]


@contextmanager
def noted_kernels(counter: LaunchCounter, module: ModuleType, kernels: Iterable[TritonKernel]) -> Iterator[None]:
    """Let kernels of a module be noted in place of their launches."""
    with ExitStack() as stack:
        for kernel in kernels:
            stand_in = _StandIn(kernel, getattr(module, kernel.name).arg_names, counter)
            stack.enter_context(mock.patch(f"{module.__name__}.{kernel.name}", stand_in))
        yield


@dataclass(frozen=True)
class _StandIn:
    kernel: TritonKernel
    arg_names: Sequence[str]
    counter: LaunchCounter

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            given, kernel = dict(zip(self.arg_names, args, strict=False)), self.kernel
            read, written = ([given[name] for name in names] for names in (kernel.read, kernel.written))
            self.counter.note(kernel.name, read, written)

        return launch


@dataclass(frozen=True)
class Fused:
    """A function that is one launch forward and one backward. `saved`: from its arguments and results to what backward
    reads beside the gradients; `summed`: the number of first arguments with one gradient, those of a sum; `keeps`: it
    keeps the amaxes of its last result's rows (`ops.known_amax`).
    """

    counter: LaunchCounter
    name: str
    function: Callable[..., Any]
    saved: Callable[[Sequence[Any], Sequence[Tensor]], Iterable[Tensor]]
    summed: int = 1
    keeps: bool = False

    def __call__(self, *args: Any) -> Any:
        return _Fused.apply(self, *args)

    def computed(self, *args: Any) -> Any:
        """Note one launch."""
        if self.keeps:
            return keeping_row_amax(self.counter.noted(self.name, with_row_amax(self.function)))(*args)
        return self.counter.noted(self.name, self.function)(*args)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fused: Fused, *args: Any) -> Any:
        out = fused.computed(*args)
        ctx.fused, ctx.args = fused, args
        ctx.save_for_backward(*fused.saved(args, (out,) if isinstance(out, Tensor) else out))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        fused, needed = ctx.fused, zip(ctx.args, ctx.needs_input_grad[1:], strict=True)
        found = [torch.empty_like(each) if needs else None for each, needs in needed]
        found[: fused.summed] = found[:1] * fused.summed
        fused.counter.note(f"{fused.name} backward", [ctx.saved_tensors, grads], found)
        return None, *found
