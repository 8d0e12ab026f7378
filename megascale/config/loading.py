"""Loading of configurations: TOML to a checked `RunConfig`; all mistakes are reported at once, with place and hint.

`load_config` reads a file, `load_config_tree` nested values; `check_rules` checks a changed configuration.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from megascale.config.hints import unknown_key_hint, unsupported, value_hint
from megascale.config.model import DERIVED_FROM, ModelConfig, fill_defaults
from megascale.config.renamed import REMOVED_KEYS, renamed
from megascale.config.rules import DATA_RULES, RULES, InvalidValueError, run_rules
from megascale.config.run import NAME_PATTERN, RunConfig, RunKeys
from megascale.config.section import AUTO, AUTO_AS_NONE, Section
from megascale.config.toml_reader import Source, Tree, apply_overrides, read_toml
from megascale.config.world_rules import WORLD_KEYS, layout_findings, world_findings
from megascale.core.errors import ConfigError, Problem
from megascale.core.registry import closest_name


def load_config(
    path: str, overrides: Sequence[str] = (), world_size: int | None = None, *, skip_sections: Collection[str] = (),
    world_option: str = "",
) -> RunConfig:  # fmt: skip
    """Read, check and resolve a configuration.

    `world_size`: number of processes; None for the smallest number that the layout allows. `skip_sections`: sections
    without rule checks; of `data` without those of the files, before they exist. `world_option`: option of the command
    line that gives `world_size`, for messages.
    Raises: ConfigError with all problems.
    """
    return _check_and_resolve(read_toml(path, overrides, _is_text_key), world_size, skip_sections, world_option)


def load_config_tree(
    tree: Tree, origin: str, overrides: Sequence[str] = (), world_size: int | None = None, *,
    skip_sections: Collection[str] = (), world_option: str = "",
) -> RunConfig:  # fmt: skip
    """Check and resolve a configuration from nested values, as `load_config`. `origin`: name in messages, in place of a
    file.

    Raises: ConfigError with all problems.
    """
    source = Source(origin, tree)
    apply_overrides(source, overrides, _is_text_key)
    return _check_and_resolve(source, world_size, skip_sections, world_option)


def check_rules(config: RunConfig, where: str) -> None:
    """Check the rules between keys for a configuration that was changed after loading. `where`: name in messages.

    Raises: ConfigError with all problems.
    """
    findings = list(run_rules(RULES, dict(config)))
    if findings:
        raise ConfigError([finding.problem(where) for finding in findings])


def _check_and_resolve(
    source: Source, world_size: int | None, skip_sections: Collection[str] = (), world_option: str = ""
) -> RunConfig:
    found = _find_problems(source, world_size, skip_sections, world_option)
    if problems := list({(problem.key, problem.message): problem for problem in found}.values()):
        raise ConfigError(problems)  # of a rule that is checked again for the number of processes, the later hint
    return RunConfig.model_validate(source.tree).resolve(world_size)


def _is_text_key(key: str) -> bool:
    table, _, name = key.rpartition(".")
    field = _keys(sections()[table]).get(name) if table in sections() else None
    return key in RunKeys.model_fields or (field is not None and _has_text(field.annotation))


def _has_text(annotation: Any) -> bool:
    """Return True for str and for unions with str."""
    if get_origin(annotation) in (list, tuple):
        return False
    return annotation is str or any(_has_text(argument) for argument in get_args(annotation))


def sections() -> dict[str, type[Section]]:
    """Section classes by table name, in the order of docs/configuration.md."""
    return {
        name: field.annotation
        for name, field in RunConfig.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    }


def _find_problems(
    source: Source, world_size: int | None, skip_sections: Collection[str], world_option: str
) -> Iterator[Problem]:
    valid: dict[str, Any] = {}  # sections by name; a `_PartialSection` for a section with mistakes
    types = sections()
    for name in source.tree:
        if name not in RunConfig.model_fields:
            yield _unknown_key(source, name, list(RunConfig.model_fields), source.tree[name])
    for name, section in _without_misspelled(types, source.tree).items():
        values = source.tree.get(name, {})
        details, value = _validate(section, values)
        for key, group in itertools.groupby(details, key=lambda detail: detail["loc"][:1]):
            yield _problem_of_key(source, section, ".".join([name, *map(str, key)]), values, list(group))
        if value is not None:
            valid[name] = value
    if (run := source.tree.get("name")) is None:
        yield Problem(source.path, "name", "missing", 'name = "my-run" at the top of the file')
    elif not (isinstance(run, str) and NAME_PATTERN.fullmatch(run)):
        yield Problem(source.location("name"), "name", f"{_display_value(run)} cannot name a folder", _NAME_HINT)
    top = {key: source.tree[key] for key in RunKeys.model_fields if key in source.tree}
    if wrong := [detail for detail in _validate(RunKeys, top)[0] if detail["loc"] == ("output_dir",)]:
        yield _problem_of_key(source, RunKeys, "output_dir", top, wrong)
    checked = {name: section for name, section in valid.items() if name == "data" or name not in skip_sections}
    rules = [rule for rule in RULES if "data" not in skip_sections or rule not in DATA_RULES]
    findings = list(run_rules(rules, checked))
    yield from (finding.problem(source.location(finding.key)) for finding in findings)
    yield from _shared_folders(source)
    least = not findings and "parallel" not in skip_sections
    if (world_size or least) and all(isinstance(valid.get(name), Section) for name in types):
        config = RunConfig.model_construct(name="check", **valid)
        yield from _world_problems(source, config, world_size, world_option)


def _without_misspelled(types: dict[str, type[Section]], tree: Tree) -> dict[str, type[Section]]:
    """Drop the sections whose table stands under a misspelled name: their keys are not missing."""
    unknown = [name for name, values in tree.items() if name not in RunConfig.model_fields and isinstance(values, dict)]
    meant = {closest_name(name, types) for name in unknown}
    return {name: section for name, section in types.items() if name in tree or name not in meant}


def _world_problems(source: Source, config: RunConfig, world_size: int | None, option: str) -> Iterator[Problem]:
    """Find what is wrong with the number of processes, which an `option` of the command line gives, or the smallest."""
    for finding in world_findings(config, world_size) if world_size else layout_findings(config.resolve(None)):
        if option and finding.key in WORLD_KEYS:
            yield Problem("command line", option, finding.message, finding.hint)
        else:
            yield finding.problem(source.location(finding.key))


def _shared_folders(source: Source) -> Iterator[Problem]:
    """Find folders outside of a run's own that a copy of the run would share with the original."""
    for table, name in (("checkpoint", "dir"), ("observe", "store_dir")) if source.moved_from else ():
        key, section = f"{table}.{name}", source.tree.get(table)
        parent = section.get(name) if isinstance(section, dict) else None
        if parent and (where := source.location(key)) != "command line":
            what = f"{parent} belongs to the run in {source.moved_from}, of which this one was moved or copied"
            hint = f"for a run that was moved write {key}={parent} on the command line, for a copy another folder"
            yield Problem(where, key, what, hint)


_NAME_HINT = "letters, digits, '.', '_' and '-', at most 128"


class _PartialSection:
    """The valid keys of a section with mistakes. Reading any other key ends the rule."""

    def __init__(self, section: type[Section], values: dict[str, Any]) -> None:
        self._section = section
        self._values = values

    def __getattr__(self, name: str) -> Any:
        if isinstance(derived := getattr(self._section, name, None), property) and derived.fget:
            return derived.fget(self)
        if name not in self._values:
            raise InvalidValueError(name)
        return self._values[name]


def _validate(section: type[Section], table: Any) -> tuple[list[ErrorDetails], Section | _PartialSection | None]:
    """Return a table's errors and the section for the rules: complete if only keys are unknown, else with the valid
    keys; None if `table` is not a table.
    """
    try:
        return [], section.model_validate(table)
    except ValidationError as error:
        details = error.errors()
    if not isinstance(table, dict):
        return details, None
    invalid = {detail["loc"][0] for detail in details if detail["loc"]}
    if all(detail["type"] == "extra_forbidden" for detail in details):
        return details, section.model_validate({key: value for key, value in table.items() if key not in invalid})
    full = fill_defaults(table) if section is ModelConfig else table
    values = {}
    for name, field in section.model_fields.items():
        key = field.alias or name
        if key in full and key not in invalid:
            values[name] = None if full[key] == AUTO and AUTO_AS_NONE in field.metadata else full[key]
        elif key not in full and not field.is_required():
            values[name] = field.default
    return _root_errors(details, table), _PartialSection(section, values)


def _root_errors(details: list[ErrorDetails], table: Any) -> list[ErrorDetails]:
    """Drop errors in keys that are derived from an invalid preset or size."""
    invalid = {detail["loc"][0] for detail in details if detail["loc"]}

    def is_derived(detail: ErrorDetails) -> bool:
        key = detail["loc"][0] if detail["loc"] else None
        return key is not None and key not in table and ("preset" in invalid or DERIVED_FROM.get(str(key)) in invalid)

    return [detail for detail in details if not is_derived(detail)]


def _present_name(source: Source, key: str, value: Any) -> str:
    """Return the hint for a setting or value with a former name, or that is gone; else ''."""
    present, present_value = renamed(key, value)
    if present_value is not value:
        return f"is now {present} = {_display_value(present_value)}"
    place = "" if "." in present or source.location(key) == "command line" else ", at the top of the file"
    return f"is now {present}{place}" if present != key else REMOVED_KEYS.get(key, "")


def _unknown_key(source: Source, key: str, known: list[str], value: Any = None) -> Problem:
    table, _, last = key.rpartition(".")
    command_line = source.location(key) == "command line"
    hint = _present_name(source, key, value)
    hint = hint or unknown_key_hint(key, value, known, keys_named(last), command_line=command_line)
    return Problem(source.location(key), key, f"there is no key '{last}'" + (f" in [{table}]" if table else ""), hint)


def keys_named(name: str) -> list[str]:
    """Return the keys of a name, each with its table."""
    top = [name] if name in RunKeys.model_fields else []
    return [*top, *(f"{table}.{name}" for table, section in sections().items() if name in _keys(section))]


def _keys(section: type[Section]) -> dict[str, FieldInfo]:
    """Fields of a section by key in the TOML file."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def _problem_of_key(
    source: Source, section: type[Section], key: str, table: Any, details: list[ErrorDetails]
) -> Problem:
    """Rephrase pydantic's errors of one key: one detail, or one per type of a union."""
    table_name, name = key.partition(".")[0], key.rpartition(".")[2]
    detail, keys = details[0], _keys(section)
    if not detail["loc"]:
        message = f"must be a table, not {_display_value(table)}"
        return Problem(source.location(key), key, message, f"write [{table_name}] and its keys below it")
    if detail["type"] == "extra_forbidden":
        return _unknown_key(source, key, list(keys), detail["input"])
    if detail["type"] == "missing" and name not in table:
        help_line = _MARKDOWN_LINK.sub(r"\1", keys[name].description or "")
        hint = f"write {name} = ... in [{table_name}]: {help_line}"
        return Problem(source.location(table_name), key, "missing", hint)
    hint = _present_name(source, key, detail["input"]) or value_hint(key, keys[name], table.get(name))
    if name not in table and name in DERIVED_FROM:
        hint = f"it follows {DERIVED_FROM[name]}: change that, or write {name}"
    if detail["type"] == "choice":
        context = detail["ctx"]
        known = f"did you mean '{context['nearest']}'?" if context["nearest"] else context.get("hint", "")
        return Problem(source.location(key), key, detail["msg"], unsupported(key, table.get(name)) or known or hint)
    value = detail["input"] if len(details) == 1 else table.get(name)
    shown, expected = _display_value(value), _expected(details)
    message = expected if expected.startswith(shown) else f"{shown}: {expected}"
    own_hint = str(detail.get("ctx", {}).get("hint", ""))
    return Problem(source.location(key), key, message, own_hint or _as_number(value, details) or hint)


_MARKDOWN_LINK = re.compile(r"\[([^]]+)\]\([^)]*\)")


def _as_number(value: Any, details: list[ErrorDetails]) -> str:
    """Return the number that is meant by a quoted number, or by a whole number with a decimal point; else ''."""
    types = {detail["type"] for detail in details}
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63 and "int_type" in types:
        return f"{value:.0f}, without a decimal point"
    if isinstance(value, str) and types & {"int_type", "float_type"} and _NUMBER.fullmatch(value):
        return f"{value}, without quotes"
    return ""


_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")


def _expected(details: list[ErrorDetails]) -> str:
    """Join pydantic's expectations for a key, one per type of a union, with the types' names in the docs."""
    messages = dict[str, None]()
    for detail in details:
        text = detail["msg"].removeprefix("Input ").replace(" after validation", "")
        for pydantic_name, name in _TYPES.items():
            text = text.replace(pydantic_name, name)
        messages[text] = None
    return ", or ".join(message[:1].lower() + message[1:] for message in messages)


_TYPES = {
    "a valid boolean": "true or false", "a valid integer": "a whole number", "a valid number": "a number",
    "a valid string": "text", "a valid dictionary": "a table", "a valid list": "a list", "a valid tuple": "a list",
}  # fmt: skip
"""pydantic's names of types, with those of docs/configuration.md."""


def _display_value(value: Any) -> str:
    """Format a value as in TOML, truncated to 80 characters."""
    if isinstance(value, bool):
        return str(value).lower()
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else text[:77] + "..."
