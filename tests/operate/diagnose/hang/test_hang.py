"""The verdict about a hang names the rank at fault, in simulated jobs and in the records of single situations."""

from __future__ import annotations

import cProfile
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from lab.hanging_worlds import Call, Fault, HangingWorld, Workload, step_calls
from megascale.layout.topology import Topology
from megascale.operate.diagnose.hang.hang import Verdict, hang_verdict
from megascale.operate.diagnose.hang.wait_chain import wait_chain, waiting_sets
from megascale.operate.diagnose.hang.waits import wait_graph
from megascale.record.layout import COLLECTIVE, Phase
from megascale.record.rank_state import LAST_EVENTS, GroupState, RankRuns, RankState, Wait

SMALL = [
    (Topology(tp=2, pp=2, dp=2), Workload()), (Topology(pp=4, dp=2), Workload()), (Topology(dp=4), Workload()),
    (Topology(tp=2, dp=2), Workload()), (Topology(tp=2, pp=2), Workload()), (Topology(tp=2), Workload()),
    (Topology(tp=4, pp=2), Workload()), (Topology(pp=4), Workload()), (Topology(tp=2, pp=2), Workload(sequence=True)),
    (Topology(tp=2, pp=2), Workload(vpp=2)), (Topology(tp=2, pp=2, dp=2), Workload(bucketed=True)),
]  # fmt: skip
LARGE = [
    (Topology(tp=2, pp=2, dp=4), Workload()), (Topology(tp=4, pp=4, dp=4), Workload()),
    (Topology(tp=2, pp=2, dp=2), Workload(vpp=2)), (Topology(tp=2), Workload(layers=12, sequence=True)),
    (Topology(tp=2, dp=2), Workload(layers=12)), (Topology(tp=2, pp=2), Workload(layers=12)),
]  # fmt: skip

Jobs = list[tuple[Topology, Workload]]
COUNTS = pytest.mark.parametrize(
    ("jobs", "count"), [(SMALL, 8), pytest.param(SMALL + LARGE, 100, marks=pytest.mark.slow)], ids=["few", "many"]
)


def is_collective(call: Call) -> bool:
    return call.key != "" and " " not in call.key and call.name != "wait"


CALLS: dict[str, Callable[[Call], bool]] = {
    "issue": lambda call: call.key != "",
    "skip": is_collective,
    "skip_step": is_collective,
    "extra": is_collective,
    "skip_send": lambda call: call.name == "send",
    "lose": lambda call: call.key != "" and call.name != "send",
}


def faults(kind: str, jobs: Jobs, count: int, step: int = 2) -> Iterator[tuple[Topology, Workload, Fault, Call]]:
    """Draw faults in a step of random jobs."""
    draw = random.Random(kind)
    while count:
        topology, work = draw.choice(jobs)
        rank = draw.randrange(topology.world_size)
        calls = step_calls(topology, rank, work)
        at = draw.randrange(len(calls))
        if calls[at].name in ("wait", "host wait") or not CALLS.get(kind, lambda call: True)(calls[at]):
            continue
        count -= 1
        fault = Fault("skip" if kind == "skip_send" else kind, rank, (step - 1) * len(calls) + at)
        yield topology, work, fault, calls[at]


def verdict_of(world: HangingWorld) -> Verdict:
    """Reach a verdict as the driver does: from short records, and if it wants, from longer ones of some ranks."""
    records, states = world.records(LAST_EVENTS), world.states()
    verdict = hang_verdict(records, states)
    if verdict.compare:
        longer = world.records()
        verdict = hang_verdict(records | {rank: longer[rank] for rank in verdict.compare}, states)
    return verdict


KINDS = {"stop": "stopped", "lock": "spinning", "sleep": "locked", "issue": "collective"}


@COUNTS
@pytest.mark.parametrize("kind", ["stop", "lock", "sleep", "hang", "issue"])
@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
def test_a_rank_that_hangs_is_named(kind: str, jobs: Jobs, count: int, device: bool) -> None:
    for topology, work, fault, call in faults(kind, jobs, count):
        verdict = verdict_of(HangingWorld(topology, fault, work, device=device))
        in_data = call.name == "data" and kind in ("sleep", "hang")
        expected = "data" if in_data else KINDS.get(kind, "collective")
        where = topology, work, fault, call, verdict
        assert (verdict.ranks, verdict.kind, verdict.confident) == ((fault.rank,), expected, True), where
        assert any(f"rank {fault.rank} is in phase" in line for line in verdict.evidence)


@pytest.mark.parametrize(("letters", "kind"), [("TtSS", "stopped"), ("ZXSS", "dead")])
def test_ranks_that_were_stopped_at_the_same_moment_are_all_culprits(letters: str, kind: str) -> None:
    """The second, which waits for the first by its record, too."""
    world = HangingWorld(Topology(dp=4), Fault("stop", 0, 5))
    verdict = hang_verdict(world.records(), dict(enumerate(letters)))
    assert (verdict.kind, set(verdict.ranks), verdict.confident) == (kind, {0, 1}, True)


def test_nothing_is_claimed_of_a_rank_without_heartbeats_whose_process_is_not_seen() -> None:
    world = HangingWorld(Topology(dp=4), Fault("lock", 0, 5))
    assert hang_verdict(world.records(), {}).kind == "locked"


@COUNTS
def test_a_lost_message_is_the_network_s(jobs: Jobs, count: int) -> None:
    for topology, work, fault, call in faults("lose", jobs, count):
        verdict = verdict_of(HangingWorld(topology, fault, work))
        assert verdict.kind == "network" and fault.rank in verdict.ranks, (topology, fault, call, verdict)
        assert verdict.group == call.key


@COUNTS
@pytest.mark.parametrize("kind", ["skip", "skip_step", "extra", "skip_send"])
def test_a_rank_that_makes_other_calls_is_named(kind: str, jobs: Jobs, count: int) -> None:
    """Also in groups of two without a third rank of their role, by earlier steps and other micro-batches."""
    for topology, work, fault, call in faults(kind, jobs, count):
        verdict = verdict_of(HangingWorld(topology, fault, work))
        where = topology, work, fault, call, verdict
        assert (verdict.ranks, verdict.kind, verdict.confident) == ((fault.rank,), "divergence", True), where
        assert f"rank {fault.rank} " in verdict.evidence[0]


def test_an_exchange_of_tokens_that_a_rank_left_out_is_named() -> None:
    """With the reduction in which the rank waits for the others."""
    topology, work = Topology(dp=4, ep=4), Workload(experts=True, bucketed=True, micro_batches=2)
    calls, rank = step_calls(topology, 2, work), 2
    for at, call in enumerate(calls):
        if call.key == "ep":
            verdict = verdict_of(HangingWorld(topology, Fault("skip", rank, len(calls) + at), work))
            assert (verdict.ranks, verdict.kind, verdict.confident) == ((rank,), "divergence", True), call
            left_out, waits = verdict.evidence
            assert left_out.startswith(
                f"rank 2 left out all_to_all '{call.part}' of layer {call.layer} in group ep for"
            )
            assert waits.endswith("waiting in reduce_scatter 4 'chunk 0.0' of group dp")


@COUNTS
@pytest.mark.parametrize("kind", ["skip", "extra"])
def test_a_host_that_is_ahead_of_its_device_is_named(kind: str, jobs: Jobs, count: int) -> None:
    """Or the two ranks of a group, if the host has issued more since than the record holds."""
    right = 0
    for topology, work, fault, call in faults(kind, jobs, count):
        verdict = verdict_of(HangingWorld(topology, fault, work, device=True))
        assert fault.rank in verdict.ranks and len(verdict.ranks) <= 2, (topology, work, fault, call, verdict)
        assert verdict.confident == (len(verdict.ranks) == 1)
        right += verdict.confident
    assert right >= 0.9 * count


def test_without_a_precedent_both_ranks_of_a_group_are_named() -> None:
    """In the first micro-batch of the first step nothing tells which of two ranks is right."""
    topology, work = Topology(tp=2, pp=2), Workload()
    calls = step_calls(topology, 0, work)
    at = next(place for place, call in enumerate(calls) if call.part == "out")
    verdict = verdict_of(HangingWorld(topology, Fault("skip", 1, at), work))
    assert (verdict.ranks, verdict.kind, verdict.confident) == ((0, 1), "divergence", False)
    assert verdict.evidence[0] == "one of ranks 0, 1 made other calls than the rest"


def test_calls_of_other_sizes_are_no_lost_data() -> None:
    """Both ranks have issued operation n, and wait for its end: one an all-gather, the other a reduce-scatter."""
    topology, work = Topology(tp=2, dp=2), Workload(sequence=True)
    calls = step_calls(topology, 0, work)
    at = len(calls) + next(place for place, call in enumerate(calls) if call.key == "tp")
    world = HangingWorld(topology, Fault("skip", 3, at), work)
    waits = {rank: record.wait for rank, record in world.records().items()}
    assert waits[2] == waits[3]
    verdict = verdict_of(world)
    assert (verdict.ranks, verdict.kind) == ((3,), "divergence")


@pytest.mark.parametrize("bucketed", [False, True], ids=["after", "within the backward"])
def test_a_reduction_left_out_of_the_first_step_is_told_by_tensor_parallel_ranks(bucketed: bool) -> None:
    """They made it, and no earlier step is known; other micro-batches have none, which says nothing."""
    topology, work = Topology(tp=2, pp=2, dp=2), Workload(bucketed=bucketed)
    for rank in range(topology.world_size):
        for at, call in enumerate(step_calls(topology, rank, work)):
            if call.name == "reduce_scatter":
                verdict = verdict_of(HangingWorld(topology, Fault("skip", rank, at), work))
                assert (verdict.ranks, verdict.kind) == ((rank,), "divergence"), (rank, call, verdict)


def operations(records: dict[int, RankState]) -> int:
    """Return the calls of a verdict and of its chain of waits, and the edges of the wait graph: the least of three, as
    the profile of Python 3.12 counts calls of other threads.
    """
    return min(_operations(records) for _ in range(3))


def _operations(records: dict[int, RankState]) -> int:
    profile = cProfile.Profile()
    with profile:
        verdict, graph = hang_verdict(records, {}), wait_graph(records)
        sets = waiting_sets(graph)
        wait_chain(sets, verdict.ranks)
    calls = sum(entry.callcount for entry in profile.getstats())
    return calls + sum(map(len, graph._edges().values())) + sum(len(each.awaited) for each in sets)


def in_phases(topology: Topology) -> dict[int, RankState]:
    """Return the records of a job half of whose ranks wait for the other half in a start, and rank 0 imports."""
    records = HangingWorld(topology, Fault("hang", 0, 0)).records(1)
    phases = {rank: Phase.GROUPS if rank % 2 else Phase.RENDEZVOUS for rank in records} | {0: Phase.IMPORT}
    return {rank: replace(record, phase=phases[rank], wait=None) for rank, record in records.items()}


def on_devices(topology: Topology) -> dict[int, RankState]:
    """Return the records of a job all of whose ranks wait for their devices in one group, where one is ahead."""
    records = HangingWorld(topology, Fault("hang", 0, 5)).records(1)
    runs = RankRuns(((0, topology.world_size, 1),))
    return {
        rank: replace(record, phase=Phase.STEP, wait=Wait("device", "", 0, 1),
                      groups={"dp": GroupState("dp", COLLECTIVE, runs, 7, 7 if rank == 0 else 6, 5)})
        for rank, record in records.items()
    }  # fmt: skip


def hanging(topology: Topology) -> dict[int, RankState]:
    return HangingWorld(topology, Fault("hang", 5, 20)).records(LAST_EVENTS)


def skipping(topology: Topology) -> dict[int, RankState]:
    calls = step_calls(topology, 5, Workload())
    return HangingWorld(
        topology, Fault("skip", 5, next(i for i, call in enumerate(calls) if is_collective(call)))
    ).records(LAST_EVENTS)


@pytest.mark.parametrize("records_of", [hanging, skipping, in_phases, on_devices])
def test_a_verdict_takes_operations_in_proportion_to_the_ranks(
    records_of: Callable[[Topology], dict[int, RankState]],
) -> None:
    few, many = (operations(records_of(Topology(tp=2, pp=2, dp=dp))) for dp in (8, 32))
    assert many < 4.5 * few  # 4 times the ranks
