"""The executor: runs one rank's list of actions. It knows how to do each action, and nothing about their order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megascale.comm.collectives import all_gather
from megascale.comm.group import Group, Recorded
from megascale.comm.mesh import Mesh
from megascale.core.label import BACKWARD, FORWARD, Label
from megascale.parallel.gradients import Gradients
from megascale.parallel.microbatch import MicroBatch
from megascale.schedule.ir import Action, Kind, Order


class Batch(Protocol):
    """A step's samples on this rank."""

    def micro_batch(self, index: int) -> MicroBatch: ...


@dataclass(frozen=True)
class Boundary:
    """The activation between two stages, [s, b, h]. Where each rank of `tp` has the whole of it, a stage sends this
    rank's part, 1 / size, and the next one collects it (Narayanan et al. 2021, 4.1); `tp` is a group of one where a
    rank has no more than its part.
    """

    shape: tuple[int, int, int]
    dtype: torch.dtype
    device: torch.device
    tp: Group

    def empty(self) -> Tensor:
        """Room to receive a part: flat."""
        return torch.empty(math.prod(self.shape) // self.tp.size, dtype=self.dtype, device=self.device)

    def part(self, whole: Tensor) -> Tensor:
        """What this rank sends, contiguous."""
        return whole.contiguous().view(self.tp.size, -1)[self.tp.index]

    def whole(self, part: Tensor, what: Label) -> Tensor:
        """The activation, from what this rank has received."""
        if self.tp.size > 1:
            full = part.new_empty(self.tp.size * part.numel())  # flat, as gloo wants it
            all_gather(self.tp, full, part, what=what)
            part = full
        return part.view(self.shape)


class Pipeline:
    """This rank's stages, in the order of its chunks. `loss_dtype`: the format in which losses are formed."""

    def __init__(
        self,
        stages: Sequence[nn.Module],
        gradients: Gradients,
        mesh: Mesh,
        boundary: Boundary,
        loss_dtype: torch.dtype,
    ) -> None:
        self.stages = stages
        self.gradients = gradients
        self.channels = mesh.channels
        self.recorder = mesh.recorder
        self.boundary = boundary
        self.loss_dtype = loss_dtype
        self._leaving: list[tuple[Recorded, Tensor]] = []

    def send(self, tensor: Tensor, target: int, what: Label) -> None:
        """Send to a stage rank. The tensor is kept until it has been sent, which nobody waits for."""
        self._leaving.append((self.channels.send(tensor, target, what=what), tensor))

    def finish_sends(self) -> None:
        """Wait until everything has been sent."""
        for sending, _ in self._leaving:
            sending.wait()
        self._leaving.clear()

    def release(self) -> None:
        """Let go of what has been sent, and of records that are complete."""
        self._leaving = [(sending, tensor) for sending, tensor in self._leaving if not sending.done()]
        self.recorder.keep_up()

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
        self._arriving: dict[tuple[Kind, int, int], tuple[Recorded, Tensor]] = {}
        self._leaving: dict[tuple[Kind, int, int], Tensor] = {}
        self._saved: dict[tuple[int, int], tuple[Tensor | None, GradientEdge]] = {}
        self._loss = pipeline.scalar(0.0)

    def run(self, order: Order) -> Tensor:
        reduced = {action[1:] for action in order if action.kind is Kind.REDUCE}
        recorder = self._p.recorder
        for action in order:
            place = action[1:]
            match action.kind:
                case Kind.F:
                    with recorder.action("F", *place):
                        self._forward(action)
                case Kind.B:
                    with recorder.action("B", *place):
                        self._backward(action, last=place in reduced)
                case Kind.SEND_F | Kind.SEND_B:
                    with recorder.place(*place):
                        self._send(action)
                case Kind.RECV_F | Kind.RECV_B:
                    with recorder.place(*place):
                        self._receive(action)
                case Kind.GATHER:
                    self._p.gradients.enter(action.chunk)
                case Kind.REDUCE:
                    with recorder.place(*place):
                        self._p.gradients.reduce(action.chunk)
            self._p.release()
        return self._loss

    def _forward(self, action: Action) -> None:
        key = (action.chunk, action.microbatch)
        x = self._arrived(Kind.F, action)
        last = self._p.stage(action.chunk) == self._last
        if x is not None and self._training:
            x.requires_grad_()
        if last and self._training:
            self._p.gradients.begin_loss(action.chunk)
        out = self._p.stages[action.chunk](x, self._batch.micro_batch(action.microbatch))
        if last:
            self._loss += out.detach()
        else:
            self._leaving[Kind.F, *key] = out.detach()
        if self._training:  # the edge, not the tensor, which may be freed as soon as it was sent
            self._saved[key] = (x, get_gradient_edge(out))

    def _backward(self, action: Action, *, last: bool) -> None:
        key = (action.chunk, action.microbatch)
        grad = self._arrived(Kind.B, action)
        if grad is None:
            grad = self._p.scalar(1.0)
        x, edge = self._saved.pop(key)
        self._p.gradients.begin_backward(action.chunk, last=last)
        torch.autograd.backward((edge,), (grad,))
        if x is not None:
            assert x.grad is not None
            self._leaving[Kind.B, *key] = x.grad

    def _send(self, action: Action) -> None:
        forward = action.kind is Kind.SEND_F
        tensor = self._leaving.pop((Kind.F if forward else Kind.B, action.chunk, action.microbatch))
        stage = self._p.stage(action.chunk) + (1 if forward else -1)
        self._p.send(self._p.boundary.part(tensor), stage % self._p.channels.ranks, _label(forward, stage))

    def _receive(self, action: Action) -> None:
        forward = action.kind is Kind.RECV_F
        stage = self._p.stage(action.chunk)
        source = (stage - (1 if forward else -1)) % self._p.channels.ranks
        out = self._p.boundary.empty()
        pending = self._p.channels.receive(out, source, what=_label(forward, stage))
        self._arriving[Kind.F if forward else Kind.B, action.chunk, action.microbatch] = (pending, out)

    def _arrived(self, kind: Kind, action: Action) -> Tensor | None:
        """The activation or gradient that an action needs from another rank, once it is here; None if from no other."""
        key = (kind, action.chunk, action.microbatch)
        if key not in self._arriving:
            return None
        pending, part = self._arriving.pop(key)
        pending.wait()
        return self._p.boundary.whole(part, _label(kind is Kind.F, self._p.stage(action.chunk)))


def _label(forward: bool, stage: int) -> Label:
    """Label the message that arrives at virtual stage `stage`, alike on both sides."""
    return Label(stage=stage, direction=FORWARD if forward else BACKWARD)
