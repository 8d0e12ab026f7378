"""The table of commands: each has a help with an example and a page, and old commands are answered with new ones."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megascale.cli.command_table import COMMANDS, FAMILIES, GONE, GROUPS, HIDDEN_COMMANDS, command_of
from megascale.cli.main import command_parser, main, parse
from megascale.config.run import RunConfig
from megascale.core.named_run import USUAL_PARENT
from tests.operate.show.folders import make_run

ROOT = Path(__file__).parents[2]
EVERY = ["", *COMMANDS]


def shown_help(command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_the_groups_have_every_command_of_one_word(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [name for group in GROUPS.values() for name in group]
    assert sorted(names) == sorted(name for name in COMMANDS if " " not in name)
    out = shown_help("", capsys, monkeypatch, 100)
    places = [re.search(rf"^{heading}:$", out, re.MULTILINE) for heading in GROUPS]
    assert all(places) and [place.start() for place in places if place] == sorted(
        place.start() for place in places if place
    )
    for name in names:
        assert re.search(rf"^  {name}\s", out, re.MULTILINE)
    for name in HIDDEN_COMMANDS:
        assert not re.search(rf"^ +{name}\b", out, re.MULTILINE)


@pytest.mark.parametrize("command", EVERY)
@pytest.mark.parametrize("width", [72, 120])
def test_a_help_has_a_description_an_example_and_a_page(
    command: str, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = shown_help(command, capsys, monkeypatch, width)
    assert out.startswith(f"usage: megascale {command}".rstrip())
    one = COMMANDS[command or "check"]
    if command:
        assert f"{one.help[0].upper()}{one.help[1:]}." in " ".join(out.split())
    assert f"\nexample:\n  megascale {one.example}\n" in out, "in a line that can be copied"
    (page,) = re.findall(r"^page: (\S+)$", out, re.MULTILINE)
    assert (ROOT / page).is_file()
    for default in re.findall(r"\(default: [^)]*\)?", out):
        assert "\n" not in default or len(" ".join(default.split())) > width - 24, "a default is on one line"
    if command in FAMILIES or command in ("plan", "doctor"):
        for name in COMMANDS:
            assert not name.startswith(f"{command} ") or f"\n  {name} " in out


@pytest.mark.parametrize("command", [*EVERY, *HIDDEN_COMMANDS])
def test_every_argument_has_a_help(command: str) -> None:
    for action in command_parser(command)._actions:
        assert action.help, action
        assert action.help.lstrip()[:1] != "(", f"{action.dest}: only a default"
        if "--output" in action.option_strings:
            assert re.fullmatch(r"FILE(\.\w+)?|DIR|PREFIX", str(action.metavar))
        if not action.option_strings and str(action.metavar).startswith("RUN"):
            assert action.metavar == "RUN"


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_are_parsed(command: str) -> None:
    words = shlex.split(COMMANDS[command].example)
    name, options = parse(words)
    assert name == command or (command in FAMILIES and name.startswith(f"{command} "))
    for word in words:
        if word.startswith("configs/"):
            assert (ROOT / word).is_file()
    assert vars(options)


@pytest.mark.parametrize(
    ("line", "old"),
    [
        ("observe run.toml --driver node1", "observe"),
        ("report runs/a --output a.html", "report"),
        ("mfu runs/a --json", "mfu"),
        ("data which runs/a --step 3", "data which"),
        ("plan run.toml --hardware h100 --lengths fixed:length=9", "plan --lengths"),
        ("plan run.toml --lengths=fixed:length=9", "plan --lengths"),
        ("doctor --nodes 3", "doctor --nodes"),
        ("doctor --nodes run.toml", "doctor --nodes"),
    ],
)
def test_an_old_command_is_answered_with_the_new_one(line: str, old: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(f"megascale: `megascale {old}` is now `megascale {GONE[old]}`") and err.count("\n") == 1
    assert command_of(GONE[old].split()) in COMMANDS


def test_every_old_command_is_refused_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for old, new in GONE.items():
        with pytest.raises(SystemExit) as ended:
            main(old.split())
        assert ended.value.code == 2 and f"`megascale {new}`" in capsys.readouterr().err


def test_a_file_with_the_name_of_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lengths").write_text("")
    assert parse(["plan", "./lengths", "--hardware", "h100"])[0] == "plan"
    command, options = parse(["plan", "lengths", "lengths", "--lengths", "fixed:length=9"])
    assert (command, options.config) == ("plan lengths", "lengths")
    assert parse(["plan", "--hardware", "h100", "lengths"])[0] == "plan", "a second word stands after the first"


def test_a_misspelled_option_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["diagnose", "run", "--slw"])
    assert "unrecognized arguments: --slw  -> did you mean '--slow'?" in capsys.readouterr().err


READERS = [
    "watch RUN", "diagnose RUN", "diagnose RUN --slow", "diagnose RUN --mfu", "diagnose RUN --hosts", "trace RUN",
    "events RUN slowest-ranks", "dashboard RUN --file a.html", "data samples RUN --step 1", "ckpt list RUN",
    "ckpt show RUN", "ckpt verify RUN", "ckpt diff RUN RUN", "ckpt model RUN", "ckpt convert RUN out", "sample RUN",
    "ckpt spectrum RUN", "plan batch configs/gpu/llama3-8b.toml --run RUN",
    "data teacher configs/gpu/llama3-8b.toml --checkpoint RUN --output a.labels",
]  # fmt: skip
"""Every command that reads a run."""


@pytest.mark.parametrize("line", READERS)
def test_a_missing_run_has_one_answer(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)
    missing = f"{run}x"
    assert main(line.replace("RUN", missing).split()) == 2
    assert capsys.readouterr().err == f"{missing}: no such folder  -> did you mean {run}?\n"


def test_commands_that_take_a_run_are_tried() -> None:
    """`ckpt copies` names runs whose folders are gone."""
    tried = {command_of(line.split()) for line in READERS}
    for command in COMMANDS:
        takes = {"RUN", "CHECKPOINT", "SOURCE"} & {action.metavar for action in command_parser(command)._actions}
        assert not takes or command in tried or command == "ckpt copies", command


def test_runs_are_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert Path(RunConfig.model_fields["output_dir"].default) == USUAL_PARENT
    monkeypatch.chdir(tmp_path)
    assert main(["watch", "mine"]) == 2
    assert capsys.readouterr().err == (
        "mine: no such folder  -> give a run's folder: output_dir/name of its configuration\n"
    )
    for name in ("first", "second"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.toml").touch()
    assert main(["watch", "first"]) == 2
    assert capsys.readouterr().err == "first: no such folder  -> did you mean runs/first?\n"
    assert main(["watch", "runs"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("runs: not a run's folder: it has no config.toml  -> a run's folder, such as runs/")


@pytest.mark.parametrize("words", [["plan"], ["plan", "lengths", "--lengths", "fixed:length=9"]])
def test_a_plan_without_hardware_names_the_profiles(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words, "configs/gpu/llama3-8b.toml", "--gpus", "64"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert ": --hardware is missing  -> one of a100-40g, " in line and " h100, " in line


@pytest.mark.parametrize("words", [["check"], ["plan", "--hardware", "h100"], ["doctor"], ["train"]])
def test_only_what_launches_says_that_nothing_was_launched(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "configs/gpu/llama3-8b.toml", "train.steps=x"]) == 2
    assert capsys.readouterr().err.endswith(
        "1 problem; nothing was launched\n" if words == ["train"] else "1 problem\n"
    )
