"""Conversion of checkpoints: from_huggingface makes a megascale checkpoint, to_huggingface a Hugging Face folder."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from megascale.checkpoint import folders, offline
from megascale.checkpoint.companions import COMPANIONS, SOURCE_CONFIG, copy_companions, write_companion
from megascale.checkpoint.format import manifest
from megascale.config.model import ModelConfig
from megascale.convert import tokenizer_files
from megascale.convert.config_file import CONFIG_FILE
from megascale.convert.huggingface import PretrainedWeights, export_model
from megascale.convert.tensor_map import model_tensors
from megascale.core.errors import CheckpointError
from megascale.core.files import atomic_folder, is_file
from megascale.core.storage import Location
from megascale.parallel.stateful import AVERAGE, AVERAGE_UPDATES, WEIGHTS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def from_huggingface(source: Path, output: Path, dtype: torch.dtype | None = None) -> None:
    """Make a checkpoint of a Hugging Face folder. `dtype`: of the weights; None keeps the stored dtypes.

    Raises: CheckpointError if the folder is unreadable or its model unsupported, or if an element overflows in `dtype`;
        OSError if `output` cannot be written
    """
    pretrained = PretrainedWeights(source)
    pretrained.check_tensors()
    config: dict[str, Any] = {"model": pretrained.model.model_dump(mode="json", by_alias=True)}

    def weights() -> Iterator[tuple[str, Tensor]]:
        for tensor in pretrained.tensors:
            weight = pretrained.read_tensor(tensor.name)
            where = f"{pretrained.folder}: {pretrained.hf_name(tensor.name)}"
            yield tensor.name, _cast(weight, dtype or weight.dtype, where)

    with atomic_folder(output) as folder:
        copied = copy_companions(Location(str(source)), Location(str(folder)), COMPANIONS)
        text = (source / CONFIG_FILE).read_bytes()
        write_companion(folder, SOURCE_CONFIG, text)
        copied[SOURCE_CONFIG] = manifest.StoredFile(bytes=len(text), crc32=zlib.crc32(text))
        offline.write_weights(folder, weights(), config, copied)


def _cast(tensor: Tensor, dtype: torch.dtype, where: str) -> Tensor:
    """Cast a tensor. Raises: CheckpointError if finite elements become infinite"""
    if tensor.dtype == dtype:
        return tensor
    converted = tensor.to(dtype)
    overflowed = tensor[converted.isinf() & tensor.isfinite()].abs()
    if len(overflowed):
        elements = f"{len(overflowed)} of its {tensor.numel()} elements, up to {overflowed.max():.6g}"
        what = f"{where} overflows in {str(dtype).removeprefix('torch.')}: {elements}"
        raise CheckpointError(what, hint="leave out --dtype, or choose a dtype with the range of fp32")
    return converted


def read_model_section(source: Location) -> dict[str, Any]:
    """The keys of `[model]` of Hugging Face weights, or of a checkpoint or a run, without keys that have no value.

    Raises: CheckpointError if there are none, or their model is unsupported
    """
    folder = source.local_path
    if folder and is_file(folder / CONFIG_FILE) and not is_file(folder / manifest.NAME):
        model = PretrainedWeights(folder).model
    else:
        checkpoint = folders.find_checkpoint(source)
        model = _saved_model(checkpoint, manifest.read(checkpoint))
    keys = model.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"preset"})
    return keys | ({"positions": model.position_rows} if model.position_rows else {})  # whatever seq_length becomes


def _saved_model(source: Location, saved: manifest.Manifest) -> ModelConfig:
    try:
        return ModelConfig.model_validate(saved.facts.config.get("model"))
    except ValidationError as error:
        what = f"{source}: this version of megascale cannot read its [model]: {error.errors()[0]['msg']}"
        raise CheckpointError(what, hint="use the version that wrote the checkpoint") from None


def to_huggingface(
    source: Location,
    output: Path,
    dtype: torch.dtype | None = None,
    tokenizer: Path | None = None,
    eod: str | None = None,
    average: bool = False,
) -> list[str]:
    """Make a Hugging Face folder of a checkpoint. Returns what its files lack, a line each.

    `dtype`: of the weights; by default the smallest dtype that holds all stored dtypes. `tokenizer`: a tokenizer.json;
    by default the files beside the weights, or the tokenizer of the run's configuration. `eod`: its end-of-document
    token; by default that of the training data, or what the tokenizer's files say. `average`: export that
    of the weights.

    Raises: CheckpointError if the checkpoint is unreadable or has no average, no architecture computes its model, or an
        element overflows in `dtype`; DataError if `tokenizer` is unusable or larger than the model's vocabulary;
        OSError if `output` cannot be written
    """
    saved = manifest.read(source)
    model = _saved_model(source, saved)
    weights = average_of_weights(source, saved) if average else SavedWeights(source, saved)

    def read(name: str) -> Tensor:
        return _cast(weights.read(name), target, f"{source}: {name}")

    stored = [weights.dtype(tensor.name) for tensor in model_tensors(model)]
    dtypes = {found for found in stored if found} or {torch.float32}
    target = dtype or functools.reduce(torch.promote_types, dtypes)
    with atomic_folder(output) as folder:
        copy_companions(source, Location(str(folder)), COMPANIONS)
        configured = (saved.facts.config.get("data") or {}).get("tokenizer")
        wanted = tokenizer, eod, configured and str(configured)
        extra_keys, missing = tokenizer_files.add_tokenizer(source, folder, model, *wanted)
        export_model(model, read, folder, target, extra_keys)
    return missing


@dataclass(frozen=True)
class SavedWeights:
    """Tensors of a checkpoint in `source` that are weights: the means of those with the `prefixes`."""

    source: Location
    saved: manifest.Manifest
    prefixes: tuple[str, ...] = (WEIGHTS,)

    def dtype(self, name: str) -> torch.dtype | None:
        """Return the stored dtype of a weight; None without one."""
        stored = self.saved.tensors.get(self.prefixes[0] + name)
        return None if stored is None else getattr(torch, stored.dtype)

    def read(self, name: str) -> Tensor:
        """Read a weight. Raises: DamagedError if it is missing or damaged"""
        found = []
        for prefix in self.prefixes:
            if prefix + name not in self.saved.tensors:
                raise manifest.DamagedError(f"{self.source} has no tensor {prefix}{name}")
            found.append(offline.read_tensor(self.source, self.saved, prefix + name))
        return torch.stack(found).mean(0) if len(found) > 1 else found[0]


def average_of_weights(source: Location, saved: manifest.Manifest) -> SavedWeights:
    """Return the average: of `lawa` the mean of the snapshots so far. Raises: CheckpointError without one"""
    kept = {name.partition(".")[0] for name in saved.tensors if name.startswith(AVERAGE)} - {AVERAGE_UPDATES}
    taken = int(offline.read_tensor(source, saved, AVERAGE_UPDATES)) if AVERAGE_UPDATES in saved.tensors else 0
    if not taken:
        hint = "train.average = ema or lawa keeps one, every train.average_every steps"
        raise CheckpointError(f"{source} has no average of the weights", hint=hint)
    return SavedWeights(source, saved, tuple(f"{AVERAGE}{index}." for index in range(min(taken, len(kept)))))
