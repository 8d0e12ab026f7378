"""Metrics of steps: all fields, averages since the last record, and MFU from the planner's FLOPs."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.catalog.accelerators import Peak
from megascale.checkpoint.format.state import Progress
from megascale.checkpoint.save.saver import SaveResult
from megascale.core.errors import CheckpointError
from megascale.device import Device
from megascale.plan.account.attended import count_scores_in, scores_per_token
from megascale.plan.account.flops import hardware_flops, token_flops
from megascale.record.metrics import EvaluationMetrics, MetricsRecord, StepMetrics, as_json
from megascale.record.metrics_writers import format_record
from megascale.record.recorder import Recorder
from megascale.train import reporter
from megascale.train.reporter import Reporter, open_writers
from megascale.train.run import StepResult
from megascale.train.saves import Saves
from tests.runs import GPT, LLAMA, config_of, settings

CPU = Device(torch.device("cpu"), "gloo")
FIELDS = {"step", "loss", "grad_norm", "lr", "loss_tokens", "step_time_s", "tokens_per_s", "loss_tokens_per_s",
          "tflops_per_device", "mfu_full", "mfu_causal", "hfu_full", "hfu_causal"}  # fmt: skip
"""Documented fields of a step's record."""


class Listener:
    """A writer that keeps records and messages."""

    name = "a listener"

    def __init__(self) -> None:
        self.records: list[MetricsRecord] = []
        self.messages: list[str] = []
        self.closed = False

    def write(self, record: MetricsRecord) -> None:
        self.records.append(record)

    def write_message(self, text: str) -> None:
        self.messages.append(text)

    def close(self) -> None:
        self.closed = True


def records(config: Any, peak: Peak | None, monkeypatch: pytest.MonkeyPatch) -> list[StepMetrics]:
    """Records after steps 1, 3 and 4. Step i takes i s and has 10 i loss tokens; 100 s pass between steps."""
    times: list[float] = [0.0]  # construction of the reporter
    for step in range(1, 5):
        times += [times[-1] + 100, times[-1] + 100 + step]
    monkeypatch.setattr(reporter.time, "perf_counter", iter(times).__next__)
    listener = Listener()
    metrics, progress = Reporter(config, CPU, peak, [listener], Recorder()), Progress()
    for step in range(1, 5):
        metrics.start_step()
        result = StepResult(loss=1 / step, grad_norm=2.0 * step, loss_tokens=10 * step, lr=step * 1e-3, totals={})
        metrics.end_step(result)
        progress.step, progress.samples, progress.tokens = step, 8 * step, progress.tokens + result.loss_tokens
        if step != 2:
            metrics.write_step(result, progress, {})
    return [record for record in listener.records if isinstance(record, StepMetrics)]


def test_mfu_counts_what_the_steps_have_attended_to(tmp_path: Path) -> None:
    """Steps differ in their documents; a record has the mean since the last one."""
    config = config_of(settings(GPT, tmp_path, data__attention_mask="document", train__recompute="selective"), tmp_path)
    listener, rows, tokens = Listener(), [[16], [4, 12], [1] * 16], 8 * 16
    metrics, flops = Reporter(config, CPU, Peak(1e9, "stated"), [listener], Recorder()), []
    for lengths in rows:
        full, causal = count_scores_in(8 * lengths, None)
        totals = {"scores full all": full, "scores causal all": causal}
        metrics.start_step()
        metrics.end_step(StepResult(1.0, 1.0, 100, 1e-3, totals))
        flops.append((token_flops(config.model, scores_per_token(config.model, lengths)), lengths))
    metrics.write_step(StepResult(1.0, 1.0, 100, 1e-3, {}), Progress(3), {})
    (record,) = listener.records
    assert isinstance(record, StepMetrics) and record.mfu_full is not None and record.hfu_causal is not None
    mean = sum(counted.full for counted, _ in flops) / 3
    assert record.mfu_full == pytest.approx(mean * record.tokens_per_s / 1e9, rel=1e-12)
    hardware = [hardware_flops(config, scores_per_token(config.model, lengths)).causal for _, lengths in flops]
    assert record.hfu_causal == pytest.approx(sum(hardware) / 3 * record.tokens_per_s / 1e9, rel=1e-12)
    assert record.tokens_per_s * record.step_time_s == pytest.approx(tokens)


def test_every_field_of_the_design_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for record in records(config_of(settings(GPT, tmp_path), tmp_path), Peak(1e9, "stated"), monkeypatch):
        assert as_json(record).keys() >= FIELDS


def test_times_are_averages_since_the_last_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = records(config_of(settings(GPT, tmp_path), tmp_path), None, monkeypatch)
    assert [r.step_time_s for r in (first, second, third)] == [1.0, 2.5, 4.0]
    assert [r.loss_tokens_per_s for r in (first, second, third)] == [10 / 1, (20 + 30) / 5, 40 / 4]
    assert [r.loss_tokens for r in (first, second, third)] == [10, 60, 100], (
        "loss tokens count from the start of the run"
    )
    assert [r.samples for r in (first, second, third)] == [8, 24, 32]


def test_throughput_and_mfu_are_of_processed_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masked tokens are computed too; the rate of loss tokens is reported beside."""
    config = config_of(settings(GPT, tmp_path), tmp_path)
    processed = config.batch.total * config.model.seq_length
    step_records = records(config, Peak(1e9, "stated"), monkeypatch)
    assert [record.tokens_per_s for record in step_records] == [processed / 1, 2 * processed / 5, processed / 4]
    for record in step_records:
        assert record.mfu_full == pytest.approx(token_flops(config.model).full * record.tokens_per_s / 1e9)
        assert record.loss_tokens_per_s < record.tokens_per_s
        assert f"{record.loss_tokens_per_s:.0f} in the loss)" in format_record(record, 4)
    unmasked = replace(step_records[0], loss_tokens_per_s=step_records[0].tokens_per_s)
    assert "in the loss" not in format_record(unmasked, 4)


def test_loss_norm_and_learning_rate_belong_to_the_record_s_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_records = records(config_of(settings(GPT, tmp_path), tmp_path), None, monkeypatch)
    assert [(r.step, r.loss, r.grad_norm, r.lr) for r in step_records] == [
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
def test_hfu_counts_activation_recomputation(recompute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(settings(LLAMA, tmp_path, train__recompute=recompute), tmp_path)
    flops, peak = hardware_flops(config), Peak(3e7, "stated")
    for record in records(config, peak, monkeypatch):
        assert record.hfu_full == pytest.approx(flops.full * record.tokens_per_s / peak.flops)
        assert record.hfu_causal == pytest.approx(flops.causal * record.tokens_per_s / peak.flops)
        assert record.mfu_full is not None and record.hfu_full is not None
        assert (record.hfu_full > record.mfu_full) == (recompute != "none")
        assert ("HFU" in format_record(record, 4)) == (recompute != "none")


def test_without_a_known_peak_there_is_no_mfu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for record in records(config_of(settings(GPT, tmp_path), tmp_path), None, monkeypatch):
        unknown = {"mfu_full", "mfu_causal", "hfu_full", "hfu_causal"}
        assert not unknown & as_json(record).keys() and as_json(record).keys() >= FIELDS - unknown


def test_every_writer_gets_every_record_and_message(tmp_path: Path) -> None:
    listeners = [Listener(), Listener()]
    reporter = Reporter(config_of(settings(GPT, tmp_path), tmp_path), CPU, None, listeners, Recorder())
    reporter.write_message("hello")
    reporter.write(EvaluationMetrics(3, 2.0, 10))
    reporter.close()
    for listener in listeners:
        assert (listener.messages, listener.records, listener.closed) == (
            ["hello"],
            [EvaluationMetrics(3, 2.0, 10)],
            True,
        )


@pytest.mark.parametrize("tensorboard", [True, False])
def test_tensorboard_is_written_only_with_observe_tensorboard(tensorboard: bool, tmp_path: Path) -> None:
    config = config_of(settings(GPT, tmp_path, observe__tensorboard=tensorboard), tmp_path)
    config.folder.mkdir(parents=True)
    for writer in open_writers(config.folder, config.train.steps, 0, tensorboard=config.observe.tensorboard):
        writer.close()
    assert (config.folder / "metrics.jsonl").exists()
    assert (config.folder / "tensorboard").exists() is tensorboard


class Broken(Listener):
    """A writer on a full disk."""

    name = "a disk"

    def write(self, record: MetricsRecord) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write_message(self, text: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def close(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_writer_that_fails_does_not_end_the_training(tmp_path: Path) -> None:
    listener = Listener()
    reporter = Reporter(config_of(settings(GPT, tmp_path), tmp_path), CPU, None, [Broken(), listener], Recorder())
    record = EvaluationMetrics(1, 2.0, 3)
    reporter.write(record)
    reporter.close()
    assert listener.records == [record] and listener.closed
    lost = "No space left on device"
    assert listener.messages == [
        f"WARNING: a disk cannot be written: {lost}; tried again with every record",
        f"WARNING: a disk lacks its last records: {lost}",
    ]


class Momentary(Listener):
    """A writer that fails for records 2 to 4."""

    name = "a disk"

    def write(self, record: MetricsRecord) -> None:
        super().write(record)
        if 2 <= len(self.records) <= 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_writer_that_fails_for_a_while_has_one_warning_and_one_message_at_its_end(tmp_path: Path) -> None:
    momentary, listener = Momentary(), Listener()
    reporter = Reporter(config_of(settings(GPT, tmp_path), tmp_path), CPU, None, [momentary, listener], Recorder())
    for step in range(6):
        reporter.write(EvaluationMetrics(step, 2.0, 3))
    assert len(listener.records) == 6
    assert listener.messages == [
        "WARNING: a disk cannot be written: No space left on device; tried again with every record",
        "a disk is written again",
    ]


def test_copies_in_memory_that_fail_for_a_while_have_one_warning(tmp_path: Path) -> None:
    listener = Listener()
    reporter = Reporter(config_of(settings(GPT, tmp_path), tmp_path), CPU, None, [listener], Recorder())
    lost = CheckpointError("rank 1: cannot write a copy to host-b: Connection refused")
    for step in range(1, 7):
        saved = SaveResult(None, step, 0.0, 0.0, 0.0, lost if 2 <= step <= 4 else None)
        Saves(reporter).report_copy(saved)
    assert listener.messages == [
        f"WARNING: no copy in memory of step 2: {lost}; tried again at every copy",
        "copies in memory are made again from step 5 on; 3 attempts failed before",
    ]
