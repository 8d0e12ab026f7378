"""Conversion of checkpoints: from_huggingface makes a megascale checkpoint, to_huggingface a Hugging Face folder, and
upcycle a checkpoint with experts of a dense one: they begin as copies of its MLPs, with fresh routers (Komatsuzaki et
al. 2023). A token's weights add up to 1, so the first forward is that of the dense model.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megascale.checkpoint import offline
from megascale.checkpoint.companions import COMPANIONS, SOURCE_CONFIG, copy_companions, write_companion
from megascale.checkpoint.format import manifest
from megascale.config.exclusions import EXPERTS, ONE_EXPERT
from megascale.config.model import ModelConfig
from megascale.config.model_rules import experts as experts_rule
from megascale.config.parallel import ParallelConfig
from megascale.config.rules import run_rules
from megascale.config.train import TrainConfig
from megascale.convert import tokenizer_files
from megascale.convert.config_file import CONFIG_FILE, QUANTIZED
from megascale.convert.huggingface import PretrainedWeights, export_model
from megascale.convert.saved_weights import open_weights
from megascale.convert.tensor_map import model_weights, stack_biases
from megascale.core.errors import CheckpointError
from megascale.core.files import atomic_folder
from megascale.core.storage import Location
from megascale.layout.parameters import all_params
from megascale.layout.topology import Coord, Topology
from megascale.model.initialize import init_parameters
from megascale.parallel.stateful import BALANCE_BIAS, WEIGHTS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Read = Callable[[str], Tensor]
"""Reads a whole tensor by its megascale name."""


class Upcycling(NamedTuple):
    """The number of experts of a layer, and of a token."""

    experts: int
    chosen: int


def from_huggingface(source: Path, output: Path, dtype: torch.dtype | None = None, to: Upcycling | None = None) -> None:
    """Make a checkpoint of a Hugging Face folder. `dtype`: of the weights; None keeps the stored dtypes. `to`: experts,
    which begin as the MLPs.

    Raises: CheckpointError if the folder is unreadable or its model unsupported, or if an element overflows in `dtype`;
        OSError if `output` cannot be written
    """
    pretrained = PretrainedWeights(source)
    pretrained.check_tensors()

    def read(name: str) -> Tensor:
        weight = pretrained.read_tensor(name)
        if dtype is None or name.startswith(BALANCE_BIAS):
            return weight
        return _cast(weight, dtype, f"{pretrained.folder}: {pretrained.hf_name(name)}")

    with atomic_folder(output) as folder:
        copied = copy_companions(Location(str(source)), Location(str(folder)), COMPANIONS)
        text = (source / CONFIG_FILE).read_bytes()
        write_companion(folder, SOURCE_CONFIG, text)
        copied[SOURCE_CONFIG] = manifest.StoredFile(bytes=len(text), crc32=zlib.crc32(text))
        _write(folder, pretrained.model, read, copied, to, str(source))


def upcycle(
    source: Location, output: Path, to: Upcycling, dtype: torch.dtype | None = None, average: bool = False
) -> None:
    """Make a checkpoint of the weights of a dense one, or of their average, with experts that begin as its MLPs.

    Raises: CheckpointError if the checkpoint is unreadable or its model cannot have experts; OSError
    """
    weights = open_weights(source, average)

    def read(name: str) -> Tensor:
        weight = weights.read(name)
        return _cast(weight, dtype or weight.dtype, f"{source}: {name}")

    with atomic_folder(output) as folder:
        copied = copy_companions(source, Location(str(folder)))
        _write(folder, weights.model, read, copied, to, str(source))


def _write(
    folder: Path, model: ModelConfig, read: Read, companions: Mapping[str, manifest.StoredFile], to: Upcycling | None,
    where: str,
) -> None:  # fmt: skip
    """Write the weights that `read` returns of a `model`, as they are or `to` experts."""
    if to is not None:
        model = _upcycled_model(model, to, where)
        read = _upcycled_reader(model, read)
    biases = [(BALANCE_BIAS, stack_biases(model, read))] if model.balance_bias else []
    config = {"model": model.model_dump(mode="json", by_alias=True)}
    tensors = itertools.chain(((WEIGHTS + weight.name, read(weight.name)) for weight in model_weights(model)), biases)
    offline.write_state(folder, tensors, config, companions)


def _upcycled_model(dense: ModelConfig, to: Upcycling, where: str) -> ModelConfig:
    """The model with experts in place of MLPs. Raises: CheckpointError for a model, `where`, that cannot have them"""
    if dense.experts:
        raise CheckpointError(f"{where}: the model has {dense.experts} experts", hint="a dense model for --experts")
    keys = dense.model_dump(by_alias=True, exclude={"preset"})
    model = ModelConfig.model_validate(keys | {"experts": to.experts, "experts_per_token": to.chosen})
    sections = {
        "model": model,
        "parallel": ParallelConfig.model_construct(),
        "train": TrainConfig.model_construct(steps=1),
    }
    if finding := next(run_rules((EXPERTS, experts_rule, ONE_EXPERT), sections), None):
        raise CheckpointError(f"{where}: {finding.key}: {finding.message}", hint=finding.hint)
    return model


def _upcycled_reader(model: ModelConfig, read: Read) -> Read:
    """A reader of the tensors of `model`, with experts, by those that `read` returns of the dense model. Routers are
    fp32, drawn with the default of `train.seed`.
    """
    params = {param.name: param for param in all_params(model)}

    def read_or_make(name: str) -> Tensor:
        base, _, stack = name.partition(".experts.")
        if stack:
            layer, _, kind = stack.partition(".")
            parts = [read(f"{base}.mlp.{part}.{kind}") for part in layer.split("_")]
            return torch.stack(parts).expand(params[name].parts[0].shape)
        if not name.endswith(".router.weight"):
            return read(name)
        router = torch.empty(params[name].parts[0].shape)
        init_parameters([(router, params[name])], Topology(), Coord(), TrainConfig.model_fields["seed"].default)
        return router

    return read_or_make


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


def to_huggingface(
    source: Location, output: Path, dtype: torch.dtype | None = None, tokenizer: Path | None = None,
    eod: str | None = None, average: bool = False,
) -> list[str]:  # fmt: skip
    """Make a Hugging Face folder of a checkpoint. Returns what its files lack, a line each.

    `dtype`: of the weights; by default the smallest dtype that holds all stored dtypes. `tokenizer`: a tokenizer.json;
    by default the files beside the weights, or the tokenizer of the run's configuration. `eod`: its end-of-document
    token; by default that of the training data, or what the tokenizer's files say. `average`: export that
    of the weights.

    Raises: CheckpointError if the checkpoint is unreadable or has no average, no architecture computes its model, or an
        element overflows in `dtype`; DataError if `tokenizer` is unusable or larger than the model's vocabulary;
        OSError if `output` cannot be written
    """
    weights = open_weights(source, average)
    model = weights.model.model_copy(update={"exits": []})

    def read(name: str, index: tuple[int, ...]) -> Tensor:
        tensor = weights.read(name, index)
        where = f"{source}: {name}{list(index) or ''}"
        return tensor if name.startswith(BALANCE_BIAS) else _cast(tensor, target, where)

    target = dtype or weights.widest_dtype()
    with atomic_folder(output) as folder:
        copy_companions(source, Location(str(folder)), COMPANIONS)
        configured = (weights.saved.facts.config.get("data") or {}).get("tokenizer")
        wanted = tokenizer, eod, configured and str(configured)
        extra_keys, missing = tokenizer_files.add_tokenizer(source, folder, model, *wanted)
        export_model(model, read, folder, target, extra_keys)
    if extra_keys.get(QUANTIZED):
        missing.append(f"no {QUANTIZED} included: weights that were quantized are written in {target}")
    if weights.model.exits:
        missing.append("no early exits included: transformers has no such models")
    return missing
