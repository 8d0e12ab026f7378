"""FP8 recipes: the granularity and the source of scales.

Facts: `granularity`: tensor, row, or block (128 elements). `scaling`: current, from the tensor's own amax; delayed,
from the amax history of earlier steps; static, from unit scaling's standard deviations. `grad_format`: FP8 format of
output gradients. `alignment`: the sides of a GEMM must be multiples.
"""

from megascale.core.registry import Card, Registry


def _card(name: str, help: str, granularity: str, scale: str, grad_format: str, alignment: int = 16) -> Card:
    facts = {"granularity": granularity, "scaling": scale, "grad_format": grad_format, "alignment": alignment}
    return Card(name, help, "megascale.parallel.fp8_linear:Recipe", facts)


RECIPES = Registry(
    "fp8 recipe",
    "megascale.fp8_recipes",
    [
        _card("tensorwise", "a scale per tensor, from its amax", "tensor", "current", "e5m2"),
        _card(
            "delayed",
            "a scale per tensor, from the amax history (Micikevicius et al. 2022)",
            "tensor",
            "delayed",
            "e5m2",
        ),
        _card("rowwise", "a scale per row of an operand, from its amax", "row", "current", "e4m3"),
        _card(
            "blockwise",
            "a scale per 128 elements, and per 128 x 128 of weights (DeepSeek-V3, 3.3)",
            "block",
            "current",
            "e4m3",
            128,
        ),
        _card(
            "mu_unit",
            "static scales, weights at unit variance (after Narayan et al. 2025)",
            "tensor",
            "static",
            "e5m2",
        ),
    ],
    synonyms={
        "hybrid": "tensorwise",
        "current": "tensorwise",
        "deepseek": "blockwise",
        "mxfp8": "",
        "mx": "",
    },
)
