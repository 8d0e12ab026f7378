"""FP8 linear layers. amax is max-reduced over tp and cp: scales are the same for any tp, sp and cp.

All three GEMMs of a layer take operands of a `Recipe`; scales of rows or blocks lie along the contracted dimension:

    forward  Y  = X W^T    contracts k       X [t, k], W [n, k]          t: tokens
    dgrad    dX = dY W     contracts n       dY [t, n], W^T [k, n]
    wgrad    dW = dY^T X   contracts t       dY^T [n, t], X^T [k, t]

A scale is computed from the amax of the elements that share the scale; if tp shards them, from the amax over the tp
ranks, and if it covers all tokens of a micro-batch, over the ranks along cp that share its sequences. Where one copy
serves the transpose too, its codes are all-gathered and saved for backward, and for wgrad transposed, or decoded and
quantized along the other dimension if scales are powers of two (`QuantizerSpec.requantises`). Otherwise the
high-precision tensor is saved, and quantized a second time for wgrad: if scales are of rows, by the amaxes of columns
that the first cast keeps with it (`ops.known_amax`). Weights are quantized once per
step, not once per micro-batch; sharded ones, of which no rank keeps a whole, before they are gathered
(`parallel.fp8_codes`), or with every use.

`Fp8Gemms` are the GEMMs of one layer, with the model's `parallel.fp8_state`; `build_linear_gemms` returns them, or
high-precision GEMMs for a layer that is not FP8.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megascale.catalog.recipes import TENSOR
from megascale.comm.collectives import all_reduce
from megascale.comm.group import Group
from megascale.device import profiler_range
from megascale.ops.known_amax import known_amax, known_column_amax
from megascale.ops.planned_cast import PlannedCast, kept_cast
from megascale.ops.quantized import Quantized
from megascale.ops.recipe import Quantizer
from megascale.parallel.fp8_state import Fp8State
from megascale.parallel.grad_accumulation import accumulate_scaled_wgrad
from megascale.parallel.linear_gemms import HIGH_PRECISION_GEMMS, LinearGemms, Operand, OperandName
from megascale.parallel.tp_overlap import TensorParallel


@dataclass
class Fp8Gemms(LinearGemms):
    """The FP8 GEMMs of one layer.

    `state`: of the whole model. `shard_dim`: the dimension of the weight that tp shards: 0 column-parallel, 1
    row-parallel. `static_amaxes`: by operand. The operands `input`, `weight` and `gradient` are X, W and dY.
    `_weights`: W [n, k] for forward and W^T [k, n] for dgrad, cast at the state's `weight_version` `_version`.
    """

    name: str
    state: Fp8State
    tp: TensorParallel
    shard_dim: int
    static_amaxes: Mapping[str, Tensor]
    wgrad_in_pieces: bool = False  # a scale of a wgrad operand can cover all tokens
    _version: int = -1
    _weights: tuple[Quantized, ...] = ()

    def input_operand(self, x: Tensor) -> Operand:
        # forwards without a backward, as a recomputation's first, need no transpose for wgrad
        return self._cast_tokens("input", x, k_sharded=self.shard_dim == 1, for_wgrad=x.requires_grad)

    def grad_operand(self, grad: Tensor) -> Operand:
        return self._cast_tokens("gradient", grad, k_sharded=self.shard_dim == 0)

    def planned_cast(self, name: OperandName) -> PlannedCast | None:
        quantizer = self.state.recipe.rows[name]
        if quantizer.spec.block != TENSOR or self.state.uses_own_amax(quantizer.spec):
            return None
        record = self.state.record(f"{self.name}.{name}")
        return PlannedCast(self._expected_amax(name), quantizer.element, record)

    def _cast_tokens(self, name: OperandName, x: Tensor, *, k_sharded: bool, for_wgrad: bool = True) -> Quantized:
        """Quantize X [s, b, k] or dY [s, b, n]. tp shards k or n; or s with sequence parallelism; or nothing.

        An operand sharded along s is cast without transpose: wgrad transposes the all-gathered operand, as it does any
        that was cast without.
        """
        if (kept := kept_cast(x)) is not None:
            return kept
        rows_sharded = self.tp.activations_sharded and not k_sharded
        known = known_amax(x) if self.state.recipe.rows[name].spec.amax_block == TENSOR else None
        return self._cast(
            name, x, rows_sharded=rows_sharded, k_sharded=k_sharded, amax=known,
            with_transpose=for_wgrad and not rows_sharded,
        )  # fmt: skip

    def before_all_gather(self, grad: Tensor) -> Operand:
        # Where scales serve one direction, wgrad quantizes the gathered gradient a second time, along the tokens.
        return self.grad_operand(grad) if self.state.recipe.rows["gradient"].spec.serves_transpose else grad

    def after_all_gather(self, grad: Operand) -> Operand:
        return grad if isinstance(grad, Quantized) else self._cast("gradient", grad, with_transpose=True)

    def weight_for_forward(self, weight: Tensor) -> Operand:
        return self._forward_weight(weight) if self.state.cast_shards else self._kept_weights(weight)[0]

    def weight_for_dgrad(self, weight: Tensor) -> Operand:
        return self._dgrad_weight(weight) if self.state.cast_shards else self._kept_weights(weight)[1]

    def wgrad_source(self, x: Tensor, operand: Operand) -> Operand:
        assert isinstance(operand, Quantized), "the operand comes from `input_operand` or `grad_operand`"
        return operand.without_rows() if operand.serves_transpose else x

    def gemm(self, x: Operand, weight: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        out = self._gemm(x, weight, dtype)
        return out if bias is None else out.add_(bias)

    def gemm_out(
        self, out: Tensor, x: Operand, weight: Operand, bias: Tensor | None = None, *, add: bool = False
    ) -> None:
        result = self._gemm(x, weight, out.dtype)
        if add:
            out.add_(result)
        elif bias is None:
            out.copy_(result)
        else:
            torch.add(result, bias, out=out)

    def operand_for_wgrad(self, name: OperandName, x: Operand) -> Operand:
        if isinstance(x, Quantized) and not x.requantises:
            return self.state.recipe.rows[name].transpose(x)
        rows = x.decode(torch.bfloat16) if isinstance(x, Quantized) else x
        turned = self.state.recipe.columns[name].turned(rows.reshape(-1, x.shape[-1]))  # for scales along the tokens
        return self._cast(name, turned, amax=known_column_amax(rows), contracts_tokens=True, transposed=True)

    def accumulate_wgrad(self, weight: Tensor, grad: Operand, x: Operand) -> Tensor | None:
        assert isinstance(grad, Quantized) and isinstance(x, Quantized), "both operands are FP8"
        return accumulate_scaled_wgrad(weight, grad, x, self.state.recipe.wgrad)

    def _gemm(self, x: Operand, weight: Operand, dtype: torch.dtype) -> Tensor:
        assert isinstance(x, Quantized) and isinstance(weight, Quantized), "both operands are FP8"
        return self.state.recipe.gemm(x, weight, dtype)

    def _kept_weights(self, weight: Tensor) -> tuple[Quantized, ...]:
        if self._version != self.state.weight_version:
            x = weight.detach()  # keeps the amaxes of its columns
            with self.tp.group.recorder.memory_kind("parameters"):
                forward = self._forward_weight(x)
                self._weights = forward, self._dgrad_weight(x, forward)
            self._version = self.state.weight_version
        return self._weights

    def _forward_weight(self, weight: Tensor) -> Quantized:
        """Return W [n, k] for forward: as it was gathered, or cast."""
        operand: Quantized | None = getattr(weight, "gathered", None)
        if operand is None:
            both, (by_row, by_column) = self.state.cast_shards is None, (self.shard_dim == 0, self.shard_dim == 1)
            operand = self._cast("weight", weight, rows_sharded=by_row, k_sharded=by_column, with_transpose=both)
        return replace(operand, use_fast_accum=True)

    def _dgrad_weight(self, weight: Tensor, forward: Quantized | None = None) -> Quantized:
        """Return W^T [k, n] for dgrad: the transpose of what forward used if its scales serve it, or cast."""
        quantizer, source, by_row = self.state.recipe.columns["weight"], weight, self.shard_dim == 0
        if not quantizer.spec.serves_transpose:
            forward = None
        elif forward is None:
            forward = self._forward_weight(weight)
        if forward is not None and not forward.requantises:
            operand = quantizer.transpose(forward)
        else:
            source = weight if forward is None else forward.decode(weight.dtype)
            given, known = quantizer.turned(source), known_column_amax(source)
            operand = self._cast(
                "weight", given, rows_sharded=not by_row, k_sharded=by_row, amax=known, transposed=True
            )
        # Transformer Engine's default: fast accumulation in forward; dgrad and wgrad, which are more sensitive,
        # accumulate in fp32.
        return replace(operand, use_fast_accum=self.state.fast_dgrad)

    def _cast(
        self, operand: str, x: Tensor, *, rows_sharded: bool = False, k_sharded: bool = False,
        contracts_tokens: bool = False, amax: Tensor | None = None, transposed: bool = False,
        with_transpose: bool = False,
    ) -> Quantized:  # fmt: skip
        """Quantize x [rows, k] to FP8, where k is contracted.

        `rows_sharded`, `k_sharded`: x is a tp shard of the operand along that dimension. `contracts_tokens`: k are the
        tokens. `amax`: of this rank's x, if known. `transposed`: x is the operand's transpose; the operand itself is in
        this step's statistics. `with_transpose`: this rank needs the transpose too.
        """
        state, name = self.state, f"{self.name}.{operand}"
        quantizer = (state.recipe.columns if transposed else state.recipe.rows)[operand]
        expected, block = amax, quantizer.spec.amax_block
        if not state.uses_own_amax(quantizer.spec):  # an amax history is already over all ranks
            expected = self._expected_amax(operand)
        else:
            # smaller blocks never span ranks: shards have multiples of their sides, the recipe's alignment
            spans_tp = self.tp.size > 1 and ((rows_sharded and block.rows is None) or (k_sharded and block.k is None))
            spans_tokens = operand != "weight" and (block.k if contracts_tokens else block.rows) is None
            groups = [*([self.tp.group] if spans_tp else ()), *(state.token_groups if spans_tokens else ())]
            if groups:
                expected = self._reduced_amax(operand, quantizer, x, amax, groups)
        record = None if transposed else state.record(name)
        with profiler_range("quantize"):
            return quantizer.encode(x, expected, with_transpose=with_transpose, record=record)

    def _expected_amax(self, operand: str) -> Tensor:
        """Return the amax of a scale that does not come from the operand itself."""
        delayed = self.state.recipe.rows[operand].spec.scaling == "delayed"
        return self.state.history_amax(f"{self.name}.{operand}") if delayed else self.static_amaxes[operand]

    def _reduced_amax(
        self, operand: str, quantizer: Quantizer, x: Tensor, amax: Tensor | None, groups: Iterable[Group]
    ) -> Tensor:
        if amax is None:
            with profiler_range("quantize"):
                amax = quantizer.amax(x)
        else:
            amax = amax.clone()  # what a tensor keeps is of this rank
        operand_label = self.state.labels[f"{self.name}.{operand}"]
        label = operand_label.for_backward("amax") if operand == "gradient" else operand_label.with_suffix("amax")
        for group in groups:
            all_reduce(group, amax, "max", label=label)
        return amax


def build_linear_gemms(name: str, state: Fp8State, tp: TensorParallel) -> LinearGemms:
    """Return the GEMMs of the linear layer of this name: in FP8 if the layer is an FP8 layer, else high-precision."""
    parameter = state.weights.get(f"{name}.weight")
    if parameter is None:
        return HIGH_PRECISION_GEMMS
    return Fp8Gemms(name, state, tp, parameter.sharding["tp"], state.static_amaxes(parameter.parts[0].std))
