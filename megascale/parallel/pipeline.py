"""Pipeline executor: runs one rank's list of actions (`schedule.ir`), in their order.

    F               wait for the activation and, only without sp, all-gather its shards over tp; run the chunk's
                    forward; save the autograd edges of its output and of the terms of the loss that it adds
    R               run a forward again, from its saved input; the first one has saved nothing else
    B               wait for the output gradient and, only without sp, all-gather its shards; run the chunk's backward
    I, W            the same in two: the gradient of the input, and then those of the weights, whose operands wait in a
                    queue (`parallel.grad_accumulation`)
    F&B, F&I        an Overlap: both, by turns a segment of the backward and one of the forward (`parallel.segments`)
    SEND_F, SEND_B  send the output of F to the next virtual stage on its path, the input gradient of B or I back;
                    one on the same rank is handed the tensor itself, without an action
    RECV_F, RECV_B  post a receive; the F, B or I that consumes the message waits for it
    WAIT_PARAMS     wait for the all-gather of the chunk's first bucket group, started by `train_step` after its update
    GATHER, RELEASE  with sharded weights: gather a chunk's before F or B, release them (`parallel.sharded_weights`)
    REDUCE          start the reduction of that group's gradients over the data-parallel group
    others          pass over this rank's rows of the vocabulary, or exchange with all stages (`vocabulary_passes`)

A bucket group is the buckets whose parameters begin in the same module. For the other groups of a chunk, autograd
functions in F and B wait for the all-gathers and start the reductions (bucket boundaries,
`parallel.param_and_grad_buffers`).

Sends do not block, unless they are not to `overlap` with compute: the executor releases completed sends after every
action, and the caller waits for the rest with `finish_sends` after the last step. An exception leaves messages in
flight: the executor cannot run again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megascale.comm.group import TrackedWork
from megascale.parallel.activation_messages import P2PActivationSpec
from megascale.parallel.grad_accumulation import WeightGradients
from megascale.parallel.microbatch import MicroBatch, StageOutput, StepBatch
from megascale.parallel.recompute import run_backward
from megascale.parallel.segments import Cut, InputGradient, Steps, cut_graphs, finish, graph_input
from megascale.record.label import Label
from megascale.schedule.dependencies import Neighbours, neighbours
from megascale.schedule.ir import COMPUTE_KINDS, SERVED, Action, Kind, Overlap, RankSchedule, each_action

if TYPE_CHECKING:
    from megascale.comm.mesh import Mesh
    from megascale.parallel.activation_store import ActivationStore, MovedBlock
    from megascale.parallel.param_and_grad_buffers import ParamAndGradBuffers
    from megascale.parallel.vocabulary_passes import VocabularyPasses


class PipelineStage(Protocol):
    """A model chunk's forward, at once and in segments. The first stage is given None."""

    def __call__(self, x: Tensor | None, batch: MicroBatch, /) -> StageOutput: ...

    def steps(self, x: Tensor | None, batch: MicroBatch, /) -> Steps[StageOutput]: ...


@dataclass
class _Saved:
    """A forward's remains for its backward: the autograd edges of its activation, if it has one, and of its losses; the
    `cuts` between its segments; `received`, which gets the gradient of a received input; and the last block whose saved
    tensors are `stored` elsewhere.
    """

    edges: list[GradientEdge]
    cuts: list[Cut]
    received: InputGradient | None
    stored: MovedBlock | None


class PipelineExecutor:
    """Runs schedules on this rank's stages, a stage per model chunk."""

    def __init__(
        self, stages: Sequence[PipelineStage], buffers: ParamAndGradBuffers, mesh: Mesh, p2p_spec: P2PActivationSpec,
        loss_dtype: torch.dtype, *, overlap: bool = True, store: ActivationStore | None = None,
    ) -> None:  # fmt: skip
        """`overlap`: messages overlap with compute; otherwise the sender's compute waits for them."""
        self.stages = stages
        self.placement = mesh.placement
        self.buffers = buffers
        self.channels = mesh.p2p  # messages between the pipeline's ranks
        self.recorder = mesh.recorder
        self.p2p_spec = p2p_spec
        self.loss_dtype = loss_dtype
        self.overlap = overlap
        self.store = store
        self.passes: VocabularyPasses | None = None
        """The passes of vocabulary parallelism over pp."""
        self.on_loss: Callable[[int, MicroBatch, Tensor], None] | None = None
        """If set, is called with the number of each micro-batch in training, the micro-batch, and the sum of its loss,
        on ranks with the last stage.
        """
        self._pending_sends: list[tuple[TrackedWork, Tensor]] = []

    def send(self, tensor: Tensor, target: int, label: Label) -> None:
        """Post an async send to pipeline rank `target`, and hold the tensor until the send completes."""
        send = self.channels.send(tensor, target, label=label)
        if not self.overlap:
            send.wait()
        self._pending_sends.append((send, tensor))

    def finish_sends(self) -> None:
        """Wait until all sends have completed."""
        for send, _ in self._pending_sends:
            send.wait()
        self._pending_sends.clear()

    def release_sent(self) -> None:
        """Free tensors whose send has completed. Also reads the elapsed time of finished device events, for the log."""
        self._pending_sends = [(send, tensor) for send, tensor in self._pending_sends if not send.is_completed()]
        self.recorder.resolve_oldest_marks()

    def loss_scalar(self, value: float) -> Tensor:
        """Create a scalar for a loss or its gradient."""
        return torch.full((), value, dtype=self.loss_dtype, device=self.p2p_spec.device)

    def run_actions(self, actions: RankSchedule, batch: StepBatch) -> Tensor:
        """Run the actions of one training step, or of one evaluation: forward-only if no action is a backward.

        Returns the sum of the reported terms of the loss in this rank's micro-batches, a scalar; zero without any.
        """
        training = any(action.kind in (Kind.B, Kind.I) for action in each_action(actions))
        with torch.set_grad_enabled(training):
            return _Execution(self, batch, training).run_actions(actions)


class _Execution:
    """State of one run of a list of actions."""

    def __init__(self, pipeline: PipelineExecutor, batch: StepBatch, training: bool) -> None:
        self._p = pipeline
        self._batch = batch
        self._training = training
        self._placement = pipeline.placement if training else pipeline.placement.whole
        # By F or B, B for an I too: the receive posted for the action, and its buffer.
        self._receiving: dict[Action, tuple[TrackedWork, Tensor]] = {}
        # By F or B: the action's result, until its SEND.
        self._to_send: dict[Action, Tensor] = {}
        # By F or B: what it takes from another stage of this rank.
        self._handed: dict[Action, Tensor] = {}
        # By (chunk, micro-batch), from F or R to B.
        self._saved: dict[tuple[int, int], _Saved] = {}
        # By (chunk, micro-batch), from F to R: the chunk's input.
        self._dropped: dict[tuple[int, int], Tensor | None] = {}
        # By (chunk, micro-batch), from I to W.
        self._left: dict[tuple[int, int], WeightGradients] = {}
        self._loss = pipeline.loss_scalar(0.0)

    def run_actions(self, actions: RankSchedule) -> Tensor:
        # The backwards that a REDUCE follows: a REDUCE has the chunk and micro-batch of its backward.
        reductions = [action for action in each_action(actions) if action.kind is Kind.REDUCE]
        self._last_backwards = {action[1:] for action in reductions}
        self._final_backwards = {action.chunk: action[1:] for action in reductions}.values()
        self._recomputed = {action[1:] for action in each_action(actions) if action.kind is Kind.R}
        pairs = [entry for entry in actions if isinstance(entry, Overlap)]
        self._in_segments = {action[1:] for action in each_action(pairs)}
        recorder = self._p.recorder
        for action in actions:
            if isinstance(action, Overlap):  # the backward first: the forward hides what its first segment sends
                for _ in zip_longest(self._by_turns(action.backward), self._by_turns(action.forward)):
                    self._p.release_sent()
                continue
            # an event of compute; `scope` only tags the communication inside
            enter = partial(recorder.action, action.kind.value) if action.kind in COMPUTE_KINDS else recorder.scope
            with enter(action.chunk, action.microbatch):
                self._run(action)
            self._p.release_sent()
        if self._p.passes is not None:
            self._p.passes.finish()
        return self._loss

    def _run(self, action: Action) -> None:
        kind, chunk, microbatch = action
        match kind:
            case Kind.SEND_F | Kind.SEND_B:
                self._send(action)
            case Kind.RECV_F | Kind.RECV_B:
                self._receive(action)
            case Kind.WAIT_PARAMS:
                self._p.buffers.wait_params(chunk)
            case Kind.GATHER_F | Kind.GATHER_B:
                self._p.buffers.gather_weights(chunk, backward=kind is Kind.GATHER_B)
            case Kind.RELEASE:
                self._p.buffers.release_weights(chunk)
            case Kind.REDUCE:
                if self._p.passes is not None and chunk == self._placement.v:
                    self._p.passes.add_embedding_gradients()
                self._p.buffers.start_chunk_reduction(chunk)
            case Kind.F | Kind.R | Kind.B | Kind.I | Kind.W:
                finish(self._compute(action))
            case _:
                assert self._p.passes is not None, "only vocabulary parallelism has passes and exchanges"
                loss = self._p.passes.run(action, self._batch.micro_batches[microbatch], training=self._training)
                if loss is not None:
                    self._loss += loss

    def _by_turns(self, action: Action) -> Iterator[None]:
        """Run an action segment by segment, each an event."""
        segments, ended = self._compute(action), False
        while not ended:
            with self._p.recorder.action(action.kind.value, action.chunk, action.microbatch):
                ended = next(segments, True) is True
            yield

    def _compute(self, action: Action) -> Generator[None, None, object]:
        """Return the segments of an action of compute."""
        match action.kind:
            case Kind.F:
                return self._forward(action)
            case Kind.R:
                return self._run_stage(action, self._dropped.pop(action[1:]))
            case _:
                return self._run_backward(action)

    def _forward(self, action: Action) -> Generator[None, None, None]:
        """Run a forward, which saves its input only if it is recomputed before its backward."""
        micro_batch, x = self._batch.micro_batches[action.microbatch], self._wait_received(action)
        dropped = action[1:] in self._recomputed
        if dropped:
            self._dropped[action[1:]] = x
        with torch.set_grad_enabled(self._training and not dropped):
            out = yield from self._run_stage(action, x)
        if out.loss is not None:
            self._loss += out.loss
        micro_batch.further_losses.update(out.further)
        if out.activation is not None:
            self._hand_on(action, out.activation)
        elif self._training and self._p.on_loss is not None and out.loss is not None:
            self._p.on_loss(action.microbatch, micro_batch, out.loss)
        if not self._training:
            micro_batch.release(forward_only=True)
        elif dropped:
            micro_batch.release_masks()

    def _run_stage(self, action: Action, x: Tensor | None) -> Generator[None, None, StageOutput]:
        """Run the chunk's forward, and return its output, detached. With gradients enabled, its autograd edges are
        saved: backward needs no more, and a sent output is freed when its send completes.
        """
        stage, micro_batch = self._p.stages[action.chunk], self._batch.micro_batches[action.microbatch]
        saves, cuts, received = torch.is_grad_enabled(), list[Cut](), None
        if saves and x is not None:
            x, received = graph_input(x)
        if saves and action[1:] in self._in_segments:
            out = yield from cut_graphs(stage.steps(x, micro_batch), cuts)
        else:
            out = stage(x, micro_batch)
        if saves:
            stored = self._p.store.end_forward() if self._p.store is not None else None
            roots = (out.activation, out.loss, *out.further.values())
            edges = [get_gradient_edge(root) for root in roots if root is not None]
            self._saved[action[1:]] = _Saved(edges, cuts, received, stored)
        activation, loss = (None if root is None else root.detach() for root in out[:2])
        return StageOutput(activation, loss, {module: loss.detach() for module, loss in out.further.items()})

    def _stage(self, action: Action) -> int:
        return self._placement.stage(self._p.channels.rank, action.chunk)

    def _neighbours(self, action: Action) -> Neighbours:
        return neighbours(action, self._p.channels.rank, self._placement)

    def _run_backward(self, action: Action) -> Generator[None, None, None]:
        """Run a backward, or a part of it."""
        key, buffers = action[1:], self._p.buffers
        if action.kind is Kind.I:
            left = self._left[key] = WeightGradients()
            yield from self._backward(action._replace(kind=Kind.B), left)
            return
        with buffers.backward(action.chunk, last=key in self._last_backwards, final=key in self._final_backwards):
            if action.kind is Kind.W:
                self._left.pop(key).run()
            else:
                yield from self._backward(action)

    def _backward(self, action: Action, left: WeightGradients | None = None) -> Iterator[None]:
        """Run the backward of the output and the losses of a forward, and free what it has saved. `left`: for the work
        on the gradients of weights; without it, this is done at once, of experts behind the exchange.
        """
        saved = self._saved.pop((action.chunk, action.microbatch))
        self._p.buffers.wait_params(action.chunk, backward=True)
        if saved.stored is not None:  # loaded while the gradient arrives
            saved.stored.fetch()
        grad = self._wait_received(action)
        grads = [] if grad is None else [grad]
        grads += [self._p.loss_scalar(1.0) for _ in saved.edges[len(grads) :]]
        (edges, saved.edges), grad = (saved.edges, []), None
        while True:
            behind = WeightGradients() if left is None and len(saved.cuts) % 2 else None
            queue = left or behind
            with nullcontext() if queue is None else self._p.buffers.input_gradient(action.chunk, queue):
                run_backward(edges, grads)
            if behind is not None:
                behind.run()
            if not saved.cuts:
                break
            edges, grads = saved.cuts.pop().take()
            yield
        if not any(microbatch == action.microbatch for _, microbatch in self._saved):
            self._batch.micro_batches[action.microbatch].release()
        if saved.received is not None:
            assert saved.received.grad is not None, "the chunk's output depends on its input"
            self._hand_on(action, saved.received.grad)

    def _hand_on(self, made: Action, result: Tensor) -> None:
        """Keep the result of an F or B for its SEND, or for the stage of this rank that takes it; at an end of the
        pipeline give it to the passes.
        """
        if self._neighbours(made).target is not None:
            self._to_send[made] = result
            return
        takes = self._placement.along_path(self._stage(made), 1 if made.kind is Kind.F else -1, made.microbatch)
        if takes is not None:
            self._handed[made._replace(chunk=self._placement.places[takes][1])] = result
        else:
            assert self._p.passes is not None, f"nothing takes the result of {made}"
            self._p.passes.give(made, result)

    def _send(self, action: Action) -> None:
        made, target = action._replace(kind=SERVED[action.kind]), self._neighbours(action).target
        assert target is not None, f"no other rank needs the result of {made}"
        rank, _ = self._placement.places[target]
        self._p.send(self._p.p2p_spec.local_shard(self._to_send.pop(made)), rank, _label(made, target))

    def _receive(self, action: Action) -> None:
        served, source = action._replace(kind=SERVED[action.kind]), self._neighbours(action).source
        assert source is not None, f"no other rank sends to {served}"
        rank, _ = self._placement.places[source]
        out = self._spec(action).receive_buffer()
        receive = self._p.channels.receive(out, rank, label=_label(served, self._stage(action)))
        self._receiving[served] = (receive, out)

    def _wait_received(self, action: Action) -> Tensor | None:
        """Wait for the activation or gradient that an action takes; None at an end of the pipeline."""
        if action in self._handed:
            return self._handed.pop(action)
        if action not in self._receiving:
            at_end = self._stage(action) == (self._placement.count - 1 if action.kind is Kind.B else 0)
            assert at_end, f"nothing was received for {action}"
            return None if self._p.passes is None else self._p.passes.take(action)
        receive, shard = self._receiving.pop(action)
        receive.wait()
        return self._spec(action).gather_full(shard, _label(action, self._stage(action)))

    def _spec(self, action: Action) -> P2PActivationSpec:
        """The format of the micro-batch's messages."""
        return self._p.p2p_spec.with_rows(self._batch.micro_batches[action.microbatch].planned_rows)


def _label(action: Action, stage: int) -> Label:
    """Label an action's message by its direction and its receiving virtual `stage`: equal for sender and receiver."""
    return Label(stage=stage, direction=COMPUTE_KINDS[action.kind].runs)
