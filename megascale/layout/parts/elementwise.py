"""Norms, activation functions and residual additions: passes over memory without GEMMs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megascale.catalog.layers import NORMS
from megascale.config.model import ModelConfig
from megascale.layout.parts.microbatch_sizes import MicroBatchSizes, UnitBytes
from megascale.layout.parts.part import Part, Surroundings
from megascale.layout.parts.times import OperationTimes, PassTimes, Seconds
from megascale.layout.recompute_policy import RecomputePolicy
from megascale.layout.tensors import ParamSpec, TensorSpec


@dataclass(frozen=True)
class NormSpec(Part):
    """A norm over the hidden size. `name`: path inside the block. `shares_input`: an earlier norm has the same input,
    which both save for backward as a single tensor. `gain`: at the start.
    """

    name: str
    shares_input: bool = False
    gain: float = 1.0

    normalizes: ClassVar[bool] = True

    def params(self, block: str, model: ModelConfig) -> list[ParamSpec]:
        return norm_params(f"{block}.{self.name}", model, self.gain)

    def memory(self, sizes: MicroBatchSizes, at: Surroundings) -> UnitBytes:
        after_branch = at.before is not None and at.before.ends_branch and not self.shares_input
        gradient = sizes.stream - sizes.branch if after_branch else -sizes.stream
        saved = sizes.norm_saved - (sizes.stream if self.shares_input else 0)
        small = sizes.stays(sizes.norm_saved - sizes.stream)
        again = bool(at.rest) and at.rest[0].recomputes_input(sizes) and not self.shares_input
        replaced = at.sums_gradients and not sizes.branch  # the sum is another tensor
        left = sizes.stream * (again + replaced)
        return UnitBytes(saved, sizes.stream, sizes.norm_backward, gradient, left=left, small=small)

    def spared_reads(self, sizes: MicroBatchSizes, after: Part | None, by_amax: bool) -> tuple[int, int]:
        return sizes.full if by_amax and after is not None and after.enters else 0, 0

    def seconds(self, times: OperationTimes, fp8: bool) -> PassTimes:
        return times.passes(2 * times.stream)

    def recomputed_seconds(self, forward: Seconds, recompute: RecomputePolicy, after: Part | None) -> Seconds:
        return forward if recompute.norm and after is not None and after.enters else Seconds()


@dataclass(frozen=True)
class ActivationSpec(Part):
    """The activation function of an MLP: elements per token of its input and output."""

    inputs: int
    outputs: int

    feeds_rows: ClassVar[bool] = True

    def memory(self, sizes: MicroBatchSizes, at: Surroundings) -> UnitBytes:
        inputs, outputs = sizes.sharded(self.inputs), sizes.sharded(self.outputs)
        gate = 2 * outputs if inputs > outputs else 0  # two tensors in the backward of SwiGLU
        left = inputs if self.recomputes_output(sizes.recompute) and not sizes.saves_codes else 0
        return UnitBytes(inputs, outputs, inputs + gate, inputs - outputs, left=left)

    def recomputes_output(self, recompute: RecomputePolicy) -> bool:
        return recompute.activation

    def spared_reads(self, sizes: MicroBatchSizes, after: Part | None, by_amax: bool) -> tuple[int, int]:
        if sizes.model.activation == "swiglu":
            return sizes.sharded(self.outputs), sizes.sharded(self.inputs)
        return sizes.sharded(self.outputs) if by_amax else 0, 0  # compiled ones find it in forward alone

    def seconds(self, times: OperationTimes, fp8: bool) -> PassTimes:
        return times.passes(times.tokens * (self.inputs + self.outputs) // times.sizes.tp)

    def recomputed_seconds(self, forward: Seconds, recompute: RecomputePolicy, after: Part | None) -> Seconds:
        return forward if recompute.activation else Seconds()


@dataclass(frozen=True)
class ResidualAdd(Part):
    """The addition of a branch to the residual stream, after dropout if the model has dropout; with `residual_tau` a
    weighted sum, whose terms have gradients of their own.
    """

    def memory(self, sizes: MicroBatchSizes, at: Surroundings) -> UnitBytes:
        return UnitBytes(sizes.mask, 2 * sizes.stream, 2 * sizes.branch, sizes.branch)

    def seconds(self, times: OperationTimes, fp8: bool) -> PassTimes:
        model = times.sizes.model
        return times.passes(((7 if model.dropout else 3) + (2 if model.residual_tau else 0)) * times.stream)


def norm_params(name: str, model: ModelConfig, gain: float = 1.0) -> list[ParamSpec]:
    """The parameters of a norm over the hidden size, with an initial `gain`."""
    shape = (model.hidden_size,)
    tensors = [TensorSpec(f"{name}.weight", shape, init=gain_init(model, gain))]
    if NORMS[model.norm].facts["bias"]:
        tensors.append(TensorSpec(f"{name}.bias", shape, init=0.0))
    return [ParamSpec(tensor.name, (tensor,), "norm") for tensor in tensors]


def gain_init(model: ModelConfig, gain: float = 1.0) -> float:
    """The initial value of a norm's stored gain: `gain` less the norm's offset."""
    return gain - float(NORMS[model.norm].facts["offset"])
