"""Communication times, against values computed by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.config.parallel import ParallelConfig
from megascale.layout.parts.microbatch_sizes import CommOp
from megascale.plan.simulate.link_time import ExpertRoute, group_route, neighbour_route
from megascale.plan.simulate.profiles import Attained, Device, Hardware, Network, Node

DEVICE = Device(memory=80 << 30, bandwidth=2e12, units=100, peak={"bf16": 3e14})
CLUSTER = Hardware(
    device=DEVICE,
    node=Node(devices=8, bandwidth=3e11, latency=1e-6),
    network=Network(bandwidth=2e11, latency=1e-5, nodes=4, taper=2.0),
    attained=Attained(link=0.5, network=0.5),
)


def test_a_ring_inside_a_node() -> None:
    route = group_route(CLUSTER, 4, 1, 64)
    assert route.collective("all_gather", 4e9, 4) == pytest.approx(3 / 4 * 4e9 / 1.5e11 + 3e-6)
    assert route.collective("all_reduce", 4e9, 4) == pytest.approx(2 * (3 / 4 * 4e9 / 1.5e11 + 3e-6))
    assert route.collective("all_gather", 4e9, 1) == 0.0


def test_groups_of_a_node_share_the_network() -> None:
    assert group_route(CLUSTER, 4, 8, 64).bandwidth == pytest.approx(1e11 / 8)  # eight groups with one rank in a node
    assert group_route(CLUSTER, 4, 2, 64).bandwidth == pytest.approx(1.5e11)  # in a node
    assert group_route(CLUSTER, 8, 2, 64).bandwidth == pytest.approx(1e11 / 2)  # two groups with four ranks in a node
    assert group_route(CLUSTER, 32, 1, 64).bandwidth == pytest.approx(1e11)  # one group has the full bandwidth


def test_groups_with_unequal_parts_on_nodes() -> None:
    assert group_route(CLUSTER, 6, 1, 96).bandwidth == pytest.approx(
        1e11 / 2
    )  # a node has the end of a group and the start of another
    assert group_route(CLUSTER, 3, 2, 96).bandwidth == pytest.approx(1e11 / 4)
    assert group_route(CLUSTER, 12, 1, 96).bandwidth == pytest.approx(1e11 / 2)
    assert group_route(CLUSTER, 4, 6, 96).bandwidth == pytest.approx(1e11 / 6)  # a run of three full nodes
    assert group_route(CLUSTER, 4, 7, 56).bandwidth == pytest.approx(1e11 / 8)  # at most one group per device


def test_a_job_is_spread_evenly_over_nodes() -> None:
    assert group_route(CLUSTER, 6, 1, 6) == group_route(CLUSTER, 6, 1, 12) == group_route(CLUSTER, 2, 1, 64)
    assert group_route(CLUSTER, 4, 3, 12).bandwidth == pytest.approx(1e11 / 3)  # two nodes with 6 devices
    large = CLUSTER.model_copy(update={"node": CLUSTER.node.model_copy(update={"devices": 72})})
    assert not group_route(large, 4, 4, 256).network  # four nodes with 64


def test_a_single_run_does_not_share_nodes() -> None:
    assert group_route(CLUSTER, 20, 1, 20).bandwidth == pytest.approx(1e11)
    assert group_route(CLUSTER, 5, 4, 20).bandwidth == pytest.approx(1e11 / 4)


def test_together_places_ranks_in_a_node_if_possible() -> None:
    assert group_route(CLUSTER, 4, 1, 12).network  # two nodes with 6 devices
    assert not group_route(CLUSTER, 4, 1, 12, together=4).network  # nodes with 8 and 4
    assert not group_route(CLUSTER, 6, 1, 12, together=6).network
    large = CLUSTER.model_copy(update={"node": CLUSTER.node.model_copy(update={"devices": 72})})
    assert not group_route(large, 16, 1, 80, together=16).network  # nodes with 64 and 16
    assert group_route(large, 16, 1, 144, together=16).network  # two nodes have no other place
    assert group_route(CLUSTER, 12, 1, 24, together=12) == group_route(CLUSTER, 12, 1, 24)
    assert neighbour_route(CLUSTER, 4, 12, together=4).bandwidth == pytest.approx(1e11 / 4)


def test_bandwidth_above_a_switch_is_tapered() -> None:
    assert group_route(CLUSTER, 5, 8, 120).bandwidth == pytest.approx(1e11 / 8 / 2)
    assert neighbour_route(CLUSTER, 32, 64).bandwidth == pytest.approx(1e11 / 8 / 2)  # all cross the switch
    assert neighbour_route(CLUSTER, 8, 64).bandwidth == pytest.approx(1e11 / 8)  # a quarter crosses the switch
    assert neighbour_route(CLUSTER, 32, 32).bandwidth == pytest.approx(1e11 / 8)  # a single switch


def test_neighbours_inside_a_node_or_across() -> None:
    assert neighbour_route(CLUSTER, 4, 8).bandwidth == pytest.approx(1.5e11)
    assert neighbour_route(CLUSTER, 8, 64).bandwidth == pytest.approx(1e11 / 8)
    assert neighbour_route(CLUSTER, 2, 64).bandwidth == pytest.approx(1e11 / 2)


@given(st.integers(2, 4096), st.sampled_from([1, 2, 3, 4, 8, 64]), st.integers(1, 100), st.floats(1, 1e11))
def test_more_bytes_take_longer_within_the_bandwidth(size: int, stride: int, groups: int, nbytes: float) -> None:
    route = group_route(CLUSTER, size, stride, size * stride * groups)
    took = route.collective("all_gather", nbytes, size)
    assert took >= (size - 1) / size * nbytes / route.bandwidth
    assert route.collective("all_gather", 2 * nbytes, size) > took
    assert (size - 1) / size * nbytes / route.bandwidth <= route.collective("all_reduce", nbytes, size) <= 2 * took


def test_a_ring_leaves_every_node_once() -> None:
    route = group_route(CLUSTER, 32, 1, 64)
    assert route.collective("all_gather", 32e9, 32) == pytest.approx(31e9 / 1e11 + 3 * 1e-5 + 28 * 1e-6)
    apart = group_route(CLUSTER, 4, 8, 64)
    assert apart.collective("reduce_scatter", 4e9, 4) == pytest.approx(3e9 / (1e11 / 8) + 3 * 1e-5)
    uneven = group_route(CLUSTER, 6, 1, 96)  # some groups lie in two nodes
    assert uneven.collective("all_gather", 6e9, 6) == pytest.approx(5e9 / 5e10 + 1e-5 + 4 * 1e-6)


def test_an_all_reduce_takes_the_faster_of_ring_and_trees() -> None:
    many = group_route(CLUSTER, 512, 8, 4096)
    assert many.collective("all_reduce", 8.0, 512) == pytest.approx(2 * 9 * 1e-5, rel=1e-3)  # depth of the trees
    ring = 2 * (511 / 512 * 1e12 / many.bandwidth + 511 * 1e-5)
    assert many.collective("all_reduce", 1e12, 512) == pytest.approx(ring)  # a ring moves fewer bytes
    two = group_route(CLUSTER, 16, 1, 64)  # an edge between two nodes carries half of the bytes per direction and tree
    assert two.collective("all_reduce", 3e9, 16) == pytest.approx(2 * 3e9 / 1.5e11 + 2 * 7e-6)
    slow = CLUSTER.model_copy(update={"network": CLUSTER.network.model_copy(update={"bandwidth": 2e10})})
    two = group_route(slow, 16, 1, 64)
    assert two.collective("all_reduce", 3e9, 16) == pytest.approx(3e9 / 1e10 + 2 * 1e-5 + 2 * 7e-6)


def experts_of(ep: int, world: int) -> ExpertRoute:
    return ExpertRoute.of_layout(CLUSTER, ParallelConfig(ep=ep, dp=world), world)


def exchange_of(ep: int, sent: float, operation: str = "all_to_all", calls: int = 1) -> float:
    return experts_of(ep, 64).seconds(CommOp("ep", operation, int(sent), "dispatch", calls))


def test_an_exchange_of_tokens_in_a_node() -> None:
    assert exchange_of(4, 3e9) == pytest.approx(3e9 / 1.5e11 + 1e-6)
    assert exchange_of(4, 4e9, "all_gather", calls=5) == pytest.approx(3e9 / 1.5e11 + 5e-6)


def test_an_exchange_of_tokens_between_nodes() -> None:
    """Of 16 ranks seven others are in the node and eight in another, where each rank has an eighth of the network."""
    assert exchange_of(16, 15e9) == pytest.approx(8e9 / (1e11 / 8) + 1e-5)
    assert exchange_of(64, 63e9) == pytest.approx(56e9 / (1e11 / 8 / 2) + 1e-5)  # above a switch of 4 nodes


def test_groups_that_cross_nodes_have_fewer_ranks_in_one() -> None:
    assert experts_of(6, 24).inside == 2
    assert experts_of(12, 24).inside == 4


def simulated(dispatch: float, gemm: float, combine: float, blocks: int) -> float:
    """Seconds of blocks of tokens on a link and a device, each in the order of `model.experts`, from event to event."""
    link = device = 0.0
    sent, ready, back = list[float](), list[float](), list[float]()

    def send(seconds: float) -> float:  # what is sent lies on the device
        nonlocal link
        link = max(link, device) + seconds
        return link

    sent.append(send(dispatch))
    for block in range(blocks):
        device = max(device, back[block - 2]) if block > 1 else device
        if block + 1 < blocks:
            sent.append(send(dispatch))
        ready.append(device := max(device, sent[block]) + gemm)
        back.append(send(combine))
    return max(back)


SECONDS = st.sampled_from([0.0, 1.0, 2.0, 3.0]) | st.floats(0, 10)


@given(SECONDS, SECONDS, SECONDS, st.integers(1, 64))
def test_blocks_of_tokens_take_as_long_as_their_events(
    dispatch: float, gemm: float, combine: float, blocks: int
) -> None:
    """Behind an exchange of counts, which is exposed."""
    route, counts = ExpertRoute(2, 2, 1e6, 1e6, 0.0), CommOp("ep", "all_to_all", 500_000, "counts")
    ways = [CommOp("ep", "all_to_all", round(seconds * 1e6) * blocks, "", blocks) for seconds in (dispatch, combine)]
    sent = [route.seconds(way) / blocks for way in ways]
    exposed = route.exposed([counts, *ways], gemm * blocks)
    assert exposed + gemm * blocks == pytest.approx(0.5 + simulated(sent[0], gemm, sent[1], blocks))


@given(st.sampled_from([2, 4, 8, 16, 32]), st.floats(1e3, 1e9))
def test_more_ranks_take_longer_for_a_token(ep: int, rows: float) -> None:
    """A rank keeps its own share of the rows."""
    times = [exchange_of(n, rows * (n - 1) / n) for n in (ep, 2 * ep)]
    assert times[0] < times[1]
