"""A simulated step as the events of its ranks, in the format of a real run's."""

from __future__ import annotations

from collections.abc import Iterator

from megascale.account.traffic import message_bytes
from megascale.config.run import RunConfig
from megascale.core.events import COMPUTE, Event, RankEvents
from megascale.layout.topology import Coord, Topology
from megascale.schedule.ir import Kind
from megascale.search.plan import Plan
from megascale.simulate.event_simulator import Span
from megascale.simulate.step_time import with_spans

NAMES = {
    Kind.F: "F",
    Kind.B: "B",
    Kind.SEND_F: "send",
    Kind.SEND_B: "send",
    Kind.GATHER: "all_gather",
    Kind.REDUCE: "reduce_scatter",
}


def events(plan: Plan) -> Iterator[RankEvents]:
    """Simulate a plan's step and generate the events of the first rank of each pipeline stage, up to the step's end."""
    config, estimate = plan.config, plan.estimate
    replay = with_spans(config, plan.hardware, plan.stack)
    updated = replay.last + estimate.causes["optimizer"]
    after = (
        Event(COMPUTE, "update", "", 1, -1, -1, replay.last, updated),
        Event(COMPUTE, "rest", "", 1, -1, -1, updated, max(updated, estimate.step_s)),
    )
    p = config.parallel
    topology = Topology(tp=p.tp, cp=p.cp, dp=config.dp, pp=p.pp)
    for stage in range(p.pp):
        spans = sorted((span for span in replay.spans if span.rank == stage), key=lambda span: span.start)
        coord, timed = Coord(0, 0, 0, stage), tuple(_event(config, span, topology) for span in spans)
        rank = topology.rank(coord)
        yield RankEvents(rank, topology.world, coord._asdict(), plan.hardware.name, (), 0, timed + after)


def _event(config: RunConfig, span: Span, topology: Topology) -> Event:
    kind, chunk, microbatch = span.action
    at, name = (1, chunk, microbatch, span.start, span.end), NAMES.get(kind, "wait")
    waits = (span.waited,) if span.waited and span.waited[1] > span.waited[0] else ()
    if span.row == COMPUTE:
        return Event(COMPUTE, name, "", *at)
    if span.row == "dp":
        return Event("dp", name, f"chunk {chunk}", *at, "dp", waits=waits)
    forward = kind in (Kind.F, Kind.SEND_F)
    target = chunk * topology.pp + span.rank + (1 if forward else -1)
    what, peer = f"{'F' if forward else 'B'} {target}", topology.rank(Coord(0, 0, 0, target % topology.pp))
    return Event("pp", name, what, *at, "pp", -1, message_bytes(config), peer, span.start, waits)
