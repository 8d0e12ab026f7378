"""Collectives through shared memory, for ranks of the same host.

A rank copies its part into a slot, raises a counter and reads the other ranks' slots: two copies at memory speed, where
a loopback message wakes up four threads (docs/results/cpu-peers.md). A group has a ring of slots, so a rank may be a
few operations ahead of another rank. A wait spins briefly, then sleeps on the counter (futex). Terms are added in rank
order, and all ranks get the same bits.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import platform
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor

from megascale.comm.group import Group
from megascale.comm.host_ranks import host_key
from megascale.comm.work import TransportWork
from megascale.core.errors import LostPeerError
from megascale.core.process import process_exists, usable_cores
from megascale.core.rank import local_world_size

RING_SLOTS = 4  # rounds that a rank may be ahead of the slowest rank
CACHE_LINE_BYTES = 64  # distance of the counters: a cache line each

_SYS_FUTEX = {"x86_64": 202}  # other processors may reorder stores, and the counters would need memory barriers
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def is_available() -> bool:
    """Return True if this machine supports the transport: Linux on x86-64."""
    return platform.machine() in _SYS_FUTEX and hasattr(os, "memfd_create")


@contextlib.contextmanager
def allocated_ring(size: int, slot_bytes: int) -> Iterator[Path]:
    """Allocate a ring for `size` ranks; yield the path under which this user's processes open it during the block.

    The memory has no name in a file system: no size of /dev/shm bounds it, and no end of a process leaves it behind.

    Raises: OSError without enough memory.
    """
    descriptor = os.memfd_create("megascale-ring")
    try:
        os.fchmod(descriptor, 0o600)
        os.posix_fallocate(descriptor, 0, _total(size, slot_bytes))
        yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _total(size: int, slot_bytes: int) -> int:
    return 2 * size * CACHE_LINE_BYTES + RING_SLOTS * size * slot_bytes


class _Counters:
    """A counter per rank, in shared memory. A rank raises its own counter and waits for the other ranks' counters."""

    def __init__(self, memory: mmap.mmap, start: int, size: int, index: int, pids: Sequence[int], spin: float) -> None:
        self._values = memoryview(memory)[start : start + size * CACHE_LINE_BYTES].cast("q")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory, start))
        self._index = index
        self._pids = pids
        self._spin = spin
        self.timeout = math.inf  # seconds to wait for a live rank
        self._libc = ctypes.CDLL(None)
        self._futex = _SYS_FUTEX[platform.machine()]

    def raise_to(self, value: int) -> None:
        self._values[self._index * CACHE_LINE_BYTES // 8] = value
        self._libc.syscall(self._futex, self._futex_address(self._index), _FUTEX_WAKE, 2**31 - 1, None, None, 0)

    def wait_for(self, rank: int, value: int) -> None:
        """Return when the counter of `rank` has reached `value`.

        Raises: LostPeerError if the rank's process has ended, or after `timeout` seconds.
        """
        values, at = self._values, rank * CACHE_LINE_BYTES // 8
        if values[at] >= value:
            return
        start = time.perf_counter()
        while time.perf_counter() < start + self._spin:
            if values[at] >= value:
                return
        second = _Timespec(1, 0)
        while (current := values[at]) < value:
            low = ctypes.c_int32(current & 0xFFFFFFFF)
            self._libc.syscall(self._futex, self._futex_address(rank), _FUTEX_WAIT, low, ctypes.byref(second), None, 0)
            waited = time.perf_counter() - start
            if values[at] < value and waited > 1 and not process_exists(self._pids[rank]):
                raise LostPeerError(f"process {self._pids[rank]} has ended", peers=(rank,))
            if waited > self.timeout:
                text = f"timed out waiting {self.timeout:.0f} s for process {self._pids[rank]}"
                raise LostPeerError(text, peers=(rank,))

    def _futex_address(self, rank: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._address + rank * CACHE_LINE_BYTES)


@dataclass
class _Operation:
    """A collective in rounds: `post(i, slot)` fills this rank's slot, `read(i, slots)` reads the slots of all ranks."""

    rounds: int
    post: Callable[[int, Tensor], None]
    read: Callable[[int, Sequence[Tensor]], None]
    rounds_posted: int = 0
    rounds_read: int = 0


class _RingWork(TransportWork):
    """An operation in flight. `wait` makes its copies."""

    completed_at = None

    def __init__(self, ring: SharedMemoryTransport, operation: _Operation) -> None:
        self._ring = ring
        self._operation = operation

    def wait(self) -> None:
        self._ring.complete_up_to(self._operation)


class SharedMemoryTransport:
    """The ring of a group. Operations complete in the order of their starts, which is the same on every rank.

    Raises: OSError if `path` cannot be opened or mapped.
    """

    def __init__(self, path: Path, size: int, index: int, pids: Sequence[int], slot_bytes: int, spin: float) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _total(size, slot_bytes))
        self._size = size
        self._index = index
        self._slot_bytes = slot_bytes
        self._posted = _Counters(self._memory, 0, size, index, pids, spin)
        self._read = _Counters(self._memory, size * CACHE_LINE_BYTES, size, index, pids, spin)
        slots = torch.frombuffer(self._memory, dtype=torch.uint8)[2 * size * CACHE_LINE_BYTES :]
        self._slots = [list(by_rank.unbind()) for by_rank in slots.view(RING_SLOTS, size, slot_bytes).unbind()]
        self._round = 0  # rounds posted by this rank
        self._pending: deque[_Operation] = deque()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of a wait for a live rank."""
        self._posted.timeout = self._read.timeout = timeout.total_seconds()

    def all_reduce(self, tensor: Tensor, op: str) -> TransportWork:
        """Reduce `tensor` over the ranks in place, by `op` "sum" or "max"."""
        flat = tensor.view(-1)
        pieces = flat.split(self._slot_bytes // flat.element_size())

        def post(i: int, slot: Tensor) -> None:
            _view_like(slot, pieces[i]).copy_(pieces[i])

        def read(i: int, slots: Sequence[Tensor]) -> None:
            _combine(pieces[i], [_view_like(slot, pieces[i]) for slot in slots], op)

        return self._start(_Operation(len(pieces), post, read))

    def all_gather(self, out: Tensor, part: Tensor) -> TransportWork:
        """Gather every rank's `part` into `out` in rank order. `part` may be a view of this rank's place in `out`."""
        per_round = self._slot_bytes // part.element_size()
        pieces = part.view(-1).split(per_round)
        targets = [rank_part.split(per_round) for rank_part in out.view(self._size, -1).unbind()]

        def post(i: int, slot: Tensor) -> None:
            _view_like(slot, pieces[i]).copy_(pieces[i])

        def read(i: int, slots: Sequence[Tensor]) -> None:
            for rank, slot in enumerate(slots):
                target = targets[rank][i]
                if target.data_ptr() != pieces[i].data_ptr():
                    target.copy_(_view_like(slot, target))

        return self._start(_Operation(len(pieces), post, read))

    def reduce_scatter(self, out: Tensor, full: Tensor) -> TransportWork:
        """Sum `full` over the ranks and write this rank's shard to `out`. `out` may be a view of a part of `full`."""
        shards = full.view(self._size, -1)
        per_round = self._slot_bytes // full.element_size() // self._size
        pieces, results = shards.split(per_round, dim=1), out.view(-1).split(per_round)

        def post(i: int, slot: Tensor) -> None:
            slot[: pieces[i].nbytes].view(full.dtype).view(pieces[i].shape).copy_(pieces[i])

        def read(i: int, slots: Sequence[Tensor]) -> None:
            count = results[i].numel()
            mine = slice(self._index * count * full.element_size(), (self._index + 1) * count * full.element_size())
            _combine(results[i], [slot[mine].view(full.dtype) for slot in slots], "sum")

        return self._start(_Operation(len(results), post, read))

    def _start(self, operation: _Operation) -> TransportWork:
        if self._pending and self._pending[-1].rounds_posted < self._pending[-1].rounds:
            self.complete_up_to(self._pending[-1])  # finish its rounds first: rounds of two operations do not mix
        self._pending.append(operation)
        self._post_next(operation)
        return _RingWork(self, operation)

    def _post_next(self, operation: _Operation) -> None:
        """Fill this rank's slot of the next round, once all ranks have read its previous content."""
        number = self._round
        while self._pending[0] is not operation and self._oldest() <= number - RING_SLOTS:
            self.complete_up_to(self._pending[0])
        for rank in range(self._size):
            self._read.wait_for(rank, number - RING_SLOTS + 1)
        operation.post(operation.rounds_posted, self._slots[number % RING_SLOTS][self._index])
        operation.rounds_posted += 1
        self._round = number + 1
        self._posted.raise_to(number + 1)

    def _oldest(self) -> int:
        """Return the first round that this rank has posted and not yet read."""
        return self._round - sum(operation.rounds_posted - operation.rounds_read for operation in self._pending)

    def complete_up_to(self, operation: _Operation) -> None:
        """Complete all operations up to and including `operation`; do nothing if it is complete."""
        while operation.rounds_read < operation.rounds:
            oldest = self._pending[0]
            number = self._oldest()
            for rank in range(self._size):
                self._posted.wait_for(rank, number + 1)
            oldest.read(oldest.rounds_read, self._slots[number % RING_SLOTS])
            oldest.rounds_read += 1
            self._read.raise_to(number + 1)
            if oldest.rounds_read == oldest.rounds:
                self._pending.popleft()
            elif oldest.rounds_posted < oldest.rounds:
                self._post_next(oldest)


def _view_like(slot: Tensor, like: Tensor) -> Tensor:
    """View the beginning of a slot as a flat tensor of the size and dtype of `like`."""
    return slot[: like.nbytes].view(like.dtype)


def _combine(out: Tensor, terms: Sequence[Tensor], op: str) -> None:
    """Reduce `terms` in order into `out`."""
    if op == "max":
        torch.maximum(terms[0], terms[1], out=out)
        for term in terms[2:]:
            torch.maximum(out, term, out=out)
        return
    torch.add(terms[0], terms[1], out=out)
    for term in terms[2:]:
        out += term


def open_ring(group: Group, slot_bytes: int) -> SharedMemoryTransport | None:
    """Open a shared-memory ring, allocated by the group's first rank; None on every rank if the ranks are on several
    hosts, or if a rank fails to, with `group.ring_problem` set.
    """
    key = host_key() if is_available() else str(group.index)
    found = group.control.gather((key, os.getpid()), "shared memory")
    crowded = local_world_size(default=group.size) > usable_cores()
    spin = 5e-6 if crowded else 100e-6  # seconds; with more ranks than cores, let other ranks run
    path, ring, problem = None, None, ""
    with contextlib.ExitStack() as allocated:
        if found is not None and len({host for host, _ in found}) == 1:  # on the group's first rank
            try:
                path = str(allocated.enter_context(allocated_ring(group.size, slot_bytes)))
            except OSError as error:
                problem = error.strerror or str(error)
        processes, path, problem = group.control.broadcast((found, path, problem), "shared memory")
        pids = [pid for _, pid in processes]
        if path is None and not problem:
            return None  # on several hosts
        if path is not None:
            try:
                ring = SharedMemoryTransport(Path(path), group.size, group.index, pids, slot_bytes, spin)
            except OSError as error:
                problem = error.strerror or str(error)
        group.ring_problem = next(filter(None, group.control.all_gather(problem, "shared memory")), "")
    return None if group.ring_problem else ring
