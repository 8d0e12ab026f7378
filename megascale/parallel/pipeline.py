"""The executor: runs one rank's list of actions. It knows how to do each action, and nothing about their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megascale.comm.p2p import Channels
from megascale.comm.pending import Pending
from megascale.parallel.gradients import Gradients
from megascale.parallel.microbatch import MicroBatch
from megascale.schedule.ir import Action, Kind, Order

GRADIENTS_IN_FLIGHT = 2
"""Gradients sent to earlier stages and not yet known to have arrived. A forward's arrival is known from the gradient
that comes back for it; a gradient's is waited for when this many are under way (`schedule.check` proves that none waits
for ever).
"""


class Batch(Protocol):
    """A step's samples on this rank."""

    def micro_batch(self, index: int) -> MicroBatch: ...


@dataclass(frozen=True)
class Boundary:
    """The activation between two stages, [s, b, h]."""

    shape: tuple[int, int, int]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        """Room to receive one."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class Pipeline:
    """This rank's stages, in the order of its chunks. `loss_dtype`: the format in which losses are formed."""

    def __init__(
        self,
        stages: Sequence[nn.Module],
        gradients: Gradients,
        channels: Channels,
        boundary: Boundary,
        loss_dtype: torch.dtype,
    ) -> None:
        self.stages = stages
        self.gradients = gradients
        self.channels = channels
        self.boundary = boundary
        self.loss_dtype = loss_dtype

    def stage(self, chunk: int) -> int:
        """The virtual stage that is `chunk` of this rank."""
        return chunk * self.channels.ranks + self.channels.rank

    def scalar(self, value: float) -> Tensor:
        """A loss, or a loss's gradient."""
        return torch.full((), value, dtype=self.loss_dtype, device=self.boundary.device)

    def run(self, order: Order, batch: Batch) -> Tensor:
        """Do the actions of one step, or of one evaluation if there is no backward among them.

        Returns the sum of the losses of this rank's micro-batches, a scalar: zero on ranks without the last stage.
        """
        training = any(action.kind is Kind.B for action in order)
        with torch.set_grad_enabled(training):
            return _Run(self, batch, training).run(order)


class _Run:
    """The state of one run: what has arrived, what waits to be sent, and what backwards need. Keys are (chunk,
    micro-batch).
    """

    def __init__(self, pipeline: Pipeline, batch: Batch, training: bool) -> None:
        self._p = pipeline
        self._batch = batch
        self._training = training
        self._last = pipeline.channels.ranks * len(pipeline.stages) - 1
        self._arriving: dict[tuple[Kind, int, int], tuple[Pending, Tensor]] = {}
        self._leaving: dict[tuple[Kind, int, int], Tensor] = {}
        self._sent_forwards: dict[tuple[int, int], tuple[Pending, Tensor]] = {}
        self._sent_gradients: deque[tuple[Pending, Tensor]] = deque()
        self._saved: dict[tuple[int, int], tuple[Tensor | None, GradientEdge]] = {}
        self._loss = pipeline.scalar(0.0)

    def run(self, order: Order) -> Tensor:
        for action in order:
            match action.kind:
                case Kind.F:
                    self._forward(action)
                case Kind.B:
                    self._backward(action)
                case Kind.SEND_F | Kind.SEND_B:
                    self._send(action)
                case Kind.RECV_F | Kind.RECV_B:
                    self._receive(action)
                case Kind.GATHER:
                    self._p.gradients.finish_gather(action.chunk)
                case Kind.REDUCE:
                    self._p.gradients.reduce(action.chunk)
        for pending, _ in (*self._sent_forwards.values(), *self._sent_gradients):
            pending.wait()
        return self._loss

    def _forward(self, action: Action) -> None:
        key = (action.chunk, action.microbatch)
        x = self._arrived(Kind.F, action)
        if x is not None and self._training:
            x.requires_grad_()
        out = self._p.stages[action.chunk](x, self._batch.micro_batch(action.microbatch))
        if self._p.stage(action.chunk) == self._last:
            self._loss += out.detach()
        else:
            self._leaving[Kind.F, *key] = out.detach()
        if self._training:  # the edge, not the tensor, which may be freed as soon as it was sent
            self._saved[key] = (x, get_gradient_edge(out))

    def _backward(self, action: Action) -> None:
        key = (action.chunk, action.microbatch)
        grad = self._arrived(Kind.B, action)
        if grad is None:
            grad = self._p.scalar(1.0)
        if key in self._sent_forwards:  # its gradient is here, so it has arrived
            self._sent_forwards.pop(key)[0].wait()
        x, edge = self._saved.pop(key)
        self._p.gradients.begin_backward(action.chunk)
        torch.autograd.backward((edge,), (grad,))
        if x is not None:
            assert x.grad is not None
            self._leaving[Kind.B, *key] = x.grad

    def _send(self, action: Action) -> None:
        forward = action.kind is Kind.SEND_F
        key = (action.chunk, action.microbatch)
        tensor = self._leaving.pop((Kind.F if forward else Kind.B, *key)).contiguous()
        target = (self._p.stage(action.chunk) + (1 if forward else -1)) % self._p.channels.ranks
        pending = self._p.channels.send(tensor, target)
        if forward and self._training:
            self._sent_forwards[key] = (pending, tensor)
            return
        self._sent_gradients.append((pending, tensor))
        if len(self._sent_gradients) > GRADIENTS_IN_FLIGHT:
            self._sent_gradients.popleft()[0].wait()

    def _receive(self, action: Action) -> None:
        forward = action.kind is Kind.RECV_F
        source = (self._p.stage(action.chunk) - (1 if forward else -1)) % self._p.channels.ranks
        out = self._p.boundary.empty()
        pending = self._p.channels.receive(out, source)
        self._arriving[Kind.F if forward else Kind.B, action.chunk, action.microbatch] = (pending, out)

    def _arrived(self, kind: Kind, action: Action) -> Tensor | None:
        """The activation or gradient that an action needs from another rank, once it is here; None if from no other."""
        key = (kind, action.chunk, action.microbatch)
        if key not in self._arriving:
            return None
        pending, tensor = self._arriving.pop(key)
        pending.wait()
        return tensor
