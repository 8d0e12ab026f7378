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
that the first cast keeps with it (`ops.known_amax`). Weights are quantized once per step, not once per micro-batch;
sharded ones, of which no rank keeps a whole, before they are gathered (`parallel.fp8_codes`), or with every use.

`Fp8Gemms` are the GEMMs of one layer, with the model's `parallel.fp8_state`; `build_linear_gemms` returns them, or
high-precision GEMMs for a layer that is not FP8.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from megascale.catalog.recipes import DITHERED, ROW, TENSOR
from megascale.comm.collectives import all_reduce
from megascale.comm.group import Group
from megascale.device import profiler_range
from megascale.ops.known_amax import known_amax, known_column_amax
from megascale.ops.planned_cast import PlannedCast, kept_cast
from megascale.ops.quantized import Quantized
from megascale.ops.recipe import Dither, Quantizer
from megascale.parallel.dither import LayerDither
from megascale.parallel.fp8_state import Fp8State
from megascale.parallel.grad_accumulation import accumulate_scaled_wgrad
from megascale.parallel.linear_gemms import HIGH_PRECISION_GEMMS, LinearGemms, Operand, OperandName
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.tp_overlap import TensorParallel


@dataclass
class _KeptWeights:
    """W [n, k] for forward and W^T [k, n] for dgrad, cast at the state's `weight_version` `version`."""

    version: int = -1
    operands: tuple[Quantized, ...] = ()

    def drop(self) -> None:
        self.version, self.operands = -1, ()


@dataclass
class Fp8Gemms(LinearGemms):
    """The FP8 GEMMs of one layer.

    `state`: of the whole model. `shard_dim`: the dimension of the weight that tp shards: 0 column-parallel, 1
    row-parallel. `static_amaxes`: by operand. The operands `input`, `weight` and `gradient` are X, W and dY. `dither`,
    `batch`: the random bits of stochastic rounding, and whose tokens they round. `_kept`: the weights of a step.
    """

    name: str
    state: Fp8State
    tp: TensorParallel
    shard_dim: int
    static_amaxes: Mapping[str, Tensor]
    wgrad_in_pieces: bool = False  # a scale of a wgrad operand can cover all tokens
    dither: LayerDither | None = None
    batch: MicroBatch | None = None
    _kept: _KeptWeights = field(default_factory=_KeptWeights)

    @property
    def grad_in_pieces(self) -> bool:  # type: ignore[override]
        return self.state.recipe.rows["gradient"].spec.cast_in_pieces

    def of(self, batch: MicroBatch) -> LinearGemms:
        state = self.state
        if not state.quantizes:
            self._kept.drop()
            return HIGH_PRECISION_GEMMS
        gemms = self if state.quantizes_forward else self._backward_gemms
        return replace(gemms, batch=batch) if state.recipe.facts["stochastic"] else gemms

    @cached_property
    def _backward_gemms(self) -> BackwardGemms:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return BackwardGemms(**values)

    def input_operand(self, x: Tensor) -> Operand:
        # forwards without a backward, as a recomputation's first, need no transpose for wgrad
        return self._cast_tokens("input", x, k_sharded=self.shard_dim == 1, for_wgrad=x.requires_grad)

    def grad_operand(self, grad: Tensor) -> Operand:
        return self._cast_tokens("gradient", grad, k_sharded=self.shard_dim == 0)

    def planned_cast(self, name: OperandName) -> PlannedCast | None:
        quantizer = self.state.recipe.rows[name]
        if quantizer.spec.block != TENSOR or quantizer.spec.stochastic or self.state.uses_own_amax(quantizer.spec):
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
        return self._kept_weights(weight)[0] if self.state.keeps_weights else self._forward_weight(weight)

    def weight_for_dgrad(self, weight: Tensor) -> Operand:
        return self._kept_weights(weight)[1] if self.state.keeps_weights else self._dgrad_weight(weight)

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
        quantizer, known = self.state.recipe.columns[name], None
        if isinstance(x, Tensor) and quantizer.spec.amax_block == ROW and not quantizer.spec.rotated:
            known = known_column_amax(x)
        turned = quantizer.turned(quantizer.kernels.decode(x) if isinstance(x, Quantized) else x)
        features_sharded = self.shard_dim == (1 if name == "input" else 0)
        return self._cast(
            name, turned, rows_sharded=features_sharded, contracts_tokens=True, amax=known, transposed=True
        )

    def accumulate_wgrad(self, weight: Tensor, grad: Operand, x: Operand) -> Tensor | None:
        assert isinstance(grad, Quantized) and isinstance(x, Quantized), "both operands are FP8"
        return accumulate_scaled_wgrad(weight, grad, x, self.state.recipe.wgrad)

    def _gemm(self, x: Operand, weight: Operand, dtype: torch.dtype) -> Tensor:
        assert isinstance(x, Quantized) and isinstance(weight, Quantized), "both operands are FP8"
        return self.state.recipe.gemm(x, weight, dtype)

    def _kept_weights(self, weight: Tensor) -> tuple[Quantized, ...]:
        kept = self._kept
        if kept.version != self.state.weight_version:
            # a tensor of its own keeps the amaxes of its columns
            x = weight.detach() if _gathered(weight) is None else weight
            with self.tp.group.recorder.memory_kind("parameters"):
                forward = self._forward_weight(x)
                kept.operands = forward, self._dgrad_weight(x, forward)
            kept.version = self.state.weight_version
        return kept.operands

    def _forward_weight(self, weight: Tensor) -> Quantized:
        """Return W [n, k] for forward: as it was gathered, or cast."""
        operand = _gathered(weight)
        if operand is None:
            both, (by_row, by_column) = self.state.keeps_weights, (self.shard_dim == 0, self.shard_dim == 1)
            operand = self._cast("weight", weight, rows_sharded=by_row, k_sharded=by_column, with_transpose=both)
        return replace(operand, use_fast_accum=True)

    def _dgrad_weight(self, weight: Tensor, forward: Quantized | None = None) -> Quantized:
        """Return W^T [k, n] for dgrad: the transpose of what forward used if its scales serve it, or cast."""
        quantizer, by_row, known = self.state.recipe.columns["weight"], self.shard_dim == 0, None
        if quantizer.spec.serves_transpose and forward is None:
            forward = self._forward_weight(weight)
        if quantizer.spec.block.serves_transpose and forward is not None:
            operand = quantizer.transpose(forward)
        else:
            if quantizer.spec.requantises and forward is not None:
                given = quantizer.turned(quantizer.kernels.decode(forward))
            else:
                given, known = quantizer.turned(weight), known_column_amax(weight)
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
        dither = self._dither(operand, x, transposed) if quantizer.spec.stochastic else None
        with profiler_range("quantize"):
            return quantizer.encode(x, expected, with_transpose=with_transpose, record=record, dither=dither)

    def _dither(self, operand: str, x: Tensor, transposed: bool) -> Dither:
        """Return the random bits of x, an operand or its transpose; of a shard of tokens, by its number of rows."""
        tokens = torch.empty(0)
        if operand != "weight":
            assert self.batch is not None, "stochastic rounding needs the tokens of a micro-batch"
            tokens = self.state.token_numbers(self.batch)
            if not transposed and len(x) < len(tokens):  # with sequence parallelism
                tokens = tokens[self.tp.index * len(x) :][: len(x)]
        assert self.dither is not None
        place = self.dither.place(operand, self.state.step, tokens, transposed=transposed)
        assert (len(place.rows), DITHERED * len(place.blocks)) == (x.shape[:-1].numel(), x.shape[-1])
        return place

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


def _gathered(weight: Tensor) -> Quantized | None:
    """Return the codes in which a weight was gathered, if it was."""
    return getattr(weight, "gathered", None)


class BackwardGemms(Fp8Gemms):
    """The FP8 GEMMs of a layer's backward; those of forward are in bf16."""

    def input_operand(self, x: Tensor) -> Operand:
        return x

    def planned_cast(self, name: OperandName) -> PlannedCast | None:
        return None if name == "input" else super().planned_cast(name)

    def weight_for_forward(self, weight: Tensor) -> Operand:
        return weight

    def wgrad_source(self, x: Tensor, operand: Operand) -> Operand:
        return x if isinstance(operand, Tensor) else super().wgrad_source(x, operand)

    def operand_for_wgrad(self, name: OperandName, x: Operand) -> Operand:
        if isinstance(x, Tensor) and self.state.recipe.rows[name].spec.serves_transpose:
            x = super().input_operand(x)
        return super().operand_for_wgrad(name, x)

    def gemm(self, x: Operand, weight: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        if isinstance(x, Tensor):
            return HIGH_PRECISION_GEMMS.gemm(x, weight, bias, dtype)
        return super().gemm(x, weight, bias, dtype)

    def gemm_out(
        self, out: Tensor, x: Operand, weight: Operand, bias: Tensor | None = None, *, add: bool = False
    ) -> None:
        if isinstance(x, Tensor):
            HIGH_PRECISION_GEMMS.gemm_out(out, x, weight, bias, add=add)
        else:
            super().gemm_out(out, x, weight, bias, add=add)


def build_linear_gemms(name: str, state: Fp8State, tp: TensorParallel) -> LinearGemms:
    """Return the GEMMs of the linear layer of this name: in FP8 if the layer is an FP8 layer, else high-precision."""
    parameter = state.weights.get(f"{name}.weight")
    if parameter is None:
        return HIGH_PRECISION_GEMMS
    amaxes, dither = state.static_amaxes(parameter.parts[0].std), state.layer_dither(parameter)
    return Fp8Gemms(name, state, tp, parameter.sharding["tp"], amaxes, dither=dither)
