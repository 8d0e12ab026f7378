"""Hugging Face folders, read and written: config.json, and weights in safetensors files."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megascale.checkpoint.format import manifest
from megascale.checkpoint.format.state import SAFETENSORS_FLOATS, Region, slices
from megascale.config.model import ModelConfig
from megascale.convert import config_file, dequantize
from megascale.convert import tensor_map as maps
from megascale.convert.config_file import CONFIG_FILE, DAMAGED_HINT, read_json
from megascale.convert.families.config_json import FAMILIES, TEXT_ALONE_HINT, make_config
from megascale.convert.families.family import ConfigKeys, Family
from megascale.core.errors import CheckpointError
from megascale.core.files import exists, is_file, why_unreadable, write_text
from megascale.core.limits import os_error_hint
from megascale.layout.tensors import HEAD, TOKEN_EMBEDDING
from megascale.parallel.stateful import BALANCE_BIAS

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"

MAX_SHARD_BYTES = 2 << 30  # bytes of weights per safetensors file. A larger tensor has a file of its own

COMPARE_CHUNK_BYTES = 64 << 20
"""Bytes of two compared tensors that are in memory at a time, unless a single row is larger."""

PICKLES = ("*.bin", "*.pth", "*.pt")  # files of weights in torch's pickles, which can run code when they are opened
TEXT_MODEL = "language_model."  # part of the names of a text model's tensors in weights of text and other inputs


class PretrainedWeights:
    """The weights of a Hugging Face folder. Tensors, or regions of tensors, are read on demand.

    Raises: CheckpointError if the folder is unreadable, or its model is not supported
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config, self.model = config_file.read_model_config(folder)
        self._family = FAMILIES[self.config["model_type"]]
        first = f"{self._family.layer_prefix}.{self.model.num_layers}."
        if self.model.mtp_layers and not any(first in name for name in self.files):
            self.leave_out_depths(0)  # as transformers saves a model, with the key of config.json
        self._places = maps.tensor_map(self._family, self.model)
        self.tensors = maps.model_tensors(self.model)
        self._specs = {tensor.name: tensor for tensor in self.tensors}
        self._headers: dict[Path, dict[str, tuple[tuple[int, ...], str]]] = {}

    @cached_property
    def files(self) -> dict[str, Path]:
        """The safetensors file of every tensor, by Hugging Face name; of a quantized one that of its elements."""
        return {name: self._stored[elements] for name, elements in dequantize.unquantized(self._stored).items()}

    @cached_property
    def _stored(self) -> dict[str, Path]:
        """The safetensors file of every stored tensor."""
        index, path = self.folder / INDEX_FILE, self.folder / WEIGHTS_FILE
        if exists(index):
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(
                isinstance(file, str) and Path(file).name == file for file in weight_map.values()
            ):
                raise CheckpointError(f"{index} has no map of weights to files beside it")
            if exists(path) and WEIGHTS_FILE not in weight_map.values():
                what = f"{self.folder} has {WEIGHTS_FILE}, and {INDEX_FILE}, which names other files"
                raise CheckpointError(what, hint="remove the older of the two; transformers reads the former")
            return {name: self.folder / file for name, file in weight_map.items()}
        if not exists(path):
            pickles = sorted(path.name for pattern in PICKLES for path in self.folder.glob(pattern))
            also = f"; {pickles[0]} is a pickle, which can run code, and is not opened" if pickles else ""
            hint = "convert it with transformers: from_pretrained(...).save_pretrained(...)"
            raise CheckpointError(f"{self.folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}{also}", hint=hint)
        with _open_safetensors(path) as file:
            return dict.fromkeys(file.keys(), path)

    def check_tensors(self) -> None:
        """Check the files against the model: its tensors and no more, with their shapes, in unquantized dtypes; and the
        small files beside them.

        Raises: CheckpointError
        """
        config_file.check_small_files(self.folder)
        unchecked = set(self.files)
        for ours, places in self._places.items():
            spec = self._specs[ours]
            unchecked -= self._check_places(places, spec.shape[len(spec.outer) :])
        head = {self._family.outer[HEAD]: TOKEN_EMBEDDING} if self.model.tie_embeddings else {}
        for copy, ours in (head | maps.stored_copies(self._family, self.model)).items():
            if copy in unchecked:
                self._check_copy(copy, self.hf_name(ours))
                unchecked.discard(copy)
        unknown = sorted(n for n in unchecked if not n.endswith(self._family.ignored_suffixes or "\0"))
        if unknown:
            what = f"{self.folder} has {len(unknown)} tensors unknown to its config.json: {', '.join(unknown[:3])}"
            raise CheckpointError(what)

    def _check_places(self, places: maps.Places, shape: tuple[int, ...]) -> set[str]:
        """Check the tensors of `places`, of a vector or matrix of `shape` each, and of one dtype. Returns their names.

        Raises: CheckpointError
        """
        dtypes = {}
        for place in places:
            name = self._stored_name(place.name)
            stored, dtypes[name] = self._shape_and_dtype(name)
            if dtypes[name] not in SAFETENSORS_FLOATS.values():
                what = f"{self.files[name]}: {name} is stored as {dtypes[name]}"
                raise CheckpointError(what, hint=config_file.UNQUANTIZED_HINT)
            if stored != (expected := place.stored_shape(shape)):
                what = f"{name} has shape {list(stored)}, its config.json says {list(expected)}"
                raise CheckpointError(what, hint="weights and config.json of one model")
        if len(set(dtypes.values())) > 1:
            one = {dtype: name for name, dtype in dtypes.items()}
            what = f"{self.folder}: {' and '.join(f'{name} in {dtype}' for dtype, name in one.items())}"
            raise CheckpointError(what, hint="experts of one dtype in a layer")
        return set(dtypes)

    def _check_copy(self, copy: str, original: str) -> None:
        """Check that a stored tensor equals another bit by bit: a tied head, or a copy of multi-token prediction.

        Raises: CheckpointError
        """
        (count, width), _ = stored = self._shape_and_dtype(original)
        rows = max(1, COMPARE_CHUNK_BYTES // (8 * width))
        chunks = (slice(start, start + rows) for start in range(0, count, rows))
        if stored == self._shape_and_dtype(copy) and all(
            self._bytes(original, chunk).equal(self._bytes(copy, chunk)) for chunk in chunks
        ):
            return
        if copy != self._family.outer[HEAD]:
            what = f"{self.folder}: {copy} is not equal to {original}, which multi-token prediction shares"
            raise CheckpointError(what, hint=f"remove {copy} from the files to train on with one")
        what = f"{self.folder / CONFIG_FILE}: tie_word_embeddings is true, but {copy} is not equal to {original}"
        hint = f"set tie_word_embeddings to false to keep both, or remove {copy} from the files"
        raise CheckpointError(what, hint=hint)

    def leave_out_depths(self, kept: int) -> int:
        """Leave out layers of multi-token prediction beyond the first `kept`, and return their number."""
        left_out = max(0, self.model.mtp_layers - kept)
        self.model = self.model.model_copy(update={"mtp_layers": self.model.mtp_layers - left_out})
        return left_out

    def _shape_and_dtype(self, hf_name: str) -> dequantize.Header:
        """Shape and dtype of a tensor, bf16 of a quantized one."""
        return dequantize.described(hf_name, self._stored, self._header)

    def _header(self, hf_name: str) -> dequantize.Header:
        """Shape and dtype of a stored tensor, by the header of its file, which is read once: it may list many
        experts.
        """
        path = self._stored[hf_name]
        if path not in self._headers:
            with _open_safetensors(path) as file:
                entries = dict(zip(names := file.keys(), map(file.get_slice, names), strict=True))
                self._headers[path] = {name: (tuple(e.get_shape()), e.get_dtype()) for name, e in entries.items()}
        if hf_name not in self._headers[path]:
            raise CheckpointError(f"{path} has no tensor {hf_name}, unlike {INDEX_FILE}", hint=DAMAGED_HINT)
        return self._headers[path][hf_name]

    def read_tensor(self, name: str, part: Region | None = None) -> Tensor:
        """Read a tensor by its megascale name, or the region `part` of the tensor, in the stored dtype; or of the state
        `BALANCE_BIAS`.

        Raises: CheckpointError if the tensor is missing or unreadable
        """

        if name == BALANCE_BIAS:
            biases = maps.stack_biases(self.model, self.read_tensor)
            return biases if part is None else biases[slices(*part)]
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}

            def stored(elements: str, box: dequantize.Box) -> Tensor:
                path = self._stored[elements]
                if path not in opened:
                    opened[path] = stack.enter_context(_open_safetensors(path))
                whole = tuple(slice(each.start, each.stop) if isinstance(each, slice) else each for each in box)
                steps = tuple(slice(None, None, each.step) for each in box if isinstance(each, slice))
                tensor: Tensor = opened[path].get_slice(elements)[whole][steps]
                return tensor

            def read(name: str, box: dequantize.Box) -> Tensor:
                return dequantize.read(self._stored_name(name), box, self._stored, stored)

            return maps.read_region(self._places[name], self._specs[name], read, part)

    def _bytes(self, hf_name: str, rows: slice) -> Tensor:
        with _open_safetensors(self.files[hf_name]) as file:
            return file.get_slice(hf_name)[rows].view(torch.uint8)

    def place_of(self, name: str) -> str:
        """Name the file of a megascale tensor, and the tensor as the file does. Raises: CheckpointError"""
        first = self._stored_name(self._places[name][0].name)
        return f"{self.files[first]}: {self.hf_name(name)}"

    def hf_name(self, name: str) -> str:
        """The name of a megascale tensor in these files, or of a stack the first and last.

        Raises: CheckpointError if the tensor is missing
        """
        places = self._places[name]
        return " to ".join(dict.fromkeys(self._stored_name(place.name) for place in (places[0], places[-1])))

    def _stored_name(self, name: str) -> str:
        """The name in these files. Files of a bare model omit the first part of a name, such as "model."."""
        bare = name.partition(".")[2]
        for candidate in (name, bare):
            if candidate in self.files:
                return candidate
        hint = "weights and config.json of one model"
        if any(TEXT_MODEL in stored for stored in self.files):
            hint = f"tensors are named {TEXT_MODEL}NAME, as in a model of text and other inputs: {TEXT_ALONE_HINT}"
        raise CheckpointError(f"{self.folder} has no tensor {name}", hint=hint)


def weights_folder(path: Path | None) -> Path | None:
    """Return a folder of Hugging Face weights; None for a checkpoint, and for remote storage."""
    return path if path and is_file(path / CONFIG_FILE) and not is_file(path / manifest.NAME) else None


def export_model(
    model: ModelConfig, read: maps.ReadMatrix, folder: Path, dtype: torch.dtype, source_keys: ConfigKeys
) -> None:
    """Write a model's weights and config.json into a folder, with the tensors of a single file in memory at a time.

    `read` returns tensors in `dtype`. `source_keys`: the config.json that the weights came with, or keys for the new
    one.

    Raises: CheckpointError if no architecture computes the model; OSError if the folder cannot be written
    """
    written = str(dtype).removeprefix("torch.")
    dtype_keys = dict.fromkeys({"torch_dtype", "dtype"} & source_keys.keys() or {"torch_dtype"}, written)
    kept = {key: value for key, value in source_keys.items() if key not in config_file.QUANTIZATION_KEYS}
    config = make_config(model, kept) | dtype_keys
    groups = list(_files(FAMILIES[config["model_type"]], model, dtype))
    weights, total = dict[str, str](), 0
    for number, group in enumerate(groups, 1):
        file = WEIGHTS_FILE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        tensors_of_file = {name: maps.assemble(parts, read) for name, parts in group}
        try:
            save_file(tensors_of_file, folder / file, {"format": "pt"})
        except SafetensorError as error:
            raise OSError(errno.EIO, str(error), str(folder / file)) from None
        weights |= dict.fromkeys(tensors_of_file, file)
        total += sum(tensor.nbytes for tensor in tensors_of_file.values())
    if len(groups) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weights}
        write_text(folder / INDEX_FILE, json.dumps(index, indent=2) + "\n")
    write_text(folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")


def _files(family: Family, model: ModelConfig, dtype: torch.dtype) -> Iterator[list[tuple[str, list[maps.Part]]]]:
    """Group the Hugging Face tensors by file, each tensor with its parts."""
    places = maps.tensor_map(family, model)
    found = maps.parts_by_name(model, places)
    matrix = {tensor.name: math.prod(tensor.shape[len(tensor.outer) :]) for tensor in maps.model_tensors(model)}
    size = {name: sum(matrix[part.tensor] for part in parts) * dtype.itemsize for name, parts in found.items()}
    for copy, ours in maps.stored_copies(family, model).items():
        original = places[ours][0].name
        found[copy], size[copy] = found[original], size[original]
    group: list[tuple[str, list[maps.Part]]] = []
    for name, parts in found.items():
        if group and sum(size[member] for member, _ in group) + size[name] > MAX_SHARD_BYTES:
            yield group
            group = []
        group.append((name, parts))
    yield group


@contextmanager
def _open_safetensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file, briefly: pages read from a mapped file count as this process's memory until closed."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except OSError as error:
        hint = os_error_hint(error, "all files of the weights in one folder")
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}", hint=hint) from None
    except SafetensorError as error:
        what = why_unreadable(path) or f"{path} cannot be read: {error}"
        raise CheckpointError(what, hint=DAMAGED_HINT) from None
