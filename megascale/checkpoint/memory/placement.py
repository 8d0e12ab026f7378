"""Placement of replicas: the rank whose host keeps the replica of a rank's copy (`replica_ranks`).

An eviction takes the nodes of a whole parallel group when a hang has no single culprit, so a replica lies outside the
tp, dp and pp groups of its owner, and those of its experts, where the layout allows (ByteRobust, section 6; arXiv
2509.16293). Every rank moves by the same displacement along the axes, 0 or a power of two on each, so that every host
keeps as many replicas as copies.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence

import numpy as np

from megascale.layout.topology import DATA_AXES, Topology

SAME_HOST, OTHER_HOST, OTHER_GROUPS, GROUPS_ELSEWHERE = range(4)
"""Ranks of a placement: of no use; lost with the owner's group; outside the owner's groups; and on a host without any
rank of these groups.
"""


def replica_ranks(topology: Topology, hosts: Sequence[Hashable]) -> list[int | None]:
    """Return for every rank the rank whose host keeps its replica; None if all ranks are on one host.

    `hosts`: the host of every rank. A pure function: all ranks compute the same result.
    """
    names = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    if len(names) == 1:
        return [None] * topology.world_size
    placement = _Placement(topology, np.array([names[host] for host in hosts]))
    ranks = np.arange(topology.world_size)
    steps = ([0, *(1 << bit for bit in range((size - 1).bit_length()))] for size in _sizes(topology))
    shifts = sorted((shift for shift in itertools.product(*steps) if any(shift)), key=lambda each: (sum(each), each))
    shifted = [placement.displaced(shift) for shift in shifts]  # short ones first
    best = max(shifted, key=lambda others: int(placement.quality(ranks, others).sum()))  # the first of equals
    return placement.repaired(best).tolist()


class _Placement:
    """Groups and hosts of ranks as arrays, by axis: the group of every rank, and the hosts of every group. Of axes with
    more than one group: no rank is outside of a group of all.
    """

    def __init__(self, topology: Topology, host: np.ndarray) -> None:
        self._host = host
        self._index = np.arange(topology.world_size).reshape(_sizes(topology))
        self._groups, self._on_host = [], []
        axes = [(self._index, axis) for axis in range(3)]
        if topology.ep > 1:
            of_experts = self._index.reshape(topology.pp, topology.edp, topology.ep)
            axes += [(of_experts, 1), (of_experts, 2)]
        for index, axis in axes:
            members = np.moveaxis(index, axis, -1).reshape(-1, index.shape[axis])
            if len(members) == 1:
                continue
            of_rank = np.empty(topology.world_size, dtype=np.int64)
            of_rank[members] = np.arange(len(members))[:, None]
            on_host = np.zeros((len(members), host.max() + 1), dtype=bool)
            on_host[of_rank, host] = True
            self._groups.append(of_rank)
            self._on_host.append(on_host)

    def displaced(self, shift: tuple[int, ...]) -> np.ndarray:
        """Return for every rank the rank at its coordinates plus `shift`, (pp, data, tp)."""
        return np.roll(self._index, [-each for each in shift], axis=(0, 1, 2)).reshape(-1)

    def quality(self, owners: np.ndarray, keepers: np.ndarray) -> np.ndarray:
        """Rank the placements of owners' replicas on the hosts of keepers."""
        host = self._host[keepers]
        shared = np.zeros(np.broadcast(owners, keepers).shape, dtype=bool)
        near = shared.copy()
        for group, on_host in zip(self._groups, self._on_host, strict=True):
            shared |= group[owners] == group[keepers]
            near |= on_host[group[owners], host]
        quality = np.where(shared, OTHER_HOST, np.where(near, OTHER_GROUPS, GROUPS_ELSEWHERE))
        return np.where(host == self._host[owners], SAME_HOST, quality)

    def repaired(self, keepers: np.ndarray) -> np.ndarray:
        """Return the placement with the best keeper, on the host with the fewest replicas and as near as possible, for
        every rank whose replica is on its host or, avoidably, in one of its groups.
        """
        ranks = np.arange(len(keepers))
        quality = self.quality(ranks, keepers)
        load = np.bincount(self._host[keepers], minlength=self._host.max() + 1)
        for rank in ranks[quality < OTHER_GROUPS]:
            options = self.quality(np.full_like(ranks, rank), ranks)
            options[options == GROUPS_ELSEWHERE] = OTHER_GROUPS  # load matters more
            best = options.max()
            if best > quality[rank]:
                load[self._host[keepers[rank]]] -= 1
                candidates = ranks[options == best]
                distance = (candidates - rank) % len(ranks)
                keepers[rank] = candidates[np.lexsort((distance, load[self._host[candidates]]))[0]]
                load[self._host[keepers[rank]]] += 1
        return keepers


def _sizes(topology: Topology) -> tuple[int, int, int]:
    """Return the sizes of pp, of data and context parallelism, and of tp."""
    return topology.pp, topology.size(*DATA_AXES), topology.tp
