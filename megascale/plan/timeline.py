"""A simulated step as the events of its ranks: what reads a run's events reads these."""

from __future__ import annotations

from collections.abc import Iterator

from megascale.config.run import RunConfig
from megascale.core.events import COMPUTE, Event, RankEvents
from megascale.layout.topology import Coord, Topology
from megascale.plan.estimate import Estimate
from megascale.plan.simulate import Span
from megascale.plan.traffic import message_bytes
from megascale.schedule.ir import Kind

NAMES = {
    Kind.F: "F",
    Kind.B: "B",
    Kind.SEND_F: "send",
    Kind.SEND_B: "send",
    Kind.GATHER: "all_gather",
    Kind.REDUCE: "reduce_scatter",
}


def events(config: RunConfig, estimate: Estimate, hardware: str) -> Iterator[RankEvents]:
    """Of the first rank of each pipeline stage of a resolved configuration; they end when the step does."""
    p, replay = config.parallel, estimate.replay
    updated = replay.last + estimate.causes["optimizer"]
    after = (
        Event(COMPUTE, "update", "", 1, -1, -1, replay.last, updated),
        Event(COMPUTE, "rest", "", 1, -1, -1, updated, max(updated, estimate.step_s)),
    )
    topology = Topology(tp=p.tp, cp=p.cp, dp=config.dp, pp=p.pp)
    for stage in range(p.pp):
        coord = Coord(0, 0, 0, stage)
        own = [span for span in replay.spans if span.rank == stage]
        found = tuple(_event(config, span, topology) for span in sorted(own, key=lambda span: span.start))
        yield RankEvents(topology.rank(coord), topology.world, coord._asdict(), hardware, (), 0, found + after)


def _event(config: RunConfig, span: Span, topology: Topology) -> Event:
    kind, chunk, microbatch = span.action
    if span.row == COMPUTE:
        return Event(COMPUTE, NAMES[kind], "", 1, chunk, microbatch, span.start, span.end)
    waits = (span.waited,) if span.waited and span.waited[1] > span.waited[0] else ()
    if span.row == "dp":
        name = NAMES.get(kind, "wait")
        return Event("dp", name, f"chunk {chunk}", 1, chunk, microbatch, span.start, span.end, "dp", waits=waits)
    stage = chunk * topology.pp + span.rank
    target = stage + 1 if kind in (Kind.F, Kind.SEND_F) else stage - 1
    peer = topology.rank(Coord(0, 0, 0, target % topology.pp))
    what = f"{'F' if kind in (Kind.F, Kind.SEND_F) else 'B'} {target}"
    return Event(
        "pp", NAMES.get(kind, "wait"), what, 1, chunk, microbatch, span.start, span.end, "pp", -1,
        message_bytes(config), peer, span.start, waits,
    )  # fmt: skip
