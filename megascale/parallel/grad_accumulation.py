"""Gradient accumulation over micro-batches in main gradients.

`parameter.main_grad` is a view of a bucket's contiguous gradient buffer (`parallel.param_and_grad_buffers`). The wgrad
GEMM accumulates into the view directly where the device can (`ops.wgrad`). The first contribution of a step overwrites
the gradient of the step before, which makes zeroing unnecessary. A parameter without `main_grad` gets its gradient from
autograd: the functions here return the gradient for such a parameter, and None otherwise; and None for a frozen one,
which has no gradient.

A backward may be split into the gradient of the input, I, and those of the weights, W (Qi et al. 2023). In I a
parameter's `accumulation` has a queue of `WeightGradients`, to which linear layers add all of their work, and of the
functions here those that other layers call add themselves with their operands; W calls them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megascale.ops.embedding_rows import add_rows_
from megascale.ops.known_amax import detach_known
from megascale.ops.wgrad import Wgrad, add_, torch_wgrad

if TYPE_CHECKING:
    from megascale.ops.fp8 import ScaledWgrad
    from megascale.ops.quantized import Quantized


class WeightGradients:
    """The work that an I has left for its W, in the order of the backward."""

    def __init__(self) -> None:
        self._starts: deque[Callable[[], Callable[[], object]]] = deque()

    def add(self, work: Callable[[], object]) -> None:
        """Leave work without communication."""
        self._starts.append(lambda: work)

    def add_started(self, start: Callable[[], Callable[[], object]]) -> None:
        """Leave work whose communication `start` starts; it returns the rest."""
        self._starts.append(start)

    @torch.no_grad()
    def run(self) -> None:
        """Do the work, outside of autograd. Communication overlaps the work before."""
        started: Callable[[], object] | None = None
        while self._starts:  # each entry holds its operands: it is dropped as it starts
            following = self._starts.popleft()()
            if started is not None:
                started()
            started = following
        if started is not None:
            started()


class Accumulation:
    """Accumulation state of a parameter, its attribute `accumulation`.

    `begun`: `main_grad` holds contributions of this step; if False, the next contribution overwrites `main_grad`.
    `left`: in an I the work for its W.
    """

    __slots__ = ("begun", "left", "wgrad")

    def __init__(self, wgrad: Wgrad, begun: bool = False) -> None:
        self.wgrad = wgrad
        self.begun = begun
        self.left: WeightGradients | None = None

    def mark_begun(self) -> bool:
        """Return `begun` and set it: True if the next contribution is added, False if it overwrites."""
        begun, self.begun = self.begun, True
        return begun


ALWAYS_ADDED = Accumulation(torch_wgrad, begun=True)
"""State of a parameter that has `main_grad` and no `accumulation`: contributions are always added."""


def is_frozen(parameter: Tensor) -> bool:
    """Return True for a parameter that is not trained: it has no gradient of any kind."""
    return not parameter.requires_grad and not hasattr(parameter, "main_grad")


def left_for_w(*parameters: Tensor) -> WeightGradients | None:
    """Return the queue for the work on the gradients of parameters in an I; None if it is done at once."""
    queues = (getattr(parameter, "accumulation", ALWAYS_ADDED).left for parameter in parameters)
    return next((queue for queue in queues if queue is not None), None)


@contextmanager
def leaving(parameters: Iterable[Tensor], left: WeightGradients | None) -> Iterator[None]:
    """Leave the work on the gradients of parameters, of a backward in a `with` block, in a queue for its W; None: do it
    at once.
    """
    accumulations = [each.accumulation for each in parameters if not is_frozen(each)]  # type: ignore[attr-defined]
    outer = [accumulation.left for accumulation in accumulations]
    for accumulation in accumulations:
        accumulation.left = left
    yield
    for accumulation, before in zip(accumulations, outer, strict=True):
        accumulation.left = before


def leaves(work: Callable[..., object], parameter: Tensor, *operands: object) -> bool:
    """Leave work(parameter, *operands) for W in an I, if it is trained. Returns False if it is to be done at once."""
    if (left := left_for_w(parameter)) is not None:
        left.add(partial(work, parameter, *detached(operands)))
    return left is not None or is_frozen(parameter)


def detached(operands: Sequence[object]) -> list[object]:
    """Return operands outside of autograd: a saved tensor holds the graph before it, with the input of a block."""
    return [detach_known(each) if isinstance(each, Tensor) else each for each in operands]


def accumulate_wgrad(weight: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
    """Add grad^T x to the gradient of `weight` [n, k], for grad [t, n] and x [t, k]."""
    main: Tensor | None = getattr(weight, "main_grad", None)
    if main is None:
        return grad.t() @ x if weight.requires_grad else None
    accumulation: Accumulation = getattr(weight, "accumulation", ALWAYS_ADDED)
    accumulation.wgrad(main, grad, x, accumulation.mark_begun())
    return None


def accumulate_scaled_wgrad(weight: Tensor, grad: Quantized, x: Quantized, wgrad: ScaledWgrad) -> Tensor | None:
    """Add grad x^T to the gradient of `weight` [n, k], for quantized grad [n, t] and x [k, t]."""
    main: Tensor | None = getattr(weight, "main_grad", None)
    total = torch.empty_like(weight, dtype=torch.float32) if main is None else main
    wgrad(total, grad, x, main is not None and _mark_begun(weight))
    return total.to(weight.dtype) if main is None else None


def accumulate_grad(weight: Tensor, gradient: Tensor) -> Tensor | None:
    """Add a gradient of any dtype to the gradient of `weight`; a returned gradient has the weight's dtype."""
    if leaves(accumulate_grad, weight, gradient):
        return None
    main: Tensor | None = getattr(weight, "main_grad", None)
    if main is None:
        return gradient.to(weight.dtype)
    if _mark_begun(weight):
        add_(main, gradient)
    else:
        main.copy_(gradient)
    return None


def accumulate_bias_grad(bias: Tensor, grad: Tensor) -> Tensor | None:
    """Add the sum over rows of grad [t, n] to the gradient of `bias` [n]."""
    main: Tensor | None = getattr(bias, "main_grad", None)
    if main is None:
        return grad.sum(0) if bias.requires_grad else None
    if _mark_begun(bias):
        main += grad.sum(0, dtype=main.dtype)
    else:
        torch.sum(grad, 0, dtype=main.dtype, out=main)
    return None


def accumulate_embedding_grad(table: Tensor, index: Tensor, grad: Tensor) -> Tensor | None:
    """Add row i of grad [t, h] to row index[i] of the gradient of `table`."""
    if leaves(accumulate_embedding_grad, table, index, grad):
        return None
    main: Tensor | None = getattr(table, "main_grad", None)
    into = torch.zeros_like(table) if main is None else main
    if main is not None and not _mark_begun(table):
        main.zero_()
    add_rows_(into, index, grad.to(into.dtype))
    return into if main is None else None


def _mark_begun(parameter: Tensor) -> bool:
    accumulation: Accumulation = getattr(parameter, "accumulation", ALWAYS_ADDED)
    return accumulation.mark_begun()
