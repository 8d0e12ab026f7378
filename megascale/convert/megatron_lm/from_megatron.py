"""A checkpoint of Megatron-LM becomes one of a run: weights, moments of Adam, and progress."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megascale.checkpoint import offline
from megascale.checkpoint.format.state import Progress
from megascale.config.model import SAME_MODEL_HINT, ModelConfig, model_differences
from megascale.config.run import RunConfig
from megascale.convert.dcp import DAMAGED_HINT
from megascale.convert.families.megatron_lm import FAMILY, VOCAB_MULTIPLE, VOCABULARY
from megascale.convert.megatron_lm.iteration import MASTER, MODEL, MOMENTS, RESHARDABLE_HINT, iteration_folder
from megascale.convert.megatron_lm.legacy import LegacyFolder
from megascale.convert.megatron_lm.namespace import model_of
from megascale.convert.megatron_lm.torch_dist import TorchDist
from megascale.convert.tensor_map import model_tensors, read_region, stack_biases, tensor_map
from megascale.core.errors import CheckpointError
from megascale.core.files import atomic_folder
from megascale.parallel.stateful import BALANCE_BIAS, WEIGHTS

CONFIG_HINT = "give the run's configuration with --config FILE.toml"
MOST_RANKS = 8  # of tensor parallelism, where no args tell them


def from_megatron(folder: Path, output: Path, config: RunConfig | None = None) -> list[str]:
    """Make a checkpoint, in a new folder, of the latest iteration in a folder of Megatron-LM, for a run with `config`.
    Returns what differs, a line each.

    Raises: CheckpointError if the folder is unreadable, its model is unsupported or not that of `config`; OSError
    """
    path = iteration_folder(folder)
    try:
        return _convert(path, output, config)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{path} is not what Megatron-LM writes: {error!r}", hint=DAMAGED_HINT) from error


def _convert(path: Path, output: Path, config: RunConfig | None) -> list[str]:
    source = LegacyFolder(path) if next(path.glob("mp_rank_*"), None) else TorchDist(path)
    args = vars(source.common["args"]) if "args" in source.common else {}
    tensors = _Tensors(source, model := _model(args, path, config.model if config else None), args)
    progress, notes = _progress(source, args, model, config.batch.total if config else 0)
    states = {WEIGHTS: MASTER if MASTER in source.states else MODEL}
    states |= {f"{moment}.": moment for moment in MOMENTS if progress.step}
    schedule = source.common.get("opt_param_scheduler") or {}  # of the optimizer that wrote the moments
    keys = {"lr": "max_lr", "min_lr": "min_lr", "weight_decay": "end_wd"}
    optimizer = {"name": "adamw", "lr": 1e-3} | {ours: schedule[key] for ours, key in keys.items() if key in schedule}
    settings = config.model_dump(mode="json", by_alias=True) if config else {"optimizer": optimizer}
    settings["model"] = model.model_dump(mode="json", by_alias=True)
    with atomic_folder(output) as made:
        offline.write_state(made, tensors.read_all(states), settings, progress=progress)
        if unread := source.unread():
            what = f"{path} has {len(unread)} tensors unknown to the model: {', '.join(unread[:3])}"
            raise CheckpointError(what, hint="weights and arguments of one model")
    return notes + tensors.notes


def _model(args: Mapping[str, Any], path: Path, here: ModelConfig | None) -> ModelConfig:
    """The model of Megatron-LM's arguments, or the one `here`. Raises: CheckpointError if they differ, or both lack"""
    if here is None:
        if not args:
            raise CheckpointError(f"{path} has no args, which would tell its model", hint=CONFIG_HINT)
        return model_of(args, f"{path}: args")
    there = model_of({**args, "vocab_size": here.vocab_size}, f"{path}: args") if args else here
    if different := model_differences(there.model_dump(by_alias=True), here):
        raise CheckpointError(f"{path} is of another model: {different}", hint=SAME_MODEL_HINT)
    rotary = ("rope_theta", "rotary_fraction", "rope_scaling") if there.position == "rope" else ()
    stored = {key: getattr(there, key) for key in ("norm_eps", "window", "sparse_attention", *rotary)}
    stored["vocab_size"] = args.get("vocab_size") or here.vocab_size
    for key, value in stored.items():
        if value != (ours := getattr(here, key)):
            what = f"{path} is of another model: {key} {value} there, {ours} here"
            raise CheckpointError(what, hint="[model] as there: a run that goes on with it may change it")
    return here


def _progress(
    source: TorchDist | LegacyFolder, args: Mapping[str, Any], model: ModelConfig, batch: int
) -> tuple[Progress, list[str]]:
    """The progress of a run that goes on, and what differs. `batch`: samples of a step, 0 if unknown.

    Raises: CheckpointError if the state is not Adam's
    """
    step = int(source.common.get("iteration", 0))
    if source.step is None or step < 1:
        what = "no optimizer state is read: a run begins at step 0 with the weights alone"
        return Progress(), [what + (f"; to keep it, {RESHARDABLE_HINT}" if "optimizer" in source.common else "")]
    if missing := sorted(set(MOMENTS) - source.states):
        what = f"{source.path}: the optimizer has no {' and no '.join(missing)}"
        raise CheckpointError(what, hint="the state of --optimizer adam, or weights saved with --no-save-optim")
    samples = int(args.get("consumed_train_samples") or step * batch)
    if samples <= 0:
        raise CheckpointError(f"{source.path} does not say how many samples were consumed", hint=CONFIG_HINT)
    notes = [f"{samples} samples count as read: Megatron-LM's, in its first epoch and if data and train.seed are equal"]
    schedule = source.common.get("opt_param_scheduler") or {}
    if schedule.get("num_steps", 0) < schedule.get("lr_warmup_steps", 0):
        notes.append("the learning rate is above Megatron-LM's up to the end of the warm-up, which begins at 0 there")
    if source.step != step:
        notes.append(f"the optimizer has made {source.step} of {step} steps: bias corrections count all of them")
    return Progress(step, samples, samples * (args.get("seq_length") or model.seq_length)), notes


class _Tensors:
    """The tensors of a `model` in a source with Megatron-LM's `args`. `notes`: what differs."""

    def __init__(self, source: TorchDist | LegacyFolder, model: ModelConfig, args: Mapping[str, Any]) -> None:
        self._source, self._model = source, model
        self._places = tensor_map(FAMILY, model)
        self._specs = {tensor.name: tensor for tensor in model_tensors(model)}
        if missing := [name for name in self._specs if name not in self._places]:
            what = f"{source.path} is of a model with {missing[0]}, a kind of tensor that is not converted"
            raise CheckpointError(what, hint="a model without latent attention, multi-token prediction and sinks")
        self._shapes = {
            place.name: place.stored_shape(self._specs[name].shape[len(self._specs[name].outer) :])
            for name, places in self._places.items()
            for place in places
        }
        ranks = args.get("tensor_model_parallel_size", 1 if args else MOST_RANKS)
        self._multiple = (args.get("make_vocab_size_divisible_by") or VOCAB_MULTIPLE) * ranks  # of rows
        self._least = args.get("vocab_size")  # rows that are no padding; None: more than half
        self._whole = lru_cache(maxsize=1)(self._load)  # parts of a fused tensor are read one after the other
        self.notes: list[str] = []

    def read_all(self, states: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a run's states, by the names of `states` and of the source's. Raises: CheckpointError"""
        for ours, theirs in states.items():
            for name in self._specs:
                if not name.startswith(BALANCE_BIAS):
                    tensor = self._read(theirs, name)
                    yield ours + name, tensor if theirs == MODEL else tensor.float()
        if self._model.balance_bias:
            yield BALANCE_BIAS, stack_biases(self._model, partial(self._read, MODEL))

    def _read(self, state: str, name: str) -> Tensor:
        places, spec = self._places[name], self._specs[name]
        return read_region(places, spec, lambda stored, box: self._whole(state, stored)[box], None)

    def _load(self, state: str, stored: str) -> Tensor:
        """Load a whole tensor of the source, without the rows that pad the vocabulary. Raises: CheckpointError"""
        tensor, expected = self._source.tensor(state, stored), self._shapes[stored]
        padding = len(tensor) - expected[0]
        least = self._least or len(tensor) // 2 + 1
        if stored in VOCABULARY and 0 < padding < self._multiple and expected[0] >= least:
            rows = f"{padding} rows that pad the vocabulary are left out: they were part of the softmax"
            self.notes += [rows] if rows not in self.notes else []
            tensor = tensor[: expected[0]]
        if tuple(tensor.shape) != expected:
            what = f"{self._source.path}: {stored} has shape {list(tensor.shape)}, the model has {list(expected)}"
            raise CheckpointError(what, hint="weights and arguments of one model")
        return tensor
