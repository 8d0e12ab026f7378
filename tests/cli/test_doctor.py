"""`megascale doctor` as a user meets it: the real command on this machine, as if it had no C++ compiler, for what
torch.compile compiles takes its time; with one in the slow tests.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.catalog.backends import BACKENDS
from megascale.cli import doctor
from megascale.cli.doctor import configs_to_check
from megascale.cli.main import main
from megascale.core.errors import Exit
from megascale.device import Device
from tests.runs import GPT, settings, write_config


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run `doctor --json`; return the exit status and the JSON object."""
    status = main(["doctor", *arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def verdicts(report: dict[str, Any], precision: str, operation: str) -> dict[str, dict[str, Any]]:
    (examination,) = [one for one in report["operations"][precision] if one["operation"] == operation]
    return {verdict["backend"]: verdict for verdict in examination["verdicts"]}


def test_the_default_is_one_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    status = main(["doctor"])
    out, err = capfd.readouterr()
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) < 120
    for operation, registry in BACKENDS.items():
        if operation == "partial_attention":  # only of ranks that exchange keys
            assert not any(line.startswith(operation) for line in lines)
            continue
        (first,) = [number for number, line in enumerate(lines) if line.startswith(f"{operation:<18}")]
        rows = [line[18:].split() for line in lines[first : first + len(registry.names())]]
        assert [row[0] for row in rows] == registry.names()
        assert sum("used" in row for row in rows) == 1
    assert re.search(r"^norm +te +- +- +needs a GPU$", out, re.MULTILINE)
    assert re.search(r"^ +torch +used \d\.\de-0\d +used \d\.\de-0\d$", out, re.MULTILINE)
    assert "torch.compile cannot compile: no C++ compiler: there is no no-such-compiler" in out
    assert list(tmp_path.iterdir()) == []


def test_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    status, report = answer(capsys)
    assert (status, report["ok"]) == (0, True)
    machine = report["machine"]
    assert machine["memory_bytes"] > 1e8
    assert all(peak["flops"] > 1e8 for peak in machine["peaks"].values())
    assert {name: peak["measured"] for name, peak in machine["peaks"].items()} == {
        "fp32": "float32",
        "bf16": "bfloat16",
    }
    assert machine["peaks"].keys() == report["operations"].keys() == {"fp32", "bf16"}
    assert {"transformer_engine", "liger_kernel", "apex", "flash_attn"} <= machine["libraries"].keys()
    for precision, bound in (("fp32", 1e-5), ("bf16", 2e-2)):
        norms = verdicts(report, precision, "norm")
        assert norms["torch"]["chosen"] and 0 < norms["torch"]["difference"] < bound
        assert norms["compile"]["reason"] == "no C++ compiler: there is no no-such-compiler"
        assert not norms["compile"]["supported"] and norms["compile"]["difference"] is None


def test_a_gpus_peak_is_the_vendors_or_unknown_and_a_cpus_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_a_gpu, on_a_cpu = Device(torch.device("cuda"), "nccl"), Device(torch.device("cpu"), "gloo")
    for name, said in (("NVIDIA H100 80GB HBM3", "989.4 TFLOP/s (vendor's)"), ("NVIDIA Z9", "unknown")):
        monkeypatch.setattr(Device, "name", name)
        assert doctor._stated(doctor._peak(on_a_gpu, "bf16")) == said
    assert doctor._stated(doctor._peak(on_a_cpu, "fp8")).endswith("(measured, GEMMs in bfloat16)")


def test_a_users_configuration_is_checked_in_its_precision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(settings(GPT, tmp_path, backends__norm="torch"), tmp_path / "run.toml")
    status, report = answer(capsys, str(config), "model.activation=gelu_tanh")
    assert status == 0
    assert report["operations"].keys() == {"fp64"}
    assert verdicts(report, "fp64", "norm")["liger"]["reason"] == "has no float64"
    assert verdicts(report, "fp64", "activation")["liger"]["reason"] == "has no gelu_tanh"
    assert verdicts(report, "fp64", "norm")["torch"]["difference"] == 0


def test_data_need_not_be_there(tmp_path: Path) -> None:
    tree = settings(GPT, tmp_path, data__mock=False, data__train=str(tmp_path / "none"))
    config = write_config(tree, tmp_path / "run.toml")
    assert configs_to_check(str(config), []).keys() == {"fp64"}


def test_a_requested_backend_that_cannot_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "backends.norm=liger", "train.precision=bf16"]) == 1
    out = capsys.readouterr().out
    assert "backends.norm = 'liger' cannot serve: liger: needs a GPU  -> backends.norm=auto" in out
    assert "fp32" not in out


def test_without_a_compiler(capsys: pytest.CaptureFixture[str]) -> None:
    status, report = answer(capsys, "train.compile=true", "train.precision=fp32")
    assert (status, report["ok"]) == (1, False)
    problems = [one["problem"] for one in report["operations"]["fp32"] if one["problem"]]
    assert problems and all(problem.endswith("-> train.compile=false") for problem in problems)


def test_a_self_test_that_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("megascale.ops.selftest.difference", lambda operation, backend, setting: 0.25)
    assert main(["doctor"]) == 1
    assert re.search(r"^norm .*(\n .*)*\n +torch +FAILS 2.5e-01 +FAILS 2.5e-01$", capsys.readouterr().out, re.MULTILINE)


def test_mistakes_end_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "backends.norm=tee"]) == 2
    assert "backends.norm: 'tee' is not one of auto, te" in capsys.readouterr().err
    assert main(["doctor", str(tmp_path / "none.toml")]) == 2
    assert "there is no such file" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["train.steps=3"], ["train.steps=3", "model.num_heads=2"]])
def test_settings_need_no_file(words: list[str]) -> None:
    report = configs_to_check(*([words[0], words[1:]] if words else [None, []]))
    assert report.keys() == {"fp32", "bf16"}
    for config in report.values():
        assert config.train.steps == (3 if words else 10)
        assert config.model.num_heads == (2 if len(words) == 2 else 4)


def test_the_built_in_model_in_fp8(capsys: pytest.CaptureFixture[str]) -> None:
    status, report = answer(capsys, "train.precision=fp8", "fp8.recipe=rowwise")
    assert status == 0
    linear = verdicts(report, "fp8", "linear")
    assert linear["torch"]["chosen"] and 0 < linear["torch"]["difference"] < 3e-2
    assert main(["doctor", "train.precision=fp8", "fp8.recipe=blockwise"]) == 2
    assert "the built-in model  model.ffn_size" in capsys.readouterr().err


@pytest.mark.slow
def test_with_a_compiler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("CXX")
    status, report = answer(capsys)
    assert status == 0
    for precision, bound in (("fp32", 1e-5), ("bf16", 2e-2)):
        for operation in ("norm", "activation"):
            compiled = verdicts(report, precision, operation)["compile"]
            assert compiled["supported"] and not compiled["chosen"]
            assert 0 < compiled["difference"] < bound


def test_the_tolerance_of_nodes_is_given_without_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "nodes", "fault.check_tolerance=2"]) == Exit.CONFIG
    assert "fault.check_tolerance: 2: should be less than 1" in capsys.readouterr().err
    assert main(["doctor", "nodes", "fault.check_tolerance=0.2"]) == Exit.CONFIG
    assert "no launcher has started this process" in capsys.readouterr().err
