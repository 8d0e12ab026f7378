"""The initial state of a run: a checkpoint, another project's weights, or fresh weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from megascale.checkpoint.collective_errors import on_all_ranks
from megascale.checkpoint.format.state import Region
from megascale.config.model import ModelConfig
from megascale.config.train import HF_PREFIX
from megascale.core.errors import CheckpointError
from megascale.core.units import format_count
from megascale.parallel.stateful import WEIGHTS
from megascale.train.finite_check import all_finite
from megascale.train.run import InitialState, Run


class InitialWeights(Protocol):
    """A folder of another project's weights, to start a run from."""

    folder: Path
    model: ModelConfig

    def check_tensors(self) -> None:
        """Check presence and shape of every tensor of the model. Raises: CheckpointError"""

    def read_tensor(self, name: str, part: Region) -> Tensor:
        """Read the region `part` (offset, size) of a tensor, in any dtype. `name`: as in `layout.tensors`."""

    def place_of(self, name: str) -> str:
        """Name the file of a tensor, and the tensor as the file does."""

    def leave_out_depths(self, kept: int) -> int:
        """Leave out layers of multi-token prediction beyond the first `kept`, and return their number."""


OpenWeights = Callable[[Path], InitialWeights]
"""Opens a folder of weights. Raises: CheckpointError for a folder without weights or with an unsupported model."""


def load_initial_state(run: Run, open_weights: OpenWeights) -> str:
    """Load the configured checkpoint or another project's weights (by `open_weights`), if any.

    Returns lines for the user: source, warnings and changes of the configuration; empty for fresh weights.
    """
    resumed = run.checkpoints.resume()
    lines = [f"WARNING: {text}" for text in run.checkpoints.warnings]
    if run.mesh.rank == 0 and run.config.checkpoint.every:
        from megascale.train.weight_companions import keep_companions

        warnings = keep_companions(
            run.config.folder, run.config.data, run.config.checkpoint.resume, resumed.path if resumed else None
        )
        lines += [f"WARNING: {text}" for text in warnings]
    if resumed is None:
        return "\n".join(lines + _load_initial_weights(run, open_weights))
    run.progress = resumed.progress
    _check_order(run, resumed.config)
    source = str(resumed.path) if resumed.path else "the copies in memory"
    run.origin = InitialState(source, run.progress.step, resumed.rebuilt)
    _check_finite(run, lambda name: f"{source}: {name}")
    copy_masters_and_gather(run)
    if run.optimizer.fresh_state and run.progress.step:  # of this rank's parameters; other stages have the same rules
        names = ", ".join(sorted(run.optimizer.fresh_state))
        lines.append(f"optimizer state that is not in the checkpoint, or is of another rule, begins at zero: {names}")
        lines.append("bias corrections do not begin anew with it: see docs/optimizers.md#changing-the-rule")
    if run.average is not None and run.average.begins_anew and run.progress.step:
        lines.append("the average of the weights begins anew: the checkpoint has none, or of another kind")
    tokens = format_count(run.progress.tokens)
    lines.append(f"resumed from {source}: step {run.progress.step}, {tokens} loss tokens")
    if run.config.checkpoint.resume == "auto" and run.progress.samples:
        from megascale.data.mix.order_changes import order_changes

        now = run.config.model_dump(mode="json", by_alias=True)
        lines += [f"WARNING: {text}" for text in order_changes(resumed.config, now)]
    return "\n".join(lines + [f"changed since the checkpoint: {change}" for change in resumed.changes])


def _check_order(run: Run, saved: Mapping[str, Any]) -> None:
    """Check that the run goes on in the order of samples of the `saved` configuration. Raises: ConfigError"""
    from megascale.train.resumed_order import check_policy, check_skipped, check_turns, check_weights

    config, before, samples = run.config, saved.get("data", {}), run.progress.samples
    check_skipped(config.data, before.get("skip_samples", []), samples)
    if config.checkpoint.resume == "auto":  # the start from another run's checkpoint may have other data
        check_turns(config.data, config.batch.total, config.model.seq_length, saved, samples)
        check_weights(config.data, before, samples)
        check_policy(config.data, before)


def _load_initial_weights(run: Run, open_weights: OpenWeights) -> list[str]:
    """Load the weights of `checkpoint.resume = "hf:..."`. Returns lines for the user; none without such weights."""
    source = run.config.checkpoint.resume
    if not source.startswith(HF_PREFIX):
        return []
    weights = open_weights(Path(source.removeprefix(HF_PREFIX)))
    if run.mesh.rank == 0:
        weights.check_tensors()
    left_out = weights.leave_out_depths(run.config.model.mtp_layers)
    model = weights.model.model_dump(mode="json", by_alias=True, exclude={"preset"})
    changes = run.checkpoints.load_weights(str(weights.folder), model, weights.read_tensor)
    run.origin = InitialState(f"the weights of {weights.folder}")
    _check_finite(run, lambda name: weights.place_of(name.removeprefix(WEIGHTS)))
    copy_masters_and_gather(run)
    lines = [f"begins with the weights of {weights.folder}"]
    if left_out:
        lines.append(f"leaves out layers of multi-token prediction ({left_out}), which model.mtp_layers would train")
    return [*lines, *(f"differs from the weights: {text}" for text in changes)]


def _check_finite(run: Run, place: Callable[[str], str]) -> None:
    """Check the loaded state before the first step, in which one element that is not finite would reach all others.

    Raises: CheckpointError on every rank, with the `place` of the first tensor
    """

    def check() -> None:
        for name, tensor in run.optimizer.global_tensors().items():
            if not all(bool(all_finite(shard.data)) for shard in tensor.shards):
                dtype = str(tensor.dtype).removeprefix("torch.")
                what = f"{place(name)} has a value that is not finite in {dtype}; nothing was trained"
                raise CheckpointError(what, hint="find out what wrote it, or begin with other weights")

    on_all_ranks(run.mesh.world, check, "the state that was loaded")


def copy_masters_and_gather(run: Run) -> None:
    """Cast master weights from outside of a step to the compute dtype, and all-gather the parameters."""
    run.optimizer.copy_masters_to_weights()
    for bucket in run.buffers.buckets:
        run.buffers.start_param_gather(bucket)
