"""Sources of the arguments of a run: a shell script, a command line, YAML, TOML, or a published name."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from megascale.config.foreign.others import TORCHTITAN_RUNS as RUNS
from megascale.config.foreign.setting import Values, plain
from megascale.config.foreign.shell_script import PROGRAM, ShellScript, split_words
from megascale.config.foreign.translation import read_flags, read_value
from megascale.core.errors import ConfigError, Problem
from megascale.core.registry import closest_name

TORCHTITAN = "torchtitan:"  # prefix of the name of a published configuration

_LIST = re.compile(r"^\[([^\[\]]*)\]$")
_DEFAULTS = {"training.local_batch_size": [8], "training.global_batch_size": [-1]}  # torchtitan's


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
