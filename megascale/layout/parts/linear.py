"""Linear layers that share their collectives over tp (`ColumnParallel`, `RowParallel`).

For activations of W = s b h B bytes, with sequence parallelism (Korthikanti et al. 2022, 4.2):

    column-parallel  all-gather W in forward, all-gather W for wgrad, reduce-scatter W of dgrad
    row-parallel     reduce-scatter W in forward, all-gather W of the output's gradient

Without sequence parallelism all-reduces replace the reduce-scatters, and no all-gathers are needed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import ClassVar

from megascale.config.model import ModelConfig
from megascale.layout.parts.microbatch_sizes import CommOp, MicroBatchSizes, UnitBytes
from megascale.layout.parts.part import LinearSpec, Part, Surroundings
from megascale.layout.parts.times import OperationTimes, PassTimes
from megascale.layout.tensors import ParamSpec, TensorSpec


@dataclass(frozen=True)
class LinearGroup(Part):
    """Parallel linear layers, which share their tp collectives and the FP8 copy of their common operand.

    `sharded`: the dimension of a weight [outputs, inputs] that tp shards.
    """

    layers: tuple[LinearSpec, ...]

    sharded: ClassVar[int]

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        return self.layers

    @property
    def fp8(self) -> bool:
        """FP8 may run the GEMMs of the group: all of them, or none."""
        allowed = {layer.fp8 for layer in self.layers}
        assert len(allowed) == 1, f"{self.label}: all GEMMs of a group run in FP8, or none"
        return allowed.pop()

    @property
    def label(self) -> str:
        """The group's name in the event log, such as 'qkv and up'."""
        return " and ".join(layer.label for layer in self.layers)

    def params(self, block: str, model: ModelConfig) -> list[ParamSpec]:
        params = (linear_params(f"{block}.{layer.name}", model, layer, self.sharded) for layer in self.layers)
        return list(itertools.chain(*params))

    def trained(self, sizes: MicroBatchSizes) -> list[bool]:
        """Return for each layer whether it has a wgrad."""
        return [f"{layer.name}.weight" not in sizes.frozen for layer in self.layers]

    def fp8_operands(self) -> Iterator[str]:
        """The input, weight and output gradient of the layers. A common input or gradient is named by the first."""
        for index, layer in enumerate(self.layers if self.fp8 else ()):
            if index == 0 or self.sharded == 1:
                yield f"{layer.name}.input"
            yield f"{layer.name}.weight"
            if index == 0 or self.sharded == 0:
                yield f"{layer.name}.gradient"

    def traffic(self, sizes: MicroBatchSizes, backward: bool = False) -> Iterator[CommOp]:
        first, column, wgrad = self.layers[0], self.sharded == 0, backward and any(self.trained(sizes))
        operand, label = ("gradient", f"{self.label} gradient") if backward else ("input", self.label)
        size = first.inputs if column else first.outputs
        if column != backward:
            width, scales = sizes.sent(operand, size, both=backward)
            overlap = not (backward and sizes.fp8) or sizes.recipe[operand].cast_in_pieces
            if sizes.cut and sizes.sends_codes(operand, both=backward):
                yield from sizes.amaxes(first.name, operand, 0)
            yield from sizes.gather(f"{label} scales", sizes.rows, scales)
            yield from sizes.gather(label, sizes.rows, width, overlap)
            if wgrad and sizes.split:  # in W again: until then the gradient would fill memory
                yield from sizes.gather(f"{self.label} wgrad gradient scales", sizes.rows, scales)
                yield from sizes.gather(f"{self.label} wgrad gradient", sizes.rows, width, overlap)
            if backward:
                yield from self._wgrad_amaxes(sizes, "input_column")
            return
        for layer in self.layers:
            yield from sizes.amaxes(layer.name, operand, sizes.rows * sizes.batch)
        if wgrad:
            width, scales = sizes.sent("input", sizes.input_rank or size)
            yield from sizes.gather(f"{self.label} wgrad input scales", sizes.rows, scales)
            yield from sizes.gather(f"{self.label} wgrad input", sizes.rows, width)
            yield from self._wgrad_amaxes(sizes, "gradient_column")
        for layer in self.layers if not column and sizes.tp > 1 and sizes.input_rank else ():
            if layer.alone:
                yield CommOp("tp", "all_reduce", sizes.tokens * sizes.input_rank * sizes.compute, "projected input")
        yield sizes.reduce(label, sizes.rows, size * sizes.compute, overlap=not backward)

    def _wgrad_amaxes(self, sizes: MicroBatchSizes, column: str) -> Iterator[CommOp]:
        """List the all-reduces of the amaxes of the operand of wgrad whose features tp shards."""
        serves = sizes.recipe[column].block.serves_transpose
        for layer in () if serves else compress(self.layers, self.trained(sizes)):
            yield from sizes.amaxes(layer.name, column, 0)

    def token_amaxes(self, sizes: MicroBatchSizes, backward: bool = False) -> Iterator[CommOp]:
        """List the all-reduces over cp of amaxes; with scales per row they are those of the operands of wgrad."""
        column, tp = self.sharded == 0, sizes.tp
        inputs = [layer.inputs // (1 if column else tp) for layer in self.layers][: 1 if column else None]
        gradients = [layer.outputs // (tp if column else 1) for layer in self.layers][: None if column else 1]
        yield from sizes.token_amaxes(*(("gradient", gradients) if backward else ("input", inputs)))
        if backward and any(trained := self.trained(sizes)):
            yield from sizes.token_amaxes("input_column", inputs if column else [*compress(inputs, trained)])
            yield from sizes.token_amaxes("gradient_column", [*compress(gradients, trained)] if column else gradients)

    def seconds(self, times: OperationTimes, fp8: bool) -> PassTimes:
        rows, columns = (times.sizes.tp, 1) if self.sharded == 0 else (1, times.sizes.tp)
        shapes, first = [(layer.outputs // rows, layer.inputs // columns) for layer in self.layers], self.layers[0]
        enters = self.sharded == 0
        width = first.inputs if enters else first.outputs
        total, trained = times.linears(shapes, fp8, enters, width), self.trained(times.sizes)
        if all(trained):
            return total
        frozen = (shape for shape, is_trained in zip(shapes, trained, strict=True) if not is_trained)
        spared = times.linears(frozen, fp8, enters, width).weights * -1
        spared = replace(spared, tp=0.0) if any(trained) else spared  # the others' wgrad needs the same input
        return total + PassTimes(backward=spared, weights=spared)


@dataclass(frozen=True)
class ColumnParallel(LinearGroup):
    """Column-parallel layers of a common input X: tp rank i computes Y_i = X W_i^T, a shard of every layer's outputs.
    With sequence parallelism X is all-gathered before the GEMMs.
    """

    sharded: ClassVar[int] = 0
    enters: ClassVar[bool] = True

    def memory(self, sizes: MicroBatchSizes, at: Surroundings) -> UnitBytes:
        return self.layer_bytes(sizes, at.before is not None and at.before.normalizes, not at.adds_gradient)

    def layer_bytes(self, sizes: MicroBatchSizes, after_norm: bool, holds_gradient: bool = True) -> UnitBytes:
        """Account for the layers. The input is all-gathered for wgrad while dgrad is reduce-scattered.

        Without a norm before, the input is the residual stream, and dgrad is added to the gradient of the stream.
        Without `holds_gradient` it is added to that of another part.
        """
        outputs = sizes.sharded(sum(layer.outputs for layer in self.layers))
        recomputed = sizes.stream if after_norm and self.recomputes_input(sizes) else 0
        casts = outputs // sizes.compute if sizes.fp8 else 0
        wgrad = max(sizes.wgrad(layer.weight_numel, sizes.sharded(layer.outputs)) for layer in self.layers)
        cast = sizes.recipe["gradient"].cast_bytes * casts
        backward = recomputed + max(casts + 2 * sizes.gathered + sizes.stream + (0 if sizes.split else wgrad), cast)
        saved = 0 if recomputed else sizes.saved_input(sizes.stream, sizes.model.hidden_size, whole=not sizes.cut)
        gradient = sizes.stream if after_norm and holds_gradient else 0
        gathering, left = 2 * sizes.gathered, saved + outputs + casts  # the norm leaves what it is recomputed from
        return UnitBytes(
            saved, sizes.gathered + outputs, backward, gradient - outputs, left=left, wgrad=gathering + wgrad
        )

    def recomputes_input(self, sizes: MicroBatchSizes) -> bool:
        return sizes.recompute.norm and not sizes.saves_codes


@dataclass(frozen=True)
class RowParallel(LinearGroup):
    """Row-parallel layers, each with a sharded input: Y = sum of X_i W_i^T over the layers and the tp ranks i. The sum
    over tp is an all-reduce, or a reduce-scatter with sequence parallelism.
    """

    sharded: ClassVar[int] = 1

    @property
    def results(self) -> tuple[LinearSpec, ...]:
        return self.layers

    def recomputed_traffic(self, sizes: MicroBatchSizes, skipped: bool) -> list[CommOp]:
        """List the collectives that full recomputation repeats: without the reduction of `skipped` layers."""
        sent = list(self.traffic(sizes))
        return sent[:-1] if skipped else sent

    def memory(self, sizes: MicroBatchSizes, at: Surroundings) -> UnitBytes:
        return self.layer_bytes(sizes, at.sources, branch_gradient(sizes, at))

    def layer_bytes(self, sizes: MicroBatchSizes, sources: Sequence[Part], result: int) -> UnitBytes:
        """Account for the layers. `result`: bytes of a gradient that the output has of its own; without them it is that
        of the residual stream, which a norm leaves.
        """
        inputs = [sizes.sharded(layer.inputs) for layer in self.layers]
        again = [not sizes.saves_codes and source.recomputes_output(sizes.recompute) for source in sources]
        recomputed = sum(size for size, repeated in zip(inputs, again, strict=True) if repeated)
        widths = [layer.inputs // sizes.tp for layer in self.layers]
        wgrad = max(sizes.wgrad(layer.weight_numel, size) for layer, size in zip(self.layers, inputs, strict=True))
        reduced = sizes.full * (2 if sizes.cut else 1)  # with shards of the other ranks, and a copy of the own one
        backward = recomputed + sum(inputs) + sizes.gathered + (0 if sizes.split else wgrad)
        kept = compress(zip(inputs, widths, self.layers, strict=True), [not repeated for repeated in again])
        saved = sum(sizes.saved_input(size, width, alone=layer.alone) for size, width, layer in kept)
        gathering, forward = 2 * sizes.gathered, sizes.stream + recomputed + reduced
        left = saved + result  # a recomputed input is left as what it is recomputed from
        return UnitBytes(saved, forward, backward, sum(inputs) - result, left=left, wgrad=gathering + wgrad)


def branch_gradient(sizes: MicroBatchSizes, at: Surroundings) -> int:
    """Size the gradient that a branch's result has of its own: before a norm, or with dropout."""
    return sizes.stream if at.ends_in_norm else sizes.branch


def initial_size(model: ModelConfig, inputs: int, residual: bool) -> tuple[float, float]:
    """The initial standard deviation of a linear layer's weight, and the `width_ratio` that divides its learning rate.
    `residual`: it feeds the residual stream, which sums 2 l branches in a network of l layers, and is divided by
    sqrt(2 l). muP divides by the root of the width. Unit scaling has weights of size 1 and multiplies the output by
    inputs^-1/2, with which the weight here and its learning rate are multiplied already.
    """
    if model.unit_scaling:
        return inputs**-0.5, math.sqrt(inputs * model.width_ratio)
    return model.init_std / math.sqrt(model.width_ratio * (2 * model.num_layers if residual else 1)), model.width_ratio


def linear_params(name: str, model: ModelConfig, linear: LinearSpec, dimension: int | None = None) -> list[ParamSpec]:
    """The parameters of a linear layer, whose weight tp shards along `dimension`: 0 outputs, 1 inputs, None neither."""
    std, ratio = initial_size(model, linear.inputs, residual=dimension == 1)
    prefix, sharding = name.rpartition(".")[0], {} if dimension is None else {"tp": dimension}
    parts = [(f"{prefix}.{part}", rows) for part, rows in linear.parts]
    weights = [
        TensorSpec(
            f"{part}.weight", (rows, linear.inputs), sharding, std=std, head_dim=linear.head_dim, width_ratio=ratio
        )
        for part, rows in parts
    ]
    params = [ParamSpec(f"{name}.weight", tuple(weights), fp8=linear.fp8)]
    if linear.bias:
        sharding = sharding if dimension == 0 else {}
        biases = tuple(TensorSpec(f"{part}.bias", (rows,), sharding, init=0.0) for part, rows in parts)
        params.append(ParamSpec(f"{name}.bias", biases, "bias"))
    return params
