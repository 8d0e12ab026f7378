"""The chain of waits leads from any rank to the culprit, in simulated jobs."""

from __future__ import annotations

import pytest

from lab.hanging_worlds import Fault, HangingWorld, Workload
from megascale.layout.topology import Topology
from megascale.operate.diagnose.hang.hang import hang_verdict
from megascale.operate.diagnose.hang.wait_chain import distances, wait_chain, waiting_sets
from megascale.operate.diagnose.hang.waits import wait_graph
from tests.operate.diagnose.hang.test_hang import SMALL, faults


@pytest.mark.parametrize("kind", ["stop", "hang", "issue"])
def test_every_wait_leads_to_the_rank_that_hangs(kind: str) -> None:
    for topology, work, fault, call in faults(kind, SMALL, 8):
        records = HangingWorld(topology, fault, work).records()
        graph = wait_graph(records)
        sets = waiting_sets(graph)
        where = topology, fault, call
        assert sorted(rank for each in sets for rank in each.ranks) == sorted(set(graph.places) - graph.stuck), where
        far = distances(sets, [fault.rank])
        assert far.keys() == set(sets), where
        chain = wait_chain(sets, [fault.rank])
        assert len(chain) == max(far.values()), where
        assert [link.awaited for link in chain] == [*(link.rank for link in chain[1:]), fault.rank], where
        for link in chain:
            assert link.rank in link.waiting.ranks and link.awaited in link.waiting.awaited, where
            assert f"rank {link.rank} waits in " in str(link) and str(link).endswith(f"for rank {link.awaited}")


def test_ranks_that_wait_for_each_other() -> None:
    """The chain ends at the rank that made other calls, which waits, too."""
    for topology, work, fault, _ in faults("skip", SMALL, 8):
        records = HangingWorld(topology, fault, work).records()
        verdict = hang_verdict(records, {})
        sets = waiting_sets(wait_graph(records))
        chain = wait_chain(sets, verdict.ranks)
        assert chain and chain[-1].awaited == fault.rank
        assert any(fault.rank in each.ranks for each in sets)


def test_lost_data_have_no_chain() -> None:
    topology = Topology(tp=2)
    for at in range(40, 80):
        world = HangingWorld(topology, Fault("lose", 1, at), Workload())
        sets = waiting_sets(wait_graph(world.records()))
        if lost := [each for each in sets if not each.awaited and not each.mixed]:
            assert str(lost[0]).endswith("which all have issued: the data are missing")
            assert wait_chain(sets, ()) == []
            return
    raise AssertionError("no call of these loses data")


def test_nobody_waits() -> None:
    assert waiting_sets(wait_graph({})) == []
    assert wait_chain([], [0]) == []
