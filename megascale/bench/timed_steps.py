"""Training steps of a benchmark: a run without checkpoints, its steps, and their times."""

from __future__ import annotations

from megascale.bench.quartiles import intervals
from megascale.comm.mesh import single_process_mesh
from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.device import Device
from megascale.train.build import build_mesh, build_rank_run
from megascale.train.run import Run
from megascale.train.step import train_step
from megascale.train.stop import StopRequest


def build_run(config: RunConfig, device: Device, rank: Rank | None = None) -> Run:
    """Build a resolved configuration on a rank of an initialised job, or without one on this process alone."""
    mesh = build_mesh(config, rank, device) if rank else single_process_mesh()
    return build_rank_run(config, mesh, device, StopRequest())


def take_step(run: Run) -> float:
    """Train for one step; return the loss."""
    loss = train_step(run, run.train_loader.batch(run.progress.samples)).loss
    run.mesh.recorder.resolve_marks()  # as in the training loop, or marks accumulate
    return loss


def time_steps(run: Run, count: int) -> tuple[list[float], list[float]]:
    """Train for `count` steps; return the seconds and the loss of every step. The times are those of marks in the
    device's stream, read when all steps are done, without extra synchronisation.
    """
    timer, losses = run.device.timer(), []
    marks = [timer.mark()]
    for _ in range(count):
        losses.append(take_step(run))
        marks.append(timer.mark())
    run.device.synchronize()
    return intervals(timer, marks), losses
