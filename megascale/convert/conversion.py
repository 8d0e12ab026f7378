"""Conversion of checkpoints: from_huggingface makes a megascale checkpoint, to_huggingface a Hugging Face folder."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from megascale.catalog.tokenizers import TOKENIZERS
from megascale.checkpoint import offline
from megascale.checkpoint.format import manifest
from megascale.checkpoint.format.state import WEIGHTS
from megascale.checkpoint.storage import Location
from megascale.config.model import ModelConfig
from megascale.convert.huggingface import COMPANIONS, CONFIG_FILE, PretrainedWeights, export_model, model_tensors
from megascale.core.errors import CheckpointError, DataError
from megascale.core.files import atomic_folder
from megascale.data.tokenizer import FileTokenizer

HF_CONFIG_FILE = "huggingface.json"
"""The config.json of a converted checkpoint's source, with keys that `[model]` lacks."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def from_huggingface(source: Path, output: Path, dtype: torch.dtype | None = None) -> None:
    """Make a checkpoint of a Hugging Face folder. `dtype`: of the weights; None keeps the stored dtypes.

    Raises: CheckpointError if the folder is unreadable or its model unsupported, or if an element overflows in `dtype`;
        OSError if `output` cannot be written
    """
    pretrained = PretrainedWeights(source)
    pretrained.check_tensors()
    config: dict[str, Any] = {"model": pretrained.model.model_dump(mode="json", by_alias=True)}
    with atomic_folder(output) as folder:
        for name in COMPANIONS:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        shutil.copyfile(source / CONFIG_FILE, folder / HF_CONFIG_FILE)
        offline.write_weights(folder, _weights(pretrained, dtype), config)


def _weights(pretrained: PretrainedWeights, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    for tensor in model_tensors(pretrained.model):
        weight = pretrained.read_tensor(tensor.name)
        where = f"{pretrained.folder}: {pretrained.hf_name(tensor.name)}"
        yield tensor.name, _cast(weight, dtype or weight.dtype, where)


def _cast(tensor: Tensor, dtype: torch.dtype, where: str) -> Tensor:
    """Cast a tensor.

    Raises: CheckpointError if finite elements become infinite
    """
    if tensor.dtype == dtype:
        return tensor
    converted = tensor.to(dtype)
    overflowed = tensor[converted.isinf() & tensor.isfinite()].abs()
    if len(overflowed):
        elements = f"{len(overflowed)} of its {tensor.numel()} elements, up to {overflowed.max():.6g}"
        what = f"{where} overflows in {str(dtype).removeprefix('torch.')}: {elements}"
        raise CheckpointError(what, hint="leave out --dtype, or choose a dtype with the range of fp32")
    return converted


def to_huggingface(
    source: Location, output: Path, dtype: torch.dtype | None = None, tokenizer: Path | None = None
) -> str:
    """Make a Hugging Face folder of a checkpoint. Returns why no tokenizer is included, or "".

    `dtype`: of the weights; by default the smallest dtype that holds all stored dtypes. `tokenizer`: a tokenizer.json;
    by default the files beside the weights, or the tokenizer of the run's configuration.

    Raises: CheckpointError if the checkpoint is unreadable, no architecture computes its model, or an element overflows
        in `dtype`; DataError if `tokenizer` is unusable or larger than the model's vocabulary; OSError if `output`
        cannot be written
    """
    saved = manifest.read(source)
    try:
        model = ModelConfig.model_validate(saved.facts.config.get("model"))
    except ValidationError as error:
        what = f"{source}: this version of megascale cannot read its [model]: {error.errors()[0]['msg']}"
        raise CheckpointError(what, hint="use the version that wrote the checkpoint") from None

    def read(name: str) -> Tensor:
        if WEIGHTS + name not in saved.tensors:
            raise manifest.DamagedError(f"{source} has no tensor {WEIGHTS}{name}")
        return _cast(offline.read_tensor(source, saved, WEIGHTS + name), target, f"{source}: {WEIGHTS}{name}")

    stored = [saved.tensors.get(WEIGHTS + tensor.name) for tensor in model_tensors(model)]
    dtypes = {getattr(torch, tensor.dtype) for tensor in stored if tensor} or {torch.float32}
    target = dtype or functools.reduce(torch.promote_types, dtypes)
    with atomic_folder(output) as folder:
        extra_keys = _copy_companions(source, folder)
        configured = (saved.facts.config.get("data") or {}).get("tokenizer")
        missing = ""
        if tokenizer:
            extra_keys |= _add_tokenizer(tokenizer, model, folder)
        elif configured and not any((folder / name).exists() for name in COMPANIONS):
            token_ids, missing = _add_run_tokenizer(str(configured), model, folder)
            extra_keys |= token_ids
        export_model(model, read, folder, target, extra_keys)
    return missing


def _copy_companions(source: Location, folder: Path) -> dict[str, Any]:
    """Copy the companion files of a checkpoint's weights. Returns the config.json of the checkpoint's source, or {}."""
    for name in COMPANIONS:
        if (source / name).exists():
            (folder / name).write_bytes((source / name).read())
    return dict(json.loads((source / HF_CONFIG_FILE).read())) if (source / HF_CONFIG_FILE).exists() else {}


def _add_run_tokenizer(name: str, model: ModelConfig, folder: Path) -> tuple[dict[str, Any], str]:
    """Copy the tokenizer of a run's configuration. Returns its keys for config.json, and why no tokenizer is included,
    or "".
    """
    if name in TOKENIZERS.cards:
        return {}, f"no tokenizer included: {name!r} has no file; use megascale sample --tokenizer {name}"
    if not Path(name).is_file():
        return {}, f"no tokenizer included: there is no file {name!r} on this host; give --tokenizer FILE"
    try:
        return _add_tokenizer(Path(name), model, folder), ""
    except DataError as error:
        return {}, f"no tokenizer included: {error.message}; give another with --tokenizer FILE"


def _add_tokenizer(file: Path, model: ModelConfig, folder: Path) -> dict[str, Any]:
    """Copy a tokenizer. Returns its keys for config.json.

    Raises: DataError if the file is no tokenizer, or has more tokens than the model's vocabulary
    """
    tokenizer = FileTokenizer(file, eod=0)  # any id: a tokenizer without an end-of-document token is accepted
    if tokenizer.vocab_size > model.vocab_size:
        what = f"{file} has tokens up to {tokenizer.vocab_size - 1}, but model.vocab_size is {model.vocab_size}"
        raise DataError(what, hint="the tokenizer that the model was trained with")
    eod = tokenizer.find_eod()
    shutil.copyfile(file, folder / "tokenizer.json")
    text = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.seq_length}
    (folder / "tokenizer_config.json").write_text(json.dumps(text, indent=2) + "\n", encoding="utf-8")
    return {} if eod is None else {"bos_token_id": eod, "eos_token_id": eod}
