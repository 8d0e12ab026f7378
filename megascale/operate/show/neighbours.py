"""The place of a rank: its index on each axis, its groups, and the ranks that it exchanges data with."""

from __future__ import annotations

from dataclasses import dataclass

from megascale.layout.chunks import stages_of
from megascale.layout.stages import Placement, looped
from megascale.layout.topology import AXES, DATA_AXES, EXPERT_AXES, Topology
from megascale.operate.show.run_view import RunView
from megascale.schedule.dependencies import neighbours
from megascale.schedule.ir import forward


@dataclass(frozen=True)
class Flow:
    """Data between a rank and another. `direction`: "from" or "to" the other; `what`: the data."""

    direction: str
    rank: int
    what: str


@dataclass(frozen=True)
class RankPlace:
    """`index`: (axis, index, size) of each axis. `groups`: of axes with more than one rank. `flows`: over the
    pipeline.
    """

    rank: int
    index: tuple[tuple[str, int, int], ...]
    groups: dict[str, tuple[int, ...]]
    flows: tuple[Flow, ...]


def place_in(view: RunView, rank: int) -> RankPlace:
    """Return the place of a rank in the layout of a run. Raises: IndexError for a rank outside the world"""
    return place_of(
        view.topology,
        rank,
        stages_of(view.config.model, view.config.parallel).placement if view.config is not None else None,
    )


def place_of(topology: Topology, rank: int, placement: Placement | None = None) -> RankPlace:
    """Return the place of a rank. `placement`: of the virtual stages; default one on each pipeline rank.

    Raises: IndexError for a rank outside the world
    """
    coord = topology.coord(rank)
    index = tuple((axis, getattr(coord, axis), getattr(topology, axis)) for axis in AXES)
    axes = {"tp": ("tp",), "cp": ("cp",), "dp": DATA_AXES, "pp": ("pp",)}
    axes |= {axis: (axis,) for axis in EXPERT_AXES if topology.ep > 1}
    groups = {name: tuple(topology.group(rank, *along)) for name, along in axes.items() if topology.size(*along) > 1}
    placement = placement or looped(topology.pp, 1)
    places = [(chunk, i) for chunk in range(placement.v) for i, path in enumerate(placement.paths)
              if placement.stage(coord.pp, chunk) in path]  # fmt: skip
    found = [neighbours(forward(*place), coord.pp, placement) for place in places]
    flows = [
        Flow(way, topology.rank(coord._replace(pp=pp)), what)
        for stages, ways in zip(zip(*found, strict=True), (("from", "to"), ("to", "from")), strict=True)
        for pp in sorted({placement.places[stage][0] for stage in stages if stage is not None})
        for way, what in zip(ways, ("activations", "gradients of activations"), strict=True)
    ]
    return RankPlace(rank, index, groups, tuple(flows))
