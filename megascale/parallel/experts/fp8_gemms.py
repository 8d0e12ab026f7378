"""FP8 GEMMs of experts: forward and dgrad, in recipes whose scales are of a row or of a part of it, so that no layout
changes them: other rows have no part in a row's scale, and a weight's scales are its expert's.

wgrad's scales are of an expert's rows together, which are of other tokens elsewhere: it is in FP8 where these change
values of subnormal codes alone (`free_borders` in `catalog.recipes`), otherwise in the compute dtype.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor

from megascale.device import profiler_range
from megascale.ops.grouped_gemm import RowGroups, scaled_grouped_gemm
from megascale.ops.planned_cast import keep_cast, kept_cast, taken_cast
from megascale.ops.quantized import Quantized
from megascale.ops.recipe import Quantizer
from megascale.ops.wgrad import Wgrad
from megascale.parallel.experts.dispatcher import CastTokens
from megascale.parallel.experts.grouped_linear import HIGH_PRECISION_GROUPS, GroupedGemms
from megascale.parallel.fp8_state import Fp8State
from megascale.parallel.linear_gemms import Operand, OperandName

ALIGNMENT = 16  # of the sum of a GEMM with scales of rows


@dataclass
class Fp8GroupedGemms(GroupedGemms):
    """The FP8 GEMMs of the experts of one layer, with the `state` of the whole model. `_weights`: all W [experts n, k]
    for forward and all W^T [experts k, n] for dgrad, cast at the state's `weight_version` `_version`.
    """

    state: Fp8State
    _version: int = -1
    _weights: tuple[Quantized, ...] = ()

    def forward(self, x: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        if not self._quantizes_forward:
            return super().forward(x, weight, groups)
        operand = self._kept_weights(weight)[0] if self.state.keeps_weights else self._forward_weight(weight)
        return self._gemm("input", x, operand, groups)

    def dgrad(self, grad: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        if not (self.state.quantizes and self.state.recipe.facts["serves_experts"]):
            self._weights, self._version = (), -1
            return super().dgrad(grad, weight, groups)
        operand = self._kept_weights(weight)[1] if self.state.keeps_weights else self._dgrad_weight(weight)
        return self._gemm("gradient", grad, operand, groups)

    @property
    def cast_tokens(self) -> CastTokens | None:
        quantizer = self.state.recipe.rows["input"]
        return quantizer.encode if self._quantizes_forward and quantizer.spec.requantises else None

    @property
    def _quantizes_forward(self) -> bool:
        return bool(self.state.quantizes_forward and self.state.recipe.facts["serves_experts"])

    def wgrad_source(self, x: Tensor) -> Operand:
        quantizer = self.state.recipe.rows["input"]
        if not (self._quantizes_forward and self.state.recipe.facts["saves_expert_codes"] and len(x)):
            return x
        if (kept := kept_cast(x)) is None:
            with profiler_range("quantize"):
                keep_cast(x, kept := quantizer.encode(x))  # for forward
        return kept

    def wgrad(self, total: Tensor, grad: Tensor, x: Operand, groups: RowGroups, wgrad: Wgrad, add: bool) -> None:
        if not (self.state.quantizes and self.state.recipe.facts["free_borders"]):
            super().wgrad(total, grad, x, groups, wgrad, add)
            return
        for rows, matrix in zip(groups.slices(), total, strict=True):
            if rows.start < rows.stop:
                gradient = self._turned("gradient", grad[rows])
                self.state.recipe.wgrad(matrix, gradient, self._turned("input", x[rows]), add)
                del gradient  # before the next expert's
            elif not add:
                matrix.zero_()

    def _turned(self, operand: OperandName, rows: Operand) -> Quantized:
        """Quantize the transpose of an expert's rows, with zeros up to whole blocks, perhaps from their codes."""
        row, column = (each[operand] for each in (self.state.recipe.rows, self.state.recipe.columns))
        missing = -rows.shape[0] % (column.spec.block.k or ALIGNMENT)
        with profiler_range("quantize"):
            codes = row.encode(rows) if row.spec.requantises and isinstance(rows, Tensor) else rows
            given = row.kernels.decode(codes) if isinstance(codes, Quantized) else codes
            del codes  # large, as what is next
            given = F.pad(given, (0, 0, 0, missing)) if missing else given
            turned = column.turned(given)
            del given
            return column.encode(turned)

    def _gemm(self, operand: OperandName, x: Tensor, weight: Quantized, groups: RowGroups) -> Tensor:
        if not len(x):
            return x.new_empty(0, weight.shape[0] // len(groups.counts))
        recipe = self.state.recipe
        with profiler_range("quantize"):
            rows = taken_cast(x) or recipe.rows[operand].encode(x)
        return scaled_grouped_gemm(rows, weight, groups, x.dtype, recipe.gemm)

    def _kept_weights(self, weight: Tensor) -> tuple[Quantized, ...]:
        if self._version != self.state.weight_version:
            with self.state.recorder.memory_kind("parameters"):
                forward = self._forward_weight(weight)
                self._weights = forward, self._dgrad_weight(weight, forward)
            self._version = self.state.weight_version
        return self._weights

    def _forward_weight(self, weight: Tensor) -> Quantized:
        """Return all W for forward: as they were gathered, or cast."""
        operand: Quantized | None = getattr(weight, "gathered", None)
        if operand is None:
            operand = self._stack(self.state.recipe.rows["weight"], weight.flatten(1, -2), len(weight))
        return replace(operand, use_fast_accum=True)

    def _dgrad_weight(self, weight: Tensor, forward: Quantized | None = None) -> Quantized:
        """Return all W^T for dgrad: transposes of what forward used if its scales serve them, or cast."""
        quantizer, experts = self.state.recipe.columns["weight"], len(weight)
        if not quantizer.spec.serves_transpose:
            operand = self._stack(quantizer, weight.flatten(1, -2).transpose(1, 2), experts)
            return replace(operand, use_fast_accum=self.state.fast_dgrad)
        forward = self._forward_weight(weight) if forward is None else forward
        if forward.requantises:
            n = forward.shape[0] // experts
            decoded = (quantizer.kernels.decode(forward[first : first + n]) for first in range(0, n * experts, n))
            operand = self._stack(quantizer, (matrix.t() for matrix in decoded), experts)
        else:
            turned = (part.view(experts, -1, part.shape[1]).transpose(1, 2) for part in forward.tensors)
            operand = forward.gathered(*(part.flatten(0, 1) for part in turned))
        return replace(operand, use_fast_accum=self.state.fast_dgrad)

    def _stack(self, quantizer: Quantizer, matrices: Iterable[Tensor], experts: int) -> Quantized:
        """Quantize one matrix at a time, whose temporary memory is many times the result's."""
        stack: Quantized | None = None
        with profiler_range("quantize"):
            for number, matrix in enumerate(matrices):
                part = quantizer.encode(matrix.contiguous())
                n = part.shape[0]
                if stack is None:
                    stack = part.gathered(part.codes.repeat(experts, 1), part.scale.repeat(experts, 1))
                for place, values in zip(stack[number * n : (number + 1) * n].tensors, part.tensors, strict=True):
                    place.copy_(values)
        assert stack is not None, "a rank has experts"
        return stack


def build_grouped_gemms(layer: int, state: Fp8State) -> GroupedGemms:
    """Return the GEMMs of a layer's experts: in FP8 in an FP8 layer, with a recipe whose scales allow it."""
    if layer not in state.layers or not any(recipe.facts["serves_experts"] for recipe in state.recipes):
        return HIGH_PRECISION_GROUPS
    return Fp8GroupedGemms(state)
