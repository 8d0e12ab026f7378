"""The values of a key in words, from its type: for the hints of mistakes and for docs/configuration.md."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import AfterValidator
from pydantic.fields import FieldInfo

from megascale.config.section import Choice

A_CHOICE = "a choice, below"


def choice_of(field: FieldInfo) -> Choice | None:
    """Return the validator of a key's choices, or None."""
    parts = [*field.metadata, *(part for arm in get_args(field.annotation) for part in get_args(arm))]
    checks = (part.func for part in parts if isinstance(part, AfterValidator))
    return next((check for check in checks if isinstance(check, Choice)), None)


def literals_of(field: FieldInfo) -> list[Any]:
    """Return the values of a key's Literal types."""
    found: list[Any] = []
    arms = [field.annotation]
    while arms:
        arm = arms.pop(0)
        found += get_args(arm) if get_origin(arm) is Literal else ()
        arms += get_args(arm) if get_origin(arm) not in (Literal, list, tuple) else ()
    return found


def values_in_words(field: FieldInfo) -> list[str]:
    """List the values of a key in words, one for each type of a union."""
    return list(dict.fromkeys(_words(field.annotation, field.metadata)))


def _words(annotation: Any, bounds: Iterable[Any] = ()) -> Iterator[str]:
    """Yield a type and its bounds in words; several for a union."""
    bounds = [inner for bound in bounds for inner in (getattr(bound, "metadata", None) or [bound])]
    origin, arguments = get_origin(annotation), get_args(annotation)
    names = {bool: "`true` or `false`", int: "whole number", float: "number", str: "text"}
    if any(isinstance(getattr(bound, "func", None), Choice) for bound in bounds):
        yield A_CHOICE
    elif annotation in names:
        yield names[annotation] + _limits(bounds)
    elif origin is Literal:
        yield from (f"`{json.dumps(argument)}`" for argument in arguments)
    elif hasattr(annotation, "__metadata__"):
        yield from _words(arguments[0], annotation.__metadata__)
    elif origin is list:
        yield f"list of {' or '.join(_words(arguments[0]))}"
    elif origin is dict:
        entry = " = ".join(" or ".join(_words(argument)) for argument in arguments)
        yield f"table of {entry}" if get_origin(arguments[0]) is Literal else "table"
    elif origin is tuple:
        yield f"[{', '.join(' or '.join(_words(argument)) for argument in arguments)}]"
    elif annotation in (None, NoneType):
        yield from ()
    else:
        for argument in arguments:
            yield from _words(argument)


def _limits(bounds: Iterable[Any]) -> str:
    """Format the bounds of a number, apart from very large bounds."""
    words = {"gt": "above", "ge": "from", "lt": "below", "le": "to"}
    bounded = [(word, getattr(bound, name, None)) for bound in bounds for name, word in words.items()]
    parts = [f"{word} {value}" for word, value in bounded if value is not None and value < 2**40]
    return f" {', '.join(parts)}" if parts else ""
