"""Checkpoints of ours from Hugging Face's folders, and the other way."""

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
from megascale.checkpoint import manifest, whole
from megascale.checkpoint.state import WEIGHTS
from megascale.checkpoint.storage import Location
from megascale.config.model import ModelConfig
from megascale.convert.huggingface import COMPANIONS, CONFIG, Pretrained, export, tensors
from megascale.core.errors import CheckpointError, DataError
from megascale.core.files import atomic_folder
from megascale.data.tokenizer import FileTokenizer

ORIGIN = "huggingface.json"
"""The config.json that a checkpoint was made from, which knows what `[model]` does not."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def from_huggingface(source: Path, output: Path, dtype: torch.dtype | None = None) -> None:
    """Make a checkpoint of a folder's weights, in the format that they have or in another.

    Raises: CheckpointError if it cannot be read, is no model of ours, or has numbers beyond the other format; OSError
        if it cannot be written
    """
    given = Pretrained(source)
    given.check()
    config: dict[str, Any] = {"model": given.model.model_dump(mode="json")}
    with atomic_folder(output) as folder:
        for name in COMPANIONS:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        shutil.copyfile(source / CONFIG, folder / ORIGIN)
        whole.write(folder, _weights(given, dtype), config)


def _weights(given: Pretrained, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    for tensor in tensors(given.model):
        found = given.part(tensor.name)
        where = f"{given.folder}: {given.theirs(tensor.name)}"
        yield tensor.name, _cast(found, dtype or found.dtype, where)


def _cast(tensor: Tensor, dtype: torch.dtype, where: str) -> Tensor:
    """A tensor in a format.

    Raises: CheckpointError if numbers would become infinite in it
    """
    if tensor.dtype == dtype:
        return tensor
    made = tensor.to(dtype)
    beyond = tensor[made.isinf() & tensor.isfinite()].abs()
    if len(beyond):
        what = f"{where} has finite numbers, {len(beyond)} of them and up to {beyond.max():.6g}, that are infinite in"
        mend = "no --dtype, which keeps every number, or one that reaches as far"
        raise CheckpointError(f"{what} {str(dtype).removeprefix('torch.')}", mend=mend)
    return made


def to_huggingface(
    source: Location, output: Path, dtype: torch.dtype | None = None, tokenizer: Path | None = None
) -> str:
    """Make a folder of a checkpoint's weights: in the format that they have, if they have several in one that holds
    them all, or in another. `tokenizer`: its file, by default what lies beside the weights or the run was configured
    with. Returns why none goes along, or nothing.

    Raises: CheckpointError if it cannot be read, no architecture computes its model, or it has numbers beyond the other
        format; DataError for a `tokenizer` that is none, or not the model's; OSError if it cannot be written
    """
    saved = manifest.read(source)
    try:
        model = ModelConfig.model_validate(saved.facts.config.get("model"))
    except ValidationError as error:
        what = f"{source}: its [model] is none of this version: {error.errors()[0]['msg']}"
        raise CheckpointError(what, mend="the version that wrote it") from None

    def read(name: str) -> Tensor:
        if WEIGHTS + name not in saved.tensors:
            raise manifest.DamagedError(f"{source} has no tensor {WEIGHTS}{name}")
        return _cast(whole.read_tensor(source, saved, WEIGHTS + name), target, f"{source}: {WEIGHTS}{name}")

    stored = [saved.tensors.get(WEIGHTS + tensor.name) for tensor in tensors(model)]
    formats = {getattr(torch, tensor.dtype) for tensor in stored if tensor} or {torch.float32}
    target = dtype or functools.reduce(torch.promote_types, formats)
    with atomic_folder(output) as folder:
        other = _companions(source, folder)
        configured = (saved.facts.config.get("data") or {}).get("tokenizer")
        missing = ""
        if tokenizer:
            other |= _add_tokenizer(tokenizer, model, folder)
        elif configured and not any((folder / name).exists() for name in COMPANIONS):
            said, missing = _add_configured(str(configured), model, folder)
            other |= said
        export(model, read, folder, target, other)
    return missing


def _companions(source: Location, folder: Path) -> dict[str, Any]:
    """Put what lies beside a checkpoint's weights into a folder. Returns what a config.json says beside the model."""
    for name in COMPANIONS:
        if (source / name).exists():
            (folder / name).write_bytes((source / name).read())
    return dict(json.loads((source / ORIGIN).read())) if (source / ORIGIN).exists() else {}


def _add_configured(name: str, model: ModelConfig, folder: Path) -> tuple[dict[str, Any], str]:
    """Put the tokenizer that a run was configured with into a folder. Returns what a config.json says of it, and why it
    does not go along, or nothing.
    """
    if name in TOKENIZERS.cards:
        return {}, f"no tokenizer goes along: {name!r} has no file; megascale sample --tokenizer {name} knows it"
    if not Path(name).is_file():
        return {}, f"no tokenizer goes along: {name!r} is no file of this host; --tokenizer FILE gives one"
    try:
        return _add_tokenizer(Path(name), model, folder), ""
    except DataError as error:
        return {}, f"no tokenizer goes along: {error.what}; --tokenizer FILE gives another"


def _add_tokenizer(file: Path, model: ModelConfig, folder: Path) -> dict[str, Any]:
    """Put a tokenizer into a folder. Returns what a config.json says of it.

    Raises: DataError if it is none, or has more tokens than the model
    """
    tokenizer = FileTokenizer(file, eod=0)  # it need not have one
    if tokenizer.vocab_size > model.vocab_size:
        what = f"{file} has tokens up to {tokenizer.vocab_size - 1}, and the model knows {model.vocab_size}"
        raise DataError(what, mend="the tokenizer that it was trained with")
    eod = tokenizer.find_eod()
    shutil.copyfile(file, folder / "tokenizer.json")
    text = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.seq_length}
    (folder / "tokenizer_config.json").write_text(json.dumps(text, indent=2) + "\n", encoding="utf-8")
    return {} if eod is None else {"bos_token_id": eod, "eos_token_id": eod}
