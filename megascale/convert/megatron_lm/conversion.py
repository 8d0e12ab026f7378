"""Checkpoints of Megatron-LM, read and written: weights, moments of Adam, and progress. Written is `torch_dist`, with
moments as the distributed optimizer stores them as `fully_reshardable`, which loads in every layout.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megascale.checkpoint import offline
from megascale.checkpoint.format import manifest
from megascale.checkpoint.format.state import Progress
from megascale.config.model import SAME_MODEL_HINT, ModelConfig, model_differences
from megascale.config.run import RunConfig
from megascale.config.train import OptimizerConfig
from megascale.convert import tensor_map as maps
from megascale.convert.dcp import DAMAGED_HINT, write_dcp
from megascale.convert.families.config_json import differences
from megascale.convert.families.megatron_lm import ALIASES, FAMILY, VOCAB_MULTIPLE, VOCABULARY, arguments_of
from megascale.convert.megatron_lm.formats import COMMON, LAYER, PREFIXES, LegacyFolder, TorchDist, stored_forms
from megascale.convert.megatron_lm.iteration import MASTER, MODEL, MOMENTS, RESHARDABLE_HINT, TRACKER, iteration_folder
from megascale.convert.megatron_lm.namespace import model_of
from megascale.convert.saved_weights import SavedWeights, open_weights, planned_steps
from megascale.core.errors import CheckpointError
from megascale.core.files import atomic_folder
from megascale.core.storage import Location
from megascale.optim.optimizer_shard import LOW
from megascale.parallel.stateful import BALANCE_BIAS, WEIGHTS, GlobalTensor, TensorShard

CONFIG_HINT = "give the run's configuration with --config FILE.toml"
MOST_RANKS = 8  # of tensor parallelism, where no args tell them
RESHARDABLE = "fully_reshardable"
BACKENDS = {"sharded_backend": "torch_dist", "common_backend": "torch"}
LOAD = (
    "load it with --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --override-opt_param-scheduler; with "
    "Transformer Engine, whose FP8 state is missing, also --dist-ckpt-strictness log_unexpected; moments of experts at "
    "an expert parallel size of 1"
)
LINEAR = re.compile(r"(.*\.linear_\w+)\.weight")  # of modules with an `_extra_state`, which is empty here


def from_megatron(folder: Path, output: Path, config: RunConfig | None = None) -> list[str]:
    """Make a checkpoint, in a new folder, of the latest iteration in a folder of Megatron-LM, for a run with `config`.
    Returns what differs, a line each.

    Raises: CheckpointError if the folder is unreadable, its model is unsupported or not that of `config`; OSError
    """
    path = iteration_folder(folder)
    try:
        source = LegacyFolder(path) if next(path.glob("mp_rank_*"), None) else TorchDist(path)
        args = vars(source.common["args"]) if "args" in source.common else {}
        model = _model(args, path, config.model if config else None)
        progress, notes = _progress(source, args, model, config.batch.total if config else 0)
        states = {WEIGHTS: MASTER if MASTER in source.states else MODEL}
        states |= {f"{moment}.": moment for moment in MOMENTS if progress.step}
        schedule = source.common.get("opt_param_scheduler") or {}  # of the optimizer that wrote the moments
        keys = (("lr", "max_lr"), ("min_lr", "min_lr"), ("weight_decay", "end_wd"))
        optimizer = {"name": "adamw", "lr": 1e-3} | {ours: schedule[key] for ours, key in keys if key in schedule}
        settings = config.model_dump(mode="json", by_alias=True) if config else {"optimizer": optimizer}
        settings["model"] = model.model_dump(mode="json", by_alias=True)
        with atomic_folder(output) as made:
            offline.write_state(made, _tensors(source, model, states, args, notes), settings, progress=progress)
            if unread := source.unread():
                what = f"{path} has {len(unread)} tensors unknown to the model: {', '.join(unread[:3])}"
                raise CheckpointError(what, hint="weights and arguments of one model")
        return notes
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{path} is not what Megatron-LM writes: {error!r}", hint=DAMAGED_HINT) from error


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


def _tensors(
    source: TorchDist | LegacyFolder, model: ModelConfig, states: Mapping[str, str], args: Mapping[str, Any],
    notes: list[str],
) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
    """Yield the tensors of a run's states, by the names of `states` and of the source's, and add to `notes` what
    differs. Raises: CheckpointError
    """
    places, weights, biases = maps.tensor_map(FAMILY, model), maps.model_weights(model), maps.bias_tensors(model)
    if missing := [weight.name for weight in weights if weight.name not in places]:
        what = f"{source.path} is of a model with {missing[0]}, a kind of tensor that is not converted"
        raise CheckpointError(what, hint="a model without latent attention, multi-token prediction and sinks")
    shapes, least = maps.stored_shapes(model, places), args.get("vocab_size")  # rows that are no padding
    ranks = args.get("tensor_model_parallel_size", 1 if args else MOST_RANKS)
    multiple = (args.get("make_vocab_size_divisible_by") or VOCAB_MULTIPLE) * ranks  # of rows

    def load(state: str, stored: str) -> Tensor:
        """Load a whole tensor of the source, without the rows that pad the vocabulary. Raises: CheckpointError"""
        tensor, expected = source.tensor(state, stored), shapes[stored]
        padding = len(tensor) - expected[0]
        if stored in VOCABULARY and 0 < padding < multiple and expected[0] >= (least or len(tensor) // 2 + 1):
            rows = f"{padding} rows that pad the vocabulary are left out: they were part of the softmax"
            notes.extend([rows] if rows not in notes else [])
            tensor = tensor[: expected[0]]
        if tuple(tensor.shape) != expected:
            what = f"{source.path}: {stored} has shape {list(tensor.shape)}, the model has {list(expected)}"
            raise CheckpointError(what, hint="weights and arguments of one model")
        return tensor

    for ours, theirs in states.items():
        for name, tensor in maps.read_tensors(weights, places, partial(load, theirs)):
            yield ours + name, tensor if theirs == MODEL else tensor.float()
    if biases:
        read = dict(maps.read_tensors(biases, places, partial(load, MODEL)))
        yield BALANCE_BIAS, maps.stack_biases(model, read.__getitem__)


def to_megatron(source: Location, output: Path) -> list[str]:
    """Make a folder of Megatron-LM, with one iteration, of a checkpoint. Returns what to know of it, a line each.

    Raises: CheckpointError if the checkpoint is unreadable, or Megatron-LM has no arguments for its model; OSError
    """
    weights = open_weights(source)
    model, saved = weights.model, weights.saved
    args = arguments_of(model)
    if different := differences(model_of(args, f"{source}: its model"), model):
        listed = ", ".join(f"{key} = {value!r}" for key, value in different.items())
        raise CheckpointError(f"{source}: Megatron-LM's arguments do not express this model, but one with {listed}")
    if any(name.startswith(f"{LOW}.") for name in saved.tensors):
        raise CheckpointError(f"{source} has compensated weights", hint="train on with optimizer.master_weights=full")
    trained = weights.have(MOMENTS)
    step = saved.facts.progress.step if trained else 0
    precision = (saved.facts.config.get("train") or {}).get("precision")
    dtype = torch.float32 if precision in ("fp32", "fp64") else torch.bfloat16
    dtype = dtype if precision else weights.widest_dtype()
    common = _optimizer(saved.facts, step) if trained else {}
    common["args"] = argparse.Namespace(
        **args, tensor_model_parallel_size=1, pipeline_model_parallel_size=1, expert_model_parallel_size=1,
        consumed_train_samples=saved.facts.progress.samples, consumed_valid_samples=0, params_dtype=dtype,
        global_batch_size=(saved.facts.config.get("batch") or {}).get("global"), ckpt_format="torch_dist",
        use_distributed_optimizer=True, no_save_rng=True, no_save_optim=False,
    )  # fmt: skip
    common |= {"iteration": step, "checkpoint_version": 3.0, "num_floating_point_operations_so_far": 0}
    with atomic_folder(output) as folder:
        (path := folder / (f"iter_{step:07d}" if trained else "release")).mkdir()
        write_dcp(path, itertools.chain(_stored_tensors(weights, dtype, trained), _extra_states(model)))
        torch.save(common, path / COMMON)
        versions = {f"{backend}_version": 1 for backend in BACKENDS}
        (path / "metadata.json").write_text(json.dumps(BACKENDS | versions))
        (folder / TRACKER).write_text(str(step) if trained else path.name)
    return [LOAD if trained else "no optimizer state of Adam: the weights alone are written, as a release"]


def _optimizer(facts: manifest.Facts, step: int) -> dict[str, Any]:
    """The state of optimizer and schedule beside tensors, and how tensors are stored."""
    config, samples = facts.config, facts.progress.samples
    settings = OptimizerConfig.model_validate(config["optimizer"])
    batch = (config.get("batch") or {}).get("global") or samples // step
    steps = planned_steps(facts)  # beyond them the rate would be min_lr
    rates, decay = {"max_lr": settings.lr, "min_lr": settings.min_lr}, settings.weight_decay
    groups = [
        rates | {
            "lr": settings.lr, "step": step, "betas": tuple(settings.betas), "eps": settings.eps,
            "bias_correction": True, "decoupled_weight_decay": True, "weight_decay": decay * share, "wd_mult": share,
            "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "default_config": True,
        }
        for share in (1.0, 0.0)
    ]  # fmt: skip
    schedule = rates | {
        "num_steps": samples, "lr_warmup_steps": max(settings.warmup_steps - 1, 0) * batch,
        "lr_decay_steps": (settings.schedule_steps or steps) * batch,
        "lr_decay_style": settings.decay.replace("wsd", "WSD"), "start_wd": decay, "end_wd": decay,
        "wd_incr_style": "constant", "wd_incr_steps": steps,
    }  # fmt: skip
    content = {"distrib_optim_sharding_type": RESHARDABLE, "distrib_optim_fully_reshardable_mem_efficient": False}
    return {
        "optimizer": {"optimizer": {"param_groups": groups}, "param_state_sharding_type": RESHARDABLE},
        "opt_param_scheduler": schedule,
        "content_metadata": content | {"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
    }


def _stored_tensors(weights: SavedWeights, dtype: torch.dtype, trained: bool) -> Iterator[tuple[str, GlobalTensor]]:
    """Yield the tensors of all states by stored name, of stacks a matrix at a time."""
    found = maps.parts_by_name(weights.model, maps.tensor_map(FAMILY, weights.model))
    states = {MODEL: WEIGHTS} | ({MASTER: WEIGHTS} | {moment: f"{moment}." for moment in MOMENTS} if trained else {})
    for (state, prefix), (name, parts) in itertools.product(states.items(), found.items()):
        if (bias := parts[0].tensor.startswith(BALANCE_BIAS)) and state != MODEL:
            continue
        whole = maps.assemble(parts, replace(weights, prefixes=(prefix,)).read)
        if name in VOCABULARY:
            whole = pad(whole, (0, 0, 0, -len(whole) % VOCAB_MULTIPLE))
        whole = whole.to(dtype if state == MODEL and not bias else torch.float32)
        stored, index, counts = _stored(name, weights.model)
        shard = TensorShard((*index, *(0 for _ in whole.shape)), (*(1 for _ in index), *whole.shape), whole)
        yield PREFIXES[state][0] + stored, GlobalTensor((*counts, *whole.shape), whole.dtype, [shard])


def _stored(name: str, model: ModelConfig) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """The stored name of a tensor, its index in stacks, and their sizes. Layers that differ have no stack."""
    layer = LAYER.fullmatch(name)
    for ours, theirs in ALIASES:  # Transformer Engine does not fuse the norm before experts
        if not (layer and model.has_experts(int(layer[1])) and ours == "pre_mlp_layernorm."):
            name = name.replace(ours, theirs)
    stored, index = next(itertools.islice(stored_forms(name), bool(model.dense_layers and layer), None))
    counts = (model.experts,) if model.dense_layers else (model.num_layers, model.experts)
    return stored, index, counts[: len(index)]


def _extra_states(model: ModelConfig) -> Iterator[tuple[str, list[None]]]:
    """Yield the empty extra states of linear layers, which megatron-core asks for."""
    names = sorted(maps.stored_shapes(model, maps.tensor_map(FAMILY, model)))
    for linear in filter(None, map(LINEAR.fullmatch, names)):
        stored, index, counts = _stored(f"{linear[1]}._extra_state", model)
        offset, shape = (".".join(map(str, numbers)) for numbers in (index or (0,), counts or (1,)))
        yield f"{stored}/shard_{offset}_{shape}", [None]
