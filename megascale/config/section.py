"""The base of every section: strict types, frozen values, unknown keys refused."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from megascale.core.registry import Registry, nearest

Count = Annotated[int, Field(gt=0, le=2**40)]
"""A whole number of things, at least one, and no more than any job will ever have."""


FilePath = Annotated[str, AfterValidator(os.path.expanduser)]
"""A file's or folder's name; `~` is the home of the user."""


AUTO = "auto"
"""What a key is where it is not set: on the command line it undoes what a file sets."""

Auto = BeforeValidator(lambda value: None if value == AUTO else value)
"""For a key whose default is None, and which may say so."""


class Section(BaseModel):
    """One table of the configuration file. Field descriptions become the configuration reference."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True)
class Choice:
    """The check that a string names a card of `registry`, or is one of `also`."""

    registry: Registry
    also: tuple[str, ...] = ()

    def __call__(self, name: str) -> str:
        names = [*self.also, *self.registry.names()]
        if name not in names:
            context = {"message": f"'{name}' is not one of {', '.join(names)}", "nearest": nearest(name, names)}
            raise PydanticCustomError("choice", "{message}", context)
        return name


def choice(registry: Registry, *also: str) -> Any:
    """A string that names a card of `registry`, or is one of `also`."""
    return AfterValidator(Choice(registry, also))


def only(value: bool | int) -> Any:
    """For a key that has one value until its feature is there. Literal alone takes `true` for 1, which equals it."""

    def check(given: Any) -> Any:
        if type(given) is not type(value):
            raise PydanticCustomError("only", "Input should be {value}", {"value": str(value).lower()})
        return given

    return BeforeValidator(check)
