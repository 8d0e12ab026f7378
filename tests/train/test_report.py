"""Records of steps: every field, over the steps since the last record, MFU by the planner's FLOPs."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.account.flops import hardware_flops, token_flops
from megascale.account.peaks import Peak
from megascale.checkpoint.state import Progress
from megascale.device import Device
from megascale.trace.record import EvaluationRecord, Record, StepRecord, as_json
from megascale.trace.recorder import Recorder
from megascale.trace.writers import describe
from megascale.train import report
from megascale.train.report import Reporter, open_writers
from megascale.train.step import StepResult
from tests.runs import GPT, LLAMA, config_of, settings

CPU = Device(torch.device("cpu"), "gloo")
FIELDS = {"step", "loss", "grad_norm", "lr", "loss_tokens", "step_time_s", "tokens_per_s", "loss_tokens_per_s",
          "tflops_per_device", "mfu_full", "mfu_causal", "hfu_full", "hfu_causal"}  # fmt: skip
"""What the design promises in each line of a step."""


class Listener:
    """A writer that keeps what it is given."""

    name = "a listener"

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.notes: list[str] = []
        self.closed = False

    def write(self, record: Record) -> None:
        self.records.append(record)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def close(self) -> None:
        self.closed = True


def records(config: Any, peak: Peak | None, monkeypatch: pytest.MonkeyPatch) -> list[StepRecord]:
    """Records after steps 1, 3 and 4 of steps that take 1, 2, 3 and 4 seconds, with 100 seconds between them; in step i
    10 i of the tokens count in the loss.
    """
    looks: list[float] = [0.0]  # when the reporter is made
    for step in range(1, 5):
        looks += [looks[-1] + 100, looks[-1] + 100 + step]
    monkeypatch.setattr(report.time, "perf_counter", iter(looks).__next__)
    listener = Listener()
    reporter, progress = Reporter(config, CPU, peak, [listener], Recorder()), Progress()
    for step in range(1, 5):
        reporter.start_step()
        result = StepResult(loss=1 / step, grad_norm=2.0 * step, tokens=10 * step, lr=step * 1e-3, stop=False)
        reporter.end_step(result)
        progress.step, progress.samples, progress.tokens = step, 8 * step, progress.tokens + result.tokens
        if step != 2:
            reporter.step(result, progress, {})
    return [record for record in listener.records if isinstance(record, StepRecord)]


def test_every_field_of_the_design_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for record in records(config_of(settings(GPT, tmp_path), tmp_path), Peak(1e9, "stated"), monkeypatch):
        assert as_json(record).keys() >= FIELDS


def test_times_are_of_the_steps_since_the_last_record_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = records(config_of(settings(GPT, tmp_path), tmp_path), None, monkeypatch)
    assert [r.step_time_s for r in (first, second, third)] == [1.0, 2.5, 4.0]
    assert [r.loss_tokens_per_s for r in (first, second, third)] == [10 / 1, (20 + 30) / 5, 40 / 4]
    assert [r.loss_tokens for r in (first, second, third)] == [10, 60, 100], "loss tokens are of the whole run"
    assert [r.samples for r in (first, second, third)] == [8, 24, 32]


def test_throughput_and_mfu_are_of_processed_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the loss mask leaves out was computed all the same; it is told beside."""
    config = config_of(settings(GPT, tmp_path), tmp_path)
    processed = config.batch.total * config.model.seq_length
    found = records(config, Peak(1e9, "stated"), monkeypatch)
    assert [record.tokens_per_s for record in found] == [processed / 1, 2 * processed / 5, processed / 4]
    for record in found:
        assert record.mfu_full == pytest.approx(token_flops(config.model).full * record.tokens_per_s / 1e9)
        assert record.loss_tokens_per_s < record.tokens_per_s
        assert f"{record.loss_tokens_per_s:.0f} in the loss)" in describe(record, 4)
    even = replace(found[0], loss_tokens_per_s=found[0].tokens_per_s)
    assert "in the loss" not in describe(even, 4)


def test_loss_norm_and_rate_are_of_the_records_own_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = records(config_of(settings(GPT, tmp_path), tmp_path), None, monkeypatch)
    assert [(r.step, r.loss, r.grad_norm, r.lr) for r in found] == [
        (step, 1 / step, 2.0 * step, step * 1e-3) for step in (1, 3, 4)
    ]


@pytest.mark.parametrize("dp", [1, 4])
def test_mfu_is_the_planners_flops_over_all_peaks(dp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(settings(LLAMA, tmp_path, parallel__dp=dp), tmp_path)
    flops, peak = token_flops(config.model), Peak(3e7, "stated")
    assert flops.causal < flops.full
    for record in records(config, peak, monkeypatch):
        assert record.tflops_per_device == pytest.approx(flops.full * record.tokens_per_s / dp / 1e12)
        assert record.mfu_full == pytest.approx(flops.full * record.tokens_per_s / (dp * peak.flops))
        assert record.mfu_causal == pytest.approx(flops.causal * record.tokens_per_s / (dp * peak.flops))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_hfu_counts_what_is_computed_again(recompute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(settings(LLAMA, tmp_path, train__recompute=recompute), tmp_path)
    flops, peak = hardware_flops(config), Peak(3e7, "stated")
    for record in records(config, peak, monkeypatch):
        assert record.hfu_full == pytest.approx(flops.full * record.tokens_per_s / peak.flops)
        assert record.hfu_causal == pytest.approx(flops.causal * record.tokens_per_s / peak.flops)
        assert record.mfu_full is not None and record.hfu_full is not None
        assert (record.hfu_full > record.mfu_full) == (recompute != "none")
        assert ("HFU" in describe(record, 4)) == (recompute != "none")


def test_without_a_known_peak_there_is_no_mfu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for record in records(config_of(settings(GPT, tmp_path), tmp_path), None, monkeypatch):
        unknown = {"mfu_full", "mfu_causal", "hfu_full", "hfu_causal"}
        assert not unknown & as_json(record).keys() and as_json(record).keys() >= FIELDS - unknown


def test_every_writer_hears_everything(tmp_path: Path) -> None:
    listeners = [Listener(), Listener()]
    reporter = Reporter(config_of(settings(GPT, tmp_path), tmp_path), CPU, None, listeners, Recorder())
    reporter.note("hello")
    reporter.write(EvaluationRecord(3, 2.0, 10))
    reporter.close()
    for listener in listeners:
        assert (listener.notes, listener.records, listener.closed) == (["hello"], [EvaluationRecord(3, 2.0, 10)], True)


@pytest.mark.parametrize("tensorboard", [True, False])
def test_tensorboard_is_written_only_if_asked_for(tensorboard: bool, tmp_path: Path) -> None:
    config = config_of(settings(GPT, tmp_path, observe__tensorboard=tensorboard), tmp_path)
    config.folder.mkdir(parents=True)
    for writer in open_writers(config, 0):
        writer.close()
    assert (config.folder / "metrics.jsonl").exists()
    assert (config.folder / "tensorboard").exists() is tensorboard


class Broken(Listener):
    """A writer on a full disk."""

    def write(self, record: Record) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def note(self, text: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def close(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_writer_that_fails_does_not_end_the_training(tmp_path: Path) -> None:
    listener = Listener()
    reporter = Reporter(config_of(settings(GPT, tmp_path), tmp_path), CPU, None, [Broken(), listener], Recorder())
    record = EvaluationRecord(1, 2.0, 3)
    reporter.write(record)
    reporter.close()
    assert listener.records == [record] and listener.closed
    assert listener.notes == ["WARNING: a listener cannot be written: No space left on device"]
