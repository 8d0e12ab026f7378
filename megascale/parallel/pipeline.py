"""Pipeline executor: runs one rank's list of actions (`schedule.ir`), in their order.

    F               wait for the activation and, only without sp, all-gather its shards over tp; run the chunk's
                    forward; save its output's autograd edge
    R               run a forward again, from its saved input; the first one has saved nothing else
    B               wait for the output gradient and, only without sp, all-gather its shards; run the chunk's backward
    SEND_F, SEND_B  send the output of F to the next virtual stage, the input gradient of B to the previous stage
    RECV_F, RECV_B  post a receive; the F or B that consumes the message waits for it
    WAIT_PARAMS     wait for the all-gather of the chunk's first bucket group, started by `train_step` after its update
    REDUCE          start the reduction of that group's gradients over the data-parallel group

A bucket group is the buckets whose parameters begin in the same module. For the other groups of a chunk, autograd
functions in F and B wait for the all-gathers and start the reductions (bucket boundaries,
`parallel.param_and_grad_buffers`).

Chunk c on rank r of p ranks is virtual stage c p + r. Sends never block: the executor releases completed sends after
every action, and the caller waits for the rest with `finish_sends` after the last step. An exception leaves messages in
flight: the executor cannot run again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megascale.comm.collectives import all_gather
from megascale.comm.group import Group, TrackedWork
from megascale.comm.mesh import Mesh
from megascale.core.label import BACKWARD, FORWARD, Label
from megascale.parallel.backward import run_backward
from megascale.parallel.input_offload import ActivationOffload, OffloadedInput
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.param_and_grad_buffers import ParamAndGradBuffers
from megascale.schedule.ir import Action, Kind, RankSchedule


class Batch(Protocol):
    """The micro-batches of a step on this rank."""

    def micro_batch(self, index: int) -> MicroBatch: ...


@dataclass(frozen=True)
class P2PActivationSpec:
    """Format of the activations, and of their gradients, that stages send: `shape`, `dtype`, and split over `tp`.

    Without sequence parallelism `shape` is [s, b, h], and the tp ranks hold replicas: a rank sends 1 / tp of the
    activation, and the receivers all-gather the shards (the scatter/gather optimization, Narayanan et al. 2021, 4.1).
    With sequence parallelism a rank sends all of its shard, `shape` [s / tp, b, h], and `tp` is a single-rank group.
    """

    shape: tuple[int, int, int]
    dtype: torch.dtype
    device: torch.device
    tp: Group

    def with_rows(self, rows: int | None) -> P2PActivationSpec:
        """Return the format for a micro-batch of one row of `rows` tokens; None: this format."""
        return self if rows is None else replace(self, shape=(rows, 1, self.shape[2]))

    def receive_buffer(self) -> Tensor:
        """Allocate a flat buffer for this rank's shard."""
        return torch.empty(math.prod(self.shape) // self.tp.size, dtype=self.dtype, device=self.device)

    def local_shard(self, full: Tensor) -> Tensor:
        """This rank's shard of an activation, contiguous and flat."""
        return full.contiguous().view(self.tp.size, -1)[self.tp.index]

    def gather_full(self, shard: Tensor, label: Label) -> Tensor:
        """All-gather the received shards into the activation [s, b, h]; with a single-rank group only reshape."""
        if self.tp.size > 1:
            full = shard.new_empty(self.tp.size * shard.numel())  # flat: gloo requires this
            all_gather(self.tp, full, shard, label=label)
            shard = full
        return shard.view(self.shape)


@dataclass
class _Saved:
    """A forward's remains for its backward: the autograd edge of its output; `received`, which gets the gradient of a
    received input; and with offload the input of the chunk's last block.
    """

    edge: GradientEdge
    received: _ReceivedGrad | None
    offloaded: OffloadedInput | None


class _ReceivedGrad:
    """The gradient of a received activation, which nothing holds but what needs its elements."""

    grad: Tensor | None = None


class _Received(torch.autograd.Function):
    """The identity on a received activation; `scalar` is a leaf that connects it to autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scalar: Tensor, holder: _ReceivedGrad) -> Tensor:
        ctx.holder = holder
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ctx.holder.grad = grads[0]
        return None, None, None


class PipelineExecutor:
    """Runs schedules on this rank's stages, a stage per model chunk."""

    def __init__(
        self, stages: Sequence[nn.Module], buffers: ParamAndGradBuffers, mesh: Mesh,
        p2p_spec: P2PActivationSpec, loss_dtype: torch.dtype, offload: ActivationOffload | None = None,
    ) -> None:  # fmt: skip
        self.stages = stages
        self.buffers = buffers
        self.channels = mesh.p2p  # messages between the pipeline's ranks
        self.recorder = mesh.recorder
        self.p2p_spec = p2p_spec
        self.loss_dtype = loss_dtype
        self.offload = offload
        self.on_loss: Callable[[int, MicroBatch, Tensor], None] | None = None
        """If set, is called with the number of each micro-batch in training, the micro-batch, and the sum of its loss,
        on ranks with the last stage.
        """
        self._pending_sends: list[tuple[TrackedWork, Tensor]] = []

    def send(self, tensor: Tensor, target: int, label: Label) -> None:
        """Post an async send to pipeline rank `target`, and hold the tensor until the send completes."""
        self._pending_sends.append((self.channels.send(tensor, target, label=label), tensor))

    def finish_sends(self) -> None:
        """Wait until all sends have completed."""
        for send, _ in self._pending_sends:
            send.wait()
        self._pending_sends.clear()

    def release_sent(self) -> None:
        """Free tensors whose send has completed. Also reads the elapsed time of finished device events, for the log."""
        self._pending_sends = [(send, tensor) for send, tensor in self._pending_sends if not send.is_completed()]
        self.recorder.resolve_oldest_marks()

    def virtual_stage(self, chunk: int) -> int:
        """The virtual stage of this rank's chunk."""
        return chunk * self.channels.size + self.channels.rank

    def loss_scalar(self, value: float) -> Tensor:
        """Create a scalar for a loss or its gradient."""
        return torch.full((), value, dtype=self.loss_dtype, device=self.p2p_spec.device)

    def run_actions(self, actions: RankSchedule, batch: Batch) -> Tensor:
        """Run the actions of one training step, or of one evaluation: forward-only if no action is a B.

        Returns the summed loss of this rank's micro-batches, a scalar; zero on ranks without the last stage.
        """
        training = any(action.kind is Kind.B for action in actions)
        with torch.set_grad_enabled(training):
            return _Execution(self, batch, training).run_actions(actions)


class _Execution:
    """State of one run of a list of actions."""

    def __init__(self, pipeline: PipelineExecutor, batch: Batch, training: bool) -> None:
        self._p = pipeline
        self._batch = batch
        self._training = training
        self._last_stage = pipeline.channels.size * len(pipeline.stages) - 1
        # By (F or B, chunk, micro-batch): the receive posted for the action, and its buffer.
        self._receiving: dict[tuple[Kind, int, int], tuple[TrackedWork, Tensor]] = {}
        # By (F or B, chunk, micro-batch): the action's output, until its SEND.
        self._to_send: dict[tuple[Kind, int, int], Tensor] = {}
        # By (chunk, micro-batch), from F or R to B.
        self._saved: dict[tuple[int, int], _Saved] = {}
        # By (chunk, micro-batch), from F to R: the chunk's input.
        self._dropped: dict[tuple[int, int], Tensor | None] = {}
        self._loss = pipeline.loss_scalar(0.0)

    def run_actions(self, actions: RankSchedule) -> Tensor:
        # The backwards that a REDUCE follows: a REDUCE has the chunk and micro-batch of its backward.
        last_backwards = {action[1:] for action in actions if action.kind is Kind.REDUCE}
        recomputed = {action[1:] for action in actions if action.kind is Kind.R}
        recorder = self._p.recorder
        for action in actions:
            key = action[1:]  # chunk, micro-batch
            match action.kind:  # recorder.action logs an event; recorder.scope only tags the collectives inside
                case Kind.F:
                    with recorder.action("F", *key):
                        self._forward(action, dropped=key in recomputed)
                case Kind.R:
                    with recorder.action("R", *key):
                        self._run_stage(action, self._dropped.pop(key))
                case Kind.B:
                    with recorder.action("B", *key):
                        self._backward(action, is_last=key in last_backwards)
                case Kind.SEND_F | Kind.SEND_B:
                    with recorder.scope(*key):
                        self._send(action)
                case Kind.RECV_F | Kind.RECV_B:
                    with recorder.scope(*key):
                        self._receive(action)
                case Kind.WAIT_PARAMS:
                    self._p.buffers.wait_params(action.chunk)
                case Kind.REDUCE:
                    with recorder.scope(*key):
                        self._p.buffers.start_chunk_reduction(action.chunk)
            self._p.release_sent()
        return self._loss

    def _forward(self, action: Action, *, dropped: bool) -> None:
        """Run a forward. `dropped`: it saves its input only, and is recomputed before its backward."""
        key, micro_batch = (action.chunk, action.microbatch), self._batch.micro_batch(action.microbatch)
        x = self._wait_received(Kind.F, action)
        if dropped:
            self._dropped[key] = x
        with torch.set_grad_enabled(self._training and not dropped):
            out = self._run_stage(action, x)
        if self._is_last(action):  # its output is the loss
            self._loss += out
            if self._training and self._p.on_loss is not None:
                self._p.on_loss(action.microbatch, micro_batch, out)
        else:
            self._to_send[Kind.F, *key] = out
        if dropped or not self._training:
            micro_batch.release(forward_only=not self._training)

    def _run_stage(self, action: Action, x: Tensor | None) -> Tensor:
        """Run the chunk's forward, and return its output, detached. With gradients enabled, its output's edge is saved:
        backward needs no more, and a sent output is freed when its send completes.
        """
        saves = torch.is_grad_enabled()
        received: _ReceivedGrad | None = None
        if saves and x is not None:
            received = _ReceivedGrad()
            x = _Received.apply(x, self._p.loss_scalar(0.0).requires_grad_(), received)
        out: Tensor = self._p.stages[action.chunk](x, self._batch.micro_batch(action.microbatch))
        if saves:
            offloaded = self._p.offload.end_forward() if self._p.offload is not None else None
            self._saved[action.chunk, action.microbatch] = _Saved(get_gradient_edge(out), received, offloaded)
        return out.detach()

    def _is_last(self, action: Action) -> bool:
        """Return True if the output of the action's forward is the loss."""
        return self._p.virtual_stage(action.chunk) == self._last_stage

    def _backward(self, action: Action, *, is_last: bool) -> None:
        """Run a backward. `is_last`: the chunk's last before a reduction of its gradients."""
        key = (action.chunk, action.microbatch)
        saved = self._saved.pop(key)
        if self._p.offload is not None and saved.offloaded is not None:  # loaded while the gradient arrives
            self._p.offload.fetch(saved.offloaded)
        grad = self._wait_received(Kind.B, action)
        if grad is None:  # the last stage: its output is the loss
            grad = self._p.loss_scalar(1.0)
        with self._p.buffers.backward(action.chunk, last=is_last):
            run_backward(saved.edge, grad)
        if not any(microbatch == action.microbatch for _, microbatch in self._saved):
            self._batch.micro_batch(action.microbatch).release()
        if saved.received is not None:
            assert saved.received.grad is not None, "the chunk's output depends on its input"
            self._to_send[Kind.B, *key] = saved.received.grad

    def _send(self, action: Action) -> None:
        forward = action.kind is Kind.SEND_F
        tensor = self._to_send.pop((Kind.F if forward else Kind.B, action.chunk, action.microbatch))
        stage = self._p.virtual_stage(action.chunk) + (1 if forward else -1)
        self._p.send(self._p.p2p_spec.local_shard(tensor), stage % self._p.channels.size, _label(forward, stage))

    def _receive(self, action: Action) -> None:
        forward = action.kind is Kind.RECV_F
        stage = self._p.virtual_stage(action.chunk)
        source = (stage - (1 if forward else -1)) % self._p.channels.size
        out = self._spec(action).receive_buffer()
        receive = self._p.channels.receive(out, source, label=_label(forward, stage))
        self._receiving[Kind.F if forward else Kind.B, action.chunk, action.microbatch] = (receive, out)

    def _wait_received(self, kind: Kind, action: Action) -> Tensor | None:
        """Wait for the activation or gradient that another rank sends for an action; None without such a neighbour."""
        key, stage = (kind, action.chunk, action.microbatch), self._p.virtual_stage(action.chunk)
        if key not in self._receiving:
            assert stage == (0 if kind is Kind.F else self._last_stage), f"no RECV was posted for {action}"
            return None
        receive, shard = self._receiving.pop(key)
        receive.wait()
        return self._spec(action).gather_full(shard, _label(kind is Kind.F, stage))

    def _spec(self, action: Action) -> P2PActivationSpec:
        """The format of the micro-batch's messages."""
        return self._p.p2p_spec.with_rows(self._batch.micro_batch(action.microbatch).planned_rows)


def _label(forward: bool, stage: int) -> Label:
    """Label a message by its direction and its receiving virtual `stage`: equal for sender and receiver."""
    return Label(stage=stage, direction=FORWARD if forward else BACKWARD)
