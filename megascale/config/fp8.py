"""Products of linear layers in eight bits."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megascale.catalog.recipes import RECIPES
from megascale.config.section import Section, choice

Layers = Annotated[int, Field(ge=0, le=10_000)]
Steps = Annotated[int, Field(gt=0, le=65_536)]  # each takes a number of every operand


class Fp8Config(Section):
    """`[fp8]`: with train.precision = "fp8", the linear layers of blocks multiply in eight bits."""

    recipe: Annotated[str, choice(RECIPES)] = Field("tensorwise", description="where scales come from")
    history: Steps = Field(16, description="for delayed: steps whose largest magnitudes make a scale")
    bf16_first: Layers = Field(1, description="first layers that stay in bf16")
    bf16_last: Layers = Field(1, description="last layers that stay in bf16, like embedding and head always")
    monitor: bool = Field(
        True, description="count in logged steps what each cast loses: largest magnitude, saturation, underflow"
    )
