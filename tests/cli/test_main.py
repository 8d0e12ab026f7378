"""The `megascale` command: imports, exit status, errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import megascale
from megascale.cli.command_table import COMMANDS, COMMANDS_ELSEWHERE, command_of
from megascale.cli.main import main
from megascale.core.errors import DataError, Exit
from tests.runs import GPT, settings, write_config

HEAVY = ("torch", "numpy", "rich", "tokenizers", "megatron")


def _imports(*arguments: str) -> tuple[int, set[str]]:
    """Run the command; return the exit status and the imported packages."""
    command = [sys.executable, "-X", "importtime", "-m", "megascale", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return done.returncode, {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


@pytest.fixture
def config(tmp_path: Path) -> str:
    """Write a configuration without mistakes."""
    return str(write_config(settings(GPT, tmp_path), tmp_path / "run.toml"))


def test_no_object_is_collected_after_the_command() -> None:
    """The interpreter's last collection, which would scan all of torch, has nothing to scan."""
    code = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 10_000))"
    command = [sys.executable, "-c", f"{code}; from megascale.cli.main import main; main()", "--version"]
    assert subprocess.check_output(command, text=True).splitlines()[-1] == "True"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["check", "--help"], ["train", "--help"], ["doctor", "--help"]]
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    status, imported = _imports(*arguments)
    assert status == 0
    assert "argparse" in imported
    assert not imported & set(HEAVY)


@pytest.mark.parametrize("more", [[], ["--show"], ["--json"], ["--gpus", "8"], ["model.num_heads=3"]])
def test_check_imports_nothing_heavy(config: str, more: list[str]) -> None:
    status, imported = _imports("check", config, *more)
    assert status == (2 if "model.num_heads=3" in more else 0)
    assert "pydantic" in imported
    assert not imported & set(HEAVY)


def test_a_mistake_is_found_before_torch_is_imported(config: str) -> None:
    status, imported = _imports("train", config, "model.num_heads=3")
    assert status == 2
    assert not imported & set(HEAVY)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"megascale {megascale.__version__}\n"


@pytest.mark.parametrize(
    "arguments", [[], ["chek"], ["--nonsense"], ["check"], ["check", "--nonsense"], ["data"], ["data", "prepair"]]
)
def test_a_wrong_command_line_ends_with_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert re.fullmatch(r"megascale[ a-z]*: .*  -> .*\n", capsys.readouterr().err)


def test_an_error_of_ours_is_a_line_and_its_status(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(options: object) -> int:
        raise DataError("the disk is empty", hint="fill it")

    monkeypatch.setattr("megascale.cli.check.run", fail)
    assert main(["check", config]) == 3
    assert capsys.readouterr().err == "the disk is empty  -> fill it\n"


def test_a_bug_keeps_its_traceback(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(options: object) -> int:
        raise KeyError("a bug")

    monkeypatch.setattr("megascale.cli.check.run", fail)
    with pytest.raises(KeyError):
        main(["check", config])


def test_a_reader_that_goes_away_is_no_error(config: str) -> None:
    command = f"{sys.executable} -m megascale check {config} --show | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""


@pytest.mark.parametrize(
    "words",
    [["train.steps=3", "model.num_heads=2", "--json"], ["--json", "train.steps=3", "model.num_heads=2"],
     ["train.steps=3", "--json", "model.num_heads=2"]],
)  # fmt: skip
def test_settings_stand_before_and_after_options(
    config: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", config, *words]) == 0
    answer = json.loads(capsys.readouterr().out)["config"]
    assert (answer["train"]["steps"], answer["model"]["num_heads"]) == (3, 2)


def test_an_unknown_option_is_no_setting(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", config, "train.steps=3", "--train.steps=3"]) == 2
    assert "--train.steps 3: a setting has no dashes  -> write train.steps=3" in capsys.readouterr().err


def test_a_misspelled_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["trian", "run.toml"])
    assert caught.value.code == 2
    assert "there is no command 'trian'  -> did you mean 'train'?" in capsys.readouterr().err


@pytest.mark.parametrize("word", COMMANDS_ELSEWHERE)
def test_a_command_of_another_tool(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([word, "runs/x"])
    assert f"there is no command '{word}'  -> {COMMANDS_ELSEWHERE[word]}\n" in capsys.readouterr().err
    assert command_of(COMMANDS_ELSEWHERE[word].split()[1:]) in COMMANDS


def test_a_current_folder_that_was_removed_is_named(tmp_path: Path) -> None:
    """MKL would end the process with a line of its own as torch loads it."""
    command = f'cd "{tmp_path}/gone" && rmdir "{tmp_path}/gone" && "{sys.executable}" -m megascale doctor'
    (tmp_path / "gone").mkdir()
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == Exit.CONFIG
    what = "environment  the current folder cannot be used: No such file or directory  -> cd to another folder"
    assert done.stderr.splitlines()[-2:] == [what, "1 problem"], done.stderr
