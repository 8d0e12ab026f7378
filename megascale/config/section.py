"""The base class of sections: strict types, frozen values, no unknown keys."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo
from pydantic_core import PydanticCustomError

from megascale.core.files import absolute_path
from megascale.core.registry import Registry, closest_names

Count = Annotated[int, Field(gt=0, le=2**40)]
"""A positive count, up to 2^40."""

NonNegativeInt = Annotated[int, Field(ge=0, lt=2**63)]

Size = Annotated[int, Field(gt=0, le=2**26)]
"""A dimension of a matrix. The bytes of a matrix of two such dimensions, or of one and a vocabulary, fit 63 bits."""

Ranks = Annotated[int, Field(gt=0, le=2**20)]
"""A number of ranks on an axis of parallelism."""


def _in_float32(value: float) -> float:
    if value and not 2**-126 <= abs(value) < 2**128:
        raise PydanticCustomError("float32", "should be within fp32's range, from 1.2e-38 to 3.4e38")
    return value


Float32 = Annotated[float, AfterValidator(_in_float32)]
"""A number that fp32 can hold without overflow, and without becoming 0 or less precise."""


def _encodable(path: str) -> str:
    if odd := next((character for character in path if character == "\0" or "\ud800" <= character <= "\udfff"), None):
        context = {"character": ascii(odd), "hint": "a path without this character"}
        raise PydanticCustomError("file_name", "has {character}, which no name of a file in UTF-8 has", context)
    return path


FilePath = Annotated[str, AfterValidator(_encodable), AfterValidator(os.path.expanduser)]
"""A path in UTF-8, which manifests and TensorBoard need; `~` is the user's home folder."""


def absolute_or_url(text: str) -> str:
    """Make a path absolute; return a URL unchanged."""
    return text if "://" in text else str(absolute_path(text))


AUTO = "auto"  # the value of an unset key; on the command line, auto overrides a value of the file

AUTO_AS_NONE = BeforeValidator(lambda value: None if value == AUTO else value)
"""Converts auto to None, for keys with the default None."""


class Section(BaseModel):
    """One table of the configuration file. Field descriptions become the configuration reference."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


ELSEWHERE = "elsewhere"
"""The context of a validation of what another host has resolved, whose plug-ins this one may lack."""


FEW_CHOICES = 12  # choices of which a message lists all


def no_choice(
    kind: str, name: str, names: Sequence[str], nearest: str | None, page: str = "configuration.md"
) -> PydanticCustomError:  # fmt: skip
    """Return the error for a name that is no choice: the message lists few choices, the hint the nearest of many.
    `nearest`: the choice that is meant; `page`: of the docs, with all choices.
    """
    context = {"message": f"'{name}' is not one of {', '.join(names)}", "nearest": nearest}
    if len(names) > FEW_CHOICES:
        similar = f"similar: {', '.join(three)}; " if (three := closest_names(name, names, 3)) else ""
        hint = f"{similar}docs/{page} lists all {len(names)}"
        context = {"message": f"there is no {kind} '{name}'", "hint": hint, "nearest": nearest}
    return PydanticCustomError("choice", "{message}", context)


@dataclass(frozen=True)
class Choice:
    """A validator: the string names a card of `registry` or is in `also`; any name is valid ELSEWHERE."""

    registry: Registry
    also: tuple[str, ...] = ()

    def __call__(self, name: str, info: ValidationInfo) -> str:
        names = [*self.also, *self.registry.names()]
        if name not in names and info.context != ELSEWHERE:
            nearest = self.registry.nearest(name, self.also) or _but_for_digits(name, names)
            raise no_choice(self.registry.kind, name, names, nearest)
        return name


def _but_for_digits(name: str, names: Sequence[str]) -> str | None:
    """Return the only name that has the same letters, such as bf16 for bf17; None without one."""
    found = [each for each in names if _DIGITS.sub("", each) == _DIGITS.sub("", name)]
    return found[0] if len(found) == 1 and _DIGITS.sub("", name) else None


_DIGITS = re.compile(r"\d+")


def choice(registry: Registry, *also: str) -> Any:
    """Return the validator of a string that names a card of `registry` or is in `also`."""
    return AfterValidator(Choice(registry, also))


@dataclass(frozen=True)
class TableChoice(Choice):
    """A validator: `type` of a table names a card of `registry`, whose facts `required` and `optional` map the other
    keys to types. Numbers are positive and within fp32's range; whole numbers become floats where floats are meant.
    `weighted`: a table has a `weight` too, 0 or more.
    """

    weighted: bool = False

    def required(self, name: str) -> dict[str, type]:
        """Return the keys that a table of a type needs, with the types of their values."""
        return ({WEIGHT: float} if self.weighted else {}) | self.registry[name].facts["required"]

    def __call__(self, table: Any, info: ValidationInfo) -> Any:
        name = table.get("type")
        if name not in self.registry.cards:
            if info.context == ELSEWHERE:
                return table
            message = f"type should be one of {', '.join(self.registry.names())}"
            raise PydanticCustomError("table", "{message}", {"message": message})
        required, values = self.required(name), dict(table)
        kinds = required | self.registry[name].facts["optional"]
        mistakes = [f"{name} needs {key}" for key in required if key not in table]
        for key, value in table.items():
            if key in kinds:
                values[key] = number = float(value) if kinds[key] is float and type(value) is int else value
                may_be_zero = kinds[key] is bool or key == WEIGHT
                if type(number) is not kinds[key] or not (2**-126 <= number < 2**128 or (number == 0 and may_be_zero)):
                    mistakes.append(f"{key} should be {FROM_ZERO if key == WEIGHT else _POSITIVE[kinds[key]]}")
            elif key != "type":
                mistakes.append(f"{name} has no {key}")
        if mistakes:
            raise PydanticCustomError("table", "{message}", {"message": "; ".join(mistakes)})
        return values


WEIGHT, FROM_ZERO = "weight", "a number, 0 or more"

_POSITIVE = {float: "a number above 0", int: "a whole number above 0", bool: "true or false"}


def _whole(value: Any) -> Any:
    if type(value) is not int:
        raise PydanticCustomError("only", "Input should be 1")
    return value


One = Annotated[Literal[1], BeforeValidator(_whole)]
"""The only value of a key. Literal alone would accept `true` as 1."""
