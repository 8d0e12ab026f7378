"""Hand-written events of a small job, on a common clock or on clocks that differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from megascale.record.events import COMPUTE, Event, RankEvents
from megascale.record.label import FORWARD, Label, LabelLike

STEPS = (1, 2, 3)
MICRO_BATCHES = 2


def job(steps: Iterable[int] = STEPS) -> list[RankEvents]:
    """The events of pp = 2, tp = 2, on the clock of rank 0. A step takes a second."""
    return [_rank(rank, steps) for rank in range(4)]


def _rank(rank: int, steps: Iterable[int]) -> RankEvents:
    pp, tp = divmod(rank, 2)
    events = []
    for step in steps:
        for m in range(MICRO_BATCHES):
            sent = 1000.0 + step + 0.1 * m + 0.040
            events += [_message(rank, step, m, sent)]
            events += _forward(step, m, sent - 0.040 if pp == 0 else sent + 0.010)
        late = 1000.5 + step  # two reductions that overlap without nesting; the first is waited for in two spans
        waits = ((late + 0.010, late + 0.020), (late + 0.025, late + 0.030))
        events += [
            _communication("dp", "reduce_scatter", "chunk 0", step, late, late + 0.030, "dp", 1 << 20, waits=waits),
            _communication("dp", "reduce_scatter", "chunk 1", step, late + 0.010, late + 0.050, "dp", 1 << 21),
            Event(COMPUTE, "update", "", step, 0, -1, late + 0.050, late + 0.060),
        ]
    return RankEvents(rank, 4, {"tp": tp, "cp": 0, "dp": 0, "pp": pp}, "here", (), 0, tuple(events))


def _forward(step: int, m: int, start: float) -> list[Event]:
    """A forward of 30 ms with an all-gather, whose exposed span is from 3 ms to 5 ms."""
    gather = _communication(
        "tp", "all_gather", Label.for_layer(0, "qkv"), step, start + 0.001, start + 0.005, "tp", 4096,
        waits=((start + 0.003, start + 0.005),), chunk=0, m=m,
    )  # fmt: skip
    return [Event(COMPUTE, "F", "", step, 0, m, start, start + 0.030), gather]


def _message(rank: int, step: int, m: int, sent: float) -> Event:
    """The message of an activation. The second stage begins to wait 20 ms before the send."""
    label, arrived = Label(stage=1, direction=FORWARD), sent + 0.010
    if rank < 2:
        return _communication("pp", "send", label, step, sent, sent + 0.009, "pp up", 512, peer=rank + 2, m=m)
    posted = sent - 0.020
    return _communication(
        "pp", "receive", label, step, posted, arrived, "pp up", 512, peer=rank - 2, waits=((posted, arrived),), m=m
    )


def _communication(
    axis: str, name: str, label: LabelLike, step: int, start: float, end: float, group: str, nbytes: int, *,
    waits: tuple[tuple[float, float], ...] = (), peer: int = -1, chunk: int = -1, m: int = -1,
) -> Event:  # fmt: skip
    part, layer, stage, direction = Label.from_part(label)
    return Event(
        axis, name, part, step, chunk, m, start, end, group=group, sequence=step, bytes=nbytes, peer=peer,
        issue=start - 0.0005, waits=waits, layer=layer, stage=stage, direction=direction,
    )  # fmt: skip


def on_own_clock(events: RankEvents, ahead: float, drift: float = 0.0) -> RankEvents:
    """The events on a different clock, with offsets measured before and after the run. Rank 0's clock is `ahead`
    seconds ahead at rank 0's time 1000, and `drift` more per second.
    """

    def local(time: float) -> float:
        return time - ahead - drift * (time - 1000)

    shifted = [
        dataclasses.replace(
            event,
            start=local(event.start),
            end=local(event.end),
            issue=local(event.issue),
            waits=tuple((local(start), local(end)) for start, end in event.waits),
        )
        for event in events.events
    ]
    clock = tuple((local(time), time - local(time)) for time in (1000.0, 1020.0))
    return dataclasses.replace(events, events=tuple(shifted), clock=clock)
