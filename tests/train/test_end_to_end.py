"""From text to a trained model, by the user's commands."""

from __future__ import annotations

import json
import random
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megascale.cli.main import main
from megascale.core.errors import Exit
from tests.jobs import Job, curve, job_config
from tests.runs import GPT

SIZES = GPT | {"num_layers": 2, "hidden_size": 64, "vocab_size": 257, "seq_length": 32}
RUN: dict[str, Any] = {
    "parallel__tp": 2,
    "batch__micro": 4,
    "train__precision": "fp32",
    "train__steps": 30,
    "train__log_every": 5,
    "train__eval_every": 10,
    "train__eval_steps": 2,
    "data__split": [0.8, 0.2],
    "checkpoint__every": 15,
    "observe__tensorboard": True,
    "optimizer__decay": "constant",  # so that a run of twenty steps is the beginning of one of thirty
}
TEXT = "the scale of a model is the number of its weights and the time of a step is what it costs"


@dataclass(frozen=True)
class Trained:
    """A run of 20 steps that was resumed to 30 steps."""

    config: Path
    folder: Path
    first: str  # output of the two parts
    second: str

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.lines() if "loss" in line]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("run")
    chance = random.Random(0)
    documents = [" ".join(chance.choices(TEXT.split(), k=60)) for _ in range(120)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    prefix = str(folder / "data" / "corpus")
    options = ["--output", prefix, "--tokenizer", "bytes", "--workers", "1"]
    assert main(["data", "prepare", str(folder / "corpus.jsonl"), *options]) == 0
    config = job_config(folder, SIZES, data__mock=False, data__train=prefix, **RUN)
    outputs = []
    for overrides in (["train.steps=20"], []):
        job = Job(config, *overrides)
        status, out, err = job.end()
        assert status == 0, err
        outputs.append(out)
    return Trained(config, job.folder, *outputs)


def test_training_and_validation_loss_fall(trained: Trained) -> None:
    steps = trained.steps()
    assert [line["step"] for line in steps] == [1, 5, 10, 15, 20, 25, 30]
    assert steps[0]["loss"] == pytest.approx(5.55, abs=0.15)  # the logarithm of 257
    assert steps[-1]["loss"] < 3.5
    valid = [(line["step"], line["valid_loss"]) for line in trained.lines() if "valid_loss" in line]
    assert [step for step, _ in valid] == [0, 10, 20, 30]
    assert valid[0][1] == pytest.approx(5.55, abs=0.15)
    assert valid[-1][1] < 3.5


def test_the_second_part_resumed_the_first(trained: Trained) -> None:
    assert "resumed" not in trained.first
    assert f"resumed from {trained.folder / 'checkpoints' / 'step-00000020'}: step 20" in trained.second
    saved = sorted(path.name for path in (trained.folder / "checkpoints").iterdir())
    assert saved == ["step-00000015", "step-00000020", "step-00000030"]


def test_metrics_are_consistent(trained: Trained) -> None:
    tokens = 8 * SIZES["seq_length"]
    for line in trained.steps():
        assert line["loss_tokens"] == line["step"] * tokens
        assert line["tokens_per_s"] * line["step_time_s"] == pytest.approx(tokens)
        assert line["loss_tokens_per_s"] == line["tokens_per_s"]
        assert 0 < line["mfu_causal"] < line["mfu_full"]
        assert line["lr"] == pytest.approx(1e-2 * min(line["step"] / 2, 1))
        assert line["peak_memory_bytes"] > 0
    ratios = [line["tflops_per_device"] / line["tokens_per_s"] for line in trained.steps()]
    assert ratios == pytest.approx([ratios[0]] * len(ratios))


def test_tensorboard_has_the_same_metrics(trained: Trained) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(trained.folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    names = {"train/": [n for n in trained.steps()[0] if n not in ("step", "communication")]}
    names["valid/"] = ["loss", "tokens"]
    for axis, traffic in trained.steps()[0]["communication"].items():
        names[f"train/communication/{axis}/"] = list(traffic)
    assert set(events.Tags()["scalars"]) == {prefix + name for prefix, tags in names.items() for name in tags}
    for tag, key in (("train/loss", "loss"), ("train/mfu_full", "mfu_full"), ("valid/loss", "valid_loss")):
        scalars = [(event.step, event.value) for event in events.Scalars(tag)]
        expected = [(line["step"], line[key]) for line in trained.lines() if key in line]
        assert scalars == [(step, pytest.approx(value, rel=1e-6)) for step, value in expected]


def test_without_a_terminal_the_output_is_plain_lines(trained: Trained) -> None:
    assert not {"\x1b", "\r"} & set(trained.first + trained.second)
    lines = trained.first.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step ")] == [
        "0/20", "1/20", "5/20", "10/20", "10/20", "15/20", "20/20", "20/20",
    ]  # fmt: skip
    assert sum("validation loss" in line for line in lines) == 3
    assert sum(line.startswith("saved ") for line in lines) == 2
    assert f"writing to {trained.folder}" in lines


@pytest.mark.slow
def test_the_written_configuration_repeats_the_run(trained: Trained) -> None:
    """Under another name, without an interruption, the curve is the same."""
    written = trained.folder / "config.toml"
    resolved = tomllib.loads(written.read_text())
    assert resolved["parallel"] | {"tp": 2, "pp": 1, "dp": 1, "schedule": "1f1b"} == resolved["parallel"]
    repeated = Job(written, "name=again")
    repeated.folder = trained.folder.parent / "again"
    status, _, err = repeated.end()
    assert status == 0, err
    assert curve(repeated.steps()) == curve(trained.steps())


def test_a_run_with_resume_never_refuses_an_existing_folder(trained: Trained) -> None:
    before = (trained.folder / "metrics.jsonl").read_bytes()
    status, out, err = Job(trained.config, "checkpoint.resume=never").end()
    assert status == Exit.CONFIG and out == ""
    assert "there is a run of this name already" in err and "another name" in err and "Traceback" not in err
    assert (trained.folder / "metrics.jsonl").read_bytes() == before
