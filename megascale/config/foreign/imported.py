"""A run of another system as a configuration: its arguments, of a shell script, a command line, YAML, TOML, or a
published name, are mapped, dropped with a reason, or refused.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from megascale.config.exclusions import SWITCHED_OFF
from megascale.config.foreign import translation
from megascale.config.foreign.others import TORCHTITAN_RUNS as RUNS
from megascale.config.foreign.setting import MANY, Context, Values, plain
from megascale.config.foreign.shell_script import PROGRAM, ShellScript, split_words
from megascale.config.foreign.translation import SYSTEMS, Translation, find, read_flags, read_value, translate
from megascale.config.loading import load_config_tree, sections
from megascale.config.rules import run_rules
from megascale.config.toml_reader import Source
from megascale.config.toml_writer import LOSS_SECTIONS, toml_value
from megascale.core.errors import ConfigError, Problem
from megascale.core.registry import closest_name

TORCHTITAN = "torchtitan:"  # prefix of the name of a published configuration

_LIST = re.compile(r"^\[([^\[\]]*)\]$")
_DEFAULTS = {"training.local_batch_size": [8], "training.global_batch_size": [-1]}  # torchtitan's

UNKNOWN = "unknown: docs/from-megatron.md has no row of it"
_UNKNOWN_TEXT = re.compile(r"\$(\w+)|(?:\$|`).*", re.DOTALL)


@dataclass(frozen=True)
class Arguments:
    """The arguments of a run of `system`: values by name; `gpus`: of the job, None if the source does not say it;
    `unknown`: statements by unknown variable of a script; `text`: the source.
    """

    system: str
    given: Mapping[str, Values]
    gpus: int | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)
    text: str = ""

    def line_of(self, name: str) -> int | None:
        """Return the line of a name in the source, None unless it stands in one alone."""
        word = re.compile(rf"(?<![\w-]){re.escape(name.lstrip('$'))}(?![\w-])")
        lines = [number for number, line in enumerate(self.text.splitlines(), 1) if word.search(line.partition("#")[0])]
        return lines[0] if len(lines) == 1 else None


def read_arguments(source: str, words: Sequence[str], environment: Mapping[str, str]) -> Arguments:
    """Read a source. `words`: behind the name of a script; `environment`: its variables.

    Raises: ConfigError for a file that cannot be read, or has no arguments.
    """
    if source.startswith(TORCHTITAN):
        return _published(source.removeprefix(TORCHTITAN), source)
    try:
        text = Path(source).read_text(encoding="utf-8")
        if source.endswith(".toml"):
            return Arguments("torchtitan", _DEFAULTS | _flat(tomllib.loads(text)))
        if source.endswith((".yaml", ".yml")):
            return _from_yaml(yaml.safe_load(text), ShellScript("", environment))
    except OSError as error:
        raise ConfigError([Problem(source, "", f"cannot be read: {error.strerror}", "give a file")]) from None
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError([Problem(source, "", f"cannot be read: {' '.join(str(error).split())}")]) from None
    return _from_script(text, ShellScript(text, environment, words), source)


def _from_script(text: str, script: ShellScript, source: str) -> Arguments:
    """Read the training command of a script, or a file of words."""
    command, is_script = script.command or ["pretrain_gpt.py", *split_words(text)], bool(script.command)
    if (count := len(script.commands)) > 1:
        what, hint = f"has {count} training commands", "leave one of them in a copy"
    elif not is_script and any("/pretrain_" in f"/{word}" and word.endswith(".py") for word in command[1:]):
        what = "names a program that no command known here runs: it is behind an unknown variable, or not called"
        hint = "write the training command into a copy"
    elif any(map(str.isspace, command)):
        what, hint = "has a backslash with spaces behind it, which joins no lines", "remove the spaces"
    elif not is_script and not any(word.startswith("--") for word in command):
        what, hint = "has no command of pretrain_gpt.py or torchtitan", "a training script"
    else:
        return replace(_from_command(command, source), unknown=script.unknown, text=text)
    raise ConfigError([Problem(source, "", what, hint)])


def _from_command(command: Sequence[str], source: str) -> Arguments:
    at = next(number for number, word in enumerate(command) if PROGRAM.fullmatch(word))
    program, given = command[at].rpartition("/")[2], read_flags(command[at + 1 :])
    given |= {word: [] for word in given.pop("", [])}  # neither flags nor values
    launcher = {plain(name): values for name, values in read_flags(command[:at]).items() if values}
    ranks, nodes = launcher.get("nproc_per_node", [None])[0], launcher.get("nnodes", [1])[0]
    gpus = ranks * nodes if isinstance(ranks, int) and isinstance(nodes, int) else None
    if not program.startswith("pretrain_"):
        name = given.pop("--config", ["llama3_debugmodel"])[0]
        files = [word.rpartition("=")[2] for word in command if word.endswith(".toml")]  # of --job.config_file
        given = {flag: values for flag, values in given.items() if flag not in ("--module", "--job.config_file")}
        published = read_arguments(files[-1], (), {}).given if files else _published(str(name), source).given
        return Arguments("torchtitan", {**published, **{plain(flag): values for flag, values in given.items()}}, gpus)
    if program != "pretrain_gpt.py":
        raise ConfigError([Problem(source, program, "trains a model of another kind", "a script of pretrain_gpt.py")])
    return Arguments("Megatron-LM", given, gpus)


def _from_yaml(tree: Any, script: ShellScript) -> Arguments:
    """Read `MODEL_ARGS` of a recipe of Megatron-LM's tests, or a configuration in tables."""
    tree = tree.get("MODEL_ARGS", tree) or {} if isinstance(tree, dict) else tree
    if not isinstance(tree, dict):
        raise ValueError("not a table of arguments")
    given: dict[str, list[Any]] = {}
    for name, (value,) in _flat(tree).items():
        words: list[Any] = []
        for one in value if isinstance(value, list) else [value]:
            text = " ".join(script.expand(one)) if isinstance(one, str) else ""
            words += _LIST.sub(r"\1", text).split() if text else [one]
        given[name] = [read_value(word) if isinstance(word, str) else word for word in words]
    nemo = any(name.startswith("trainer.") for name in given)
    return Arguments("NeMo" if nemo else "Megatron-LM", given)


def _published(name: str, source: str) -> Arguments:
    """Return the arguments of a configuration of torchtitan 0.3, by the name of its function."""
    if name not in RUNS:
        near = closest_name(name, RUNS)
        hint = f"did you mean {near}?" if near else f"one of {', '.join(RUNS)}, or a TOML file of torchtitan 0.2"
        raise ConfigError([Problem(source, name, "is a Python function of torchtitan, which is not run", hint)])
    return Arguments("torchtitan", _DEFAULTS | _flat(RUNS[name]))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, list[Any]]:
    """Return the values of nested tables by dotted name."""
    flat: dict[str, list[Any]] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value.get("_call_") is False:  # a function of Megatron Bridge
            flat[f"{prefix}{key}"] = [value.get("_target_")]
        elif isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        elif key != "_target_":
            flat[f"{prefix}{key}"] = [value]
    return flat


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
    switches = {name for name in given if (row := find(name, system)) and not row[1].takes and "--" in row[1].names[0]}
    given = {name: values for name, values in given.items() if list(values) != [None]}
    given = {name: values for name, values in given.items() if name not in switches or list(values) != [False]}
    context = translation.context_of(given) | ({"gpus": [gpus]} if gpus else {})
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
