"""Flags of Megatron-LM and others behind a command with settings: each is answered with what to write."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megascale.cli.command_table import ELSEWHERE, FAMILIES, command_of, commands_below
from megascale.cli.main import command_parser, main
from tests.config.test_foreign import GPT3_175B, LLAMA3_8B, MORE_FLAGS
from tests.config.test_mistakes import GOOD

COMMANDS = ["check run.toml", "train run.toml", "launch run.toml --nodes 1", "plan run.toml --hardware h100"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(GOOD)


def answered(words: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of standard error of a command line that is wrong, without the count."""
    assert main(shlex.split(words)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()[:-1]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_flag_of_megatron(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert answered(f"{command} --tensor-model-parallel-size 4", capsys) == [
        "command line  --tensor-model-parallel-size 4: Megatron-LM has this option  -> write parallel.tp=4"
    ]
    assert not Path("runs").exists()


@pytest.mark.parametrize("script", [GPT3_175B, LLAMA3_8B, MORE_FLAGS])
def test_a_whole_command_of_megatron(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Flags before and after CONFIG: every one has its line, and what it says is no flag."""
    words = " ".join(script.split())
    lines = answered(f"check run.toml {words}", capsys)
    assert len(lines) == sum(word.startswith("--") for word in words.split())
    assert all("has this option  -> " in line and "-> write --" not in line for line in lines)
    assert answered(f"train {words} run.toml", capsys) == lines


@pytest.mark.parametrize(("words", "line"), [
    ("--num-layers=32", "--num-layers 32: Megatron-LM has this option  -> write model.num_layers=32"),
    ("--training.seq_len 8192", "--training.seq_len 8192: torchtitan has this option  -> write model.seq_length=8192"),
    ("--zero-stage 2", "--zero-stage 2: DeepSpeed has this option  -> write parallel.zero=2"),
    ("--parallel.tp 4", "--parallel.tp 4: a setting has no dashes  -> write parallel.tp=4"),
    ("--parallel.tp=4", "--parallel.tp 4: a setting has no dashes  -> write parallel.tp=4"),
    ("--no-such-flag 4",
     "--no-such-flag 4: there is no such option  -> settings have no dashes: write section.key=value"),
    ("--checkpoint.interval 10", "--checkpoint.interval 10: torchtitan has this option  -> write checkpoint.every=10"),
    ("--parallel.no_such 4",
     "--parallel.no_such 4: there is no such option  -> settings have no dashes: write section.key=value"),
    ("--optimizer.options.beta1 0.8",
     "--optimizer.options.beta1 0.8: a setting has no dashes  -> write optimizer.options.beta1=0.8"),
    ("--save 2026-01-01", "--save 2026-01-01: Megatron-LM has this option  -> write output_dir=2026-01-01 "
     "(a run's folder is output_dir/name; checkpoint.dir puts checkpoints elsewhere)"),
    ("--gpus 1 --json -1", "-1: not a setting  -> write section.key=value"),
    ("--resume runs/a", "--resume runs/a: there is no such option  -> write checkpoint.resume=runs/a"),
    ("--tp=4", "--tp 4: there is no such option  -> write parallel.tp=4"),
    ("--every", "--every: there is no such option  -> write checkpoint.every=VALUE"),
    ("--name a", "--name a: there is no such option  -> write name=a"),
    ("--hepl", "--hepl: there is no such option  -> settings have no dashes: write section.key=value"),
    ("--foo", "--foo: there is no such option  -> settings have no dashes: write section.key=value"),
    ("--jsom", "--jsom: there is no such option  -> did you mean '--json'?"),
])  # fmt: skip
def test_kinds_of_flags(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert answered(f"check run.toml {words}", capsys) == [f"command line  {line}"]


@pytest.mark.parametrize("row", ELSEWHERE)
def test_an_option_of_another_tool(row: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is no option of the command, and the answer names options and commands that there are."""
    first, _, option = row.rpartition(" ")
    for command in commands_below(first) if first in FAMILIES else [first]:
        (line,) = answered(f"{command} {option} 3", capsys)
        assert line.startswith(f"command line  {option} ") and line.endswith(f"no such option  -> {ELSEWHERE[row]}")
        named = command_of(ELSEWHERE[row].partition("megascale ")[2].split()) or command
        words = {word.strip(",;:") for word in ELSEWHERE[row].split() if word.startswith("--")}
        assert words <= set(command_parser(named)._option_string_actions)


def test_options_of_other_tools_stand_beside_flags(capsys: pytest.CaptureFixture[str]) -> None:
    lines = answered("check --config=run.toml --swiglu --nodes 8 --dry-run --gpus 4", capsys)
    assert [line.partition("  -> ")[2] for line in lines] == [
        ELSEWHERE["check --config"], "write model.activation=swiglu", ELSEWHERE["check --nodes"],
        ELSEWHERE["check --dry-run"],
    ]  # fmt: skip
    assert "--gpus 64" in lines[2]
    lines = answered("data prepare --input docs --output-prefix=x --append-eod", capsys)
    assert [line.split()[2] for line in lines] == ["--input", "--output-prefix", "--append-eod:"]


def test_every_word_that_no_flag_takes(capsys: pytest.CaptureFixture[str]) -> None:
    lines = answered("check run.toml --swiglu 4 train.steps=3 name=x --lr 1 2 other", capsys)
    assert [line.split()[2].strip(":") for line in lines] == ["--swiglu", "--lr", "4", "2", "other"]


def test_options_of_the_command_stand_between(capsys: pytest.CaptureFixture[str]) -> None:
    lines = answered("check --micro-batch-size 2 run.toml --gpus 4 train.steps=3 --swiglu", capsys)
    assert [line.partition("  -> ")[2] for line in lines] == ["write batch.micro=2", "write model.activation=swiglu"]


def test_a_name_without_dashes_and_equals_sign(capsys: pytest.CaptureFixture[str]) -> None:
    lines = answered("check run.toml checkpoint.interval 10 checkpoint.every", capsys)
    assert lines[0].endswith("not a setting  -> write checkpoint.every=10; the name is torchtitan's")
    assert lines[2].endswith("not a setting  -> write checkpoint.every=...")
    lines = answered("check run.toml tensor-model-parallel-size 4", capsys)
    assert lines[0].endswith("not a setting  -> write parallel.tp=4; the name is Megatron-LM's")


def test_the_answers_that_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "from-megatron.md").read_text(encoding="utf-8")
    block = page.partition("\n$ megascale ")[2].partition("```")[0]
    command, *lines, count = [line.strip() for line in block.rstrip().splitlines()]
    assert answered(command, capsys) == lines
    assert count == f"{len(lines)} problems"
