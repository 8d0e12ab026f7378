"""Metrics of steps: throughput, MFU and communication since the last record, written on rank 0."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megascale.catalog.accelerators import Peak
from megascale.config.run import RunConfig
from megascale.core.outages import Outages
from megascale.core.run_folder import METRICS_FILE
from megascale.layout.parts.part import Scores
from megascale.plan.account.flops import hardware_flops, mfu, model_flops
from megascale.record.metrics import MetricsRecord, StepMetrics
from megascale.record.recorder import Recorder
from megascale.train.batch_totals import per_token, take_scores

if TYPE_CHECKING:
    from megascale.checkpoint.format.state import Progress
    from megascale.device import Device
    from megascale.parallel.fp8_state import CastStats
    from megascale.record.metrics_writers import MetricsWriter
    from megascale.train.fp8_casts import CastMonitor
    from megascale.train.run import StepResult


class Reporter:
    """Measures step times and writes metrics; `writers` is empty on all ranks except 0. `outages`: failures that
    the loop reports.
    """

    def __init__(
        self, config: RunConfig, device: Device, peak: Peak | None, writers: Sequence[MetricsWriter], recorder: Recorder
    ) -> None:
        self._flops, self._hardware = model_flops(config), hardware_flops(config)
        self._config = config
        self._world = config.world_size
        self._device = device
        self._peak = peak
        self._writers = writers
        self._recorder = recorder
        self._cast_monitor: CastMonitor | None = None
        if config.train.quantizes:
            from megascale.train.fp8_casts import CastMonitor

            self._cast_monitor = CastMonitor.of(config.fp8)
        self.outages = Outages()
        self._step_tokens = config.batch.total * config.model.seq_length  # processed tokens; the loss may mask some
        self._steps = self._tokens = 0
        self._loss_tokens = 0.0
        self._scores: list[Scores] = []  # of each step, with a document mask
        self._seconds = 0.0
        self._started = time.perf_counter()

    def load_history(self, folder: Path) -> None:
        """Restore the FP8 cast monitor of a resumed run from the metrics file."""
        if self._cast_monitor is not None:
            self._cast_monitor.load_history(folder / METRICS_FILE)

    def start_step(self) -> None:
        """Start the step's clock, which `end_step` stops."""
        self._started = time.perf_counter()

    def end_step(self, result: StepResult) -> None:
        seconds = time.perf_counter() - self._started
        totals = {"loss_tokens": result.loss_tokens}
        if result.loss_tokens:
            totals |= {"loss": result.loss, "grad_norm": result.grad_norm}
        self._recorder.log.end_step(seconds, totals)
        self._seconds += seconds
        self._steps += 1
        self._loss_tokens += result.loss_tokens
        samples = result.totals.get("samples")  # with a batch ramp-up
        self._tokens += self._step_tokens if samples is None else int(samples) * self._config.model.seq_length
        if scores := take_scores(self._config.model, result.totals):
            self._scores.append(scores)
        self._recorder.resolve_marks()

    def write_step(
        self,
        result: StepResult,
        progress: Progress,
        cast_stats: Mapping[str, CastStats],
        noise_scale: float | None = None,
        kept_updates: float | None = None,
        **features: dict[str, dict[str, float]],
    ) -> None:
        """Write metrics over the steps since the last record. `cast_stats`: FP8 casts of this step, by tensor.
        `noise_scale`, `kept_updates`: if they are measured. `features`: `experts`, `mtp` and `exits` of `StepMetrics`.
        """
        if self._scores:
            scores = per_token(self._scores, self._tokens)
            self._flops = model_flops(self._config, scores)
            self._hardware = hardware_flops(self._config, scores)
        speed, traffic = self._tokens / self._seconds, self._recorder.take_traffic()
        peak = self._peak.flops * self._world if self._peak else None
        self.write(
            StepMetrics(
                step=progress.step,
                loss=result.loss,
                grad_norm=result.grad_norm,
                lr=result.lr,
                samples=progress.samples,
                loss_tokens=progress.tokens,
                step_time_s=self._seconds / self._steps,
                tokens_per_s=speed,
                loss_tokens_per_s=self._loss_tokens / self._seconds,
                tflops_per_device=self._flops.full * speed / self._world / 1e12,
                mfu_full=mfu(self._flops.full, speed, peak) if peak else None,
                mfu_causal=mfu(self._flops.causal, speed, peak) if peak else None,
                hfu_full=mfu(self._hardware.full, speed, peak) if peak else None,
                hfu_causal=mfu(self._hardware.causal, speed, peak) if peak else None,
                peak_memory_bytes=self._device.peak_memory(),
                communication={axis: traffic[axis].per_step(self._steps) for axis in sorted(traffic)},
                noise_scale=noise_scale,
                kept_updates=kept_updates,
                fp8={name: asdict(stats) for name, stats in cast_stats.items()},
                **features,
            )
        )
        for alert in self._cast_monitor.update(progress.step, cast_stats) if self._cast_monitor is not None else ():
            self.write(alert)
        self._steps = self._tokens = 0
        self._loss_tokens = 0.0
        self._scores.clear()
        self._seconds = 0.0

    def write(self, record: MetricsRecord) -> None:
        """Write a record. A full disk or a closed terminal must not end training: a message at the first failure of a
        writer, and one when it works again.
        """
        for writer in self._writers:
            try:
                writer.write(record)
            except OSError as error:
                if self.outages.begins(writer.name):
                    reason = error.strerror or error
                    text = f"WARNING: {writer.name} cannot be written: {reason}; tried again with every record"
                    self.write_message(text)
            else:
                if self.outages.ends(writer.name):
                    self.write_message(f"{writer.name} is written again")

    def write_message(self, text: str) -> None:
        for writer in self._writers:
            with contextlib.suppress(OSError):
                writer.write_message(text)

    def close(self) -> None:
        for writer in self._writers:
            try:
                writer.close()
            except OSError as error:
                self.write_message(f"WARNING: {writer.name} lacks its last records: {error.strerror or error}")


def open_writers(folder: Path, steps: int, resumed_step: int, *, tensorboard: bool) -> list[MetricsWriter]:
    """Open rank 0's writers in the folder of a run of `steps`: metrics file, terminal and TensorBoard."""
    from megascale.record.metrics_writers import JsonLinesWriter, TensorBoardWriter, TerminalWriter

    writers: list[MetricsWriter] = [
        JsonLinesWriter(folder / METRICS_FILE, resumed_step),
        TerminalWriter(steps, resumed_step),
    ]
    if tensorboard:
        writers.append(TensorBoardWriter(folder / "tensorboard", resumed_step))
    return writers
