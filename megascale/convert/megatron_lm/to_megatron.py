"""A checkpoint of a run becomes one of Megatron-LM, in megatron-core's format `torch_dist`: with moments as the
distributed optimizer stores them as `fully_reshardable`, which loads in every layout.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad

from megascale.checkpoint.format import manifest
from megascale.config.model import ModelConfig
from megascale.config.train import OptimizerConfig
from megascale.convert.dcp import write_dcp
from megascale.convert.families.config_json import differences
from megascale.convert.families.megatron_lm import ALIASES, FAMILY, VOCAB_MULTIPLE, VOCABULARY, arguments_of
from megascale.convert.megatron_lm.iteration import MASTER, MODEL, MOMENTS, TRACKER
from megascale.convert.megatron_lm.namespace import model_of
from megascale.convert.megatron_lm.torch_dist import COMMON, LAYER, PREFIXES, stored_forms
from megascale.convert.saved_weights import SavedWeights, planned_steps, saved_model
from megascale.convert.tensor_map import assemble, model_tensors, parts_by_name, tensor_map
from megascale.core.errors import CheckpointError
from megascale.core.files import atomic_folder
from megascale.core.storage import Location
from megascale.optim.optimizer_shard import LOW
from megascale.parallel.stateful import BALANCE_BIAS, WEIGHTS, GlobalTensor, TensorShard

RESHARDABLE = "fully_reshardable"
BACKENDS = {"sharded_backend": "torch_dist", "common_backend": "torch"}
LOAD = (
    "load it with --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --override-opt_param-scheduler; with "
    "Transformer Engine, whose FP8 state is missing, also --dist-ckpt-strictness log_unexpected; moments of experts at "
    "an expert parallel size of 1"
)
LINEAR = re.compile(r"(.*\.linear_\w+)\.weight")  # of modules with an `_extra_state`, which is empty here


def to_megatron(source: Location, output: Path) -> list[str]:
    """Make a folder of Megatron-LM, with one iteration, of a checkpoint. Returns what to know of it, a line each.

    Raises: CheckpointError if the checkpoint is unreadable, or Megatron-LM has no arguments for its model; OSError
    """
    saved = manifest.read(source)
    model = saved_model(source, saved)
    args = arguments_of(model)
    if different := differences(model_of(args, f"{source}: its model"), model):
        listed = ", ".join(f"{key} = {value!r}" for key, value in different.items())
        raise CheckpointError(f"{source}: Megatron-LM's arguments do not express this model, but one with {listed}")
    if any(name.startswith(f"{LOW}.") for name in saved.tensors):
        raise CheckpointError(f"{source} has compensated weights", hint="train on with optimizer.master_weights=full")
    names = [tensor.name for tensor in model_tensors(model) if not tensor.name.startswith(BALANCE_BIAS)]
    trained = all(f"{moment}.{name}" in saved.tensors for moment in MOMENTS for name in names)
    step = saved.facts.progress.step if trained else 0
    precision = (saved.facts.config.get("train") or {}).get("precision")
    dtype = torch.float32 if precision in ("fp32", "fp64") else torch.bfloat16
    dtype = dtype if precision else SavedWeights(source, saved).widest_dtype()
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
        write_dcp(path, itertools.chain(_tensors(source, saved, model, dtype, trained), _extra_states(model)))
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


def _tensors(
    source: Location, saved: manifest.Manifest, model: ModelConfig, dtype: torch.dtype, trained: bool
) -> Iterator[tuple[str, GlobalTensor]]:
    """Yield the tensors of all states by stored name, of stacks a matrix at a time."""
    found = parts_by_name(model, tensor_map(FAMILY, model))
    states = {MODEL: WEIGHTS} | ({MASTER: WEIGHTS} | {moment: f"{moment}." for moment in MOMENTS} if trained else {})
    for (state, prefix), (name, parts) in itertools.product(states.items(), found.items()):
        if (bias := parts[0].tensor.startswith(BALANCE_BIAS)) and state != MODEL:
            continue
        whole = assemble(parts, SavedWeights(source, saved, (prefix,)).read)
        if name in VOCABULARY:
            whole = pad(whole, (0, 0, 0, -len(whole) % VOCAB_MULTIPLE))
        whole = whole.to(dtype if state == MODEL and not bias else torch.float32)
        stored, index, counts = _stored(name, model)
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
    for linear in filter(None, map(LINEAR.fullmatch, sorted(parts_by_name(model, tensor_map(FAMILY, model))))):
        stored, index, counts = _stored(f"{linear[1]}._extra_state", model)
        offset, shape = (".".join(map(str, numbers)) for numbers in (index or (0,), counts or (1,)))
        yield f"{stored}/shard_{offset}_{shape}", [None]
