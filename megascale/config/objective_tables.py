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
    try:
        found = TableChoice(OBJECTIVES)(options, info)
        if type(weight) not in (int, float) or not (weight == 0 or 2**-126 <= weight < 2**128):
            raise PydanticCustomError("table", "{message}", {"message": "weight should be a number, 0 or more"})
    except PydanticCustomError as error:
        raise PydanticCustomError("table", "{message}", {**(error.context or {}), "hint": _example()}) from None
    return {**found, "weight": float(weight)}


def _example() -> str:
    """Write a table of each built-in type."""
    needed = {card.name: card.facts["required"] for card in OBJECTIVES.cards.values() if card.built_in}
    keys = {name: "".join(f", {key} = ..." for key in required) for name, required in needed.items()}
    return " or ".join(f'{{type = "{name}", weight = 1.0{more}}}' for name, more in keys.items())


ObjectiveTable = Annotated[dict[str, Any], AfterValidator(_check)]
