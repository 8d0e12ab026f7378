"""Experts in place of an MLP (`ExpertLayer`): router, exchange of tokens over ep, grouped GEMMs, shared expert.

A rank routes its T tokens, k slots each, and exchanges their rows over ep: T k h elements each way, in forward and in
backward, of which its own (1 / ep of them, if experts are equally loaded) stay. Sizes are those of equal loads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megascale.config.model import ModelConfig
from megascale.layout.parts.elementwise import ActivationSpec
from megascale.layout.parts.linear import ColumnParallel, RowParallel, branch_gradient, initial_std
from megascale.layout.parts.microbatch_sizes import CommOp, MicroBatchSizes, UnitBytes, walk
from megascale.layout.parts.part import LinearSpec, Part, Scores, Surroundings, TokenFlops
from megascale.layout.parts.times import OperationTimes, PassTimes
from megascale.layout.tensors import ParamSpec, TensorSpec, expert_param, matrix_param


@dataclass(frozen=True)
class SharedExpert:
    """An MLP for all tokens, beside the routed experts. `gated`: its output times the sigmoid of a learned gate."""

    columns: ColumnParallel
    activation: ActivationSpec
    rows: RowParallel
    gated: bool

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.columns, self.activation, self.rows


@dataclass(frozen=True)
class ExpertLayer(Part):
    """`experts` of inner `width`, of which a token has `chosen`. `inputs`: elements of the activation's input, twice
    the width if gated.
    """

    experts: int
    chosen: int
    hidden: int
    width: int
    inputs: int
    shared: SharedExpert | None = None

    enters: ClassVar[bool] = True

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """The dense linear layers: of the shared expert."""
        return () if self.shared is None else self.shared.columns.layers + self.shared.rows.layers

    def fp8_operands(self) -> Iterator[str]:
        """The operands of the shared expert. Routed experts compute in the compute dtype."""
        for part in () if self.shared is None else self.shared.parts:
            yield from part.fp8_operands()

    def params(self, block: str, model: ModelConfig) -> list[ParamSpec]:
        ratio, up = model.width_ratio, "gate_up" if model.gated else "up"
        first, last = (initial_std(model, residual) for residual in (False, True))
        router = TensorSpec(f"{block}.router.weight", (self.experts, self.hidden), std=first, width_ratio=ratio)
        inner = (self.experts, *([2] if model.gated else []), self.width, self.hidden)
        params = [
            matrix_param(router.name, router),
            expert_param(f"{block}.experts.{up}.weight", inner, first, ratio),
            expert_param(f"{block}.experts.down.weight", (self.experts, self.hidden, self.width), last, ratio),
        ]
        for part in () if self.shared is None else self.shared.parts:
            params += part.params(block, model)
        if self.shared is not None and self.shared.gated:
            gate = TensorSpec(f"{block}.shared_gate.weight", (1, self.hidden), std=first, width_ratio=ratio)
            params.append(matrix_param(gate.name, gate))
        return params

    def flops(self, scores: Scores) -> TokenFlops:
        """Count the FLOPs of a token, of active parameters: of the experts that it has, router and shared expert."""
        gates = 1 if self.shared is not None and self.shared.gated else 0
        expert = self.hidden * (self.inputs + self.width)
        dense = sum(layer.weight_numel for layer in self.linears) + (self.experts + gates) * self.hidden
        return TokenFlops(2 * (self.chosen * expert + dense))

    def memory(self, sizes: MicroBatchSizes, at: Surroundings) -> UnitBytes:
        """Account for equally loaded experts: the input, rows before and after the first GEMM, the activation and its
        weighted result are saved; logits and scores are in the accumulation dtype.
        """
        slots = sizes.local * self.chosen
        rows, inner, outer = (slots * width * sizes.compute for width in (self.hidden, self.inputs, self.width))
        saved = sizes.stream + rows + inner + 2 * outer + 2 * sizes.local * self.experts * sizes.wide
        forward, backward = rows + 2 * outer, 2 * rows + inner + 2 * outer
        shared, again, back = (0, 0, 0) if self.shared is None else self._shared_bytes(sizes, at)
        gradient = sizes.stream - branch_gradient(sizes, at.after)
        return UnitBytes(saved + shared, saved + shared + forward + again, sizes.stream + backward + back, gradient)

    def _shared_bytes(self, sizes: MicroBatchSizes, at: Surroundings) -> tuple[int, int, int]:
        assert self.shared is not None
        columns = self.shared.columns.layer_bytes(sizes, after_norm=False)
        rows = self.shared.rows.layer_bytes(sizes, [self.shared.activation], 0)
        return walk([columns, self.shared.activation.memory(sizes, at), rows], sizes.stream)

    def traffic(self, sizes: MicroBatchSizes, backward: bool = False) -> Iterator[CommOp]:
        for part in () if self.shared is None else self.shared.parts:
            yield from part.traffic(sizes, backward)

    def seconds(self, times: OperationTimes, fp8: bool) -> PassTimes:
        """Time equally loaded experts, and four passes over each slot's row."""
        shapes = [(self.inputs * self.chosen, self.hidden), (self.hidden, self.width * self.chosen)]
        routed = times.linears([(self.experts, self.hidden), *shapes], False, enters=True)
        moved = times.passes(4 * times.stream * self.chosen, backward=1)
        dense = (part.seconds(times, fp8) for part in (() if self.shared is None else self.shared.parts))
        return sum(dense, start=routed + moved)


def expert_layer(model: ModelConfig) -> ExpertLayer:
    """The experts of a layer, as `[model]` describes them."""
    factor, width = 2 if model.gated else 1, model.expert_ffn_size
    shared = _shared_expert(model, factor, model.shared_ffn_size) if model.shared_ffn_size else None
    return ExpertLayer(model.experts, model.experts_per_token, model.hidden_size, width, factor * width, shared)


def _shared_expert(model: ModelConfig, factor: int, width: int) -> SharedExpert:
    name, parts = ("gate_up", ("gate", "up")) if model.gated else ("up", ("up",))
    up = LinearSpec(f"shared.{name}", "shared up", model.hidden_size, tuple((part, width) for part in parts))
    down = LinearSpec("shared.down", "shared down", width, (("down", model.hidden_size),))
    activation = ActivationSpec(factor * width, width)
    return SharedExpert(ColumnParallel((up,)), activation, RowParallel((down,)), model.shared_gate)
