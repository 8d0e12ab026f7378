"""Reading a TOML file that is one section, such as a hardware profile: every mistake with its place and a mend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from megascale.config.files import Source, read
from megascale.config.section import Section
from megascale.core.errors import ConfigError, Problem
from megascale.core.registry import nearest

Read = TypeVar("Read", bound=Section)


def read_section(path: str, section: type[Read], **given: object) -> Read:
    """Read a file, with values that are `given` where the file has none.

    Raises: ConfigError with every mistake.
    """
    source = read(path)
    try:
        return section.model_validate({**given, **source.tree})
    except ValidationError as error:
        raise ConfigError([_problem(source, section, each) for each in error.errors()]) from None


def _problem(source: Source, section: type[Section], detail: ErrorDetails) -> Problem:
    *tables, name = [str(part) for part in detail["loc"] if part != "[key]"] or [""]
    key, fields = ".".join([*tables, name]).strip("."), _fields(section, tables)
    if detail["type"] == "extra_forbidden":
        close = nearest(name, fields)
        mend = f"did you mean '{close}'?" if close else f"one of {', '.join(fields)}"
        return Problem(source.place(key), key, "there is no such key", mend)
    if detail["type"] == "missing" or isinstance(detail["input"], dict):
        found = detail["msg"].removeprefix("Value error, ")
    else:
        found = f"{detail['input']!r}: {detail['msg']}"
    mend = (fields[name].description if name in fields else "") or "docs/planning.md has the keys"
    return Problem(source.place(key), key, found, mend)


def _fields(section: type[Section], tables: Sequence[str]) -> Mapping[str, FieldInfo]:
    """The keys of a table in a section."""
    for table in tables:
        field = section.model_fields.get(table)
        types = [field.annotation, *get_args(field.annotation)] if field else []
        inner = [each for each in types if isinstance(each, type) and issubclass(each, Section)]
        if not inner:
            return {}
        section = inner[0]
    return section.model_fields
