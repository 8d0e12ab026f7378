"""The recipes of a run, one after another: healing by a late change to bf16, of all GEMMs or of those of forward
(NVIDIA 2025, arXiv:2509.25149, 3.5).

A phase begins with the first step before which its share of the run's samples is consumed, in every layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from megascale.config.backends import BF16, BF16_FORWARD, Fp8Config
from megascale.ops.fp8 import Fp8Kernels
from megascale.ops.recipe import Recipe, build_recipe


class RecipePhase(NamedTuple):
    """From the share `start` of the run on, `recipe` quantizes operands of backward, and of `forward` too; none: of
    neither.
    """

    start: float
    recipe: Recipe | None
    forward: bool = True


def later_phases(fp8: Fp8Config, kernels_of: Callable[[str], Fp8Kernels]) -> list[RecipePhase]:
    """List the phases of `fp8.schedule`. `kernels_of`: the kernels for a recipe."""
    phases, name = list[RecipePhase](), fp8.recipe
    for start, change in fp8.schedule:
        name = name if change in (BF16, BF16_FORWARD) else change
        recipe = None if change == BF16 else build_recipe(name, kernels_of(name), fp8.scale)
        phases.append(RecipePhase(start, recipe, change != BF16_FORWARD))
    return phases
