"""Hugging Face folders: config.json, weights in safetensors files, and a tokenizer.

PretrainedWeights: read such a folder. export_model: write one. model_tensors: the tensors of a model.
"""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megascale.checkpoint.format.state import SAFETENSORS_DTYPES, Region, slices
from megascale.config.model import ModelConfig
from megascale.convert.families import (
    ConfigKeys,
    Family,
    TensorLocation,
    family_of_config,
    family_of_model,
    make_config,
    model_keys,
)
from megascale.core.errors import CheckpointError
from megascale.core.files import write_text
from megascale.layout.tensors import TOKEN_EMBEDDING, all_params
from megascale.layout.tensors import TensorSpec as Named

CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"

COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
              "merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json")  # fmt: skip
"""Optional files beside the weights, copied by a conversion."""

MAX_SHARD_BYTES = 2 << 30
"""Bytes of weights per safetensors file. A larger tensor has a file of its own."""

COMPARE_CHUNK_BYTES = 64 << 20
"""Bytes of two compared tensors that are in memory at a time, unless a single row is larger."""

_HEAD = "lm_head.weight"  # the name in all families

_UNQUANTIZED_HINT = f"the weights before quantization, in {', '.join(SAFETENSORS_DTYPES.values())}"


class PretrainedWeights:
    """The weights of a Hugging Face folder. Tensors, or regions of tensors, are read on demand.

    Raises: CheckpointError if the folder is unreadable, or its model is not supported
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = read_json(folder / CONFIG_FILE)
        self._family = family_of_config(self.config, str(folder / CONFIG_FILE))
        keys = model_keys(self.config, str(folder / CONFIG_FILE))
        try:
            self.model = ModelConfig.model_validate(keys)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            what = f"{folder / CONFIG_FILE}: {first['input']!r} as {key}: {first['msg']}"
            raise CheckpointError(what, hint="the config.json that belongs to the weights") from None

    @cached_property
    def files(self) -> dict[str, Path]:
        """The safetensors file of every tensor, by Hugging Face name."""
        if (self.folder / INDEX_FILE).exists():
            weight_map = read_json(self.folder / INDEX_FILE).get("weight_map")
            if not isinstance(weight_map, dict) or not all(_is_name(file) for file in weight_map.values()):
                raise CheckpointError(f"{self.folder / INDEX_FILE} has no map of weights to files beside it")
            return {name: self.folder / file for name, file in weight_map.items()}
        path = self.folder / WEIGHTS_FILE
        if not path.exists():
            hint = "convert it with transformers: from_pretrained(...).save_pretrained(...)"
            raise CheckpointError(f"{self.folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}", hint=hint)
        with _open_safetensors(path) as file:
            return dict.fromkeys(file.keys(), path)

    def check_tensors(self) -> None:
        """Check the files against the model: its tensors and no more, with their shapes, in unquantized dtypes.

        Raises: CheckpointError
        """
        if quantized := self.config.get("quantization_config"):
            method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
            what = f"{self.folder / CONFIG_FILE}: the weights are quantized, by quant_method {method!r}"
            raise CheckpointError(what, hint=_UNQUANTIZED_HINT)
        unchecked = set(self.files)
        for tensor in model_tensors(self.model):
            location = self._family.locate(tensor.name)
            name = self._stored_name(location.name)
            shape, dtype = self._shape_and_dtype(name)
            if dtype not in SAFETENSORS_DTYPES.values():
                raise CheckpointError(f"{self.files[name]}: {name} is stored as {dtype}", hint=_UNQUANTIZED_HINT)
            expected = _hf_shape(location, tensor.shape)
            if shape != expected:
                what = f"{name} has shape {list(shape)}, its config.json says {list(expected)}"
                raise CheckpointError(what, hint="another download")
            unchecked.discard(name)
        if self.model.tie_embeddings and _HEAD in unchecked:
            self._check_tied()
            unchecked.discard(_HEAD)
        unknown = sorted(n for n in unchecked if not n.endswith(self._family.ignored_suffixes or "\0"))
        if unknown:
            names = ", ".join(unknown[:3])
            raise CheckpointError(f"{self.folder} has {len(unknown)} tensors unknown to its config.json: {names}")

    def _check_tied(self) -> None:
        """Check that a stored head equals, bit by bit, the embedding of a model with tied embeddings.

        Raises: CheckpointError
        """
        embedding = self.hf_name(TOKEN_EMBEDDING)
        (count, width), _ = stored = self._shape_and_dtype(embedding)
        rows = max(1, COMPARE_CHUNK_BYTES // (8 * width))
        chunks = (slice(start, start + rows) for start in range(0, count, rows))
        if stored == self._shape_and_dtype(_HEAD) and all(
            self._bytes(embedding, chunk).equal(self._bytes(_HEAD, chunk)) for chunk in chunks
        ):
            return
        what = f"{self.folder / CONFIG_FILE}: tie_word_embeddings is true, but {_HEAD} is not equal to {embedding}"
        hint = f"set tie_word_embeddings to false to keep both, or remove {_HEAD} from the files"
        raise CheckpointError(what, hint=hint)

    def _shape_and_dtype(self, hf_name: str) -> tuple[tuple[int, ...], str]:
        """Shape and safetensors dtype of a stored tensor."""
        with _open_safetensors(self.files[hf_name]) as file:
            stored = file.get_slice(hf_name)
            return tuple(stored.get_shape()), stored.get_dtype()

    def _bytes(self, hf_name: str, rows: slice) -> Tensor:
        """Rows of a stored matrix, as bytes."""
        with _open_safetensors(self.files[hf_name]) as file:
            return file.get_slice(hf_name)[rows].view(torch.uint8)

    def read_tensor(self, name: str, part: Region | None = None) -> Tensor:
        """Read a tensor by its megascale name, or the region `part` of the tensor, in the stored dtype.

        Raises: CheckpointError if the tensor is missing or unreadable
        """
        location, hf_name = self._family.locate(name), self.hf_name(name)
        with _open_safetensors(self.files[hf_name]) as file:
            stored = file.get_slice(hf_name)
            tensor = stored[_hf_slices(location, tuple(stored.get_shape()), part)]
        return (tensor.t() if location.transposed else tensor).contiguous()

    def place_of(self, name: str) -> str:
        """Name the file of a megascale tensor, and the tensor as the file does. Raises: CheckpointError"""
        hf_name = self.hf_name(name)
        return f"{self.files[hf_name]}: {hf_name}"

    def hf_name(self, name: str) -> str:
        """The name of a megascale tensor in these files.

        Raises: CheckpointError if the tensor is missing
        """
        return self._stored_name(self._family.locate(name).name)

    def _stored_name(self, name: str) -> str:
        """The name in these files. Files of a bare model omit the prefix "transformer." or "model."."""
        bare = name.removeprefix("transformer.").removeprefix("model.")
        for candidate in (name, bare):
            if candidate in self.files:
                return candidate
        raise CheckpointError(f"{self.folder} has no tensor {name}", hint="another download")


def model_tensors(model: ModelConfig) -> list[Named]:
    """The tensors of a model, in the order of the network."""
    return [tensor for parameter in all_params(model) for tensor in parameter.parts]


def export_model(
    model: ModelConfig, read: Callable[[str], Tensor], folder: Path, dtype: torch.dtype, extra_keys: ConfigKeys
) -> None:
    """Write a model's weights and config.json into a folder, with the tensors of a single file in memory at a time.

    `read` returns a tensor in `dtype` by its megascale name. `extra_keys`: further keys of the config.json.

    Raises: CheckpointError if no architecture computes the model; OSError if the folder cannot be written
    """
    written = str(dtype).removeprefix("torch.")
    dtype_keys = {"torch_dtype": written} | ({"dtype": written} if "dtype" in extra_keys else {})  # transformers 5
    config = extra_keys | make_config(model) | dtype_keys
    groups = list(_files(family_of_model(model), model, dtype))
    weights: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file = WEIGHTS_FILE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        tensors_of_file = {
            name: _concatenate([_to_hf_layout(location, read(part)) for part, location in parts])
            for name, parts in group
        }
        try:
            save_file(tensors_of_file, folder / file, {"format": "pt"})
        except SafetensorError as error:
            raise OSError(errno.EIO, str(error), str(folder / file)) from None
        weights |= dict.fromkeys(tensors_of_file, file)
    if len(groups) > 1:
        total = sum(math.prod(tensor.shape) for tensor in model_tensors(model)) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": weights}
        write_text(folder / INDEX_FILE, json.dumps(index, indent=2) + "\n")
    write_text(folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")


TensorParts = list[tuple[str, TensorLocation]]


def _files(family: Family, model: ModelConfig, dtype: torch.dtype) -> Iterator[list[tuple[str, TensorParts]]]:
    """Group the Hugging Face tensors by file, each tensor with its megascale parts."""
    parts_by_name: dict[str, TensorParts] = {}
    size: dict[str, int] = {}
    for tensor in model_tensors(model):
        location = family.locate(tensor.name)
        parts_by_name.setdefault(location.name, []).append((tensor.name, location))
        size[location.name] = size.get(location.name, 0) + math.prod(tensor.shape) * dtype.itemsize
    group: list[tuple[str, TensorParts]] = []
    for name, parts in parts_by_name.items():
        if group and sum(size[member] for member, _ in group) + size[name] > MAX_SHARD_BYTES:
            yield group
            group = []
        group.append((name, sorted(parts, key=lambda part: part[1].index)))
    yield group


def _to_hf_layout(location: TensorLocation, tensor: Tensor) -> Tensor:
    return tensor.t() if location.transposed else tensor


def _concatenate(parts: list[Tensor]) -> Tensor:
    return (torch.cat(parts, -1) if len(parts) > 1 else parts[0]).contiguous()


def _hf_shape(location: TensorLocation, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the Hugging Face tensor that holds a megascale tensor of `shape`."""
    hf_shape = tuple(reversed(shape)) if location.transposed else shape
    return (*hf_shape[:-1], hf_shape[-1] * location.count)


def _hf_slices(location: TensorLocation, hf_shape: tuple[int, ...], part: Region | None) -> tuple[slice, ...]:
    """The slices of a Hugging Face tensor that hold a megascale tensor, or the region `part` of the latter."""
    width = hf_shape[-1] // location.count
    if part is None:
        hf_slices = [slice(0, n) for n in (*hf_shape[:-1], width)]
    else:
        hf_slices = list(slices(*part))
        if location.transposed:
            hf_slices.reverse()
    *leading, last = hf_slices
    start = location.index * width
    return (*leading, slice(start + last.start, start + last.stop))


def _is_name(file: Any) -> bool:
    return isinstance(file, str) and Path(file).name == file


def read_json(path: Path) -> ConfigKeys:
    """Read a JSON object from a file.

    Raises: CheckpointError
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        hint = "a folder with config.json and safetensors"
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", hint=hint) from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}", hint="another download") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object", hint="another download")
    return value


@contextmanager
def _open_safetensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file, briefly: pages read from a mapped file count as this process's memory until closed."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", hint="another download") from None
