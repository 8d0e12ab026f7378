"""A loss or a gradient that is not finite stops the run before anything is updated, and says where it began."""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megascale.comm.totals import sum_over_job
from megascale.config.model import ModelConfig
from megascale.core.errors import DivergenceError
from megascale.layout.tensors import whole
from megascale.parallel.gradients import Bucket

if TYPE_CHECKING:
    from megascale.train.build import Run


@dataclass(frozen=True)
class Report:
    """What is not finite on one rank. Ranks of one `place`, (pp, tp), hold the same buckets.

    `gradients`: parameters whose sum over data parallelism is not finite in this rank's shard, with their bucket;
    `spoilt`: the buckets that were not finite before that sum, for after it no shard shows whose gradient it was;
    `blind`: whether a bucket that is not among them may have been so, but for its norms and biases.
    """

    rank: int
    host: str
    place: list[int]
    loss: float
    weights: list[str]
    gradients: dict[str, int]
    spoilt: list[int]
    blind: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host})"


def check_finite(run: Run, own_loss: float, total_loss: float, norm: float) -> None:
    """Raise if the step's loss or gradient is not finite. Every rank sees the same sums, so all raise together.

    `own_loss`: this rank's part of `total_loss`.
    Raises: DivergenceError with step, rank and parameter.
    """
    if math.isfinite(total_loss) and math.isfinite(norm):
        return
    everyone = run.mesh.world.control.gather(asdict(_report(run, own_loss)), "what is not finite")
    reports = [Report(**each) for each in everyone]
    raise DivergenceError(
        f"step {run.progress.step + 1}: {_verdict(reports, run.config.model)}; nothing was updated or saved",
        mend="lower optimizer.lr, or look at the samples of this step; the last checkpoint is good",
    )


def check_state(run: Run) -> None:
    """Raise on every rank if a weight, or what the optimizer keeps of it, is not finite: no such state may become the
    last checkpoint.

    Raises: DivergenceError with step, rank and parameter.
    """
    held = [(s.bucket, values) for s in run.optimizer.shards for values in (s.master, *s.state.values())]
    spoilt = torch.stack([~_finite(values) for _, values in held]).sum()
    sum_over_job(run.mesh, spoilt, what="state that is not finite")
    if not bool(spoilt):
        return
    bad = next((name for bucket, values in held for name in _not_finite(bucket, values)), "")
    everyone = run.mesh.world.control.gather(bad, "state that is not finite")
    rank, name = next((rank, name) for rank, name in enumerate(everyone) if name)
    raise DivergenceError(
        f"step {run.progress.step}: {name} or its optimizer state is not finite on rank {rank}; it was not saved",
        mend="lower optimizer.lr; the last checkpoint is good",
    )


def _finite(values: Tensor) -> Tensor:
    """Whether all of many numbers are finite, a bool where they are: a nan is the least and the largest of them. To
    look for these two reads the numbers once, where isfinite() writes as many.
    """
    return torch.stack(values.aminmax()).isfinite().all()


def _report(run: Run, own_loss: float) -> Report:
    coord, buckets = run.mesh.coord, run.gradients.buckets
    return Report(
        rank=run.mesh.rank,
        host=socket.gethostname(),
        place=[coord.pp, coord.tp],
        loss=own_loss,
        weights=[name for b in buckets for name, p in b.parameters.items() if not bool(p.isfinite().all())],
        gradients={name: index for index, b in enumerate(buckets) for name in _not_finite(b, b.grad)},
        spoilt=[i for i, bucket in enumerate(buckets) if bucket.group.size == 1 or not bucket.finite_before()],
        blind=any(bucket.blind for bucket in buckets),
    )


def _not_finite(bucket: Bucket, values: Tensor) -> list[str]:
    """Parameters of which the part in this rank's shard is not finite in `values` [size of the shard]."""
    start, stop = bucket.shard
    found = []
    for slot in bucket.layout.slots:
        low, high = (min(max(edge, start), stop) - start for edge in (slot.start, slot.stop))
        if not bool(values[low:high].isfinite().all()):
            found.append(slot.parameter.name)
    return found


def _verdict(reports: Sequence[Report], model: ModelConfig) -> str:
    """The first cause that the reports show: a weight, else a loss, else a gradient."""
    for report in reports:
        if report.weights:
            return f"{report.weights[0]} has a weight that is not finite on {report}"
    named = _first_gradient(reports, model)
    for report in reports:
        if not math.isfinite(report.loss):
            return f"the loss is {report.loss} on {report}" + (f", and so is {named}" if named else "")
    return f"{named or 'the sum of all gradients'} is not finite"


def _first_gradient(reports: Sequence[Report], model: ModelConfig) -> str:
    """The parameter that the backward came to first, for it carries a bad value to all that it comes to later; and the
    ranks from which it may have come.
    """
    order = {parameter.name: position for position, parameter in enumerate(whole(model))}
    bad = {(order[name], name) for report in reports for name in report.gradients}
    if not bad:
        return ""
    _, name = max(bad)
    holders = [report for report in reports if name in report.gradients]
    buckets = [(report.place, report.gradients[name]) for report in holders]
    sources = [r for r in reports if any(r.place == place and bucket in r.spoilt for place, bucket in buckets)]
    blind = [r for r in reports if r.blind and any(r.place == place for place, _ in buckets)]
    first, *others = sources or blind or holders
    return f"the gradient of {name} on {first}" + (f" and {len(others)} more" if others else "")
