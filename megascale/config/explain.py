"""From what is written to a checked run: every mistake at once, each with its place and a mend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megascale.config.files import Source, read
from megascale.config.rules import RULES, Finding, world_findings
from megascale.config.run import NAME, RunConfig
from megascale.config.section import Section
from megascale.core.errors import ConfigError, Problem
from megascale.core.registry import nearest


def load(path: str, overrides: Sequence[str] = (), world: int | None = None) -> RunConfig:
    """Read, check and resolve a configuration. `world`: number of processes, None for the fewest that the layout needs.

    Raises: ConfigError with every problem found.
    """
    source = read(path, overrides)
    problems = list(_check(source, world))
    if problems:
        raise ConfigError(problems)
    return RunConfig.model_validate(source.tree).resolve(world)


def sections() -> dict[str, type[Section]]:
    """The section classes by their table's name, in the order of the reference."""
    return {
        name: field.annotation
        for name, field in RunConfig.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    }


def _check(source: Source, world: int | None) -> Iterator[Problem]:
    valid: dict[str, Any] = {}
    types = sections()
    for name in source.tree:
        if name not in RunConfig.model_fields:
            yield _unknown(source, name, list(RunConfig.model_fields))
    for name, section in types.items():
        given = source.tree.get(name, {})
        details, value = _validate(section, given)
        yield from (_problem(source, section, name, detail) for detail in details)
        if value is not None:
            valid[name] = value
    given_name = source.tree.get("name")
    if not (isinstance(given_name, str) and NAME.fullmatch(given_name)):
        yield _name_problem(source, given_name)
    checked = SimpleNamespace(**valid)
    for needs, rule in RULES:
        if all(need in valid for need in needs):
            yield from (_placed(source, finding) for finding in rule(checked))
    if world is not None and len(valid) == len(types):
        config = RunConfig.model_construct(name="check", **valid)
        yield from (_placed(source, finding) for finding in world_findings(config, world))


def _validate(section: type[Section], given: Any) -> tuple[list[ErrorDetails], Section | None]:
    """The errors of a section, and its value if there is one: without its unknown keys the rules can still judge it."""
    try:
        return [], section.model_validate(given)
    except ValidationError as error:
        details = error.errors()
    unknown = {detail["loc"][0] for detail in details if detail["type"] == "extra_forbidden"}
    if len(unknown) < len(details):
        return details, None
    return details, section.model_validate({key: value for key, value in given.items() if key not in unknown})


def _placed(source: Source, finding: Finding) -> Problem:
    return Problem(source.place(finding.key), finding.key, finding.found, finding.mend)


def _name_problem(source: Source, value: Any) -> Problem:
    if value is None:
        return Problem(source.path, "name", "missing", 'name = "my-run" at the top of the file')
    return Problem(source.place("name"), "name", f"{value!r} cannot name a folder", "letters, digits, '.', '_' and '-'")


def _unknown(source: Source, key: str, known: list[str]) -> Problem:
    table, _, last = key.rpartition(".")
    close = nearest(last, known)
    mend = f"did you mean '{close}'?" if close else f"known here: {', '.join(known)}"
    return Problem(source.place(key), key, f"there is no key '{last}'" + (f" in [{table}]" if table else ""), mend)


def _problem(source: Source, section: type[Section], table: str, detail: ErrorDetails) -> Problem:
    """A pydantic error in our words."""
    keys = {field.alias or name: field for name, field in section.model_fields.items()}
    loc = [str(part) for part in detail["loc"]]
    last = loc[0] if loc else ""
    key = f"{table}.{last}" if last else table
    context = detail.get("ctx", {})
    value = detail["input"]
    if detail["type"] == "extra_forbidden":
        return _unknown(source, key, list(keys))
    if detail["type"] == "missing":
        return Problem(source.place(table), key, "missing", keys[last].description or "")
    if detail["type"] in ("choice", "preset"):
        close = context.get("nearest")
        key = f"{table}.preset" if detail["type"] == "preset" else key
        return Problem(source.place(key), key, detail["msg"], f"did you mean '{close}'?" if close else "")
    if not last:
        return Problem(
            source.place(table), table, f"must be a table, not {value!r}", f"write [{table}] and its keys below it"
        )
    field = keys.get(last)
    mend = f"{last}: {field.description}" if field is not None and field.description else ""
    if detail["type"] == "literal_error":
        return Problem(source.place(key), key, f"{value!r} is not {context['expected']}", mend)
    message = detail["msg"][:1].lower() + detail["msg"][1:]
    return Problem(source.place(key), key, f"{value!r}: {message}", mend)
