"""The place of a rank: its index on each axis, its groups, and the ranks that it exchanges data with."""

from __future__ import annotations

from dataclasses import dataclass

from megascale.layout.topology import AXES, DATA_AXES, Topology


@dataclass(frozen=True)
class Flow:
    """Data between a rank and another. `direction`: "from" or "to" the other; `what`: the data."""

    direction: str
    rank: int
    what: str


@dataclass(frozen=True)
class RankPlace:
    """`index`: (axis, index, size) of each axis. `groups`: of axes with more than one rank. `flows`: over the pipeline,
    a ring if it has virtual stages.
    """

    rank: int
    index: tuple[tuple[str, int, int], ...]
    groups: dict[str, tuple[int, ...]]
    flows: tuple[Flow, ...]


def place_of(topology: Topology, rank: int, vpp: int = 1) -> RankPlace:
    """Return the place of a rank. Raises: IndexError for a rank outside the world"""
    coord = topology.coord(rank)
    index = tuple((axis, getattr(coord, axis), getattr(topology, axis)) for axis in AXES)
    axes = {"tp": ("tp",), "cp": ("cp",), "dp": DATA_AXES, "pp": ("pp",)}
    groups = {name: tuple(topology.group(rank, *along)) for name, along in axes.items() if topology.size(*along) > 1}
    return RankPlace(rank, index, groups, tuple(_flows(topology, rank, vpp)))


def _flows(topology: Topology, rank: int, vpp: int) -> list[Flow]:
    if topology.pp == 1:
        return []
    coord = topology.coord(rank)
    before = topology.rank(coord._replace(pp=(coord.pp - 1) % topology.pp))
    after = topology.rank(coord._replace(pp=(coord.pp + 1) % topology.pp))
    flows = []
    if coord.pp > 0 or vpp > 1:
        flows += [Flow("from", before, "activations"), Flow("to", before, "gradients of activations")]
    if coord.pp < topology.pp - 1 or vpp > 1:
        flows += [Flow("to", after, "activations"), Flow("from", after, "gradients of activations")]
    return flows
