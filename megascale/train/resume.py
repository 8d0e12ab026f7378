"""The initial state of a run: a checkpoint, another project's weights, or fresh weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from megascale.checkpoint.collective_errors import on_all_ranks
from megascale.checkpoint.format.state import Region
from megascale.config.decomposition import CYCLE, MIN_PIECE
from megascale.config.model import ModelConfig
from megascale.config.run import RunConfig
from megascale.config.train import HF_PREFIX
from megascale.core.errors import CheckpointError, ConfigError, Problem
from megascale.core.units import format_count
from megascale.data.mix.blend import blend_parts, same_order
from megascale.data.mix.skipped_ranges import Ranges, below, read_before
from megascale.parallel.stateful import WEIGHTS
from megascale.train.finite_check import all_finite
from megascale.train.run import InitialState, Run
from megascale.train.weight_companions import keep_companions


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


OpenWeights = Callable[[Path], InitialWeights]
"""Opens a folder of weights. Raises: CheckpointError for a folder without weights or with an unsupported model."""


def load_initial_state(run: Run, open_weights: OpenWeights) -> str:
    """Load the configured checkpoint or another project's weights (by `open_weights`), if any.

    Returns lines for the user: source, warnings and changes of the configuration; empty for fresh weights.
    """
    resumed = run.checkpoints.resume()
    lines = [f"WARNING: {text}" for text in run.checkpoints.warnings]
    if run.mesh.rank == 0 and run.config.checkpoint.every:
        lines += [f"WARNING: {text}" for text in keep_companions(run.config, resumed.path if resumed else None)]
    if resumed is None:
        return "\n".join(lines + _load_initial_weights(run, open_weights))
    run.progress = resumed.progress
    data = resumed.config.get("data", {})
    _check_skipped(run.config, data.get("skip", []), run.progress.samples)
    if run.config.checkpoint.resume == "auto":  # the start from another run's checkpoint may have other data
        _check_turns(run.config, resumed.config, run.progress.samples)
        _check_weights(run.config, data, run.progress.samples)
        _check_policy(run.config, data)
    source = str(resumed.path) if resumed.path else "the copies in memory"
    run.origin = InitialState(source, run.progress.step)
    _check_finite(run, lambda name: f"{source}: {name}")
    _copy_masters_and_gather(run)
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


def _check_skipped(config: RunConfig, saved: Ranges, samples: int) -> None:
    """Check that `data.skip` is as it was for the `samples` that the saved run has read: another range among those
    would move all samples after them.

    Raises: ConfigError on every rank
    """
    end = read_before(samples, saved)
    if below(end, saved) != below(end, config.data.skip):
        message = f"differs from the checkpoint's {saved} below {end}, up to where the run has read its samples"
        hint = "keep its ranges, and leave out later samples only, or resume from an earlier checkpoint"
        raise ConfigError([Problem("data", "data.skip", message, hint)])


def _check_turns(config: RunConfig, saved: Mapping[str, Any], samples: int) -> None:
    """Check that decomposed documents have the order of lengths that they had for the saved run, which has read
    `samples`: in another, all samples would move.

    Raises: ConfigError on every rank
    """
    if not samples or config.data.packing != "decompose" or saved.get("data", {}).get("packing") != "decompose":
        return
    data, turn = saved["data"], saved["data"]["bucket_samples"] or saved["batch"]["global"]
    now = config.data.bucket_samples or config.batch.total
    if turn != now:
        message = f"has turns of {now} samples of a length, and the checkpoint of {turn}"
        raise ConfigError([Problem("data", "data.bucket_samples", message, f"data.bucket_samples = {turn}")])
    for key, default in (
        ("min_piece", min(MIN_PIECE, config.model.seq_length)),
        ("curriculum", None),
        ("cycle", CYCLE),
    ):
        if (before := data[key] or default) != (found := getattr(config.data, key) or default):
            message = f"is {found}, and the order of the samples that the run has read is of {before}"
            raise ConfigError([Problem("data", f"data.{key}", message, f"data.{key} = {json.dumps(before)}")])


def _check_weights(config: RunConfig, saved: Mapping[str, Any], samples: int) -> None:
    """Check that the blend's weights are as they were for the `samples` that the saved run has read: with others, the
    run would read samples of its datasets again, and leave others out.

    Raises: ConfigError on every rank
    """
    end = read_before(samples, config.data.skip)
    before, now = (
        blend_parts([weight for weight, _ in source], changes) if isinstance(source, list) else [(0, [1.0])]
        for source, changes in (
            (saved.get("train"), saved.get("weights", [])),
            (config.data.train, config.data.weights),
        )
    )
    if not same_order(before, now, end, config.data.packing == "decompose"):
        weights = [part for part in before if part[0] < end]
        message = f"has other weights below {end}, up to where the run has read its samples, than {weights}"
        hint = f"data.weights = {[[start, list(part)] for start, part in weights]}, and new weights from {end} on"
        raise ConfigError([Problem("data", "data.weights", message, hint)])


def _check_policy(config: RunConfig, saved: Mapping[str, Any]) -> None:
    """Check that a run whose data policy has changed the weights has one: by the configured weights it would read
    samples of its datasets again, and leave others out.

    Raises: ConfigError on every rank
    """
    if (before := saved.get("policy")) and not config.data.policy:
        message = f"is not set, and {before} has changed the weights of the blend so far"
        raise ConfigError([Problem("data", "data.policy", message, "data.policy = fixed keeps its last weights")])


def _load_initial_weights(run: Run, open_weights: OpenWeights) -> list[str]:
    """Load the weights of `checkpoint.resume = "hf:..."`. Returns lines for the user; none without such weights."""
    source = run.config.checkpoint.resume
    if not source.startswith(HF_PREFIX):
        return []
    weights = open_weights(Path(source.removeprefix(HF_PREFIX)))
    if run.mesh.rank == 0:
        weights.check_tensors()
    model = weights.model.model_dump(mode="json", by_alias=True, exclude={"preset"})
    changes = run.checkpoints.load_weights(str(weights.folder), model, weights.read_tensor)
    run.origin = InitialState(f"the weights of {weights.folder}")
    _check_finite(run, lambda name: weights.place_of(name.removeprefix(WEIGHTS)))
    _copy_masters_and_gather(run)
    return [f"begins with the weights of {weights.folder}", *(f"differs from the weights: {text}" for text in changes)]


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


def _copy_masters_and_gather(run: Run) -> None:
    """Cast the loaded master weights to the compute dtype and all-gather the parameters."""
    run.optimizer.copy_masters_to_weights()
    for bucket in run.buffers.buckets:
        run.buffers.start_param_gather(bucket)
