"""A rank's mesh without peers: every communication is recorded and completes at once, without data transfer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megascale.comm.group import Group
from megascale.comm.mesh import GroupSpec, Mesh, assemble_mesh
from megascale.comm.timeout import Timeout
from megascale.comm.work import COMPLETED, TransportWork
from megascale.layout.topology import Topology
from megascale.record.recorder import Recorder


class FakeTransport:
    """A transport whose collectives leave their tensors unchanged."""

    def all_reduce(self, tensor: Tensor, op: str) -> TransportWork:
        return COMPLETED

    def all_gather(self, out: Tensor, part: Tensor) -> TransportWork:
        return COMPLETED

    def reduce_scatter(self, out: Tensor, full: Tensor) -> TransportWork:
        return COMPLETED


class FakeP2PTransport:
    """A transport for collectives in pieces and messages, which leaves its tensors unchanged."""

    def send_on(self, out: Tensor, into: Tensor, to: int, source: int) -> TransportWork:
        return COMPLETED

    def all_to_all(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> TransportWork:
        return COMPLETED


class _FakeWork(TransportWork):
    """A point-to-point message that has completed, so the executor can release its tensor."""

    completed_at = 0.0

    def wait(self) -> None:
        return None


def _post(kind: str, group: Group, tensor: Tensor, peer: int) -> TransportWork:
    return _FakeWork()


def fake_mesh(topology: Topology, rank: int, recorder: Recorder, *, tied: bool, collectives_in_pieces: bool) -> Mesh:
    """Build the mesh of `rank` with the groups that `comm.mesh.open_mesh` opens.

    `collectives_in_pieces`: overlapped collectives are cut into pieces, as between GPUs.
    """

    def fake(spec: GroupSpec) -> Group:
        index = spec.ranks.index(rank)
        if len(spec.ranks) == 1:
            return Group(spec.name, spec.ranks, index, recorder=recorder)
        messages: Any = FakeP2PTransport()
        in_pieces = messages if spec.messages or collectives_in_pieces else None
        return Group(spec.name, spec.ranks, index, None, recorder, FakeTransport(), in_pieces, messages)

    return assemble_mesh(topology, rank, fake, lambda: _post, tied=tied, recorder=recorder, timeout=Timeout())
