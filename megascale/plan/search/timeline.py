"""Events of a simulated step, in the format of a training run's event log."""

from __future__ import annotations

from collections.abc import Iterator

from megascale.layout.chunks import stages_of
from megascale.layout.stages import Placement
from megascale.layout.topology import Coord, Topology, topology_of
from megascale.plan.search.plan import Plan
from megascale.plan.simulate.event_simulator import Span
from megascale.record.events import COMPUTE, Event, RankEvents
from megascale.schedule.dependencies import neighbours
from megascale.schedule.ir import Kind

NAMES = {
    **dict.fromkeys((Kind.SEND_F, Kind.SEND_B), "send"),
    **dict.fromkeys((Kind.WAIT_PARAMS, Kind.GATHER_F, Kind.GATHER_B), "all_gather"),
    Kind.REDUCE: "reduce_scatter",
}


def events(plan: Plan) -> Iterator[RankEvents]:
    """Simulate a plan's step and generate the events of the first rank of every pipeline stage."""
    config, estimate, parts = plan.config, plan.estimate, plan.parts
    simulation = parts.pipeline.simulate(parts.times, parts.overlaps, spans=True)
    updated = simulation.last + estimate.causes["optimizer"]
    after = (
        Event(COMPUTE, "update", "", 1, -1, -1, simulation.last, updated),
        Event(COMPUTE, "rest", "", 1, -1, -1, updated, max(updated, estimate.step_s)),
    )
    topology, message = topology_of(config.parallel), parts.layers.sizes.message
    placement = stages_of(config.model, config.parallel).placement
    for stage in range(topology.pp):
        spans = sorted((span for span in simulation.spans if span.rank == stage), key=lambda span: span.start)
        coord, timed = Coord(pp=stage), tuple(_event(span, topology, placement, message) for span in spans)
        rank = topology.rank(coord)
        yield RankEvents(rank, topology.world_size, coord._asdict(), plan.hardware.name, (), 0, timed + after)


def _event(span: Span, topology: Topology, placement: Placement, message: int) -> Event:
    kind, chunk, microbatch = span.action
    at, name = (1, chunk, microbatch, span.start, span.end), NAMES.get(kind, kind.value)
    waits = (span.waited,) if span.waited and span.waited[1] > span.waited[0] else ()
    if span.row == COMPUTE:
        return Event(COMPUTE, name, "", *at)
    if span.row == "dp":
        return Event("dp", name, f"chunk {chunk}", *at, "dp", waits=waits)
    direction = Kind.F if kind in (Kind.F, Kind.SEND_F) else Kind.B
    source, target = neighbours(span.action, span.rank, placement)
    other, receiving = (target, target) if kind in NAMES else (source, placement.stage(span.rank, chunk))
    if other is None:  # a pass, or a stage at an end of the network, waits for an exchange of all stages
        return Event("pp", "exchange", "vocabulary", *at, "pp", waits=waits)
    label, peer = f"{direction} {receiving}", topology.rank(Coord(pp=placement.places[other][0]))
    return Event("pp", name, label, *at, "pp", -1, message, peer, span.start, waits)
