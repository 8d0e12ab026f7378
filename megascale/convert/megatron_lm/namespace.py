"""The namespace of arguments in a checkpoint of Megatron-LM: those that nobody gave have their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from megascale.config.foreign.setting import Values
from megascale.config.foreign.sources import Arguments
from megascale.config.foreign.translation import SYSTEMS, find, read_value
from megascale.convert.dcp import Record
from megascale.convert.families.config_json import read_keys
from megascale.convert.families.megatron_lm import FAMILY
from megascale.convert.megatron_lm.iteration import iteration_folder, read_plain
from megascale.convert.megatron_lm.legacy import FILE
from megascale.convert.megatron_lm.torch_dist import COMMON
from megascale.core.errors import CheckpointError

SYSTEM = "Megatron-LM"
FLAGS = {"fp8": "fp8_format", "fp4": "fp4_format"}  # flags of attributes with another name
BACKENDS = ("flash", "fused", "unfused", "local", "auto")  # values of AttnBackend, from 1
IDLE_ZERO = ("", "optimizer.warmup_steps")  # keys of settings whose 0 is as no argument

BESIDE = {
    "padded_vocab_size": "num_layers", "num_layers_per_virtual_pipeline_stage": "num_layers",
    "use_checkpoint_args": "num_layers", "use_flash_attn": "attention_backend", "train_iters": "train_samples",
    "lr_decay_iters": "train_samples", "global_batch_size": "step_batch_size_schedule",
}  # fmt: skip
"""Arguments that follow from others, or say nothing, beside another one that has a value."""


def stored_arguments(folder: Path) -> Arguments:
    """The arguments, and the model, of the run that wrote the latest iteration in a folder.

    Raises: CheckpointError if it has no arguments, or their model is unsupported
    """
    path = iteration_folder(folder)
    file = min(path.glob(f"mp_rank_*/{FILE}"), default=path / COMMON)
    stored = read_plain(file)
    if not isinstance(stored, Mapping) or "args" not in stored:
        raise CheckpointError(f"{file} has no args", hint="a checkpoint that Megatron-LM has written in training")
    args = {FLAGS.get(name, name): value for name, value in vars(stored["args"]).items()}
    args["no_gradient_accumulation_fusion"] = args.get("gradient_accumulation_fusion") is False
    if isinstance(backend := args.get("attention_backend"), Record | Enum):  # an Enum where megatron.core is imported
        (number,) = backend.args if isinstance(backend, Record) else (backend.value,)
        args["attention_backend"] = dict(enumerate(BACKENDS, 1)).get(number)
    model = read_keys(FAMILY, args, f"{file}: args", "a model without this argument")
    unknown = {"preset", "dropout", *([] if args.get("vocab_size") else ["vocab_size"])}  # of which one is padded
    keys = model.model_dump(mode="json", by_alias=True, exclude_none=True, exclude=unknown)
    return Arguments(SYSTEM, _given(args), args.get("world_size"), {f"model.{key}": keys[key] for key in keys})


def _given(args: Mapping[str, Any]) -> dict[str, Values]:
    """The values of the arguments in the table, without those that are off, or of other optimizers."""
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
