"""Experts in place of an MLP (`ExpertLayer`): router, exchange of tokens over ep, grouped GEMMs, shared expert.

A rank routes its T tokens to k slots each, and sends their rows to the ranks of the experts and back, in forward and in
backward. With equal loads a rank has rows for 1 / ep of its slots itself, and as many rows arrive as leave. Or it
gathers the tokens of all ranks, and sends the sums of its rows by token back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, compress

from megascale.config.model import ModelConfig
from megascale.layout.parts.elementwise import ActivationSpec
from megascale.layout.parts.linear import ColumnParallel, RowParallel, branch_gradient, initial_size, linear_params
from megascale.layout.parts.microbatch_sizes import FP32, CommOp, MicroBatchSizes, UnitBytes, walk
from megascale.layout.parts.part import LinearSpec, Part, Surroundings
from megascale.layout.parts.times import OperationTimes, PassTimes
from megascale.layout.tensors import ParamSpec, TensorSpec

INDEX = 8  # bytes of the number of an expert or a row, and of a count of rows

Peaks = tuple[int, int]
"""Transient bytes in forward and in backward."""


SharedExpert = tuple[ColumnParallel, ActivationSpec, RowParallel]
"""An MLP for all tokens, beside the routed experts."""


@dataclass(frozen=True)
class ExpertLayer(Part):
    """`experts` of inner `width`, of which a token has `chosen`. `inputs`: elements of the activation's input, twice
    the width if gated. `normalized`: the weights of a token's experts add up to 1. `bias`: of the experts' layers;
    `router_bias`: of the router's. `shared_gate`: a learned gate scales the output of the `shared` expert.
    """

    experts: int
    chosen: int
    hidden: int
    width: int
    inputs: int
    normalized: bool
    shared: SharedExpert | None
    shared_gate: bool
    bias: bool
    router_bias: bool

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.shared or ()

    @property
    def ends_branch(self) -> bool:
        return True

    @property
    def expert_numel(self) -> int:
        return self.experts * self.hidden * (self.inputs + self.width)

    @property
    def token_weights(self) -> int:
        """Count the active parameters: of the chosen experts, router, shared expert and its gate."""
        router = (self.experts + self.shared_gate) * self.hidden
        return self.expert_numel // self.experts * self.chosen + router + super().token_weights

    def params(self, block: str, model: ModelConfig) -> list[ParamSpec]:
        up = "gate_up" if model.gated else "up"
        first, last = initial_size(model, self.hidden, False), initial_size(model, self.width, True)
        router = LinearSpec(
            "router", "router", self.hidden, (("router", self.experts),), fp8=False, bias=self.router_bias
        )
        inner = (self.experts, *([2] if model.gated else []), self.width, self.hidden)
        stacks = (up, inner, first), ("down", (self.experts, self.hidden, self.width), last)
        weights = [
            TensorSpec(f"{block}.experts.{name}.weight", shape, {"ep": 0}, std=std, width_ratio=ratio)
            for name, shape, (std, ratio) in stacks
        ]
        biases = [
            TensorSpec(f"{block}.experts.{name}.bias", shape[:-1], {"ep": 0}, init=0.0, vectors=True)
            for name, shape, _ in stacks if self.bias
        ]  # fmt: skip
        params = linear_params(f"{block}.router", model, router)
        params += [ParamSpec(tensor.name, (tensor,), reduce_axes=("edp",)) for tensor in weights]
        params += [ParamSpec(tensor.name, (tensor,), "bias", reduce_axes=("edp",)) for tensor in biases]
        params += chain.from_iterable(part.params(block, model) for part in self.parts)
        if self.shared_gate:
            gate = LinearSpec("shared_gate", "shared gate", self.hidden, (("shared_gate", 1),), fp8=False)
            params += linear_params(f"{block}.shared_gate", model, gate)
        return params

    def expert_traffic(self, sizes: MicroBatchSizes, backward: bool = False, again: bool = False) -> Iterator[CommOp]:
        """List the exchanges of counts or choices, once, and of rows or tokens: with a weight for each slot to the
        experts and their gradients back, without one for the results. Rows go to experts as codes if these serve
        wgrad. Bytes of an all-to-all are those that a rank sends to others, with equal loads.
        """
        if sizes.ep == 1:
            return
        slots, row, weights = sizes.local * self.chosen, self.hidden * sizes.compute, sizes.wide
        sent, suffix = slots - slots // sizes.ep, " gradient" if backward else ""
        known = CommOp("ep", "all_to_all", INDEX * self.experts * sizes.token_blocks, "experts counts")
        ways, counts = ["all_to_all", "all_to_all"], [sent, sent]
        if sizes.gathers_tokens:
            known = CommOp("ep", "all_gather", INDEX * slots * sizes.ep, "experts choices")
            ways, counts = ["all_gather", "all_to_all"], [sizes.local * sizes.ep, sizes.local * (sizes.ep - 1)]
            weights *= self.chosen
        if not (backward or again):
            yield known
        dispatch, combine = (1, 0) if backward else (0, 1)
        coded = _sends_codes(sizes) and not backward
        there = (sum(sizes.recipe["input"].row_bytes(self.hidden)) if coded else row) + weights
        yield CommOp("ep", ways[dispatch], counts[dispatch] * there, f"dispatch{suffix}", sizes.token_blocks)
        yield CommOp("ep", ways[combine], counts[combine] * row, f"combine{suffix}", sizes.token_blocks)

    def memory(self, sizes: MicroBatchSizes, at: Surroundings) -> UnitBytes:
        """Account for the steps of `model.experts` in turn. A rank sends the rows of its slots; with uneven loads more
        arrive on the fullest.
        """
        slots, result = sizes.local * self.chosen, branch_gradient(sizes, at)
        rows = slots if sizes.ep == 1 else math.ceil(slots * max(1.0, sizes.imbalance))
        arrived = rows * self.hidden * sizes.compute
        inputs, outputs = (rows * width * sizes.compute for width in (self.inputs, self.width))
        exchange = self._gathered if sizes.gathers_tokens else self._exchanged
        dispatch, combine, in_flight = exchange(sizes, rows)
        dispatch = (self._coded_dispatch(sizes, rows), dispatch[1]) if _sends_codes(sizes) else dispatch
        gate = 2 * outputs if self.inputs > self.width else 0
        up, down = (self._wgrad(sizes, rows, width) for width in (self.inputs, self.width))
        if self.bias:  # rows of an expert in the accumulation dtype, before wgrad
            down = max(down, math.ceil(rows * sizes.ep / self.experts) * self.hidden * sizes.wide * sizes.narrow)
        own = sizes.stream if at.before is not None and at.before.normalizes else 0
        quantized = sizes.fp8 and sizes.recipe["serves_experts"]
        cast = (FP32 + 1) / sizes.compute if quantized else 0  # of rows, for each of their bytes
        (saved, beside), (down_saved, down_beside) = (self._saved(sizes, rows, n) for n in (self.hidden, self.width))
        steps = [
            self._router_bytes(sizes),
            UnitBytes(0, *dispatch, own - arrived),
            UnitBytes(
                saved, beside + max(inputs, int(cast * arrived)), max(arrived + up, int(cast * inputs)),
                arrived - inputs, left=saved + inputs, wgrad=up,
            ),  # `up`: wgrad of an expert
            UnitBytes(inputs, outputs, inputs + gate, inputs - outputs),
            UnitBytes(outputs + rows * sizes.compute, outputs, 2 * outputs),  # times the weights of slots
            UnitBytes(
                down_saved, down_beside + max(arrived, int(cast * outputs)), max(outputs + down, int(cast * arrived)),
                outputs - arrived, left=down_saved + arrived, wgrad=down,
            ),
            UnitBytes(0, *combine, arrived - result),
            *self._shared_bytes(sizes, at, *in_flight),
        ]  # fmt: skip
        walked = walk(steps, result, sizes.split)
        return walked._replace(backward=walked.backward - result, gradient=own - result)

    def _exchanged(self, sizes: MicroBatchSizes, rows: int) -> tuple[Peaks, Peaks, Peaks]:
        """Account for the rows of an all-to-all: to the experts, back, and on the way back beside what overlaps."""
        sent, arrived = (n * self.hidden * sizes.compute for n in (sizes.local * self.chosen, rows))
        copies = 0 if sizes.ep == 1 else 1 if sizes.ep == self.experts else 2  # of rows: as they came, and by expert
        back = max((copies - 1) * arrived + sent, 2 * sent) if copies else 0  # of results: as sent, and by slot
        back = max(back, sent + _wide_stream(sizes) + sizes.stream)
        return (
            (sent + copies * arrived, max(back, copies * arrived)),
            (arrived + back, max(sent + arrived * (copies > 0), copies * arrived)),
            (arrived + sent * (copies > 0), (sent + arrived) * (copies > 0)),
        )

    def _gathered(self, sizes: MicroBatchSizes, rows: int) -> tuple[Peaks, Peaks, Peaks]:
        """Account for the tokens of all ranks, and for sums of rows by token in the accumulation dtype, as
        `_exchanged`.
        """
        every, weights = sizes.ep * sizes.stream, sizes.local * self.chosen * sizes.wide
        arrived, wide = (rows * self.hidden * size for size in (sizes.compute, sizes.wide * sizes.narrow))
        sums = every // sizes.compute * sizes.wide
        adding, packed = sums + max(wide, every * sizes.narrow), every + sizes.ep * weights
        last = _wide_stream(sizes) + sizes.stream
        return (
            (packed + max(sizes.stream + weights, arrived), max(adding, every + packed, 2 * packed, packed + last)),
            (max(arrived + max(adding, 2 * every), every + last), every + arrived),
            (2 * every, every + sizes.stream),
        )

    def _coded_dispatch(self, sizes: MicroBatchSizes, rows: int) -> int:
        """Size the cast of tokens, their codes on the way, and those of rows beside what they are decoded to."""
        token, tokens = sum(sizes.sent("input", self.hidden)), sizes.local
        sent, arriving = (tokens, sizes.ep * tokens) if sizes.gathers_tokens else (2 * tokens * self.chosen, rows)
        arrived = token * (arriving + 2 * rows) + rows * self.hidden * sizes.compute
        return max(
            sizes.recipe["input"].cast_bytes * tokens * self.hidden, token * (2 * tokens + sent + arriving), arrived
        )

    def _saved(self, sizes: MicroBatchSizes, rows: int, width: int) -> tuple[int, int]:
        """Size what is saved of the rows of a layer's input, and what forward has besides: the rows, if that are codes,
        which their cast has counted.
        """
        whole = rows * width * sizes.compute
        if not (sizes.fp8 and sizes.recipe["saves_expert_codes"]):
            return whole, 0
        codes = rows * sum(sizes.recipe["input"].row_bytes(width))
        return codes, whole - codes

    def _wgrad(self, sizes: MicroBatchSizes, rows: int, width: int) -> int:
        """Size wgrad of an expert's layer of `width`, with both operands if it is in FP8."""
        elements = self.hidden * width
        if not (sizes.fp8 and sizes.recipe["serves_experts"] and sizes.recipe["free_borders"]):
            return elements * sizes.compute * sizes.narrow
        share = math.ceil(rows * sizes.ep / self.experts)
        operands = share * width, share * self.hidden
        return sizes.cast_wgrad(elements, *(operands if width == self.inputs else operands[::-1]))

    def kept(self, sizes: MicroBatchSizes) -> int:
        """Size the route of a micro-batch, which recomputation uses again."""
        slots = sizes.local * self.chosen
        return INDEX * slots * (2 if sizes.gathers_tokens else 3 if sizes.ep in (1, self.experts) else 5)

    def _router_bytes(self, sizes: MicroBatchSizes) -> UnitBytes:
        """Account for the router, with all numbers of experts and rows."""
        scores = sizes.local * self.experts * sizes.wide
        weights = sizes.local * (self.chosen + 1) * sizes.wide * self.normalized
        saved = sizes.stream + scores + weights + self.kept(sizes)
        wide = _wide_stream(sizes)
        forward, backward = max(wide + scores, 3 * scores), 2 * scores + 2 * wide + sizes.stream
        return UnitBytes(saved, forward, backward, left=sizes.stream + scores, wgrad=wide)

    def _shared_bytes(self, sizes: MicroBatchSizes, at: Surroundings, beside: int, behind: int) -> list[UnitBytes]:
        """Account for the shared expert, in forward `beside` the results of the others on their way, in backward
        `behind` their gradients. Its input is saved for the router.
        """
        if self.shared is None:
            return []
        up, activation, down = self.shared
        columns, common = up.layer_bytes(sizes, after_norm=False), 0 if sizes.saves_codes else sizes.stream
        saved, left, gradient = columns.saved - common, columns.left - common, columns.gradient + sizes.stream
        columns = columns._replace(saved=saved, left=left, gradient=gradient)
        gate = [UnitBytes(sizes.stream, sizes.stream, 2 * sizes.stream, sizes.stream)] if self.shared_gate else []
        rows = down.layer_bytes(sizes, [activation], 0)
        rows = rows._replace(left=rows.left + sizes.stream)
        steps = [columns, activation.memory(sizes, at), rows, *gate]
        return [step._replace(forward=step.forward + beside, backward=step.backward + behind) for step in steps]

    def seconds(self, times: OperationTimes, fp8: bool) -> PassTimes:
        """Time the steps in turn; rows are moved by (2 k + 2) T h elements in forward and in backward, in which fused
        permutations read and write each slot's row and each token. With gathered tokens they read those of all ranks,
        write sums for them, and read sums of all ranks: (2 k + 3 ep + 1) T h.
        """
        sizes, local = replace(times.sizes, fp8=fp8), self.experts // times.sizes.ep
        uneven = sizes.imbalance if sizes.ep > 1 else min(1.0, sizes.imbalance)
        rows = times.stream // self.hidden * self.chosen * uneven
        total = times.local_linear(self.experts, self.hidden) + times.host_wait()
        moved = 2 * self.chosen + (3 * sizes.ep + 1 if sizes.gathers_tokens else 2)
        total += times.passes(moved * times.stream, backward=1)
        total += times.passes(rows * (self.inputs + self.width))
        shapes = (self.inputs, self.hidden), (self.hidden, self.width)
        blocks = sizes.token_blocks  # each reads the weights
        gemms = times.grouped_linears(shapes, local, rows / local / blocks, fp8) * blocks
        frozen = {"experts.gate_up.weight", "experts.up.weight"} & sizes.frozen, "experts.down.weight" in sizes.frozen
        if any(frozen):
            stay = times.grouped_linears(compress(shapes, frozen), local, rows / local / blocks, fp8).weights * -blocks
            gemms += PassTimes(backward=stay, weights=stay)
        total += gemms
        total += times.exchanges((self.expert_traffic(sizes), self.expert_traffic(sizes, backward=True)), gemms)
        return sum((part.seconds(times, fp8) for part in self.parts), start=total)


def _sends_codes(sizes: MicroBatchSizes) -> bool:
    """True if tokens travel to experts as codes (`parallel.experts.fp8_gemms`)."""
    return bool(sizes.fp8 and sizes.recipe["serves_experts"] and sizes.recipe["input"].requantises)


def _wide_stream(sizes: MicroBatchSizes) -> int:
    """Size a copy of the residual stream in the accumulation dtype, if it is another."""
    return sizes.stream // sizes.compute * sizes.wide if sizes.narrow else 0


def expert_layer(model: ModelConfig, shared: SharedExpert | None) -> ExpertLayer:
    """The experts of a layer, as `[model]` describes them."""
    width, inputs = model.expert_ffn_size, (2 if model.gated else 1) * model.expert_ffn_size
    sizes = model.experts, model.experts_per_token, model.hidden_size, width, inputs
    return ExpertLayer(*sizes, model.router_normalize, shared, model.shared_gate, model.bias, model.router_bias)
