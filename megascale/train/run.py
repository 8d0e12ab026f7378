"""A run on one rank: its objects (`Run`), and hooks: what acts at named moments, such as metrics, evaluations, saves.

    run_begins
      step_begins  batch_read  backwards_end  add_totals  step_ends      for every step
        evaluation_ends, save_starts, save_ends                as they happen
    run_ends or run_fails

All ranks have the same hooks in the same order, so a hook may communicate. Hooks of a plug-in, in `Run.hooks` before
training, come last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megascale.checkpoint.checkpoints import Checkpoints
    from megascale.checkpoint.format.state import Progress
    from megascale.checkpoint.load.lost_stages import Shares
    from megascale.checkpoint.save.saver import SaveResult
    from megascale.comm.mesh import Mesh
    from megascale.config.run import RunConfig
    from megascale.data.mix.loader import Loader
    from megascale.device import Device
    from megascale.model.transformer import Stage
    from megascale.optim.outer_optimizer import OuterOptimizer
    from megascale.optim.sharded import ShardedOptimizer
    from megascale.parallel.fp8_state import Fp8State
    from megascale.parallel.microbatch import StepBatch
    from megascale.parallel.param_and_grad_buffers import ParamAndGradBuffers
    from megascale.parallel.pipeline import PipelineExecutor
    from megascale.record.metrics import EvaluationMetrics
    from megascale.schedule.ir import RankSchedule
    from megascale.train.noise_scale import NoiseScale
    from megascale.train.policy_state import PolicyState
    from megascale.train.step_totals import StepTotals
    from megascale.train.stop import StopRequest
    from megascale.train.weight_average import WeightAverage

Dtypes = tuple[torch.dtype, torch.dtype]
"""The dtypes of compute and of accumulation."""


@dataclass(frozen=True)
class InitialState:
    """The state that a run was begun or resumed with in this process, and its step; "" for fresh weights. `rebuilt`: as
    in `ResumeResult`.
    """

    name: str = ""
    step: int = 0
    rebuilt: Shares = field(default_factory=dict)


@dataclass(frozen=True)
class StepResult:
    """Results of a step, equal on all ranks.

    `loss`: mean per token. `grad_norm`: norm of the mean gradient before clipping. `loss_tokens`: the labels that
    count, or the sum of their weights; without any, the loss is NaN, the norm 0, and nothing is updated. `totals`: sums
    over all ranks by name, such as "stops", the ranks with a stop request, "ranks_written" and "ranks_failed", the
    ranks that have completed or failed their part of the save in progress, "samples" with a batch ramp-up, and the
    totals of hooks; "skipped", 1 if the step was not applied.
    """

    loss: float
    grad_norm: float
    loss_tokens: float
    lr: float
    totals: Mapping[str, float]

    @property
    def stop(self) -> bool:
        """True if a rank has a stop request."""
        return self.totals["stops"] > 0


class Hook:
    """The base class of hooks: does nothing at any moment. An error of a hook ends the run."""

    def run_begins(self, run: Run) -> None:
        """Act before the first step of this process."""

    def step_begins(self, run: Run) -> None:
        """Act before the batch of a step is read; a hook of the step itself, after it."""

    def batch_read(self, run: Run, batch: StepBatch) -> None:
        """Act on the batch of a step before its forwards; a hook of the step itself only."""

    def backwards_end(self, run: Run) -> None:
        """Act after the last backward of a step, while gradients are reduced; a hook of the step itself only."""

    def add_totals(self, run: Run, totals: StepTotals) -> None:
        """Add named totals of this step, after its reductions; `StepResult.totals` has the sums over all ranks."""

    def step_ends(self, run: Run, result: StepResult) -> None:
        """Act after a step; `run.progress` counts it."""

    def evaluation_ends(self, run: Run, metrics: EvaluationMetrics) -> None:
        """Act after an evaluation."""

    def save_starts(self, run: Run, step: int) -> None:
        """Act after the start of a save to storage."""

    def save_ends(self, run: Run, saved: SaveResult) -> None:
        """Act after a save or a copy in memory is complete, or has failed."""

    def run_ends(self, run: Run) -> None:
        """Act after the last step of this process, or a stop request."""

    def run_fails(self, run: Run, error: BaseException) -> None:
        """Act on an error in training, which this process ends with."""


class Hooks(Hook):
    """Several hooks as one, called in turn."""

    def __init__(self, hooks: Iterable[Hook] = ()) -> None:
        self._hooks = list(hooks)

    def add(self, *hooks: Hook) -> None:
        """Add hooks at the end."""
        self._hooks += hooks

    def run_begins(self, run: Run) -> None:
        for hook in self._hooks:
            hook.run_begins(run)

    def step_begins(self, run: Run) -> None:
        for hook in self._hooks:
            hook.step_begins(run)

    def batch_read(self, run: Run, batch: StepBatch) -> None:
        for hook in self._hooks:
            hook.batch_read(run, batch)

    def backwards_end(self, run: Run) -> None:
        for hook in self._hooks:
            hook.backwards_end(run)

    def add_totals(self, run: Run, totals: StepTotals) -> None:
        for hook in self._hooks:
            hook.add_totals(run, totals)

    def step_ends(self, run: Run, result: StepResult) -> None:
        for hook in self._hooks:
            hook.step_ends(run, result)

    def evaluation_ends(self, run: Run, metrics: EvaluationMetrics) -> None:
        for hook in self._hooks:
            hook.evaluation_ends(run, metrics)

    def save_starts(self, run: Run, step: int) -> None:
        for hook in self._hooks:
            hook.save_starts(run, step)

    def save_ends(self, run: Run, saved: SaveResult) -> None:
        for hook in self._hooks:
            hook.save_ends(run, saved)

    def run_ends(self, run: Run) -> None:
        for hook in self._hooks:
            hook.run_ends(run)

    def run_fails(self, run: Run, error: BaseException) -> None:
        for hook in reversed(self._hooks):
            hook.run_fails(run, error)


@dataclass
class Run:
    """All objects of a run on one rank. A resume replaces `progress` and `origin`; other state is loaded in place.

    `order_of`: the actions for a number of micro-batches, in training or not. `step_hooks`: features of the step
    itself; `hooks`: those of plug-ins before training, all other hooks in training. None if there is none: `fp8_state`,
    `noise_scale`, `policy` (the data policy's state), `average`, `outer`; `sites`, once they have met.
    """

    config: RunConfig
    device: Device
    mesh: Mesh
    dtypes: Dtypes
    stages: list[Stage]
    buffers: ParamAndGradBuffers
    fp8_state: Fp8State | None
    noise_scale: NoiseScale | None
    policy: PolicyState | None
    average: WeightAverage | None
    optimizer: ShardedOptimizer
    pipeline: PipelineExecutor
    order_of: Callable[[int, bool], RankSchedule]
    train_loader: Loader
    valid_loader: Loader | None
    valid_batches: int
    lr: Callable[[int], float]
    checkpoints: Checkpoints
    progress: Progress
    stop: StopRequest
    outer: OuterOptimizer | None = None
    sites: Hook | None = None
    origin: InitialState = InitialState()
    step_hooks: Hooks = field(default_factory=Hooks)
    hooks: Hooks = field(default_factory=Hooks)
