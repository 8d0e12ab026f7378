"""The verdict about a hang names the rank at fault, in simulated jobs and in the records of single situations."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from megascale.layout.topology import Topology
from megascale.observe.hang import hang_verdict
from tests.observe.hanging_worlds import Call, Fault, HangingWorld, step_calls, topology_groups

LAYOUTS = [
    Topology(tp=2, pp=2, dp=4), Topology(tp=4, pp=4, dp=4), Topology(tp=1, pp=4, dp=2), Topology(tp=1, pp=1, dp=4),
    Topology(tp=2, pp=1, dp=2),
]  # fmt: skip


def faults(kind: str, count: int) -> Iterator[tuple[Topology, Fault, Call]]:
    """Draw faults in the second step of random layouts."""
    draw = random.Random(kind)
    while count:
        topology = draw.choice(LAYOUTS)
        rank = draw.randrange(topology.world_size)
        calls = step_calls(topology_groups(topology, rank), 2, 2)
        at = len(calls) + draw.randrange(len(calls))
        call = calls[at - len(calls)]
        if kind == "issue" and not call.key:
            continue
        if kind == "skip" and (not call.key or " " in call.key):
            continue
        if kind == "lose" and (not call.key or not call.waits):
            continue
        count -= 1
        yield topology, Fault(kind, rank, at), call


KINDS = {"stop": "stopped", "lock": "spinning", "issue": "collective"}


@pytest.mark.parametrize("kind", ["stop", "lock", "hang", "issue"])
def test_a_rank_that_hangs_is_named(kind: str) -> None:
    for topology, fault, call in faults(kind, 100):
        world = HangingWorld(topology, fault)
        verdict = hang_verdict(world.records(), world.states())
        expected = KINDS.get(kind, "data" if call.name == "data" else "collective")
        assert (verdict.ranks, verdict.kind, verdict.confident) == ((fault.rank,), expected, True), (
            fault,
            call,
            verdict,
        )
        assert any(f"rank {fault.rank} is in phase" in line for line in verdict.evidence)


def test_a_lost_message_is_the_network_s() -> None:
    for topology, fault, call in faults("lose", 100):
        world = HangingWorld(topology, fault)
        verdict = hang_verdict(world.records(), world.states())
        assert verdict.kind == "network" and fault.rank in verdict.ranks, (fault, call, verdict)
        assert verdict.group == call.key


def test_a_skipped_collective_is_a_divergence() -> None:
    """Where the calls of two ranks differ and no third rank is like them, both may be named."""
    right = 0
    for topology, fault, call in faults("skip", 100):
        world = HangingWorld(topology, fault)
        verdict = hang_verdict(world.records(), world.states())
        assert verdict.kind == "divergence" and fault.rank in verdict.ranks, (topology, fault, call, verdict)
        right += verdict.ranks == (fault.rank,)
    assert right >= 98
