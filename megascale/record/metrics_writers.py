"""Writers of metrics: `JsonLinesWriter`, `TensorBoardWriter` and `TerminalWriter`. Only rank 0 has writers."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from megascale.core.append_file import AppendFile
from megascale.core.files import exists, write_text
from megascale.core.units import format_count, format_duration
from megascale.record.metrics import (
    Alert,
    EvaluationMetrics,
    MetricsRecord,
    MixtureUpdate,
    RebuiltStages,
    SharpnessMetrics,
    StepMetrics,
    as_json,
    scalars,
)
from megascale.record.tensorboard_file import TensorBoardFile


class MetricsWriter(Protocol):
    """A destination of metrics records, and of messages for people, ignored by default. `name` is shown in messages.

    Methods raise OSError. A file's writer keeps the records that cannot be written, and tries again with the next.
    """

    name: str

    def write(self, record: MetricsRecord) -> None: ...

    def write_message(self, text: str) -> None:
        return None

    def close(self) -> None: ...


class JsonLinesWriter(MetricsWriter):
    """Writer of metrics.jsonl. A resumed run continues the file after removing the lines of steps after the checkpoint;
    a new run (`resumed_step` 0) truncates the file.
    """

    name = "metrics.jsonl"

    def __init__(self, path: Path, resumed_step: int) -> None:
        kept = list[str]()
        if resumed_step and exists(path):  # without lines that a crash left truncated or corrupt
            with open(path, encoding="utf-8", errors="replace") as file:
                kept = [line for line in file if line.endswith("\n") and _step(line) <= resumed_step]
        write_text(path, "".join(kept))
        self._file = AppendFile(path, in_run=True)

    def write(self, record: MetricsRecord) -> None:
        self._file.append(json.dumps(as_json(record)).encode() + b"\n")

    def close(self) -> None:
        self._file.flush()


def _step(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf


_TENSORBOARD_PREFIXES = {
    StepMetrics: "train", EvaluationMetrics: "valid", SharpnessMetrics: "valid", Alert: "alert", MixtureUpdate: "data",
    RebuiltStages: "start",
}  # fmt: skip


class TensorBoardWriter(MetricsWriter):
    """Writer of a TensorBoard event file."""

    name = "TensorBoard"

    def __init__(self, folder: Path, resumed_step: int) -> None:
        self._file = TensorBoardFile(folder, resumed_step + 1 if resumed_step else 0)

    def write(self, record: MetricsRecord) -> None:
        values = scalars(record)
        step, prefix = int(values.pop("step")), _TENSORBOARD_PREFIXES[type(record)]
        self._file.write(step, {f"{prefix}/{name.removeprefix('valid_')}": value for name, value in values.items()})

    def close(self) -> None:
        self._file.flush()


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Redirect output to /dev/null; rich would end the process."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class TerminalWriter:
    """Writer of a line per record, above a progress bar if the output is a terminal. Silent after a broken pipe."""

    name = "the terminal"

    def __init__(self, steps: int, first: int, console: Console | None = None) -> None:
        self._steps = steps
        self._console = console or _Console()
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
        self._progress = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._task = self._progress.add_task("", total=steps, completed=first)
        self._progress.start()

    def write(self, record: MetricsRecord) -> None:
        self.write_message(format_record(record, self._steps))
        if isinstance(record, StepMetrics):
            self._progress.update(self._task, completed=record.step, description=time_left(record, self._steps))

    def write_message(self, text: str) -> None:
        # no wrapping: users copy paths and commands
        self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()


def format_record(record: MetricsRecord, steps: int) -> str:
    """Format a record as a line. `steps`: steps of the whole run."""
    if isinstance(record, Alert | RebuiltStages):
        return f"WARNING: step {record.step}: {record}"
    step = f"step {record.step:,}/{steps:,}"
    if isinstance(record, MixtureUpdate):
        return f"{step}  {record}"
    if isinstance(record, EvaluationMetrics):
        averaged = "" if record.averaged_loss is None else f"  of averaged weights {record.averaged_loss:.4f}"
        return f"{step}  validation loss {record.valid_loss:.4f}{averaged}"
    if isinstance(record, SharpnessMetrics):
        return f"{step}  sharpness of logits {record.logit_sharpness:.3g}%"
    mfu = "MFU n/a" if record.mfu_full is None else f"MFU {record.mfu_full:.1%} full {record.mfu_causal:.1%} causal"
    speed = f"{format_count(record.tokens_per_s)} tok/s"
    if record.loss_tokens_per_s != record.tokens_per_s:
        speed += f" ({format_count(record.loss_tokens_per_s)} in the loss)"
    if record.hfu_full != record.mfu_full:  # with activation recomputation
        mfu += f"  HFU {record.hfu_full:.1%} full {record.hfu_causal:.1%} causal"
    return (
        f"{step}  loss {record.loss:.4f}  norm {record.grad_norm:.2f}  lr {record.lr:.2e}  "
        f"{speed}  {mfu}  {time_left(record, steps)}"
    )


def time_left(record: StepMetrics, steps: int) -> str:
    """Format the remaining time of the run at a record's step time."""
    return f"{format_duration((steps - record.step) * record.step_time_s)} left"
