"""Entry of a rank: the summary at the start, and the exit status and message of errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.catalog.accelerators import Peak
from megascale.core.errors import Exit
from megascale.core.rank import Rank
from megascale.device import Device
from megascale.ops.library import Library
from megascale.plan.account.state_bytes import state_bytes
from megascale.train.peak_flops import find_peak_flops
from megascale.train.run_summary import run_summary
from tests.jobs import Job, job_config
from tests.runs import LLAMA, build_run, config_of, settings

SIZES = LLAMA | {"num_layers": 2}


def a_run(folder: Path, **changes: Any) -> Any:
    return build_run(Rank(0, 1, 0, "localhost"), config_of(settings(SIZES, folder, **changes), folder))


def on_gpu(run: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(Library, "missing_reason", lambda library: f"{library.package} is not installed")
    return replace(run, device=Device(torch.device("cuda", 0), "nccl"))


def test_the_summary_describes_the_run(tmp_path: Path) -> None:
    run = a_run(tmp_path, train__precision="bf16")
    text = run_summary(run, Peak(2.5e9, "a processor, measured by GEMM"))
    numel = sum(p.numel() for p in run.buffers.parameters(0).values())
    padding = 2 * (128 - 101) * 32  # padding rows of the two vocabulary matrices
    for part in (
        f"test: {(numel - padding) / 1e3:.2f}k parameters in bf16",
        "tp 1 x pp 1 (vpp 1, 1f1b) x dp 1 (zero 1) = 1 ranks",
        "a step is 8 x 16 tokens, 8 micro-batches a rank",
        "MFU is measured against 2.5 GFLOP/s a rank (a processor, measured by GEMM)",
        "norm torch, activation torch",
        f"writing to {tmp_path / 'test'}",
    ):
        assert part in text
    assert state_bytes(run.config, 0).total > 18 * (numel - padding)


def test_an_unknown_gpu_has_no_mfu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = on_gpu(a_run(tmp_path), "NVIDIA Tomorrow", monkeypatch)
    assert find_peak_flops(run) is None
    summary = run_summary(run, None)
    assert "MFU n/a: the peak of 'NVIDIA Tomorrow' is not known" in summary
    slow = "rope, norm, add_norm, activation, cross_entropy"
    assert f"\nWARNING: {slow}: slower than possible on this GPU; missing, any of: compile: triton is not" in summary


def with_code(folder: Path, code: str) -> dict[str, str]:
    """An environment in which every Python process runs `code` at its start."""
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": str(site)}


def test_a_users_mistake_ends_with_its_status_and_one_message(tmp_path: Path) -> None:
    """Tokens outside the vocabulary, which show only when samples are read, in data of another tool."""
    from megascale.cli.main import main

    (tmp_path / "corpus.txt").write_text("text " * 1000)
    prefix = str(tmp_path / "set")
    assert main(["data", "prepare", str(tmp_path / "corpus.txt"), "--output", prefix, "--tokenizer", "bytes"]) == 0
    (tmp_path / "set.json").unlink()
    config = job_config(tmp_path, SIZES | {"vocab_size": 64}, data__mock=False, data__train=prefix)
    status, _, err = Job(config).end()
    assert status == Exit.DATA, err
    assert "rank 0 of 1" in err and "has token 120; model.vocab_size is 64  -> " in err and "Traceback" not in err


def test_a_bug_ends_with_its_traceback(tmp_path: Path) -> None:
    code = "import megascale.catalog.decays as d\ndef f(*a): raise LookupError('a bug')\nd.constant = f\n"
    config = job_config(tmp_path, SIZES, optimizer__decay="constant", optimizer__warmup_steps=0)
    status, _, err = Job(config, env=with_code(tmp_path, code)).end()
    assert status == Exit.UNCLASSIFIED, err
    assert "Traceback" in err and "LookupError: a bug" in err
