"""FP8 GEMMs of experts: forward and dgrad, in recipes whose scales are of a row or of a part of it, so that no layout
changes them: other rows have no part in a row's scale, and a weight's scales are its expert's.

wgrad is in the compute dtype. Its scales would be of an expert's rows together, which are of other tokens elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from megascale.device import profiler_range
from megascale.ops.grouped_gemm import RowGroups, scaled_grouped_gemm
from megascale.ops.quantized import Quantized
from megascale.parallel.experts.grouped_linear import HIGH_PRECISION_GROUPS, GroupedGemms
from megascale.parallel.fp8_state import Fp8State
from megascale.parallel.linear_gemms import OperandName
from megascale.record.recorder import Recorder


@dataclass
class Fp8GroupedGemms(GroupedGemms):
    """The FP8 GEMMs of the experts of one layer, with the `state` of the whole model. `_weights`: all W [experts n, k]
    for forward and all W^T [experts k, n] for dgrad, cast at the state's `weight_version` `_version`.
    """

    state: Fp8State
    recorder: Recorder
    _version: int = -1
    _weights: tuple[Quantized, ...] = ()

    def forward(self, x: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        operand = self._forward_weight(weight) if self.state.cast_shards else self._kept_weights(weight)[0]
        return self._gemm("input", x, operand, groups)

    def dgrad(self, grad: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        operand = self._dgrad_weight(weight) if self.state.cast_shards else self._kept_weights(weight)[1]
        return self._gemm("gradient", grad, operand, groups)

    def _gemm(self, operand: OperandName, x: Tensor, weight: Quantized, groups: RowGroups) -> Tensor:
        if not len(x):
            return x.new_empty(0, weight.shape[0] // len(groups.counts))
        recipe = self.state.recipe
        with profiler_range("quantize"):
            rows = recipe.rows[operand].encode(x)
        return scaled_grouped_gemm(rows, weight, groups, x.dtype, recipe.gemm)

    def _kept_weights(self, weight: Tensor) -> tuple[Quantized, ...]:
        if self._version != self.state.weight_version:
            with self.recorder.memory_kind("parameters"):
                self._weights = self._forward_weight(weight), self._dgrad_weight(weight)
            self._version = self.state.weight_version
        return self._weights

    def _forward_weight(self, weight: Tensor) -> Quantized:
        """Return all W for forward: as they were gathered, or cast."""
        operand: Quantized | None = getattr(weight, "gathered", None)
        return replace(operand or self._stack(weight.flatten(1, -2)), use_fast_accum=True)

    def _dgrad_weight(self, weight: Tensor) -> Quantized:
        """Return all W^T for dgrad: transposes of those that were gathered, or cast."""
        operand: Quantized | None = getattr(weight, "gathered", None)
        if operand is None:
            operand = self._stack(weight.flatten(1, -2).transpose(1, 2))
        else:
            turned = (part.view(len(weight), -1, part.shape[1]).transpose(1, 2) for part in operand.tensors)
            operand = operand.gathered(*(part.flatten(0, 1) for part in turned))
        return replace(operand, use_fast_accum=self.state.fast_dgrad)

    def _stack(self, matrices: Tensor) -> Quantized:
        """Quantize one matrix at a time, whose temporary memory is many times the result's."""
        encode, (experts, n, _) = self.state.recipe.rows["weight"].encode, matrices.shape
        with profiler_range("quantize"):
            first = encode(matrices[0].contiguous())
            stack = first.gathered(first.codes.repeat(experts, 1), first.scale.repeat(experts, 1))
            for expert in range(1, experts):
                part = encode(matrices[expert].contiguous())
                for place, values in zip(stack[expert * n : (expert + 1) * n].tensors, part.tensors, strict=True):
                    place.copy_(values)
        return stack


def build_grouped_gemms(layer: int, state: Fp8State, recorder: Recorder) -> GroupedGemms:
    """Return the GEMMs of a layer's experts: in FP8 in an FP8 layer, with a recipe whose scales allow it."""
    if layer not in state.layers or state.recipe.rows["input"].spec.block.rows is None:
        return HIGH_PRECISION_GROUPS
    return Fp8GroupedGemms(state, recorder)
