"""A run of another system as a configuration: its arguments are mapped, dropped with a reason, or refused."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megascale.config.exclusions import SWITCHED_OFF
from megascale.config.foreign.setting import MANY, Context, Values, plain
from megascale.config.foreign.translation import SYSTEMS, Translation, context_of, find, translate
from megascale.config.loading import load_config_tree, sections
from megascale.config.rules import run_rules
from megascale.config.toml_reader import Source
from megascale.config.toml_writer import LOSS_SECTIONS, toml_value
from megascale.core.errors import ConfigError, Problem

UNKNOWN = "unknown: docs/from-megatron.md has no row of it"
_UNKNOWN_TEXT = re.compile(r"\$(\w+)|(?:\$|`).*", re.DOTALL)


@dataclass
class Imported:
    """The arguments of a run in the terms here. `settings`: values by key; `defaults`: keys of them that no argument
    gives, since the default here is another; `notes`: on converted values, by key; `mapped`: arguments that are
    written; `dropped` and `refused`: reasons, by argument.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    defaults: set[str] = field(default_factory=set)
    notes: dict[str, str] = field(default_factory=dict)
    mapped: list[str] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def tree(self, name: str) -> dict[str, Any]:
        """Return the configuration of a run of this name, unchecked."""
        source = Source("", {"name": name, "output_dir": "runs"} | {table: {} for table in sections()})
        for key, value in self.settings.items():
            source.set(key.split("."), value)
        return {key: value for key, value in source.tree.items() if value != {}}

    def take_back(self, keys: Collection[str]) -> bool:
        """Remove the defaults of these keys, which have no effect. Returns False if there are none."""
        idle = self.defaults & set(keys)
        self.settings = {key: value for key, value in self.settings.items() if key not in idle}
        self.defaults -= idle
        return bool(idle)

    def check(self, name: str, source: str, gpus: int | None, system: str) -> None:
        """Check the configuration, but for the data, which may be on other machines, and take back defaults without
        effect.

        Raises: ConfigError, which names a default of `system` as such.
        """
        taken_back = True
        while taken_back:
            try:
                tree = self.tree(name)
                config = load_config_tree(tree, source, (), gpus, skip_sections={"data"}, world_option="--gpus")
                taken_back = self.take_back({finding.key for finding in run_rules(SWITCHED_OFF, dict(config))})
            except ConfigError as error:
                taken_back = self.take_back({one.key for one in error.problems if "has no effect" in one.message})
                if not taken_back:
                    raise ConfigError([self._named(one, system) for one in error.problems]) from None

    def _named(self, problem: Problem, system: str) -> Problem:
        """Return the problem; with a default of `system`, its arguments too."""
        if problem.key not in self.defaults:
            return problem
        names = ", ".join(one for row in SYSTEMS[system] if row.key == problem.key for one in row.names)
        why = f"{problem.message}; {toml_value(self.settings[problem.key])} is the default of {system}"
        hint = f"{problem.hint}: by {names}, or {problem.key}=VALUE behind the source"
        return replace(problem, message=why, hint=hint)

    def to_toml(self, name: str) -> str:
        """Return the configuration as TOML, with a comment on each value that is converted."""
        lines = []
        for table, value in self.tree(name).items():
            keys, prefix = (value, f"{table}.") if isinstance(value, dict) else ({table: value}, "")
            lines += ["", f"[{table}]"] if prefix else []
            for key, item in keys.items():
                note = self.notes.get(prefix + key)
                lines.append(f"{key} = {toml_value(item)}" + (f"  # {note}" if note else ""))
        return "\n".join(lines) + "\n"


def import_arguments(
    system: str, given: Mapping[str, Values], gpus: int | None = None, unknown: Mapping[str, str] = {}
) -> Imported:
    """Translate the arguments of a run by the table of `system`, and write its defaults that differ. `given`: values by
    name; None, and False for a switch, are as no argument. `gpus`: of the job, for what counts by them. `unknown`:
    statements by variable of the script.
    """
    given = {name: values for name, values in given.items() if not _is_unset(name, values, system)}
    context = context_of(given) | ({"gpus": [gpus]} if gpus else {})
    made = Imported()
    for name, values in given.items():
        one = _translation(name, values, context, system, unknown)
        if one.value is not None:
            _write(made, name, one)
        else:
            (made.dropped if one.needless else made.refused)[name] = one.note
    for setting in SYSTEMS[system]:
        unset = setting.key not in made.settings and not any(plain(name) in context for name in setting.names)
        if unset and setting.theirs is not None and (not setting.only_with or plain(setting.only_with) in context):
            made.settings[setting.key] = setting.theirs
            made.defaults.add(setting.key)
    if made.settings.get("parallel.zero") == 3 and made.settings.get("model.mtp_layers"):
        made.settings["parallel.zero"] = 2  # sharded gradients and state give the same bits
        made.settings.pop("parallel.reshard", None)
        made.notes["parallel.zero"] = "sharded weights: parallel.zero = 2, as 3 does not support MTP layers"
    return made


def _translation(name: str, values: Values, context: Context, system: str, changed: Mapping[str, str]) -> Translation:
    """Return an argument's translation, with a note if it has no value here."""
    found, one = find(name, system), translate(name, values, context, system)
    unknown = next(filter(None, (_UNKNOWN_TEXT.search(str(text)) for text in (name, *values))), None)
    if one is not None and one.needless and not (unknown and found and found[1].takes == MANY):
        return one  # an unknown word behind a list may be another argument
    if unknown:
        why = f"has no one value: {changed[unknown[1]]} may set it" if unknown[1] in changed else "has no value"
        return Translation(system, "", None, f"{unknown[1] or unknown[0]} {why} in the script")
    if found is None or one is None or any(value != value for value in values):
        return Translation(system, "", None, "nan is no number" if found else UNKNOWN)
    if (only := found[1].only_with) and plain(only) not in context:
        return Translation(system, "", None, f"nothing to write without {only}", needless=True)
    if one.key and one.value is None:
        note = f"no value of {one.key} means it" if values or not found[1].takes else "no value stands behind it"
        note = one.note if "not supported" in one.note else f"{note}: {one.note}".removesuffix(": ")
        return replace(one, note=note, needless=one.key.partition(".")[0] not in LOSS_SECTIONS)
    return one


def _is_unset(name: str, values: Values, system: str) -> bool:
    if list(values) == [None]:
        return True
    found = find(name, system)
    return list(values) == [False] and found is not None and found[1].takes == 0 and found[1].names[0].startswith("--")


def _write(made: Imported, name: str, one: Translation) -> None:
    """Write what an argument means, unless another one means another value of the key."""
    for key, value in one.settings.items():
        if (before := made.settings.get(key, value)) != value:
            made.refused[name] = f"means {key} = {toml_value(value)}, another argument {toml_value(before)}"
            return
    made.mapped.append(name)
    made.settings |= one.settings
    if one.converted and one.note:
        made.notes.setdefault(next(iter(one.settings)), f"{name}: {one.note}")
