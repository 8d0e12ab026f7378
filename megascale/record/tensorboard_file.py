"""A TensorBoard event file, with the `tensorboard` package's records: torch's wrapper takes seconds to import, and the
thread of `tensorboard`'s own writer ends for good at the first error.
"""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megascale.core.append_file import AppendFile


class TensorBoardFile:
    """A new file of scalars in `folder`. The viewer drops what earlier files have of the steps from `first_step` on.

    Methods raise OSError; records that cannot be written are kept, and tried again with the next.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary, self._record_writer = Event, Summary, RecordWriter
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time_ns()
        self._file = AppendFile(folder / f"events.out.tfevents.{now}.{socket.gethostname()}.{os.getpid()}")
        self._append(Event(wall_time=now / 1e9, file_version="brain.Event:2"))
        log = SessionLog(status=SessionLog.START)
        self._append(Event(wall_time=time.time(), step=first_step, session_log=log))

    def _append(self, event: Any) -> None:
        record = io.BytesIO()
        self._record_writer(record).write(event.SerializeToString())
        self._file.append(record.getvalue())

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step, by tag."""
        scalars = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._append(self._event(wall_time=time.time(), step=step, summary=self._summary(value=scalars)))

    def flush(self) -> None:
        """Write what could not be written before."""
        self._file.flush()
