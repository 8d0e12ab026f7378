"""A loss or a gradient that is not finite stops the run before anything is updated, and says where it began."""

from __future__ import annotations

import math
import socket
from typing import TYPE_CHECKING, Any

from megascale.comm.collectives import gather_objects
from megascale.core.errors import DivergenceError
from megascale.parallel.gradients import Bucket

if TYPE_CHECKING:
    from megascale.train.build import Run


def check_finite(run: Run, own_loss: float, total_loss: float, norm: float) -> None:
    """Raise if the step's loss or gradient is not finite. Every rank sees the same sums, so all raise together.

    `own_loss`: this rank's part of `total_loss`.
    Raises: DivergenceError with step, rank and parameter.
    """
    if math.isfinite(total_loss) and math.isfinite(norm):
        return
    reports = gather_objects(run.mesh.world, _report(run, own_loss))
    raise DivergenceError(
        f"step {run.progress.step + 1}: {_verdict(reports)}; nothing was updated or saved",
        mend="lower optimizer.lr, or look at the samples of this step; the last checkpoint is good",
    )


def _report(run: Run, own_loss: float) -> dict[str, Any]:
    """What is not finite on this rank: its weights, its loss, its gradients as far as they are its own."""
    gradients = [name for bucket in run.gradients.buckets for name in _bad_gradients(bucket)]
    weights = [
        name
        for bucket in run.gradients.buckets
        for name, parameter in bucket.parameters.items()
        if not bool(parameter.isfinite().all())
    ]
    return {
        "rank": run.mesh.rank,
        "host": socket.gethostname(),
        "loss": own_loss,
        "weights": weights,
        "gradients": sorted(gradients, key=_depth),
    }


def _bad_gradients(bucket: Bucket) -> list[str]:
    """Parameters whose gradient is not finite, unless only other data-parallel ranks had made the bucket so."""
    if bucket.group.size > 1 and bool(bucket.finite_before):
        return []
    found = []
    for slot in bucket.layout.slots:
        low, high = (min(max(edge, bucket.shard[0]), bucket.shard[1]) for edge in (slot.start, slot.stop))
        parts = [bucket.grad[low - bucket.shard[0] : high - bucket.shard[0]]]
        main = getattr(bucket.parameters[slot.parameter.name], "main_grad", None)
        if main is not None:  # outside its shard a rank still has what it computed itself
            parts.append(main)
        if not all(bool(part.isfinite().all()) for part in parts):
            found.append(slot.parameter.name)
    return found


def _depth(name: str) -> float:
    """Position in the network: what a backward comes to first is last."""
    if name.startswith("layers."):
        return float(name.split(".")[1])
    return -1.0 if name.startswith("embedding.position") else math.inf


def _verdict(reports: list[dict[str, Any]]) -> str:
    """The first cause that the reports show: a weight, else a loss, else a gradient. A backward carries a bad value to
    all that it comes to later, so the deepest parameter is named.
    """
    for report in reports:
        if report["weights"]:
            return f"{report['weights'][0]} has a weight that is not finite on rank {report['rank']} ({report['host']})"
    deepest = max((r for r in reports if r["gradients"]), key=lambda r: _depth(r["gradients"][-1]), default=None)
    named = (
        f"the gradient of {deepest['gradients'][-1]} on rank {deepest['rank']} ({deepest['host']})" if deepest else ""
    )
    for report in reports:
        if not math.isfinite(report["loss"]):
            rest = f", and so is {named}" if named else ""
            return f"the loss is {report['loss']} on rank {report['rank']} ({report['host']}){rest}"
    return f"{named or 'the sum of all gradients'} is not finite"
