"""Where metrics go: a JSON-lines file, TensorBoard, and the console. Only rank 0 has writers."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from megascale.core.files import write_text
from megascale.core.units import format_count, format_duration
from megascale.trace.record import EvaluationRecord, Record, StepRecord, as_json, scalars


class Writer(Protocol):
    """Takes records as they come, and with `note` a line for people, by default nowhere. `name` is for people."""

    name: str

    def write(self, record: Record) -> None: ...

    def note(self, text: str) -> None:
        return None

    def close(self) -> None: ...


class JsonLines(Writer):
    """metrics.jsonl. A resumed run continues the file: lines of steps after the checkpoint, which are trained again,
    go. A run that starts anew (`resumed_step` 0) starts the file anew.
    """

    name = "metrics.jsonl"

    def __init__(self, path: Path, resumed_step: int) -> None:
        if path.exists():
            write_text(path, "".join(_lines_until(path, resumed_step) if resumed_step else []))
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115  closed by `close`

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(as_json(record)) + "\n")

    def close(self) -> None:
        self._file.close()


def _lines_until(path: Path, step: int) -> list[str]:
    """The lines of a metrics file up to a step, without what was cut off or spoilt when the run or its host died."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return [line for line in file if line.endswith("\n") and _step(line) <= step]


def _step(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf


FLUSH_SECONDS = 10
"""How long a figure may wait before it is in the event file."""


class TensorBoard(Writer):
    """Event files, written by the `tensorboard` package itself: torch's wrapper takes seconds to import."""

    name = "TensorBoard"

    def __init__(self, folder: Path, resumed_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder), flush_secs=FLUSH_SECONDS)
        # the viewer drops what an earlier process wrote for these steps
        log, trained = SessionLog(status=SessionLog.START), resumed_step + 1 if resumed_step else 0
        self._writer.add_event(Event(wall_time=time.time(), step=trained, session_log=log))

    def write(self, record: Record) -> None:
        found = scalars(record)
        step = int(found.pop("step"))
        prefix = "valid" if isinstance(record, EvaluationRecord) else "train"
        values = [
            self._summary.Value(tag=f"{prefix}/{name.removeprefix('valid_')}", simple_value=value)
            for name, value in found.items()
        ]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        self._writer.close()


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Write to nowhere; rich would end the process."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Terminal:
    """A line for each record, above a progress bar where there is a terminal. Silent once its reader has gone."""

    name = "the terminal"

    def __init__(self, steps: int, first: int, console: Console | None = None) -> None:
        self._steps = steps
        self._console = console or _Console()
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
        self._progress = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._task = self._progress.add_task("", total=steps, completed=first)
        self._progress.start()

    def write(self, record: Record) -> None:
        self.note(describe(record, self._steps))
        if isinstance(record, StepRecord):
            self._progress.update(self._task, completed=record.step, description=time_left(record, self._steps))

    def note(self, text: str) -> None:
        # a wrapped line would break paths and commands that are to be copied
        self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()


def describe(record: Record, steps: int) -> str:
    """A record in one line. `steps`: of the whole run."""
    place = f"step {record.step:,}/{steps:,}"
    if isinstance(record, EvaluationRecord):
        return f"{place}  validation loss {record.valid_loss:.4f}"
    mfu = "MFU n/a" if record.mfu_full is None else f"MFU {record.mfu_full:.1%} full {record.mfu_causal:.1%} causal"
    speed = f"{format_count(record.tokens_per_s)} tok/s"
    if record.loss_tokens_per_s != record.tokens_per_s:
        speed += f" ({format_count(record.loss_tokens_per_s)} in the loss)"
    if record.hfu_full != record.mfu_full:  # something is recomputed
        mfu += f"  HFU {record.hfu_full:.1%} full {record.hfu_causal:.1%} causal"
    return (
        f"{place}  loss {record.loss:.4f}  norm {record.grad_norm:.2f}  lr {record.lr:.2e}  "
        f"{speed}  {mfu}  {time_left(record, steps)}"
    )


def time_left(record: StepRecord, steps: int) -> str:
    """How long the rest of the run takes at the speed of a record."""
    return f"{format_duration((steps - record.step) * record.step_time_s)} left"
