"""Where metrics go: a JSON-lines file, TensorBoard, and the console. Only rank 0 has writers."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from megascale.core.files import write_text
from megascale.core.units import format_count, format_duration
from megascale.trace.record import EvaluationRecord, Record, StepRecord, as_json


class Writer(Protocol):
    """Takes records as they come. `note` is a line for people that is no measurement."""

    def write(self, record: Record) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """metrics.jsonl. A resumed run continues the file: lines of steps after the checkpoint, which are trained again,
    go.
    """

    def __init__(self, path: Path, resumed_step: int) -> None:
        if path.exists():
            write_text(path, "".join(line for line in _whole_lines(path) if json.loads(line)["step"] <= resumed_step))
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115  closed by `close`

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(as_json(record)) + "\n")

    def note(self, text: str) -> None:
        return None

    def close(self) -> None:
        self._file.close()


def _whole_lines(path: Path) -> list[str]:
    """The lines of a file, without a last one that was cut off when the run was killed."""
    return [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]


class TensorBoard:
    """Event files, written by the `tensorboard` package itself: torch's wrapper takes seconds to import."""

    def __init__(self, folder: Path, resumed_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder))
        if resumed_step:  # the viewer drops what was written for later steps
            log = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=resumed_step + 1, session_log=log))

    def write(self, record: Record) -> None:
        scalars = as_json(record)
        step = scalars.pop("step")
        prefix = "valid" if isinstance(record, EvaluationRecord) else "train"
        values = [
            self._summary.Value(tag=f"{prefix}/{name.removeprefix('valid_')}", simple_value=value)
            for name, value in scalars.items()
        ]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def note(self, text: str) -> None:
        return None

    def close(self) -> None:
        self._writer.close()


class Terminal:
    """A progress bar with the last step's figures, and lines above it; plain lines where there is no terminal."""

    def __init__(self, steps: int, first: int) -> None:
        self._steps = steps
        self._console = Console(highlight=False)
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=24), TextColumn("{task.description}"))
        self._progress = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._task = self._progress.add_task("", total=steps, completed=first)
        self._progress.start()

    def write(self, record: Record) -> None:
        if isinstance(record, EvaluationRecord):
            self.note(f"step {record.step:,}/{self._steps:,}  validation loss {record.valid_loss:.4f}")
            return
        line = describe(record, self._steps)
        self._progress.update(self._task, completed=record.step, description=line)
        if not self._console.is_terminal:
            print(f"step {record.step:,}/{self._steps:,}  {line}", flush=True)

    def note(self, text: str) -> None:
        if self._console.is_terminal:
            self._progress.print(text, markup=False)
        else:
            print(text, flush=True)

    def close(self) -> None:
        self._progress.stop()


def describe(record: StepRecord, steps: int) -> str:
    """A step's figures in one line."""
    mfu = "MFU n/a" if record.mfu_full is None else f"MFU {record.mfu_full:.1%} full {record.mfu_causal:.1%} causal"
    left = format_duration((steps - record.step) * record.step_time_s)
    return (
        f"loss {record.loss:.4f}  norm {record.grad_norm:.2f}  lr {record.lr:.2e}  "
        f"{format_count(record.tokens_per_s)} tok/s  {mfu}  {left} left"
    )
