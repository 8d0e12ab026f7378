"""Worlds of threads for tests: every rank of a small job in one process, with meshes whose messages are copies.

A rank of a layout is a thread with a mesh of its own; collectives and messages meet in a `Mailbox`. It is the training
program but for processes and their transports, and starts at once: what is tested is the mathematics of a layout.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from megascale.comm.group import Group
from megascale.comm.mesh import Mesh
from megascale.comm.p2p import P2PCommunicator
from megascale.comm.p2p_collectives import reduce_in_rank_order
from megascale.comm.work import TransportWork
from megascale.config.run import RunConfig
from megascale.layout.chunks import shares_embedding, stages_of
from megascale.layout.stages import Placement
from megascale.layout.topology import Topology, topology_of

T = TypeVar("T")

SECONDS = 60
"""A message that takes longer never comes."""


class Mailbox:
    """Messages between threads by key, each taken once. After the error of a rank no other rank waits."""

    def __init__(self) -> None:
        self._messages: dict[Hashable, Tensor] = {}
        self._changed = threading.Condition()
        self._broken = False

    def put(self, key: Hashable, tensor: Tensor) -> None:
        with self._changed:
            assert key not in self._messages, f"{key} was sent twice"
            self._messages[key] = tensor.detach().clone()
            self._changed.notify_all()

    def take(self, key: Hashable) -> Tensor:
        with self._changed:
            arrived = self._changed.wait_for(lambda: self._broken or key in self._messages, SECONDS)
            if self._broken or not arrived:
                raise RuntimeError(f"no message {key}" if arrived else f"waited {SECONDS} s for {key}")
            return self._messages.pop(key)

    def give_up(self) -> None:
        """Let no rank wait any more."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()

    @property
    def empty(self) -> bool:
        return not self._messages


class _Work(TransportWork):
    """A communication that ends when it is waited for."""

    completed_at = None

    def __init__(self, *ends: Callable[[], object]) -> None:
        self._ends = list(ends)

    def wait(self) -> None:
        while self._ends:
            self._ends.pop(0)()


class _Sent(TransportWork):
    completed_at = 0.0

    def wait(self) -> None:
        return None


class ThreadTransport:
    """The collectives of a group, of which each is an exchange of messages between all pairs of ranks."""

    def __init__(self, mailbox: Mailbox, group: Group) -> None:
        self._mailbox, self._group, self._count = mailbox, group, itertools.count()
        self._sent: dict[tuple[str, int], Any] = defaultdict(itertools.count)

    def all_to_all(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> TransportWork:
        group, number = self._group, next(self._count)
        peers = [rank for rank in range(group.size) if rank != group.index]
        for peer in peers:
            self._mailbox.put((group.name, group.ranks, number, group.index, peer), outgoing[peer])

        def end() -> None:
            for peer in peers:
                incoming[peer].copy_(
                    self._mailbox.take((group.name, group.ranks, number, peer, group.index)).view_as(incoming[peer])
                )

        return _Work(end)

    def send_on(self, out: Tensor, into: Tensor, to: int, source: int) -> TransportWork:
        group = self._group
        sent, received = (next(self._sent[way, peer]) for way, peer in (("to", to), ("from", source)))
        self._mailbox.put((group.name, group.ranks, "ring", sent, group.index, to), out)
        key = (group.name, group.ranks, "ring", received, source, group.index)
        return _Work(lambda: into.copy_(self._mailbox.take(key)))

    def all_gather(self, out: Tensor, part: Tensor) -> TransportWork:
        parts = out.view(self._group.size, -1).unbind()
        parts[self._group.index].copy_(part.reshape(-1))
        return self.all_to_all([part.reshape(-1)] * self._group.size, parts)

    def reduce_scatter(self, out: Tensor, full: Tensor) -> TransportWork:
        parts = list(full.view(self._group.size, -1).unbind())
        terms = [torch.empty_like(part) for part in parts]
        terms[self._group.index] = parts[self._group.index].clone()
        exchange = self.all_to_all(parts, terms).wait
        return _Work(exchange, lambda: reduce_in_rank_order(out.view(-1), terms))

    def all_reduce(self, tensor: Tensor, op: str) -> TransportWork:
        terms = [torch.empty_like(tensor) for _ in range(self._group.size)]
        terms[self._group.index] = tensor.clone()
        exchange = self.all_to_all([tensor] * self._group.size, terms).wait
        return _Work(exchange, lambda: reduce_in_rank_order(tensor, terms, op))


def thread_mesh(
    topology: Topology, rank: int, mailbox: Mailbox, *, tied: bool, placement: Placement | None = None
) -> Mesh:
    """Return the mesh of a rank whose peers are threads."""
    from megascale.plan.dryrun.fake_mesh import fake_mesh
    from megascale.record.recorder import Recorder

    mesh = fake_mesh(topology, rank, Recorder(), tied=tied, collectives_in_pieces=True, placement=placement)

    def connected(group: Group) -> Group:
        if group.transport is not None:
            transport: Any = ThreadTransport(mailbox, group)
            group.transport = transport
            group.message_transport = transport
            group.p2p_transport = transport if group.p2p_transport is not None else None
        return group

    for group in mesh.groups:
        if group not in (mesh.up, mesh.down):
            connected(group)
    counts: dict[Hashable, Any] = defaultdict(itertools.count)

    def start(kind: str, group: Group, tensor: Tensor, peer: int) -> TransportWork:
        channel = (mesh.rank, peer) if kind == "send" else (peer, mesh.rank)
        key = (*channel, next(counts[kind, *channel]))
        if kind == "send":
            mailbox.put(key, tensor)
            return _Sent()
        return _Work(lambda: tensor.copy_(mailbox.take(key)))

    return replace(mesh, p2p=P2PCommunicator(mesh.up, mesh.down, start), open=lambda spec: connected(mesh.open(spec)))


def simulate(
    topology: Topology, body: Callable[[Mesh], T], *, tied: bool = False, placement: Placement | None = None
) -> list[T]:
    """Run `body` on the mesh of every rank at once, and return the results in rank order. `tied`: the first and last
    stages share the embedding. `placement`: of the stages, by default one on each rank.

    Raises: the first error of a rank.
    """
    mailbox, errors = Mailbox(), list[BaseException]()

    def rank_main(rank: int) -> T:
        torch.set_num_threads(1)
        try:
            return body(thread_mesh(topology, rank, mailbox, tied=tied, placement=placement))
        except BaseException as error:
            errors.append(error)
            mailbox.give_up()
            raise

    with ThreadPoolExecutor(topology.world_size) as threads:
        results = [threads.submit(rank_main, rank) for rank in range(topology.world_size)]
    if errors:
        raise errors[0]
    assert mailbox.empty, "every message has been received"
    return [result.result() for result in results]


def run_threads(config: RunConfig, function: Callable[[Any], T]) -> list[T]:
    """Build the run of every rank of a layout, and return `function(run)` of each, in rank order.

    Raises: the first error of a rank.
    """
    from megascale.device import detect_device
    from megascale.train.build import build_rank_run
    from megascale.train.stop import StopRequest

    device = detect_device(allow_gpu=False)

    def body(mesh: Mesh) -> T:
        return function(build_rank_run(config, mesh, device, StopRequest()))

    p, placement = config.parallel, stages_of(config.model, config.parallel).placement
    return simulate(topology_of(p), body, tied=shares_embedding(config.model, p), placement=placement)
