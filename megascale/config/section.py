"""The base of every section: strict types, frozen values, unknown keys refused."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from megascale.core.registry import Registry, nearest

Count = Annotated[int, Field(gt=0)]
"""A whole number of things, at least one."""


class Section(BaseModel):
    """One table of the configuration file. Field descriptions become the configuration reference."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", populate_by_name=True)


def choice(registry: Registry) -> Any:
    """A string that names a card of `registry`."""

    def known(name: str) -> str:
        if name not in registry.cards:
            message = f"'{name}' is not one of {', '.join(registry.names())}"
            raise PydanticCustomError(
                "choice", "{message}", {"message": message, "nearest": nearest(name, registry.names())}
            )
        return name

    return AfterValidator(known)
