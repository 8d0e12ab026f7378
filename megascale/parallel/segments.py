"""A stage's forward in segments, which end where tokens set out to their experts, and where they set out to come back.

    segments   attention, norm, router, permute | experts | unpermute, residual, attention of the next layer, ...
    exchanges                            dispatch   combine

A forward in `Steps` is a generator: at the end of a segment it yields the tensors that the segment passes on, and is
sent those with which the next one begins. They are the same in a graph of all segments (`finish`), and detached where
each has a graph of its own (`cut_graphs`): backward then runs segment by segment, the last first. An exchange is under
way between segments, and whatever runs there hides it. An `Overlap` runs segments of two micro-batches by turns
(Megatron-LM's order):

    compute         attention F | experts B | their W | experts F | attention B
    exchange      combine B | dispatch F    | dispatch B    | combine F

F: forward, B: gradient of the input, W: gradients of weights. Segments with odd numbers are those of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

T = TypeVar("T")
P = ParamSpec("P")

Steps = Generator[tuple[Tensor, ...] | None, Any, T]
"""Computes a T in steps. It yields the tensors that a segment passes on, or None beside a collective of tensor-parallel
layers (`parallel.domino`).
"""


class InputGradient:
    """The gradient of an input of a graph, which nothing holds but what needs its elements."""

    grad: Tensor | None = None


class _Input(torch.autograd.Function):
    """The identity on an input of a graph; `scalar` is a leaf that connects it to autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scalar: Tensor, holder: InputGradient) -> Tensor:
        ctx.holder = holder
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ctx.holder.grad = grads[0]
        return None, None, None


def graph_input(x: Tensor) -> tuple[Tensor, InputGradient]:
    """Begin a graph with x, and say where backward leaves its gradient."""
    holder = InputGradient()
    return _Input.apply(x.detach(), x.new_zeros((), requires_grad=True), holder), holder


class Cut(NamedTuple):
    """The end of a segment: autograd's edges of the tensors before it, and the gradients of those after it."""

    edges: list[GradientEdge]
    gradients: list[InputGradient]

    def take(self) -> tuple[list[GradientEdge], list[Tensor]]:
        """Return the edges of tensors that have a gradient, and the gradients, which nothing else holds."""
        found = [(edge, each.grad) for edge, each in zip(self.edges, self.gradients, strict=True)]
        self.gradients.clear()
        return [edge for edge, grad in found if grad is not None], [grad for _, grad in found if grad is not None]


def finish(steps: Steps[T]) -> T:
    """Run the steps that are left, in one graph, and return the result."""
    try:
        passed = next(steps)
        while True:
            passed = steps.send(passed)
    except StopIteration as end:
        return end.value


def run_through(steps: Callable[P, Steps[T]]) -> Callable[P, T]:
    """Return the function that runs all steps: a module's `forward`."""
    return wraps(steps)(lambda *args, **kwargs: finish(steps(*args, **kwargs)))


def beside(scalars: dict[str, Tensor], steps: Steps[T]) -> Steps[T]:
    """Run steps whose segments also pass on `scalars`, of graphs before them, and leave there what the last has: the
    gradient of a scalar comes back to its own segment in backward.
    """
    try:
        ends = next(steps)
        while True:
            if ends is None:
                ends = steps.send((yield None))
                continue
            passed = yield (*ends, *scalars.values())
            scalars.update(zip(scalars, passed[len(ends) :], strict=True))
            ends = steps.send(passed[: len(ends)])
    except StopIteration as end:
        return end.value


def cut_graphs(steps: Steps[T], cuts: list[Cut]) -> Generator[None, None, T]:
    """Run a segment at a time, each in a graph of its own, and append the cuts between them."""
    try:
        ends = next(steps)
        while True:
            if ends is None:
                ends = steps.send(None)
                continue
            inputs = {id(x): (x, *graph_input(x)) for x in ends}  # one for a tensor that is passed on twice
            edges = [get_gradient_edge(x) for x, _, _ in inputs.values()]
            cuts.append(Cut(edges, [gradient for _, _, gradient in inputs.values()]))
            passed = tuple(inputs[id(x)][1] for x in ends)
            del ends, inputs
            yield
            ends = steps.send(passed)
    except StopIteration as end:
        return end.value
