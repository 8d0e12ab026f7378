"""Files of profiles: TOML files of one section in a folder of `configs`, of the user, or of this machine, by name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from megascale.config.section import Section
from megascale.config.toml_reader import OWN_FILES, Source, read_toml
from megascale.core.errors import ConfigError, Problem
from megascale.core.files import absolute_path, is_file
from megascale.core.registry import closest_name

CONFIGS = OWN_FILES / "configs"

THIS_MACHINE = "this"  # name of this machine's hardware profile, written by `megascale bench profile`


SectionT = TypeVar("SectionT", bound=Section)


def load_profile(name: str, folder: str, option: str, profile: type[SectionT], where: str = "command line") -> SectionT:
    """Read a profile: a name in a `folder` of `configs`, a file, or `this`. `option`: of the command line, or the key
    of a file `where` the name stands, for errors.

    Raises: ConfigError for an unknown name and for mistakes in the file.
    """
    path = path_of(folder, name)
    if is_file(path) or name.endswith(".toml"):
        return read_section(str(path), profile, name=path.stem)
    if (folder, name) == ("hardware", THIS_MACHINE):
        hint = "`megascale bench profile` measures it"
        raise ConfigError([Problem(str(path), "", "this machine has not been measured", hint)])
    known, close = profile_names(folder), closest_name(name, profile_names(folder))
    alike = [known_name for known_name in known if known_name.startswith(name)] or ([close] if close else known)
    hint = f"did you mean '{alike[0]}'?" if len(alike) == 1 else f"one of {', '.join(alike)}, or a file of your own"
    raise ConfigError([Problem(where, option, f"there is no profile '{name}'", hint)])


def profile_names(folder: str) -> list[str]:
    """List the profiles in a folder of `configs`."""
    return sorted(path.stem for path in (CONFIGS / folder).glob("*.toml"))


def path_of(folder: str, name: str) -> Path:
    """Return the path of a profile; `this` machine's is in the user's configuration folder."""
    if (folder, name) == ("hardware", THIS_MACHINE):
        home = os.environ.get("XDG_CONFIG_HOME") or absolute_path("~/.config")
        return Path(home) / "megascale" / "hardware" / f"{THIS_MACHINE}.toml"
    return Path(name) if name.endswith(".toml") else CONFIGS / folder / f"{name}.toml"


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
    hint = (fields[name].description if name in fields else "") or "megascale/plan/simulate/profiles.py lists the keys"
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
