"""A model's folder as Hugging Face lays it out: config.json, weights in safetensors, tokenizer."""

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

from megascale.checkpoint.state import FORMATS, Part, slices
from megascale.config.model import ModelConfig
from megascale.convert.families import Family, Keys, Place, family_for, family_of, model_keys, write_config
from megascale.core.errors import CheckpointError
from megascale.core.files import write_text
from megascale.layout.tensors import TOKEN_EMBEDDING, whole
from megascale.layout.tensors import Tensor as Named

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
              "merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json")  # fmt: skip
"""Files that go along with weights, where they are there."""

FILE_BYTES = 2 << 30
"""Of weights in one file, but for a tensor that is larger."""

COMPARED_BYTES = 64 << 20
"""Of each of two tensors that are compared, in memory at a time, but for a row that is larger."""

_HEAD = "lm_head.weight"  # so in all families

_PLAIN = f"the weights before they were quantized: in {', '.join(FORMATS.values())}"


class Pretrained:
    """Weights in such a folder, read part by part.

    Raises: CheckpointError if the folder is none, or of a model that we would compute otherwise
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = read_json(folder / CONFIG)
        self._family = family_of(self.config, str(folder / CONFIG))
        keys = model_keys(self.config, str(folder / CONFIG))
        try:
            self.model = ModelConfig.model_validate(keys)
        except ValidationError as error:
            first = error.errors()[0]
            what = f"{folder / CONFIG}: as {'.'.join(map(str, first['loc']))} {first['input']!r}: {first['msg']}"
            raise CheckpointError(what, mend="the config.json that belongs to the weights") from None

    @cached_property
    def files(self) -> dict[str, Path]:
        """Where each tensor is, by their name."""
        if (self.folder / INDEX).exists():
            found = read_json(self.folder / INDEX).get("weight_map")
            if not isinstance(found, dict) or not all(_is_name(file) for file in found.values()):
                raise CheckpointError(f"{self.folder / INDEX} has no map of weights to files beside it")
            return {name: self.folder / file for name, file in found.items()}
        path = self.folder / WEIGHTS
        if not path.exists():
            mend = "convert it with transformers: from_pretrained(...).save_pretrained(...)"
            raise CheckpointError(f"{self.folder} has neither {WEIGHTS} nor {INDEX}", mend=mend)
        with _opened(path) as file:
            return dict.fromkeys(file.keys(), path)

    def check(self) -> None:
        """Every tensor of the model is there, in its shape and as plain numbers, and no others.

        Raises: CheckpointError
        """
        if quantized := self.config.get("quantization_config"):
            method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
            what = f"{self.folder / CONFIG}: quantization_config is there, of quant_method {method!r}"
            raise CheckpointError(what, mend=_PLAIN)
        left = set(self.files)
        for tensor in tensors(self.model):
            place = self._family.place(tensor.name)
            name = self._known(place.name)
            found, kind = self._stored(name)
            if kind not in FORMATS.values():
                raise CheckpointError(f"{self.files[name]}: {name} is stored as {kind}", mend=_PLAIN)
            wanted = _their_shape(place, tensor.shape)
            if found != wanted:
                raise CheckpointError(
                    f"{name} has shape {list(found)}, its config.json says {list(wanted)}", mend="another download"
                )
            left.discard(name)
        if self.model.tie_embeddings and _HEAD in left:
            self._check_tied()
            left.discard(_HEAD)
        strange = sorted(n for n in left if not n.endswith(self._family.ignored or "\0"))
        if strange:
            names = ", ".join(strange[:3])
            raise CheckpointError(f"{self.folder} has {len(strange)} tensors that its config.json does not: {names}")

    def _check_tied(self) -> None:
        """A head beside the embedding that it is tied to is equal to it.

        Raises: CheckpointError
        """
        embedding = self.theirs(TOKEN_EMBEDDING)
        (count, width), _ = stored = self._stored(embedding)
        rows = max(1, COMPARED_BYTES // (8 * width))
        pieces = (slice(start, start + rows) for start in range(0, count, rows))
        if stored == self._stored(_HEAD) and all(
            self._bytes(embedding, p).equal(self._bytes(_HEAD, p)) for p in pieces
        ):
            return
        what = f"{self.folder / CONFIG}: tie_word_embeddings is true, but {_HEAD} is not equal to {embedding}"
        mend = f"tie_word_embeddings false, which keeps both, or files without {_HEAD}, which is then {embedding}"
        raise CheckpointError(what, mend=mend)

    def _stored(self, theirs: str) -> tuple[tuple[int, ...], str]:
        """Shape and format of a tensor by their name."""
        with _opened(self.files[theirs]) as file:
            stored = file.get_slice(theirs)
            return tuple(stored.get_shape()), stored.get_dtype()

    def _bytes(self, theirs: str, rows: slice) -> Tensor:
        """Rows of a matrix by their name."""
        with _opened(self.files[theirs]) as file:
            return file.get_slice(theirs)[rows].view(torch.uint8)

    def part(self, name: str, part: Part | None = None) -> Tensor:
        """A tensor by our name, or a part of it, in the format that it is stored in.

        Raises: CheckpointError if it is not there or cannot be read
        """
        place, theirs = self._family.place(name), self.theirs(name)
        with _opened(self.files[theirs]) as file:
            stored = file.get_slice(theirs)
            found = stored[_their_slices(place, tuple(stored.get_shape()), part)]
        return (found.t() if place.turned else found).contiguous()

    def theirs(self, name: str) -> str:
        """The name in these files of a tensor of ours.

        Raises: CheckpointError if it is not there
        """
        return self._known(self._family.place(name).name)

    def _known(self, name: str) -> str:
        """The name in these files: those of a bare model have no prefix."""
        bare = name.removeprefix("transformer.").removeprefix("model.")
        for one in (name, bare):
            if one in self.files:
                return one
        raise CheckpointError(f"{self.folder} has no tensor {name}", mend="another download")


def tensors(model: ModelConfig) -> list[Named]:
    """Every tensor of a model."""
    return [tensor for parameter in whole(model) for tensor in parameter.parts]


def export(model: ModelConfig, read: Callable[[str], Tensor], folder: Path, dtype: torch.dtype, other: Keys) -> None:
    """Write a model's weights, `read` in `dtype` by our names, and its config.json into a folder; one file of weights
    at a time is in memory. `other`: what else the config.json is to say.

    Raises: CheckpointError if no architecture computes the model; OSError if it cannot be written
    """
    written = str(dtype).removeprefix("torch.")
    said = {"torch_dtype": written} | ({"dtype": written} if "dtype" in other else {})  # read by transformers 5
    config = other | write_config(model) | said
    groups = list(_files(family_for(model), model, dtype))
    weights: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file = WEIGHTS if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        made = {name: _joined([_turned(place, read(ours)) for ours, place in parts]) for name, parts in group}
        try:
            save_file(made, folder / file, {"format": "pt"})
        except SafetensorError as error:
            raise OSError(errno.EIO, str(error), str(folder / file)) from None
        weights |= dict.fromkeys(made, file)
    if len(groups) > 1:
        total = sum(math.prod(tensor.shape) for tensor in tensors(model)) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": weights}
        write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")
    write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")


Parts = list[tuple[str, Place]]


def _files(family: Family, model: ModelConfig, dtype: torch.dtype) -> Iterator[list[tuple[str, Parts]]]:
    """Their tensors, each with the parts that it is made of, by file."""
    theirs: dict[str, Parts] = {}
    size: dict[str, int] = {}
    for tensor in tensors(model):
        place = family.place(tensor.name)
        theirs.setdefault(place.name, []).append((tensor.name, place))
        size[place.name] = size.get(place.name, 0) + math.prod(tensor.shape) * dtype.itemsize
    group: list[tuple[str, Parts]] = []
    for name, parts in theirs.items():
        if group and sum(size[one] for one, _ in group) + size[name] > FILE_BYTES:
            yield group
            group = []
        group.append((name, sorted(parts, key=lambda part: part[1].index)))
    yield group


def _turned(place: Place, ours: Tensor) -> Tensor:
    return ours.t() if place.turned else ours


def _joined(parts: list[Tensor]) -> Tensor:
    return (torch.cat(parts, -1) if len(parts) > 1 else parts[0]).contiguous()


def _their_shape(place: Place, ours: tuple[int, ...]) -> tuple[int, ...]:
    shape = tuple(reversed(ours)) if place.turned else ours
    return (*shape[:-1], shape[-1] * place.count)


def _their_slices(place: Place, shape: tuple[int, ...], part: Part | None) -> tuple[slice, ...]:
    """Where a part of our tensor is in theirs of this shape."""
    each = shape[-1] // place.count
    if part is None:
        found = [slice(0, n) for n in (*shape[:-1], each)]
    else:
        found = list(slices(*part))
        if place.turned:
            found.reverse()
    *others, last = found
    start = place.index * each
    return (*others, slice(start + last.start, start + last.stop))


def _is_name(file: Any) -> bool:
    return isinstance(file, str) and Path(file).name == file


def read_json(path: Path) -> Keys:
    """A JSON object in a file.

    Raises: CheckpointError
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        mend = "a folder with config.json and safetensors"
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", mend=mend) from None
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON: {error}", mend="another download") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is no JSON object", mend="another download")
    return found


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file; not for long, for what was read of a mapped file counts as memory until it is closed."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", mend="another download") from None
