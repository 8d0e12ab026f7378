"""A checkpoint of a run becomes one of Megatron-LM, in megatron-core's format `torch_dist`: with moments as the
distributed optimizer stores them as `fully_reshardable`, which loads in every layout.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megascale.checkpoint.format import manifest
from megascale.config.model import ModelConfig
from megascale.convert.dcp import write_dcp
from megascale.convert.families.config_json import differences, read_keys
from megascale.convert.families.megatron import ALIASES, FAMILY, VOCAB_MULTIPLE, VOCABULARY
from megascale.convert.megatron.source import MASTER, MODEL, MOMENTS, TRACKER
from megascale.convert.megatron.torch_dist import COMMON, METADATA, PREFIXES, stored_forms
from megascale.convert.saved_weights import SavedWeights, saved_model
from megascale.convert.tensor_map import Place, assemble, indices, model_tensors, tensor_map
from megascale.core.errors import CheckpointError
from megascale.core.files import atomic_folder
from megascale.core.storage import Location
from megascale.parallel.stateful import BALANCE_BIAS, WEIGHTS, GlobalTensor, TensorShard

RESHARDABLE = "fully_reshardable"
BACKENDS = {
    "sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch",
    "common_backend_version": 1,
}  # fmt: skip

LINEAR = re.compile(r"(.*\.linear_\w+)\.weight")
"""Weights of modules with an `_extra_state`, which is empty here."""

Parts = list[tuple[Place, str, tuple[int, ...]]]
"""The places in a tensor of Megatron-LM, each of a tensor or of the matrix of a stack at an index."""


def to_megatron(source: Location, output: Path) -> list[str]:
    """Make a folder of Megatron-LM, with one iteration, of a checkpoint. Returns what it lacks, a line each.

    Raises: CheckpointError if the checkpoint is unreadable, or Megatron-LM has no arguments for its model; OSError
    """
    saved = manifest.read(source)
    model = saved_model(source, saved)
    args = FAMILY.config_keys(model)
    again = read_keys(FAMILY, args, f"{source}: its model", "a model that Megatron-LM computes")
    if different := differences(again, model):
        listed = ", ".join(f"{key} = {value!r}" for key, value in different.items())
        raise CheckpointError(f"{source}: Megatron-LM's arguments do not express this model, but one with {listed}")
    names = [tensor.name for tensor in model_tensors(model) if not tensor.name.startswith(BALANCE_BIAS)]
    trained = all(f"{moment}.{name}" in saved.tensors for moment in MOMENTS for name in names)
    step = saved.facts.progress.step if trained else 0
    iteration = f"iter_{step:07d}" if trained else "release"
    dtype = _dtype(source, saved, model)
    args |= {"params_dtype": dtype, "bf16": dtype == torch.bfloat16}
    common = {"args": argparse.Namespace(**args | _run_arguments(saved)), "iteration": step, "checkpoint_version": 3.0}
    common |= _optimizer(saved.facts.config, step, saved.facts.progress.samples) if trained else {}
    with atomic_folder(output) as folder:
        (path := folder / iteration).mkdir()
        tensors = _tensors(SavedWeights(source, saved), model, dtype, trained)
        write_dcp(path, itertools.chain(tensors, _extra_states(model)))
        torch.save(common | {"num_floating_point_operations_so_far": 0}, path / COMMON)
        (path / METADATA).write_text(json.dumps(BACKENDS))
        (folder / TRACKER).write_text(str(step) if trained else iteration)
    return [] if trained else ["no optimizer state of Adam: the weights alone are written, as a release"]


def _dtype(source: Location, saved: manifest.Manifest, model: ModelConfig) -> torch.dtype:
    """The dtype of the weights: that of the run's compute. Raises: CheckpointError for weights with parts elsewhere"""
    if any(name.startswith("low.") for name in saved.tensors):
        hint = "go on for a step with optimizer.master_weights = full, and save"
        raise CheckpointError(f"{source} has compensated master weights", hint=hint)
    precision = (saved.facts.config.get("train") or {}).get("precision")
    if precision is None:
        return SavedWeights(source, saved).widest_dtype(model)
    return torch.float32 if precision in ("fp32", "fp64") else torch.bfloat16


def _run_arguments(saved: manifest.Manifest) -> dict[str, Any]:
    """The arguments of the run and its layout that Megatron-LM compares, or goes on with."""
    sizes = dict.fromkeys(
        ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"), 1
    )
    consumed = {"consumed_train_samples": saved.facts.progress.samples, "consumed_valid_samples": 0}
    return sizes | consumed | {
        "ckpt_format": "torch_dist", "use_distributed_optimizer": True, "no_save_rng": True, "no_save_optim": False,
        "global_batch_size": (saved.facts.config.get("batch") or {}).get("global"),
    }  # fmt: skip


def _optimizer(config: Mapping[str, Any], step: int, samples: int) -> dict[str, Any]:
    """The state of optimizer and schedule beside tensors, with the format of the tensors."""
    settings: Mapping[str, Any] = {"weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-8, "min_lr": 0.0} | dict(
        config.get("optimizer") or {}
    )
    batch = (config.get("batch") or {}).get("global") or samples // step
    steps = (config.get("train") or {}).get("steps", 1 << 32)  # beyond them the rate would be min_lr
    lr, decay = settings["lr"], settings["weight_decay"]
    rates = {"max_lr": lr, "min_lr": settings["min_lr"]}
    groups = [
        rates | {
            "lr": lr, "step": step, "betas": tuple(settings["betas"]), "eps": settings["eps"], "bias_correction": True,
            "decoupled_weight_decay": True, "weight_decay": decay * share, "wd_mult": share, "lr_mult": 1.0,
            "is_expert_parallel": False, "is_decoupled_lr": False, "default_config": True,
        }
        for share in (1.0, 0.0)
    ]  # fmt: skip
    schedule = rates | {
        "num_steps": samples, "lr_warmup_steps": settings.get("warmup_steps", 0) * batch,
        "lr_decay_steps": steps * batch, "lr_decay_style": settings.get("decay", "constant"), "start_wd": decay,
        "end_wd": decay, "wd_incr_style": "constant", "wd_incr_steps": steps,
    }  # fmt: skip
    return {
        "optimizer": {"optimizer": {"param_groups": groups}, "param_state_sharding_type": RESHARDABLE},
        "opt_param_scheduler": schedule,
        "content_metadata": {
            "distrib_optim_sharding_type": RESHARDABLE, "distrib_optim_fully_reshardable_mem_efficient": False,
            "singleton_local_shards": False, "chained_optim_avoid_prefix": True,
        },
    }  # fmt: skip


def _tensors(
    weights: SavedWeights, model: ModelConfig, dtype: torch.dtype, trained: bool
) -> Iterator[tuple[str, GlobalTensor]]:
    """Yield the tensors of all states by stored name, of stacks a matrix at a time."""
    parts_by_name = dict[str, Parts]()
    places = tensor_map(FAMILY, model)
    for tensor in model_tensors(model):
        for index, place in zip(indices(tensor), places[tensor.name], strict=True):
            parts_by_name.setdefault(place.name, []).append((place, tensor.name, index))
    states = {MODEL: WEIGHTS} | ({MASTER: WEIGHTS} | {moment: f"{moment}." for moment in MOMENTS} if trained else {})
    for state, prefix in states.items():
        read = SavedWeights(weights.source, weights.saved, (prefix,)).read
        for name, parts in parts_by_name.items():
            biases = parts[0][1].startswith(BALANCE_BIAS)
            if biases and state != MODEL:
                continue
            whole = assemble([(place, read(ours, index)) for place, ours, index in parts])
            whole = _padded(name, whole).to(dtype if state == MODEL and not biases else torch.float32)
            stored, index, counts = _stored(name, model)
            shape = (*counts, *whole.shape)
            shard = TensorShard((*index, *(0 for _ in whole.shape)), (*(1 for _ in index), *whole.shape), whole)
            yield PREFIXES[state][0] + stored, GlobalTensor(shape, whole.dtype, [shard])


def _padded(name: str, tensor: Tensor) -> Tensor:
    """Add rows of zeros that pad the vocabulary."""
    if name not in VOCABULARY:
        return tensor
    rows = -tensor.shape[0] % VOCAB_MULTIPLE
    return torch.nn.functional.pad(tensor, (0, 0, 0, rows))


def _stored(name: str, model: ModelConfig) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """The stored name of a tensor, its index in stacks, and their sizes: layers that differ have no stack."""
    for ours, theirs in ALIASES:
        if not (model.experts and ours == "pre_mlp_layernorm."):  # Transformer Engine fuses it with an MLP alone
            name = name.replace(ours, theirs)
    first, *others = stored_forms(name)
    stored, index = others[0] if others and model.dense_layers else first
    return (
        stored,
        index,
        (model.num_layers, model.experts)[len(index) == 1 and bool(model.dense_layers) :][: len(index)],
    )


def _extra_states(model: ModelConfig) -> Iterator[tuple[str, list[None]]]:
    """Yield the empty extra states of linear layers, which megatron-core asks for."""
    names = {place.name for places in tensor_map(FAMILY, model).values() for place in places}
    for linear in filter(None, map(LINEAR.fullmatch, sorted(names))):
        stored, index, counts = _stored(f"{linear[1]}._extra_state", model)
        offset, shape = (".".join(map(str, numbers)) for numbers in (index or (0,), counts or (1,)))
        yield f"{stored}/shard_{offset}_{shape}", [None]
