"""The section `[fp8]`: FP8 GEMMs in linear layers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megascale.catalog.recipes import RECIPES
from megascale.config.section import Section, choice

Layers = Annotated[int, Field(ge=0, le=10_000)]
Steps = Annotated[int, Field(gt=0, le=65_536)]  # the amax history has one element per step and operand


class Fp8Config(Section):
    """`[fp8]`: with train.precision = "fp8", the linear layers of transformer blocks run FP8 GEMMs."""

    recipe: Annotated[str, choice(RECIPES)] = Field("tensorwise", description="source and granularity of scales")
    history: Steps = Field(16, description="for delayed: length of the amax history, in steps")
    bf16_first: Layers = Field(1, description="number of first layers that stay in bf16")
    bf16_last: Layers = Field(1, description="number of last layers that stay in bf16; embedding and head always do")
    monitor: bool = Field(True, description="record amax, saturation and underflow of every FP8 cast in logged steps")
