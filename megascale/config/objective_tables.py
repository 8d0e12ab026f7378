"""Tables of `[[train.objectives]]`: `type`, `weight` and the options of the type."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, ValidationInfo
from pydantic_core import PydanticCustomError

from megascale.catalog.objectives import OBJECTIVES
from megascale.config.section import TableChoice


def _check(table: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    """Check the type and its options by the catalog, and the weight."""
    options = dict(table)
    weight: Any = options.pop("weight", None)
    found = TableChoice(OBJECTIVES)(options, info)
    if type(weight) not in (int, float) or not (weight == 0 or 2**-126 <= weight < 2**128):
        context = {
            "message": "weight should be a number, 0 or more",
            "hint": "weight = 1.0, relative to the next token's",
        }
        raise PydanticCustomError("table", "{message}", context)
    return {**found, "weight": float(weight)}


ObjectiveTable = Annotated[dict[str, Any], AfterValidator(_check)]
