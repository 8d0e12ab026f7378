"""Linear layers that multiply in eight bits, alike in every layout.

Each of the three products of a layer takes its factors cast along the dimension that is summed (`ops.fp8`): the input
and the weight for the output, the output's gradient and the weight for the input's gradient, both transposed for the
weight's gradient. A scale comes from the largest magnitude of what shares it; where tensor parallelism cuts that, the
largest over the ranks. With one scale for a tensor the same bytes serve both directions, and they are what travels
between ranks and what is kept for the backward; with scales along rows a factor is cast again for the other direction.
Weights are cast once a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megascale.catalog.recipes import RECIPES
from megascale.comm.collectives import all_reduce
from megascale.comm.mesh import Mesh
from megascale.comm.totals import max_over_job, sum_over_job
from megascale.config.run import RunConfig
from megascale.core.label import Label
from megascale.layout.blocks import block, operands
from megascale.layout.chunks import eight_bit_layers, eight_bit_weights
from megascale.layout.tensors import Parameter
from megascale.ops.fp8 import Grain, Kernels, Number, Quantized, Transposed, cast, lost, scale_of
from megascale.parallel.numerics import PLAIN, Name, Numerics, Operand
from megascale.parallel.overlap import TensorAxis
from megascale.parallel.weights import add_gradient
from megascale.trace.recorder import profiled


@dataclass(frozen=True)
class Recipe:
    """`catalog.recipes` in terms of `ops.fp8`."""

    grain: Grain
    scale: str
    gradient: Number

    @classmethod
    def of(cls, name: str) -> Recipe:
        facts = RECIPES[name].facts
        return cls(Grain(facts["grain"]), facts["scale"], Number[facts["gradient"].upper()])


@dataclass(frozen=True)
class Lost:
    """What the casts of one operand did in a step. Shares of its numbers: `saturated`, made the largest that the format
    can say; `underflow`, made zero.
    """

    amax: float
    saturated: float
    underflow: float


class Scaling:
    """What is known of every operand that is cast in the whole model, the same on each rank: the largest magnitudes of
    this step, and with the recipe `delayed` those of the steps before.

    `weights`: of the layers concerned, by name. `names`: of their operands; `labels` of each. `history` [operands,
    steps], the newest first; zero where there is none yet. `known`: whether there is one.
    """

    def __init__(self, config: RunConfig, mesh: Mesh, device: torch.device, kernels: Kernels = Kernels()) -> None:
        self.kernels = kernels
        self.recipe = Recipe.of(config.fp8.recipe)
        self.weights = eight_bit_weights(config)
        self.labels = {
            f"layers.{index}.{operand}": Label.of_layer(index, operand)
            for index in eight_bit_layers(config)
            for operand in operands(block(config.model, index))
        }
        self.names = list(self.labels)
        self._mesh = mesh
        self._init_std = config.model.init_std
        self._index = {name: index for index, name in enumerate(self.names)}
        self._amax = torch.zeros(len(self.names), device=device)
        self._lost = torch.zeros(len(self.names), 3, device=device)
        steps = config.fp8.history if self.recipe.scale == "history" else 0
        self.history = torch.zeros(len(self.names), steps, device=device)
        self.known = False
        self.version = 0
        self.watched = False

    @property
    def from_itself(self) -> bool:
        """Whether a scale comes from the tensor that is cast; with a history, in the first step of a run."""
        return self.recipe.scale == "current" or (self.recipe.scale == "history" and not self.known)

    def units(self, parameter: Parameter) -> dict[str, float]:
        """The static scales of a layer's operands, which bring each to about one: norms have made that of inputs, and
        weights began with their standard deviation. The gradient of a sum of losses is about one at the logits, and
        comes back through two weights at least, the head's and the block's last.
        """
        return {"input": 1.0, "weight": parameter.parts[0].std, "gradient": self._init_std**2}

    def refresh(self) -> None:
        """The weights have changed."""
        self.version += 1

    def begin(self, *, watch: bool) -> None:
        """Begin a step. `watch`: count what its casts lose."""
        self.refresh()
        self.watched = watch and bool(self.names)
        self._amax.zero_()
        self._lost.zero_()

    def finish(self) -> None:
        """The step's last backward is done: what all ranks have seen becomes the newest of the history."""
        if not self.history.numel():
            return
        max_over_job(self._mesh, self._amax, what="fp8 magnitudes")
        self.history.copy_(torch.cat([self._amax.unsqueeze(1), self.history[:, :-1]], 1))
        self.known = True

    def take_lost(self) -> dict[str, Lost]:
        """What the casts of the last watched step did, over all ranks; nothing if it was not watched. All ranks ask."""
        if not self.watched:
            return {}
        self.watched = False
        sum_over_job(self._mesh, self._lost, what="fp8 casts")
        if not self.history.numel():
            max_over_job(self._mesh, self._amax, what="fp8 magnitudes")
        found = zip(self.names, self._amax.tolist(), self._lost.tolist(), strict=True)
        return {name: Lost(top, sat / max(total, 1), low / max(total, 1)) for name, top, (sat, low, total) in found}

    def note(self, name: str, largest: Tensor) -> None:
        """An operand's magnitudes: its largest counts."""
        place = self._amax[self._index[name]]
        torch.maximum(place, largest.amax(), out=place)

    def count(self, name: str, counts: Tensor) -> None:
        """What a cast lost: saturated, made zero, and all numbers."""
        self._lost[self._index[name]] += counts

    def largest_before(self, name: str) -> Tensor:
        """The largest magnitude in the history of an operand."""
        return self.history[self._index[name]].amax()


@dataclass
class _Weight:
    """A weight's casts, of the step in which they were made."""

    version: int = -1
    along: Quantized | None = None
    across: Quantized | None = None


@dataclass
class EightBit:
    """The products of one layer in eight bits, as `numerics.Numerics`.

    `split`: the dimension of its weight that tp cuts. `units`: the static scale of each operand.
    """

    name: str
    scaling: Scaling
    axis: TensorAxis
    split: int
    units: Mapping[str, float]
    piecewise: bool = False  # a scale holds for all tokens
    _weight: _Weight = field(default_factory=_Weight)

    def input(self, x: Tensor) -> Operand:
        rows = self.split == 1
        return self._cast("input", x, cut=rows or self.axis.cut, cut_last=rows, both=rows or not self.axis.cut)

    def gradient(self, grad: Tensor) -> Operand:
        columns = self.split == 0
        return self._cast(
            "gradient", grad, cut=columns or self.axis.cut, cut_last=columns, both=columns or not self.axis.cut
        )

    def travelling(self, grad: Tensor) -> Operand:
        return self.gradient(grad) if self._grain is Grain.TENSOR else grad

    def arrived(self, grad: Operand) -> Operand:
        return grad if isinstance(grad, Quantized) else self._cast("gradient", grad, cut=False, cut_last=False)

    def weight(self, weight: Tensor) -> Operand:
        return self._weights(weight)[0]

    def across(self, weight: Tensor) -> Operand:
        return self._weights(weight)[1]

    def kept(self, x: Tensor, operand: Operand) -> Operand:
        if self._grain is not Grain.TENSOR:
            return x
        assert isinstance(operand, Quantized), "`input` has cast it"
        return operand if operand.across is None else Transposed(operand.across, operand.scale, operand.grain)

    def linear(self, x: Operand, weight: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        out = self._product(x, weight, dtype)
        return out if bias is None else out.add_(bias)

    def multiply(
        self, out: Tensor, x: Operand, weight: Operand, bias: Tensor | None = None, *, add: bool = False
    ) -> None:
        found = self._product(x, weight, out.dtype)
        if add:
            out.add_(found)
        elif bias is None:
            out.copy_(found)
        else:
            torch.add(found, bias, out=out)

    def along_tokens(self, name: Name, x: Operand) -> Operand:
        if isinstance(x, Transposed):
            return x.t()
        if isinstance(x, Quantized):
            return self.scaling.kernels.transposed(x)
        flat = self.scaling.kernels.turned(x.reshape(-1, x.shape[-1]))
        return self._cast(name, flat, cut=False, cut_last=False, again=True)

    def add_gradient(self, weight: Tensor, grad: Operand, x: Operand) -> Tensor | None:
        assert isinstance(grad, Quantized) and isinstance(x, Quantized), "`along_tokens` has cast both"
        wide = self._grain is not Grain.ROW or weight.is_cpu  # not every GPU has products by rows that end in fp32
        return add_gradient(weight, self._product(grad, x, torch.float32 if wide else torch.bfloat16))

    @property
    def _grain(self) -> Grain:
        return self.scaling.recipe.grain

    def _product(self, x: Operand, weight: Operand, dtype: torch.dtype) -> Tensor:
        assert isinstance(x, Quantized) and isinstance(weight, Quantized), "both factors are in eight bits, or none"
        return self.scaling.kernels.product(x, weight, dtype)

    def _weights(self, weight: Tensor) -> tuple[Quantized, Quantized]:
        made = self._weight
        if made.version != self.scaling.version:
            made.version = self.scaling.version
            made.along, made.across = self._quantized(weight.detach())
        assert made.along is not None and made.across is not None, "a cast of this step is there"
        return made.along, made.across

    def _quantized(self, weight: Tensor) -> tuple[Quantized, Quantized]:
        """The weight [n, k] in 8 bits, and its transpose."""
        with self.axis.group.recorder.memory("parameters"):
            square = Grain.SQUARE if self._grain is Grain.BLOCK else self._grain
            cut = self.axis.size > 1
            along = self._cast("weight", weight, cut=cut, cut_last=cut and self.split == 1, grain=square, both=True)
            along = replace(along, fast=True)  # outputs: no sum over micro-batches adds up their errors
            if square is Grain.ROW:
                turned = self.scaling.kernels.turned(weight)
                across = self._cast("weight", turned, cut=cut, cut_last=cut and self.split == 0, again=True)
            else:
                across = along.t()
            return along, across

    def _cast(
        self, operand: str, x: Tensor, *, cut: bool, cut_last: bool, grain: Grain | None = None, again: bool = False,
        both: bool = False,
    ) -> Quantized:  # fmt: skip
        """x in 8 bits. `cut`: other ranks of tp have other parts of it; `cut_last`: of each row. `again`: it was cast
        in the other direction before, and counted. `both`: it is wanted in both directions on this rank.
        """
        scaling, grain, name = self.scaling, grain or self._grain, f"{self.name}.{operand}"
        number = scaling.recipe.gradient if operand == "gradient" else Number.E4M3
        with profiled("quantise"):
            largest = scaling.kernels.amax(x, grain)
        shared = cut if grain is Grain.TENSOR else cut_last and grain is Grain.ROW
        if shared and scaling.from_itself:
            label = scaling.labels[name]
            what = label.backward("magnitude") if operand == "gradient" else label.then("magnitude")
            all_reduce(self.axis.group, largest, "max", what=what)
        if not again:
            scaling.note(name, largest)
        with profiled("quantise"):
            found = cast(x, self._scale(name, operand, largest, number), number, grain, scaling.kernels, both)
        if scaling.watched and not again:
            scaling.count(name, lost(x, found, number))
        return found

    def _scale(self, name: str, operand: str, largest: Tensor, number: Number) -> Tensor:
        if self.scaling.from_itself:
            return scale_of(largest, number)
        if self.scaling.recipe.scale == "history":
            known = scale_of(self.scaling.largest_before(name), number)
        else:
            known = torch.full_like(largest, self.units[operand])
        return torch.where(largest.isfinite(), known, math.nan)  # for a cast may make a number of what is none


def numerics_of(name: str, scaling: Scaling, axis: TensorAxis) -> Numerics:
    """In which numbers the linear layer of this name multiplies."""
    parameter = scaling.weights.get(f"{name}.weight")
    if parameter is None:
        return PLAIN
    return EightBit(name, scaling, axis, parameter.sharding["tp"], scaling.units(parameter))
