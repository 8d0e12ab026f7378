"""Replicas of copies in memory lie outside the owner's parallel groups, wherever the layout and the hosts allow."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from megascale.checkpoint.memory.placement import replica_ranks
from megascale.layout.topology import DATA_AXES, Topology

SIZES = (1, 2, 3, 4)
LAYOUTS = [
    (Topology(tp=tp, dp=dp, pp=pp), per_host)
    for tp, dp, pp in itertools.product((1, 2, 4), SIZES, SIZES)
    for per_host in (1, 2, 3, 4, 8)
    if tp * dp * pp > per_host
]
EXPERTS = [
    (Topology(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep), per_host)
    for tp, cp, dp, pp in itertools.product((1, 2), (1, 2), (2, 3, 4), (1, 2))
    for ep in (2, 4)
    for per_host in (1, 2, 4)
    if tp * cp * dp % ep == 0 and tp * cp * dp * pp > per_host
]


def groups_of(topology: Topology, rank: int) -> set[int]:
    axes = [("tp",), DATA_AXES, ("pp",), *([("ep",), ("edp",)] if topology.ep > 1 else [])]
    groups = [topology.group(rank, *along) for along in axes]
    return {member for group in groups if len(group) < topology.world_size for member in group}


def hosts_of(topology: Topology, per_host: int) -> list[int]:
    return [rank // per_host for rank in range(topology.world_size)]


def test_a_replica_is_outside_the_groups_of_its_owner_where_the_layout_allows() -> None:
    for topology, per_host in LAYOUTS + EXPERTS:
        hosts = hosts_of(topology, per_host)
        ranks = range(topology.world_size)
        for rank, keeper in enumerate(replica_ranks(topology, hosts)):
            assert keeper is not None and hosts[keeper] != hosts[rank], (topology, per_host, rank)
            groups = groups_of(topology, rank)
            if any(hosts[other] != hosts[rank] and other not in groups for other in ranks):
                assert keeper not in groups, (topology, per_host, rank)


@pytest.mark.parametrize(
    ("topology", "per_host"),
    [
        (Topology(tp=8, dp=16, pp=4), 8),
        (Topology(tp=2, dp=16, pp=4), 8),
        (Topology(tp=1, dp=4, pp=4), 1),
        (Topology(tp=2, cp=2, dp=8, pp=2), 4),
        (Topology(tp=8, dp=192, pp=8), 8),
    ],
)
def test_the_state_survives_the_loss_of_a_whole_group_of_hosts(topology: Topology, per_host: int) -> None:
    hosts = hosts_of(topology, per_host)
    keepers = replica_ranks(topology, hosts)
    for rank in range(0, topology.world_size, max(7, topology.world_size // 8)):
        for axes in (("tp",), DATA_AXES, ("pp",)):
            lost = {hosts[member] for member in topology.group(rank, *axes)}
            for owner in topology.group(rank, *axes):
                assert hosts[keepers[owner]] not in lost
    assert set(Counter(hosts[keeper] for keeper in keepers).values()) == {per_host}, "every host keeps as many"


def test_the_state_of_experts_survives_the_loss_of_the_ranks_that_exchange_tokens() -> None:
    """Ranks of dp hold different experts: neighbours keep each other's replicas only without another choice."""
    assert replica_ranks(Topology(dp=4, ep=2), [0, 1, 2, 3]) == [3, 2, 1, 0]
    keepers = replica_ranks(Topology(dp=8, ep=4), list(range(8)))
    assert all(keeper is not None and keeper // 4 != rank // 4 for rank, keeper in enumerate(keepers))


def test_a_layout_of_one_axis_uses_another_host() -> None:
    for topology in (Topology(dp=8), Topology(pp=8), Topology(tp=8)):
        hosts = hosts_of(topology, 4)
        assert all(hosts[keeper] != hosts[rank] for rank, keeper in enumerate(replica_ranks(topology, hosts)))


def test_uneven_hosts() -> None:
    topology, hosts = Topology(tp=1, dp=3, pp=2), ["a", "a", "a", "a", "a", "b"]
    assert [hosts[keeper] for keeper in replica_ranks(topology, hosts)] == ["b"] * 5 + ["a"]


def test_one_host_keeps_no_replica() -> None:
    assert replica_ranks(Topology(tp=2, dp=2), ["a"] * 4) == [None] * 4
