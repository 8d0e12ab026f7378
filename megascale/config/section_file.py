"""Reading of a TOML file with one section, such as a hardware profile; mistakes have place and hint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from megascale.config.section import Section
from megascale.config.toml_reader import Source, read_toml
from megascale.core.errors import ConfigError, Problem
from megascale.core.registry import closest_name

SectionT = TypeVar("SectionT", bound=Section)


def read_section(path: str, section: type[SectionT], **defaults: object) -> SectionT:
    """Read a file. `defaults`: values of keys that the file lacks.

    Raises: ConfigError with all mistakes.
    """
    source = read_toml(path)
    try:
        return section.model_validate({**defaults, **source.tree})
    except ValidationError as error:
        raise ConfigError([_problem_of_detail(source, section, detail) for detail in error.errors()]) from None


def _problem_of_detail(source: Source, section: type[Section], detail: ErrorDetails) -> Problem:
    *tables, name = [str(part) for part in detail["loc"] if part != "[key]"] or [""]
    key, fields = ".".join([*tables, name]).strip("."), _fields(section, tables)
    if detail["type"] == "extra_forbidden":
        close = closest_name(name, fields)
        hint = f"did you mean '{close}'?" if close else f"one of {', '.join(fields)}"
        return Problem(source.location(key), key, "there is no such key", hint)
    if detail["type"] == "missing" or isinstance(detail["input"], dict):
        message = detail["msg"].removeprefix("Value error, ")
    else:
        message = f"{detail['input']!r}: {detail['msg']}"
    hint = (fields[name].description if name in fields else "") or "docs/planning.md lists the keys"
    return Problem(source.location(key), key, message, hint)


def _fields(section: type[Section], tables: Sequence[str]) -> Mapping[str, FieldInfo]:
    """Fields of a table in a section, by key."""
    for table in tables:
        field = section.model_fields.get(table)
        types = [field.annotation, *get_args(field.annotation)] if field else []
        section_types = [t for t in types if isinstance(t, type) and issubclass(t, Section)]
        if not section_types:
            return {}
        section = section_types[0]
    return section.model_fields
