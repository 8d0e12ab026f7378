"""The state that a run begins with: a checkpoint's, another project's weights, or a fresh one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from torch import Tensor

from megascale.checkpoint.state import Part
from megascale.config.model import ModelConfig
from megascale.config.run import FOREIGN
from megascale.core.units import format_count
from megascale.train.build import Run


class InitialWeights(Protocol):
    """Weights of another project that a run may begin with, in a folder."""

    folder: Path
    model: ModelConfig

    def check(self) -> None:
        """Check that every tensor of the model is there, in its shape. Raises: CheckpointError"""

    def part(self, name: str, part: Part) -> Tensor:
        """Read a part (offset, size) of the tensor of this name in `layout.tensors`, in any dtype."""


OpenWeights = Callable[[Path], InitialWeights]
"""Opens a folder of weights. Raises: CheckpointError if it holds none, or of a model that megascale does not have"""


def resume(run: Run, open_weights: OpenWeights) -> str:
    """Load the checkpoint, or the weights of another project, that the configuration asks for, if there is one.

    `open_weights` is called for the latter. Returns a line that says so, or nothing.
    """
    found = run.checkpoints.resume()
    lines = [f"WARNING: {text}" for text in run.checkpoints.warnings]
    if found is None:
        return "\n".join(lines + _begin(run, open_weights))
    run.progress = found.progress
    _publish(run)
    tokens = format_count(run.progress.tokens)
    lines.append(f"resumed from {found.path or 'the copies in memory'}: step {run.progress.step}, {tokens} tokens")
    return "\n".join(lines + [f"changed since: {change}" for change in found.changes])


def _begin(run: Run, open_weights: OpenWeights) -> list[str]:
    """Load another project's weights if the configuration names some. Returns lines that say so, or none."""
    asked = run.config.checkpoint.resume
    if not asked.startswith(FOREIGN):
        return []
    weights = open_weights(Path(asked.removeprefix(FOREIGN)))
    if run.mesh.rank == 0:
        weights.check()
    model = weights.model.model_dump(mode="json", exclude={"preset"})
    found = run.checkpoints.start_from(str(weights.folder), model, weights.part)
    _publish(run)
    return [f"begins with the weights of {weights.folder}", *(f"otherwise there: {one}" for one in found)]


def _publish(run: Run) -> None:
    """Round the loaded master weights into the weights of all ranks."""
    run.optimizer.publish_masters()
    for bucket in run.gradients.buckets:
        run.gradients.start_gather(bucket)
