"""Experiments: comparison of runs, and errors for runs that cannot be compared."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.jobs import job_config
from tests.runs import GPT

FOLDER = Path(__file__).parents[2] / "tools" / "experiments"
sys.path.insert(0, str(FOLDER))  # the tools' files stand beside each other

import curves  # noqa: E402
import optimizer_parity  # noqa: E402


@pytest.mark.slow
def test_a_run_is_made_once_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(
        job_config(tmp_path, GPT, train__steps=4, train__eval_every=2, train__eval_steps=1, checkpoint__every=4)
    )
    first = curves.plan(config, tmp_path / "out", {"one": ["optimizer.lr=0.01"]})["one"].train()
    assert (first.tokens, first.valid_tokens) == ([128, 256, 384, 512], [0, 256, 512])
    assert first.last == first.valid_loss[-1] != first.valid_loss[0]
    metrics = tmp_path / "out" / "one" / "metrics.jsonl"
    written = metrics.read_text()
    assert curves.plan(config, tmp_path / "out", {"one": ["optimizer.lr=0.01"]})["one"].train() == first
    assert metrics.read_text() == written, "with other times it was run again"
    with pytest.raises(SystemExit):
        curves.plan(config, tmp_path / "out", {"one": ["optimizer.lr=0.02"]})
    said = capsys.readouterr().err
    assert "one was made with other keys: optimizer.lr 0.01 -> 0.02  -> give another --out" in said
    curves.draw({"first": [first], "again": [first, first]}, "two", tmp_path / "two.svg")
    assert "<svg" in (tmp_path / "two.svg").read_text()


@pytest.mark.slow
def test_optimizers_are_compared(tmp_path: Path) -> None:
    """With the rate of the sweep that ended lowest, and a curve for each rule."""
    words = ("--small", "--rules", "adamw", "muon", "galore", "--output", "out", "--picture", "curves.svg")
    command = [sys.executable, str(FOLDER / "optimizers.py"), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()[-3:]]
    assert [row[0] for row in table] == ["adamw", "muon", "galore"]
    for rule, rate, loss, *_ in table:
        last = {
            folder.name: curves.read(folder).last for folder in (tmp_path / "out").glob(f"{rule}-*") if folder.is_dir()
        }
        assert len(last) == 2 and min(last, key=lambda name: last[name]) == f"{rule}-{rate}-1"
        assert float(loss) == pytest.approx(min(last.values()), abs=1e-4)
    assert "<svg" in (tmp_path / "curves.svg").read_text()


@pytest.mark.slow
def test_the_best_rate_of_each_width_is_named() -> None:
    words = ("--widths", "32", "64", "--steps", "4")
    command = [sys.executable, str(FOLDER / "width_transfer.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith(("| 32 |", "| 64 |"))]
    assert len(rows) == 4 and all(float(min(row[1:-1])) < 6 and row[-1].startswith("2^-") for row in rows)
    assert done.stdout.count("the best rate of width 32, width 64 ends") == 2


def test_rules_are_compared_with_the_packages_that_are_there() -> None:
    """torch's at least; another rule in a rule's place shows."""
    cases = {case.rule: case for case in optimizer_parity.CASES if case.package == "torch"}
    assert cases.keys() == {"muon", "adafactor"}
    assert all(optimizer_parity.difference(case, (24, 40)) < 1e-5 for case in cases.values())
    wrong = replace(cases["muon"], rule="reg")
    assert optimizer_parity.difference(wrong, (24, 40)) > 0.1


@pytest.mark.parametrize(
    ("tool", "words", "said"),
    [
        ("fp8_recipes.py", ("--steps", "50"), "optimizer.warmup_steps: 100 is not less than train.steps = 50"),
        ("megascale_recipe.py", ("--steps", "0"), "train.steps: 0: should be greater than 0"),
        ("megascale_recipe.py", ("--window", "-3"), "model.window: -3: should be"),
        ("optimizers.py", ("--small", "--seeds", "-1"), "train.seed: -1: should be"),
        ("sites.py", ("--steps", "10"), "optimizer.warmup_steps: 20 is not less than train.steps = 10"),
    ],
)
def test_a_run_with_mistakes_is_refused(tool: str, words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / tool), *words, "--output", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
