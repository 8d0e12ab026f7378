"""Recipes of 8-bit training: what shares a scale, and where scales come from.

`grain`: tensor, row or block (of 128). `scale`: current, from the tensor itself; history, from the largest magnitudes
of earlier steps; static, from the standard deviations of unit scaling. `gradient`: the format of output gradients.
`multiple`: what the sides of a product must be multiples of.
"""

from megascale.core.registry import Card, Registry


def _card(name: str, help: str, grain: str, scale: str, gradient: str, multiple: int = 16) -> Card:
    facts = {"grain": grain, "scale": scale, "gradient": gradient, "multiple": multiple}
    return Card(name, help, "megascale.parallel.eight_bit:Recipe", facts)


RECIPES = Registry(
    "fp8 recipe",
    "megascale.fp8_recipes",
    [
        _card("tensorwise", "a scale for each tensor, from the tensor itself", "tensor", "current", "e5m2"),
        _card(
            "delayed",
            "a scale for each tensor, from the steps before (Micikevicius et al. 2022)",
            "tensor",
            "history",
            "e5m2",
        ),
        _card("rowwise", "a scale for each row of a factor, from the row itself", "row", "current", "e4m3"),
        _card(
            "blockwise",
            "a scale for 128 numbers, of weights for 128 x 128 (DeepSeek-V3, 3.3)",
            "block",
            "current",
            "e4m3",
            128,
        ),
        _card(
            "mu_unit",
            "static scales that bring weights to unit variance (after Narayan et al. 2025)",
            "tensor",
            "static",
            "e5m2",
        ),
    ],
)
