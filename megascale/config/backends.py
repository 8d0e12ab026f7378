"""The sections `[fp8]` and `[backends]`: FP8 GEMMs, and implementations of the operations and of the optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from megascale.catalog.backends import AUTO, BACKENDS
from megascale.catalog.recipes import RECIPES, with_scale
from megascale.config.section import Section, choice

Layers = Annotated[int, Field(ge=0, le=10_000)]
BF16, BF16_FORWARD = "bf16", "bf16_forward"


def _share_and_name(change: Any) -> Any:
    match change:
        case [float(share), str()] if 0 < share < 1:
            return change
    hint = 'such as [[0.82, "bf16"]]; a share is a step divided by train.steps'
    message = "should be [[share of the run, recipe], ...], with shares above 0 and below 1"
    raise PydanticCustomError("change", message, {"hint": hint})


Change = Annotated[
    tuple[Annotated[float, Field(gt=0, lt=1)], Annotated[str, choice(RECIPES, BF16, BF16_FORWARD)]],
    Field(strict=False),
    BeforeValidator(_share_and_name),
]
Steps = Annotated[int, Field(gt=0, le=65_536)]  # the amax history has one element per step and operand


class Fp8Config(Section):
    """`[fp8]`: with train.precision = "fp8", the linear layers of transformer blocks run FP8 GEMMs."""

    recipe: Annotated[str, choice(RECIPES)] = Field("tensorwise", description="source and granularity of scales")
    scale: Literal["fp32", "pow2"] = Field(
        "fp32", description="scales, or their powers of two: one FP8 copy of an operand then serves both directions"
    )
    history: Steps = Field(16, description="for delayed: length of the amax history, in steps")
    first_layers_bf16: Layers | None = Field(
        None, description="number of first layers that stay in bf16; by default 1, with nvfp4 one of 32"
    )
    last_layers_bf16: Layers | None = Field(
        None, description="number of last ones, by default 1, with nvfp4 one of 8; embedding and head always do"
    )
    schedule: list[Change] = Field(
        [], description="[[share of the run, recipe], ...]: later recipes; bf16_forward: bf16 in forward GEMMs alone"
    )
    fast_dgrad: bool = Field(
        False, description="dgrad accumulates in fewer bits than fp32, as forward does, which is faster"
    )
    monitor: bool = Field(
        True, description="record amax, saturation, underflow, RMS and kurtosis of every FP8 cast in logged steps"
    )

    @property
    def phases(self) -> list[tuple[str, Fp8Config]]:
        """The phases of the run: a recipe's name, bf16 or bf16_forward, and the section of this phase alone. The phase
        of bf16_forward has a schedule with a change at 0.
        """
        found, section = list[tuple[str, Fp8Config]](), self.model_copy(update={"schedule": []})
        for start, change in [(0.0, self.recipe), *self.schedule]:
            found = found if start else []
            if change == BF16_FORWARD:
                found.append((change, section.model_copy(update={"schedule": [(0.0, change)]})))
            else:
                section = section if change == BF16 else section._followed_by(change)
                found.append((change, section))
        return found

    def _followed_by(self, recipe: str) -> Fp8Config:
        """Return the section of a later recipe: without the format of scales of those before, if it has its own."""
        facts = RECIPES[recipe].facts
        keeps = recipe == self.recipe or with_scale(facts, self.scale) is not facts
        return self.model_copy(update={"recipe": recipe, "scale": self.scale if keeps else "fp32"})

    @property
    def facts(self) -> Mapping[str, Any]:
        """The facts of the recipe's card, with scales in the chosen format."""
        return with_scale(RECIPES[self.recipe].facts, self.scale)


def bf16_layers(fp8: Fp8Config, layers: int) -> tuple[int, int]:
    """Return the numbers of a model's first and last layers without FP8 GEMMs."""
    given = fp8.first_layers_bf16, fp8.last_layers_bf16
    shares = RECIPES[fp8.recipe].facts["bf16_layers"]
    first, last = (
        max(1, math.ceil(share * layers)) if number is None else number
        for number, share in zip(given, shares, strict=True)
    )
    return first, last


class BackendsConfig(Section):
    """`[backends]`: auto selects the best supported backend (`megascale doctor` lists them)."""

    linear: Annotated[str, choice(BACKENDS["linear"], AUTO)] = Field(
        AUTO, description="linear layers in FP8: quantization and GEMMs"
    )
    attention: Annotated[str, choice(BACKENDS["attention"], AUTO)] = Field(AUTO, description="attention")
    partial_attention: Annotated[str, choice(BACKENDS["partial_attention"], AUTO)] = Field(
        AUTO, description="attention to some of the keys, where context-parallel ranks exchange keys and values"
    )
    rope: Annotated[str, choice(BACKENDS["rope"], AUTO)] = Field(AUTO, description="rotary position embedding")
    norm: Annotated[str, choice(BACKENDS["norm"], AUTO)] = Field(AUTO, description="norms")
    add_norm: Annotated[str, choice(BACKENDS["add_norm"], AUTO)] = Field(
        AUTO, description="residual add fused with the following norm, in serial blocks"
    )
    activation: Annotated[str, choice(BACKENDS["activation"], AUTO)] = Field(
        AUTO, description="activation function of the MLP"
    )
    cross_entropy: Annotated[str, choice(BACKENDS["cross_entropy"], AUTO)] = Field(
        AUTO, description="cross-entropy loss of a chunk of logits, and its gradient"
    )
    wgrad: Annotated[str, choice(BACKENDS["wgrad"], AUTO)] = Field(
        AUTO, description="wgrad GEMMs of layers that are not FP8, which accumulate into main gradients"
    )
    optimizer: Annotated[str, choice(BACKENDS["optimizer"], AUTO)] = Field(AUTO, description="optimizer step")
