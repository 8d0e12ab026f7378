"""The events in the log of a recorder of this process."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from megascale.record.events import COMPUTE, HOST_AXIS, Event, follow_channels, single_wait
from megascale.record.log import RankLog
from megascale.record.log_reader import Drained, LogReader
from megascale.record.recorder import Recorder

NUMBERS = ("step", "chunk", "microbatch", "sequence", "bytes", "peer", "layer", "stage")

_forgotten: WeakKeyDictionary[RankLog, int] = WeakKeyDictionary()


def drain(recorder: Recorder) -> tuple[Drained, list[str]]:
    """Return all complete events and steps in a recorder's log, and the log's texts."""
    recorder.resolve_marks()
    reader = LogReader(recorder.log.memory)
    return reader.drain(), reader.texts()


def forget_events(recorder: Recorder) -> None:
    """Let `recorded_events` begin with the next event."""
    _forgotten[recorder.log] = recorder.log._count


def recorded_events(recorder: Recorder) -> list[Event]:
    """Return the complete actions and communications in a recorder's log, in the order of their issue. Of the waits for
    a communication the log has the sum: here it is one wait until its end.
    """
    drained, texts = drain(recorder)
    events = []
    for row in drained.events[drained.events["number"] > _forgotten.get(recorder.log, 0)]:
        text = {name: texts[row[name]] for name in ("axis", "name", "part", "direction")}
        same = {name: int(row[name]) for name in NUMBERS}
        times = {name: float(row[name]) for name in ("issue", "start", "end")}
        exposed = float(row["exposed"]) if text["axis"] != COMPUTE else 0.0
        waits = single_wait(times["issue"], times["end"], exposed)
        if text["axis"] != HOST_AXIS:
            events.append(Event(**text, **same, **times, group=texts[row["group_name"]], waits=waits))
    return follow_channels(events)
