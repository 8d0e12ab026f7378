"""Vocabulary parallelism in schedules: passes in place, exchanges in one order, few more micro-batches in flight."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest

from megascale.catalog.schedules import SCHEDULES
from megascale.config.exclusions import can_wait
from megascale.layout.stages import Placement, placement_of
from megascale.plan.simulate.event_simulator import StageTimes, simulate
from megascale.plan.simulate.profiles import Overlaps
from megascale.schedule.ir import Action, Kind, Schedule, build_schedule, forwards_only
from megascale.schedule.lower import lower, with_passes
from tests.marks import only_quick

EXCHANGES = (Kind.EMBED, Kind.HIDDEN, Kind.STATS, Kind.HIDDEN_GRAD, Kind.EMBED_GRAD)
BARRIERS = (1, 2)
NAMES = [*filter(can_wait, SCHEDULES.names())]
FREE = Overlaps(tp="none", pp=True, dp=True)


def pipelines(name: str) -> Iterator[tuple[Placement, Schedule]]:
    """Pipelines of a schedule, with passes."""
    facts = SCHEDULES[name].facts
    chunks = (facts["v"],) if facts["v"] else (2, 3)
    for p, v, m, barriers in itertools.product((2, 5), chunks, (1, 2, 8), BARRIERS):
        placement = placement_of(name, p, v, barriers)
        yield placement, with_passes(build_schedule(SCHEDULES[name].load(), p, v, m), placement)


@pytest.mark.parametrize("name", NAMES)
def test_every_rank_passes_between_the_forward_and_the_backward_of_the_last_stage(name: str) -> None:
    for placement, compute in pipelines(name):
        last, chunk = placement.places[placement.count - 1]
        for rank, order in enumerate(compute):
            at = {action: place for place, action in enumerate(order)}
            for i in {action.microbatch for action in order}:
                passes = [at[Action(kind, placement.v, i)] for kind in (Kind.VS, Kind.VT)]
                assert passes == sorted(passes)
                if rank == last:
                    before_backward = passes[placement.barriers - 1]
                    assert at[Action(Kind.F, chunk, i)] < passes[0]
                    backward = min(at.get(Action(kind, chunk, i), len(at)) for kind in (Kind.B, Kind.I))
                    assert before_backward < backward < len(at)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("training", [True, False])
def test_all_ranks_exchange_in_one_order(name: str, training: bool) -> None:
    for placement, compute in pipelines(name):
        plain = [[action for action in order if action.chunk < placement.v] for order in compute]
        chosen = compute if training else with_passes(forwards_only(plain), placement)
        found = [
            [action for action in order if action.kind in EXCHANGES]
            for order in lower(chosen, placement, training=training)
        ]
        m = 1 + max(action.microbatch for order in compute for action in order)
        assert all(order == found[0] for order in found)
        kinds = EXCHANGES if training else EXCHANGES[:3]
        assert Counter(action.kind for action in found[0]) == dict.fromkeys(kinds, m)


@pytest.mark.parametrize("barriers", BARRIERS)
def test_as_many_micro_batches_more_are_in_flight_as_there_are_barriers(barriers: int) -> None:
    p, m = 4, 12
    placement = placement_of("1f1b", p, 1, barriers)
    for rank, order in enumerate(with_passes(build_schedule(SCHEDULES["1f1b"].load(), p, 1, m), placement)):
        live = most = 0
        for action in order:
            live += {Kind.F: 1, Kind.B: -1}.get(action.kind, 0)
            most = max(most, live)
        assert most == p - rank + barriers


@pytest.mark.parametrize("barriers", BARRIERS)
@pytest.mark.parametrize(
    ("name", "v"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("interleaved_zb", 2), ("zb_v", 2)]
)
@pytest.mark.parametrize("head", only_quick([0.5, 2.0, 4.0], 4.0))
def test_a_step_takes_its_work_and_the_pipeline_s_bubble(head: float, name: str, v: int, barriers: int) -> None:
    """Within 4%, where a head on the last stage would be most of the step."""
    p, m = 8, 32
    places = list(itertools.product(range(p), range(v)))
    forward, backward, weights = (dict.fromkeys(places, gemms / v) for gemms in (2.0, 4.0, 2.0))
    first = 2 if barriers == 1 else 1  # GEMMs of VS
    forward |= {(rank, v): first * head / p for rank in range(p)}
    backward |= {(rank, v): (3 - first) * head / p for rank in range(p)}
    times = StageTimes(forward, backward, 0.02, 0.0, {}, {}, exchange=0.02, weight_gradient=weights)
    compute = build_schedule(SCHEDULES[name].load(), p, v, m)
    bare, placement = simulate(compute, placement_of(name, p, v), times, FREE), placement_of(name, p, v, barriers)
    shared, ideal = simulate(with_passes(compute, placement), placement, times, FREE), bare.last + m * 3 * head / p
    assert 0.97 * ideal < shared.last < 1.04 * ideal
