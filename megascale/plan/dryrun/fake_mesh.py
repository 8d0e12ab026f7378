"""A rank's mesh without peers, where every communication is recorded and completes at once without data transfer; and a
device without values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from megascale.comm.group import Group
from megascale.comm.mesh import GroupSpec, Mesh, assemble_mesh
from megascale.comm.timeout import Timeout
from megascale.comm.work import COMPLETED, TransportWork
from megascale.device import Device, HostBuffers, PlainBuffers
from megascale.layout.stages import Placement, looped
from megascale.layout.topology import Topology
from megascale.record.recorder import Recorder


class FakeDevice(Device):
    """A device on which every value read by the host is 1, and counts are equal: fake tensors have no values."""

    def host_buffers(self) -> HostBuffers:
        return PlainBuffers("meta", self.torch_device)  # whose bytes are not counted

    def copy_to_host(self, values: Tensor) -> Callable[[], list[float]]:
        return lambda: [1.0] * values.numel()

    def read_counts(self, counts: Tensor, total: int) -> list[int]:
        """Return equal shares of `total` in each of the n."""
        size = counts[0].numel()
        return [(index + 1) * total // size - index * total // size for index in range(size)] * len(counts)


class FakeTransport:
    """A transport of collectives, pieces of them and messages, which leaves its tensors unchanged."""

    def all_reduce(self, tensor: Tensor, op: str) -> TransportWork:
        return COMPLETED

    def all_gather(self, out: Tensor, part: Tensor) -> TransportWork:
        return COMPLETED

    def reduce_scatter(self, out: Tensor, full: Tensor) -> TransportWork:
        return COMPLETED

    def send_on(self, out: Tensor, into: Tensor, to: int, source: int) -> TransportWork:
        return COMPLETED

    def all_to_all(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> TransportWork:
        return COMPLETED


class _FakeWork(TransportWork):
    """A point-to-point message that has completed, so the executor can release its tensor."""

    completed_at = 0.0

    def wait(self) -> None:
        return None


def fake_mesh(
    topology: Topology, rank: int, recorder: Recorder, *, tied: bool, collectives_in_pieces: bool,
    placement: Placement | None = None,
) -> Mesh:  # fmt: skip
    """Build the mesh of `rank` with the groups that `comm.mesh.open_mesh` opens.

    `collectives_in_pieces`: overlapped collectives are cut into pieces, as between GPUs.
    """

    def fake(spec: GroupSpec) -> Group:
        index = spec.ranks.index(rank)
        if len(spec.ranks) == 1:
            return Group(spec.name, spec.ranks, index, recorder=recorder)
        messages: Any = FakeTransport()
        in_pieces = messages if spec.messages or collectives_in_pieces else None
        return Group(spec.name, spec.ranks, index, None, recorder, FakeTransport(), in_pieces, messages)

    return assemble_mesh(
        topology, rank, placement or looped(topology.pp, 1), fake, lambda: lambda *message: _FakeWork(), tied=tied,
        recorder=recorder, timeout=Timeout(),
    )  # fmt: skip
