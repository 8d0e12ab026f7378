"""From step results to records: speed and MFU since the last record, on rank 0."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megascale.account.flops import hardware_flops, mfu, token_flops
from megascale.account.peaks import Peak
from megascale.config.run import RunConfig
from megascale.device import Device
from megascale.parallel.eight_bit import Lost
from megascale.trace.record import Record, StepRecord
from megascale.trace.recorder import Recorder
from megascale.trace.writers import JsonLines, TensorBoard, Terminal, Writer
from megascale.train.casts import CastMonitor

if TYPE_CHECKING:
    from megascale.checkpoint.state import Progress
    from megascale.train.step import StepResult

METRICS = "metrics.jsonl"
"""The file of a run's records."""


class Reporter:
    """Times steps and writes records. On ranks without writers it only keeps time."""

    def __init__(
        self, config: RunConfig, device: Device, peak: Peak | None, writers: Sequence[Writer], recorder: Recorder
    ) -> None:
        self._flops, self._hardware = token_flops(config.model), hardware_flops(config)
        self._world = config.world
        self._device = device
        self._peak = peak
        self._writers = writers
        self._recorder = recorder
        self._casts = CastMonitor()
        self._step_tokens = config.batch.total * config.model.seq_length  # processed: not all count in the loss
        self._steps = self._loss_tokens = 0
        self._seconds = 0.0
        self._started = time.perf_counter()

    def remember(self, folder: Path) -> None:
        """Take up what a run's folder says of the steps until the one that it goes on from."""
        if (metrics := folder / METRICS).exists():
            self._casts.remember(metrics)

    def start_step(self) -> None:
        """Everything until `end_step` counts as the step's time."""
        self._started = time.perf_counter()

    def end_step(self, result: StepResult) -> None:
        self._seconds += time.perf_counter() - self._started
        self._steps += 1
        self._loss_tokens += result.tokens
        self._recorder.settle()

    def step(self, result: StepResult, progress: Progress, lost: Mapping[str, Lost]) -> None:
        """Write a record of the steps since the last one. `lost`: by the casts to 8 bits of this one."""
        speed, traffic = self._steps * self._step_tokens / self._seconds, self._recorder.take_traffic()
        peak = self._peak.flops * self._world if self._peak else None
        self.write(
            StepRecord(
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
                communication={axis: traffic[axis].mean(self._steps) for axis in sorted(traffic)},
                fp8={name: asdict(found) for name, found in lost.items()},
            )
        )
        for warning in self._casts.rises(lost):
            self.note(f"WARNING: step {progress.step}: {warning}")
        self._steps = self._loss_tokens = 0
        self._seconds = 0.0

    def write(self, record: Record) -> None:
        for failure in self._each(lambda writer: writer.write(record)):
            self.note(failure)

    def note(self, text: str) -> None:
        self._each(lambda writer: writer.note(text))

    def close(self) -> None:
        self._each(lambda writer: writer.close())

    def _each(self, action: Callable[[Writer], None]) -> list[str]:
        """Apply to all writers. A full disk, or a terminal that has gone, must not end the training: returns what to
        say of those that failed.
        """
        failures = []
        for writer in self._writers:
            try:
                action(writer)
            except OSError as error:
                failures.append(f"WARNING: {writer.name} cannot be written: {error.strerror or error}")
        return failures


def open_writers(config: RunConfig, resumed_step: int) -> list[Writer]:
    """The writers of rank 0, in the run's folder."""
    writers: list[Writer] = [
        JsonLines(config.folder / METRICS, resumed_step),
        Terminal(config.train.steps, resumed_step),
    ]
    if config.observe.tensorboard:
        writers.append(TensorBoard(config.folder / "tensorboard", resumed_step))
    return writers
