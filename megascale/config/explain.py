"""From what is written to a checked run: every mistake at once, each with its place and a mend."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from megascale.config.files import Source, Tree, override, read
from megascale.config.finding import Finding
from megascale.config.model import FOLLOWS, ModelConfig, fill_in
from megascale.config.rules import RULES, world_findings
from megascale.config.run import NAME, RunConfig
from megascale.config.section import AUTO, Auto, Section
from megascale.core.errors import ConfigError, Problem
from megascale.core.registry import nearest


def load(
    path: str, overrides: Sequence[str] = (), world: int | None = None, *, unchecked: Collection[str] = ()
) -> RunConfig:
    """Read, check and resolve a configuration. `world`: number of processes, None for the fewest that the layout needs.
    `unchecked`: sections that rules between keys do not judge, such as `data`, whose files need not be there yet.

    Raises: ConfigError with every problem found.
    """
    return _resolved(read(path, overrides, _takes_text), world, unchecked)


def load_tree(tree: Tree, origin: str, overrides: Sequence[str] = (), world: int | None = None) -> RunConfig:
    """`load` of nested values that no file holds; `origin` stands for the file in messages.

    Raises: ConfigError with every problem found.
    """
    source = Source(origin, tree)
    override(source, overrides, _takes_text)
    return _resolved(source, world)


def check_again(config: RunConfig, where: str) -> None:
    """Every rule between keys, of a configuration that was changed after it was loaded; `where` stands for the file in
    messages.

    Raises: ConfigError with every problem found.
    """
    found = list(_findings({name: getattr(config, name) for name in sections()}))
    if found:
        raise ConfigError([Problem(where, each.key, each.found, each.mend) for each in found])


def _resolved(source: Source, world: int | None, unchecked: Collection[str] = ()) -> RunConfig:
    problems = list(_check(source, world, unchecked))
    if problems:
        raise ConfigError(problems)
    return RunConfig.model_validate(source.tree).resolve(world)


def _takes_text(key: str) -> bool:
    table, _, name = key.rpartition(".")
    field = _keys(sections()[table]).get(name) if table in sections() else None
    return key == "name" or (field is not None and _has_text(field.annotation))


def _has_text(annotation: Any) -> bool:
    """Whether a type is text, or one of several of which one is."""
    if get_origin(annotation) in (list, tuple):
        return False
    return annotation is str or any(_has_text(argument) for argument in get_args(annotation))


def sections() -> dict[str, type[Section]]:
    """The section classes by their table's name, in the order of the reference."""
    return {
        name: field.annotation
        for name, field in RunConfig.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    }


def _check(source: Source, world: int | None, unchecked: Collection[str]) -> Iterator[Problem]:
    valid: dict[str, Any] = {}  # by section, a `_Partial` where there are mistakes
    types = sections()
    for name in source.tree:
        if name not in RunConfig.model_fields:
            yield _unknown(source, name, list(RunConfig.model_fields))
    for name, section in types.items():
        given = source.tree.get(name, {})
        details, value = _validate(section, given)
        for key, group in itertools.groupby(details, key=lambda detail: detail["loc"][:1]):
            yield _problem(source, section, ".".join([name, *map(str, key)]), given, list(group))
        if value is not None:
            valid[name] = value
    given_name = source.tree.get("name")
    if not (isinstance(given_name, str) and NAME.fullmatch(given_name)):
        yield _name_problem(source, given_name)
    yield from (_placed(source, finding) for finding in _findings(valid, unchecked))
    if world is not None and all(isinstance(valid.get(name), Section) for name in types):
        config = RunConfig.model_construct(name="check", **valid)
        yield from (_placed(source, finding) for finding in world_findings(config, world))


def _findings(valid: dict[str, Section | _Partial], unchecked: Collection[str] = ()) -> Iterator[Finding]:
    """Run the rules that read only sections that are tables, and none of the `unchecked` ones."""
    checked = SimpleNamespace(**valid)
    for needs, rule in RULES:
        if all(need in valid for need in needs) and not set(needs).intersection(unchecked):
            with contextlib.suppress(_Unknown):
                yield from rule(checked)


_NAME_MEND = "letters, digits, '.', '_' and '-', at most 128"


class _Unknown(Exception):
    """A rule reads a key that has no valid value."""


class _Partial:
    """A section with mistakes, for rules: what is valid in it has its value. Reading anything else ends the rule."""

    def __init__(self, section: type[Section], values: dict[str, Any]) -> None:
        self._section = section
        self._values = values

    def __getattr__(self, name: str) -> Any:
        if isinstance(derived := getattr(self._section, name, None), property) and derived.fget:
            return derived.fget(self)
        if name not in self._values:
            raise _Unknown(name)
        return self._values[name]


def _validate(section: type[Section], given: Any) -> tuple[list[ErrorDetails], Section | _Partial | None]:
    """The errors of a section, and what of it the rules can judge: a section without its unknown keys, else what is
    valid; None if it is no table.
    """
    try:
        return [], section.model_validate(given)
    except ValidationError as error:
        details = error.errors()
    if not isinstance(given, dict):
        return details, None
    wrong = {detail["loc"][0] for detail in details if detail["loc"]}
    if all(detail["type"] == "extra_forbidden" for detail in details):
        return details, section.model_validate({key: value for key, value in given.items() if key not in wrong})
    full = fill_in(given) if section is ModelConfig else given
    values = {}
    for name, field in section.model_fields.items():
        key = field.alias or name
        if key in full and key not in wrong:
            values[name] = None if full[key] == AUTO and Auto in field.metadata else full[key]
        elif key not in full and not field.is_required():
            values[name] = field.default
    return _roots(details, given), _Partial(section, values)


def _roots(details: list[ErrorDetails], given: Any) -> list[ErrorDetails]:
    """The mistakes that were made, without those that follow: what a wrong preset or size would have filled in."""
    wrong = {detail["loc"][0] for detail in details if detail["loc"]}

    def follows(detail: ErrorDetails) -> bool:
        key = detail["loc"][0] if detail["loc"] else None
        return key is not None and key not in given and ("preset" in wrong or FOLLOWS.get(str(key)) in wrong)

    return [detail for detail in details if not follows(detail)]


def _placed(source: Source, finding: Finding) -> Problem:
    return Problem(source.place(finding.key), finding.key, finding.found, finding.mend)


def _name_problem(source: Source, value: Any) -> Problem:
    if value is None:
        return Problem(source.path, "name", "missing", 'name = "my-run" at the top of the file')
    return Problem(source.place("name"), "name", f"{_shown(value)} cannot name a folder", _NAME_MEND)


def _unknown(source: Source, key: str, known: list[str]) -> Problem:
    table, _, last = key.rpartition(".")
    homes = [f"{name}.{last}" for name, section in sections().items() if last in _keys(section)]
    close = homes[0] if homes else nearest(last, known)
    mend = f"did you mean '{close}'?" if close else f"known here: {', '.join(known)}"
    return Problem(source.place(key), key, f"there is no key '{last}'" + (f" in [{table}]" if table else ""), mend)


def _keys(section: type[Section]) -> dict[str, FieldInfo]:
    """The fields of a section by their names in a file."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def _problem(source: Source, section: type[Section], key: str, given: Any, details: list[ErrorDetails]) -> Problem:
    """What pydantic has against one key, in our words: one detail, or one for each type that the key may have."""
    table, _, name = key.partition(".")
    detail, keys = details[0], _keys(section)
    if not detail["loc"]:
        found = f"must be a table, not {_shown(given)}"
        return Problem(source.place(key), key, found, f"write [{table}] and its keys below it")
    if detail["type"] == "extra_forbidden":
        return _unknown(source, key, list(keys))
    mend = f"{name}: {keys[name].description}"
    if detail["type"] == "missing":
        return Problem(source.place(table), key, "missing", mend)
    if detail["type"] == "choice":
        close = detail["ctx"]["nearest"]
        return Problem(source.place(key), key, detail["msg"], f"did you mean '{close}'?" if close else mend)
    value = detail["input"] if len(details) == 1 else given.get(name)
    return Problem(source.place(key), key, f"{_shown(value)}: {_complaint(details)}", mend)


def _complaint(details: list[ErrorDetails]) -> str:
    """What pydantic asks for; for a key of several types, all of it."""
    messages = (detail["msg"].removeprefix("Input ").replace(" after validation", "") for detail in details)
    messages = (text.replace("a valid boolean", "true or false") for text in messages)
    return ", or ".join(message[:1].lower() + message[1:] for message in dict.fromkeys(messages))


def _shown(value: Any) -> str:
    """A value as TOML writes it, cut where it is long."""
    if isinstance(value, bool):
        return str(value).lower()
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else text[:77] + "..."
