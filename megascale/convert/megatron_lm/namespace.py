"""The namespace of arguments in a checkpoint of Megatron-LM: those that nobody gave have their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from megascale.config.foreign.imported import Arguments, import_arguments
from megascale.config.foreign.setting import Values
from megascale.config.foreign.translation import SYSTEMS, find, read_value
from megascale.config.model import ModelConfig
from megascale.convert.dcp import Record
from megascale.convert.megatron_lm.formats import COMMON, FILE
from megascale.convert.megatron_lm.iteration import iteration_folder, read_common
from megascale.core.errors import CheckpointError

SYSTEM = "Megatron-LM"
TRAINED_HINT = "a checkpoint that Megatron-LM has written in training"
SUPPORTED_HINT = "a model without this argument"
FLAGS = {"fp8": "fp8_format", "fp4": "fp4_format", "layernorm_zero_centered_gamma": "apply_layernorm_1p"}
"""Flags of attributes with another name."""

BACKENDS = ("flash", "fused", "unfused", "local", "auto")  # values of AttnBackend, from 1
IDLE_ZERO = ("", "model.activation", "optimizer.warmup_steps")  # keys of settings whose 0 is as no argument

BESIDE = {
    "padded_vocab_size": "num_layers", "num_layers_per_virtual_pipeline_stage": "num_layers",
    "use_checkpoint_args": "num_layers", "use_flash_attn": "attention_backend", "train_iters": "train_samples",
    "lr_decay_iters": "train_samples", "global_batch_size": "step_batch_size_schedule",
    "kv_channels": "multi_latent_attention",
}  # fmt: skip
"""Arguments that follow from others, or say nothing, beside another one that has a value."""

UNSUPPORTED = (
    "rotary_interleaved", "squared_relu", "apply_residual_connection_post_layernorm", "qk_l2_norm",
    "heterogeneous_layers_config_path", "no_rope_freq", "linear_attention_freq", "attention_output_gate",
    "moe_apply_probs_on_input", "moe_latent_size", "hybrid_override_pattern", "use_legacy_models", "use_mup",
    "hybrid_layer_pattern", "experimental_attention_variant", "enable_mhc_connections", "moe_mlp_glu_interleave_size",
    "moe_shared_expert_glu_interleave_size", "decoder_num_layers", "decoder_seq_length", "dataloader_seq_length",
)  # fmt: skip
"""Arguments with an effect on the model that no key of `[model]` has."""


def stored_arguments(folder: Path) -> Arguments:
    """The arguments of the run that wrote the latest iteration in a folder.

    Raises: CheckpointError if it has no arguments, or their model is unsupported
    """
    path = iteration_folder(folder)
    file = min(path.glob(f"mp_rank_*/{FILE}"), default=path / COMMON)
    stored = read_common(file)
    if "args" not in stored:
        raise CheckpointError(f"{file} has no args", hint=TRAINED_HINT)
    args = vars(stored["args"])
    return Arguments(SYSTEM, _given(args, f"{file}: args"), args.get("world_size"))


def model_of(args: Mapping[str, Any], where: str) -> ModelConfig:
    """The model of a namespace. Raises: CheckpointError if it is unsupported"""
    if not args.get("num_layers"):
        raise CheckpointError(f"{where} has no num_layers", hint=TRAINED_HINT)
    hidden = {"attention_dropout": args.get("hidden_dropout")}  # another one is no other model
    size = {"vocab_size": args.get("vocab_size") or args.get("padded_vocab_size")}
    given = _given({**args, **hidden, **size}, where)
    made = import_arguments(SYSTEM, given)
    refused = {
        name: why
        for name, why in made.refused.items()
        if (found := find(name, SYSTEM)) and found[1].key.startswith("model.")
    }
    if given.get("apply_layernorm_1p") == [True] and made.settings.get("model.norm") != "rmsnorm_1p":
        refused["apply_layernorm_1p"] = "LayerNorm has no gains around 1"
    for name, why in refused.items():
        raise CheckpointError(f"{where}: {name} is {given[name][0]!r}: {why}", hint=SUPPORTED_HINT)
    try:
        return ModelConfig.model_validate(made.tree("")["model"])
    except ValidationError as error:
        first = error.errors()[0]
        what = f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise CheckpointError(what, hint=SUPPORTED_HINT) from None


def _given(stored: Mapping[str, Any], where: str) -> dict[str, Values]:
    """The values of the arguments in the table, without those that are off, or of other optimizers.

    Raises: CheckpointError for those of an unsupported model
    """
    if unsupported := [name for name in UNSUPPORTED if stored.get(name)]:
        what = f"{where}: {unsupported[0]} is {stored[unsupported[0]]!r}, which is not supported"
        raise CheckpointError(what, hint=SUPPORTED_HINT)
    args = {**stored, **{flag: stored[name] for name, flag in FLAGS.items() if name in stored}}
    args["disable_bias_linear"] = args.get("add_bias_linear") is False
    args["no_bias_gelu_fusion"] = not (args.get("bias_gelu_fusion") or args["disable_bias_linear"])
    args["no_gradient_accumulation_fusion"] = args.get("gradient_accumulation_fusion") is False
    if isinstance(backend := args.get("attention_backend"), Record | Enum):  # an Enum where megatron.core is imported
        (number,) = backend.args if isinstance(backend, Record) else (backend.value,)
        args["attention_backend"] = dict(enumerate(BACKENDS, 1)).get(number)
    others = tuple(f"{name}_" for name in ("muon", "lion", "sgd") if name not in args.get("optimizer", "adam"))
    given: dict[str, Values] = {}
    for name, value in args.items():
        found = find(name, SYSTEM)
        if not found or found[1] not in SYSTEMS[SYSTEM] or args.get(BESIDE.get(name, "")) or name.startswith(others):
            continue
        if value or (value not in (None, []) and found[1].key not in IDLE_ZERO):
            listed = value if isinstance(value, list | tuple) else [value]
            given[name] = [read_value(str(one)) if isinstance(one, str | torch.dtype) else one for one in listed]
    return given
