"""`megascale plan batch`: tables, JSON, keys that can be used, and runs that measured a noise scale."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megascale.cli.main import main
from megascale.cli.plan_batch import LOSSES, TOKENS
from megascale.config.loading import load_config
from tests.runs import GPT, settings, write_config

JOB = ["plan", "batch", "configs/gpu/llama3-8b.toml", "--gpus", "64", "--tokens", "300e9"]


def test_the_critical_batch_the_ramp_up_and_the_trade_off(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(JOB) == 0
    out = capsys.readouterr().out
    assert "llama3-8b: 8.03B parameters, 300.00B tokens in sequences of 8,192" in out
    assert "tokens, by the law of Kaplan et al." in out
    assert "128 (this configuration)" in out and "S / S_min" in out


def test_the_keys_make_a_legal_configuration_of_the_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(JOB) == 0
    keys = [line.replace(" ", "") for line in capsys.readouterr().out.splitlines()[-3:]]
    assert [key.partition("=")[0] for key in keys] == ["batch.global", "batch.rampup", "train.steps"]
    overrides = ["configs/gpu/llama3-8b.toml", "--gpus", "64", "--json", *keys]
    load_config(JOB[2], keys, 64, skip_sections=["data"])
    assert main(["plan", "batch", *overrides]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["tokens"] == pytest.approx(300e9, rel=1e-4)


def test_json_has_what_the_tables_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, "--json", "--loss", "2.0"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["critical_tokens"] == pytest.approx(2e8 / 2 ** (1 / 0.21))
    own = next(row for row in plan["trade_off"] if row["global"] == 128)
    assert own["tokens"] == pytest.approx(300e9)
    assert own["steps"] == pytest.approx(300e9 / 128 / 8192)
    assert (own["steps_over_least"] - 1) * (own["tokens_over_least"] - 1) == pytest.approx(1)


def test_a_run_that_measured_is_the_source(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = write_config(settings(GPT, tmp_path), run / "config.toml")
    job = ["plan", "batch", str(config), "--tokens", "6400", "--run", str(run)]
    record = {"step": 9, "loss": 3.0, "loss_tokens": 640, "noise_scale": 160.0}
    (run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    assert main([*job, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["critical_tokens"] == pytest.approx(160 * 10**0.47)
    assert main(job) == 0
    assert "from the noise scale of" in capsys.readouterr().out


def test_a_folder_without_a_noise_scale_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*JOB, "--run", str(tmp_path)]) == 2
    assert "not a run's folder: it has no config.toml" in capsys.readouterr().err
    (tmp_path / "config.toml").touch()
    assert main([*JOB, "--run", str(tmp_path)]) == 3
    assert "metrics.jsonl cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "legal"),
    [("--tokens", "1e30", "1 to 1e+15"), ("--tokens", "1e-300", "1 to 1e+15"), ("--loss", "0.0001", "0.3 to 20"),
     ("--loss", "1e300", "0.3 to 20")],
)  # fmt: skip
def test_tokens_and_losses_of_no_training_are_refused(
    option: str, value: str, legal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*JOB, option, value])
    assert ended.value.code == 2
    assert f"argument {option}: '{value}' is not from {legal}: " in capsys.readouterr().err


@pytest.mark.parametrize("loss", LOSSES)
def test_the_farthest_tokens_and_losses_have_a_plan(loss: float, capsys: pytest.CaptureFixture[str]) -> None:
    for tokens in TOKENS:
        assert main([*JOB, "--tokens", str(tokens), "--loss", str(loss), "--json"]) == 0
        keys = json.loads(capsys.readouterr().out)["keys"]
        assert keys["train.steps"] >= 1
    load_config(JOB[2], [f"{name}={value}" for name, value in keys.items()], 64, skip_sections=["data"])
