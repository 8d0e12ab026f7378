"""The place of megascale's tensors in Hugging Face's: names, transposition, fused tensors, stacks of experts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megascale.checkpoint.format.state import Region
from megascale.config.model import ModelConfig
from megascale.convert.families import prediction_layers
from megascale.convert.families.family import Family, Fused
from megascale.layout.parameters import all_params
from megascale.layout.tensors import TOKEN_EMBEDDING, TensorSpec
from megascale.parallel.stateful import BALANCE_BIAS


@dataclass(frozen=True)
class Place:
    """The place of a megascale vector or matrix of `rows` outputs in Hugging Face's tensor `name`, which has `groups`
    groups of `period` outputs: outputs `start` to `start + rows / groups` of each. `transposed`: stored [in, out], not
    [out, in]. `paired`: the first half of a group's rows are every second of its outputs, and then the others.
    """

    name: str
    rows: int
    period: int
    start: int = 0
    groups: int = 1
    transposed: bool = False
    paired: bool = False

    def stored_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of Hugging Face's tensor that holds a megascale vector or matrix of `shape`."""
        stored = (self.groups * self.period, *shape[1:])
        return stored[::-1] if self.transposed else stored

    def pieces(self, first: int, stop: int) -> Iterator[slice]:
        """The outputs of Hugging Face's tensor that are the rows [first, stop) of megascale's, in order."""
        width = self.rows // self.groups
        for group in range(first // width, -(-stop // width)):
            low, high = max(first - group * width, 0), min(stop - group * width, width)
            offset = group * self.period + self.start
            if not self.paired:
                yield slice(offset + low, offset + high)
                continue
            for odd, first_row in enumerate((0, width // 2)):
                begin, end = max(low, first_row) - first_row, min(high, first_row + width // 2) - first_row
                if begin < end:
                    yield slice(offset + odd + 2 * begin, offset + odd + 2 * end - 1, 2)


Places = tuple[Place, ...]
"""The place of a vector or matrix; of a stack [..., rows, columns] those of its matrices, the last index fastest."""


def matrix_indices(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The indices of the matrices in a stack [..., rows, columns]; of a vector or matrix ()."""
    return itertools.product(*map(range, shape[:-2]))


def model_tensors(model: ModelConfig) -> list[TensorSpec]:
    """The tensors of a model: its weights in the order of the network, and the biases of its experts."""
    weights = [tensor for parameter in all_params(model) for tensor in parameter.parts]
    return weights + [TensorSpec(name, (model.experts,)) for name in bias_names(model).values()]


def bias_names(model: ModelConfig) -> dict[int, str]:
    """The names of the experts' biases [experts], by layer: rows of the state `BALANCE_BIAS` of a run."""
    layers = range(model.dense_layers, model.total_layers) if model.balance_bias else ()
    return {layer: f"{BALANCE_BIAS}.layers.{layer}" for layer in layers}


def stack_biases(model: ModelConfig, read: Callable[[str], Tensor]) -> Tensor:
    """The state `BALANCE_BIAS` [layers x experts], f64, of the biases that `read` returns by name; 0 in others."""
    stack = torch.zeros(model.total_layers, model.experts, dtype=torch.float64)
    for layer, name in bias_names(model).items():
        stack[layer] = read(name)
    return stack.view(-1)


def tensor_map(family: Family, model: ModelConfig) -> dict[str, Places]:
    """The places of all tensors of a model, by megascale name."""
    shapes = {tensor.name: tensor.shape for tensor in model_tensors(model)}
    places: dict[str, Places] = {
        ours: (Place(theirs, shapes[ours][0], shapes[ours][0]),)
        for ours, theirs in family.outer.items()
        if ours in shapes
    }
    for index in range(model.total_layers):
        prefix = f"{family.layer_prefix}.{index}"
        for module, content in family.layer.items():
            fused = content if isinstance(content, Fused) else Fused((content,))
            if fused.beside and f"layers.{index}.{fused.beside}.weight" not in shapes:
                continue
            for kind in ("weight", "bias"):
                names = [f"layers.{index}.{part}.{kind}" for part in fused.parts]
                if names[0] in shapes:
                    places |= _fused_places(f"{prefix}.{module}.{kind}", names, shapes, fused, model)
        for part, modules in family.experts.items():
            if (name := f"layers.{index}.{part}.weight") in shapes:
                experts, rows = shapes[name][0], shapes[name][-2]
                stored = (module.replace("*", str(expert)) for expert in range(experts) for module in modules)
                places[name] = tuple(Place(f"{prefix}.{module}.weight", rows, rows) for module in stored)
    for layer, name in bias_names(model).items():
        stored_name = f"{family.layer_prefix}.{layer}.{family.balance_bias}"
        places[name] = (Place(stored_name, model.experts, model.experts),)
    return places


def stored_copies(family: Family, model: ModelConfig) -> dict[str, str]:
    """The megascale tensors that layers of multi-token prediction have copies of in files, by the copy's name."""
    return {
        f"{family.layer_prefix}.{layer}.{name}": TOKEN_EMBEDDING if model.tie_embeddings else ours
        for layer in range(model.num_layers, model.total_layers)
        for name, ours in prediction_layers.COPIES.items()
    }


def _fused_places(
    stored: str, names: list[str], shapes: Mapping[str, tuple[int, ...]], fused: Fused, model: ModelConfig
) -> dict[str, Places]:
    """The places of the tensors `names`, one after the other, in the tensor `stored`."""
    groups = model.num_heads if fused.per_head else 1
    widths = [shapes[name][0] // groups for name in names]
    starts = [sum(widths[:number]) for number in range(len(widths))]
    transposed = fused.transposed and len(shapes[names[0]]) == 2
    return {
        name: (Place(stored, width * groups, sum(widths), start, groups, transposed, part in fused.paired),)
        for name, part, width, start in zip(names, fused.parts, widths, starts, strict=True)
    }


Read = Callable[[str, tuple[slice, ...]], Tensor]
"""Reads slices of Hugging Face's tensor of a name."""


def read_region(places: Places, shape: Sequence[int], read: Read, part: Region | None) -> Tensor:
    """Read a megascale tensor of `shape`, or its region `part`. One matrix of a stack is read at a time."""
    offset, size = part or ((0,) * len(shape), tuple(shape))
    if len(shape) <= 2:
        return _read_matrix(places[0], offset, size, read)
    inside = [range(start, start + count) for start, count in zip(offset[:-2], size[:-2], strict=True)]
    chosen = [
        place
        for place, index in zip(places, matrix_indices(shape), strict=True)
        if all(map(range.__contains__, inside, index))
    ]
    matrices = (_read_matrix(place, offset[-2:], size[-2:], read) for place in chosen)
    first = next(matrices)
    stack = first.new_empty(len(chosen), *first.shape)
    for number, matrix in enumerate(itertools.chain([first], matrices)):
        stack[number] = matrix
    return stack.view(size)


def _read_matrix(place: Place, offset: Sequence[int], size: Sequence[int], read: Read) -> Tensor:
    columns = tuple(slice(start, start + count) for start, count in zip(offset[1:], size[1:], strict=True))
    found = []
    for rows in place.pieces(offset[0], offset[0] + size[0]):
        box: Any = (rows, *columns)
        tensor = read(place.name, box[::-1] if place.transposed else box)
        found.append(tensor.t() if place.transposed else tensor)
    return (found[0] if len(found) == 1 else torch.cat(found)).contiguous()


def assemble(parts: Sequence[tuple[Place, Tensor]]) -> Tensor:
    """Hugging Face's tensor that holds `parts`, which are all of it."""
    (place, first), transposed = parts[0], parts[0][0].transposed
    if len(parts) == 1:
        return (first.t() if transposed else first).contiguous()
    stored = first.new_empty((place.groups, place.period, *first.shape[1:]))
    for part, tensor in parts:
        width, grouped = part.rows // part.groups, tensor.view(part.groups, -1, *tensor.shape[1:])
        if part.paired:
            grouped = grouped.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        stored[:, part.start : part.start + width] = grouped
    stored = stored.flatten(0, 1)
    return stored.t().contiguous() if transposed else stored
