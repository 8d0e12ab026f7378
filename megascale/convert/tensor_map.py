"""The place of megascale's tensors in Hugging Face's: names, transposition, fused tensors, stacks of experts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megascale.checkpoint.format.state import Region
from megascale.config.model import ModelConfig
from megascale.convert.families.family import Family, Fused, Stacked
from megascale.layout.parameters import all_params
from megascale.layout.tensors import HEAD, TOKEN_EMBEDDING, TensorSpec
from megascale.parallel.stateful import BALANCE_BIAS


@dataclass(frozen=True)
class Place:
    """The place of a megascale vector or matrix of `rows` outputs in Hugging Face's tensor `name`, which has `groups`
    groups of `period` outputs: outputs `start` to `start + rows / groups` of each. `transposed`: stored [in, out], not
    [out, in]. `paired`: the first half of a group's rows are every second of its outputs, and then the others.
    `stack`: the number of such tensors in a stack, of which this one is at `index`; 0: there is no stack.
    """

    name: str
    rows: int
    period: int
    start: int = 0
    groups: int = 1
    transposed: bool = False
    paired: int = 0
    stack: int = 0
    index: int = 0

    def stored_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of Hugging Face's tensor that holds a megascale vector or matrix of `shape`."""
        stored = (self.groups * self.period, *shape[1:])
        return ((self.stack,) if self.stack else ()) + (stored[::-1] if self.transposed else stored)

    def box(self, rows: slice, *columns: slice) -> tuple[slice | int, ...]:
        """The slices of Hugging Face's tensor that are `rows` of its outputs and `columns` of its inputs."""
        box = (rows, *columns)
        return ((self.index,) if self.stack else ()) + (box[::-1] if self.transposed else box)

    def pieces(self, first: int, stop: int) -> Iterator[slice]:
        """The outputs of Hugging Face's tensor that are the rows [first, stop) of megascale's, in order."""
        width = self.rows // self.groups
        if width == 1:
            ends = (row * self.period + self.start for row in (first, stop - 1))
            yield slice(next(ends), next(ends) + 1, self.period)
            return
        for group in range(first // width, -(-stop // width)):
            low, high = max(first - group * width, 0), min(stop - group * width, width)
            offset, half = group * self.period + self.start, self.paired // 2
            if not half:
                yield slice(offset + low, offset + high)
                continue
            for run in range(low // half, -(-high // half)):
                begin, end = max(low, run * half), min(high, (run + 1) * half)
                start = offset + run // 2 * self.paired + run % 2 + 2 * (begin - run * half)
                yield slice(start, start + 2 * (end - begin) - 1, 2)


Places = tuple[Place, ...]
"""The place of a vector or matrix; of a stack those of its matrices or vectors, the last index fastest."""


def indices(tensor: TensorSpec) -> Iterator[tuple[int, ...]]:
    """The indices of the matrices or vectors in a stack; of another tensor ()."""
    return itertools.product(*map(range, tensor.outer))


def model_weights(model: ModelConfig) -> list[TensorSpec]:
    """The weights of a model, in the order of the network."""
    return [tensor for parameter in all_params(model) for tensor in parameter.parts]


def model_tensors(model: ModelConfig) -> list[TensorSpec]:
    """The tensors of a model: its weights, and the biases of its experts."""
    return model_weights(model) + bias_tensors(model)


def bias_tensors(model: ModelConfig) -> list[TensorSpec]:
    """The biases of a model's experts [experts]."""
    return [TensorSpec(name, (model.experts,)) for name in bias_names(model).values()]


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
    tensors = {tensor.name: tensor for tensor in model_tensors(model)}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    outer = {ours: theirs for ours, theirs in family.outer.items() if ours in shapes}
    places: dict[str, Places] = {ours: (Place(outer[ours], shapes[ours][0], shapes[ours][0]),) for ours in outer}
    for index in range(model.total_layers):
        prefix = f"{family.layer_prefix}.{index}"
        for module, content in family.layer.items():
            fused = content if isinstance(content, Fused) else Fused((content,))
            if fused.beside and f"layers.{index}.{fused.beside}.weight" not in shapes:
                continue
            for kind in (".weight", ".bias", ""):
                names = {part: f"layers.{index}.{part}{kind}" for part in fused.parts}
                if names := {part: name for part, name in names.items() if name in shapes}:
                    places |= _fused_places(f"{prefix}.{module}{kind}", names, shapes, fused, model)
        for part, modules in family.experts.items():
            weight, bias = (tensors.get(f"layers.{index}.{part}.{kind}") for kind in ("weight", "bias"))
            if isinstance(modules, Stacked):
                stacks = ((weight, modules.name), (bias, f"{modules.name}_bias"))
                places |= {one.name: _stacked(f"{prefix}.{name}", one) for one, name in stacks if one}
            elif weight:
                places[weight.name] = tuple(_expert_places(prefix, modules, weight))
    for layer, name in bias_names(model).items():
        stored_name = f"{family.layer_prefix}.{layer}.{family.balance_bias}"
        places[name] = (Place(stored_name, model.experts, model.experts),)
    return places


def stored_copies(family: Family, model: ModelConfig) -> dict[str, str]:
    """The megascale tensors that layers of multi-token prediction have copies of in files, by the copy's name."""
    head = TOKEN_EMBEDDING if model.tie_embeddings else HEAD
    return {
        f"{family.layer_prefix}.{layer}.{name}": ours
        for layer in range(model.num_layers, model.total_layers)
        for name, ours in (("embed_tokens.weight", TOKEN_EMBEDDING), ("shared_head.head.weight", head))
    }


def _stacked(stored: str, tensor: TensorSpec) -> Places:
    """The places of a stack of experts in the tensor `stored`, in which the outputs of an expert's matrices, or of its
    biases, alternate.
    """
    outer, rows = tensor.outer, tensor.shape[len(tensor.outer)]
    count = math.prod(outer[1:])
    numbers = (divmod(number, count) for number in range(math.prod(outer)))
    return tuple(
        Place(stored, rows, count, start, rows, not tensor.vectors, stack=outer[0], index=expert)
        for expert, start in numbers
    )


def _expert_places(prefix: str, modules: Sequence[str], tensor: TensorSpec) -> Iterator[Place]:
    """The places of the matrices of a stack of experts, in the modules of each, of which one may hold several."""
    experts, rows = tensor.shape[0], tensor.shape[-2]
    each = math.prod(tensor.outer[1:]) // len(modules)
    for expert, module, number in itertools.product(range(experts), modules, range(each)):
        yield Place(f"{prefix}.{module.replace('*', str(expert))}.weight", rows, each * rows, number * rows)


def _fused_places(
    stored: str, names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], fused: Fused, model: ModelConfig
) -> dict[str, Places]:
    """The places of the tensors `names`, by part, one after the other in the tensor `stored`."""
    groups = model.num_kv_heads if fused.per_head else 1
    widths = [shapes[name][0] // groups for name in names.values()]
    starts = [sum(widths[:number]) for number in range(len(widths))]
    transposed = fused.transposed and all(len(shapes[name]) == 2 for name in names.values())
    paired = dict.fromkeys(fused.paired, model.rope_head_dim or model.head_dim)
    return {
        name: (Place(stored, width * groups, sum(widths), start, groups, transposed, paired.get(part, 0)),)
        for (part, name), width, start in zip(names.items(), widths, starts, strict=True)
    }


Read = Callable[[str, tuple[slice | int, ...]], Tensor]
"""Reads slices of Hugging Face's tensor of a name, which may have a step."""


def read_region(places: Places, spec: TensorSpec, read: Read, part: Region | None) -> Tensor:
    """Read a megascale tensor, or its region `part`. One matrix of a stack is read at a time."""
    offset, size = part or ((0,) * len(spec.shape), spec.shape)
    if not (outer := len(spec.outer)):
        return _read_matrix(places[0], offset, size, read)
    inside = [range(start, start + count) for start, count in zip(offset[:outer], size[:outer], strict=True)]
    chosen = [
        place for place, index in zip(places, indices(spec), strict=True) if all(map(range.__contains__, inside, index))
    ]
    matrices = (_read_matrix(place, offset[outer:], size[outer:], read) for place in chosen)
    first = next(matrices)
    stack = first.new_empty(len(chosen), *first.shape)
    for number, matrix in enumerate(itertools.chain([first], matrices)):
        stack[number] = matrix
    return stack.view(size)


def read_tensors(
    specs: Iterable[TensorSpec], places: Mapping[str, Places], load: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors by megascale name. `load`: reads the whole of one in the files, which the next may be a part of."""
    whole = lru_cache(maxsize=1)(load)
    for spec in specs:
        yield spec.name, read_region(places[spec.name], spec, lambda name, box: whole(name)[box], None)


def stored_shapes(model: ModelConfig, places: Mapping[str, Places]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in the files, by their names."""
    return {
        place.name: place.stored_shape(spec.shape[len(spec.outer) :])
        for spec in model_tensors(model)
        for place in places[spec.name]
    }


def _read_matrix(place: Place, offset: Sequence[int], size: Sequence[int], read: Read) -> Tensor:
    columns = tuple(slice(start, start + count) for start, count in zip(offset[1:], size[1:], strict=True))
    found = []
    for rows in place.pieces(offset[0], offset[0] + size[0]):
        tensor = read(place.name, place.box(rows, *columns))
        found.append(tensor.t() if place.transposed else tensor)
    return (found[0] if len(found) == 1 else torch.cat(found)).contiguous()


class Part(NamedTuple):
    """A part of Hugging Face's tensor: a megascale tensor, or the matrix of a stack that is `at` an index."""

    tensor: str
    at: tuple[int, ...]
    place: Place


def parts_by_name(model: ModelConfig, places: Mapping[str, Places]) -> dict[str, list[Part]]:
    """The parts of each of Hugging Face's tensors, by its name."""
    parts: dict[str, list[Part]] = {}
    for tensor in model_tensors(model):
        for index, place in zip(indices(tensor), places[tensor.name], strict=True):
            parts.setdefault(place.name, []).append(Part(tensor.name, index, place))
    return parts


ReadMatrix = Callable[[str, tuple[int, ...]], Tensor]
"""Reads a tensor by its megascale name, or of a stack the matrix at an index."""


def assemble(parts: Sequence[Part], read: ReadMatrix) -> Tensor:
    """Hugging Face's tensor that holds `parts`, which are all of it."""
    tensors = [read(part.tensor, part.at) for part in parts]
    stored = tensors[0].new_empty(parts[0].place.stored_shape(tensors[0].shape))
    for (_, _, place), tensor in zip(parts, tensors, strict=True):
        pieces = list(place.pieces(0, place.rows))
        counts = [len(range(rows.start, rows.stop, rows.step or 1)) for rows in pieces]
        for rows, values in zip(pieces, tensor.split(counts), strict=True):
            box = place.box(rows, *(slice(None) for _ in tensor.shape[1:]))
            stored[box] = values.t() if place.transposed else values
    return stored
