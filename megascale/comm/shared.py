"""Collectives of ranks on one host through memory that they share.

A rank copies its part into a slot, raises a counter and reads the slots of the others: two copies at the speed of
memory, where a message over loopback costs a wake-up of four threads (docs/performance.md). Each group has a ring of
slots, so a rank may be some operations ahead of another. Waiting spins for a moment and then sleeps on the counter
(futex). Sums are formed in the order of the ranks, so every rank has the same bits.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import platform
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor

from megascale.comm.pending import Pending
from megascale.core.process import runs

FOLDER = Path("/dev/shm")
RING = 4  # operations that a rank may be ahead of the slowest
LINE = 64  # bytes between counters: one cache line each

_SYS_FUTEX = {"x86_64": 202}  # elsewhere stores may be seen out of order, and these counters would need barriers
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def usable() -> bool:
    """Whether this machine has what is needed."""
    return platform.machine() in _SYS_FUTEX and FOLDER.is_dir()


def host_key() -> str:
    """Equal for processes that can share memory, and that users mean by one host: network namespaces stand for
    hosts.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}/{FOLDER.stat().st_dev}"


def create(size: int, slot_bytes: int) -> Path:
    """Reserve the memory of a ring for `size` ranks; the others open it by its path, then it is removed from the
    folder.

    Raises: OSError if there is not enough shared memory.
    """
    descriptor, name = tempfile.mkstemp(prefix="megascale-", dir=FOLDER)
    try:
        os.posix_fallocate(descriptor, 0, _total(size, slot_bytes))
    except OSError:
        Path(name).unlink()
        raise
    finally:
        os.close(descriptor)
    return Path(name)


def _total(size: int, slot_bytes: int) -> int:
    return 2 * size * LINE + RING * size * slot_bytes


class _Counters:
    """One counter for each rank, in shared memory. A rank raises its own and waits for those of others."""

    def __init__(self, memory: mmap.mmap, start: int, size: int, index: int, pids: Sequence[int], spin: float) -> None:
        self._values = memoryview(memory)[start : start + size * LINE].cast("q")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory, start))
        self._index = index
        self._pids = pids
        self._spin = spin
        self.timeout = math.inf  # seconds to wait for a rank that lives
        self._libc = ctypes.CDLL(None)
        self._futex = _SYS_FUTEX[platform.machine()]

    def raise_to(self, value: int) -> None:
        self._values[self._index * LINE // 8] = value
        self._libc.syscall(self._futex, self._place(self._index), _FUTEX_WAKE, 2**31 - 1, None, None, 0)

    def wait_for(self, rank: int, value: int) -> None:
        """Return when the counter of `rank` has reached `value`.

        Raises: RuntimeError if that rank's process has ended, or does not get there in `timeout` seconds.
        """
        values, at = self._values, rank * LINE // 8
        if values[at] >= value:
            return
        start = time.perf_counter()
        while time.perf_counter() < start + self._spin:
            if values[at] >= value:
                return
        second = _Timespec(1, 0)
        while (seen := values[at]) < value:
            low = ctypes.c_int32(seen & 0xFFFFFFFF)
            self._libc.syscall(self._futex, self._place(rank), _FUTEX_WAIT, low, ctypes.byref(second), None, 0)
            waited = time.perf_counter() - start
            if values[at] < value and waited > 1 and not runs(self._pids[rank]):
                raise RuntimeError(f"remote process exited: group rank {rank}, pid {self._pids[rank]}")
            if waited > self.timeout:
                which = f"group rank {rank}, pid {self._pids[rank]}"
                raise RuntimeError(f"timed out waiting {self.timeout:.0f} s for {which}")

    def _place(self, rank: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._address + rank * LINE)


@dataclass
class _Operation:
    """Rounds of an operation: `post(i, slot)` fills this rank's slot, `read(i, slots)` uses everyone's."""

    rounds: int
    post: Callable[[int, Tensor], None]
    read: Callable[[int, Sequence[Tensor]], None]
    posted: int = 0
    finished: int = 0


class _Handle(Pending):
    """An operation under way, whose copies are made where it is waited for."""

    ended = None

    def __init__(self, ring: SharedMemory, operation: _Operation) -> None:
        self._ring = ring
        self._operation = operation

    def wait(self) -> None:
        self._ring.finish(self._operation)


class SharedMemory:
    """One group's ring. Operations are carried out in the order in which they were started, the same on every rank."""

    def __init__(self, path: Path, size: int, index: int, pids: Sequence[int], slot_bytes: int, spin: float) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _total(size, slot_bytes))
        self._size = size
        self._index = index
        self._slot_bytes = slot_bytes
        self._posted = _Counters(self._memory, 0, size, index, pids, spin)
        self._read = _Counters(self._memory, size * LINE, size, index, pids, spin)
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)[2 * size * LINE :]
        self._slots = [list(ring.unbind()) for ring in whole.view(RING, size, slot_bytes).unbind()]
        self._round = 0  # rounds posted by this rank
        self._pending: deque[_Operation] = deque()

    def set_timeout(self, timeout: timedelta) -> None:
        """How long to wait for a rank that lives."""
        self._posted.timeout = self._read.timeout = timeout.total_seconds()

    def all_reduce(self, tensor: Tensor, op: str) -> Pending:
        """tensor, in place, becomes the sum or maximum over the ranks."""
        flat = tensor.view(-1)
        pieces = flat.split(self._slot_bytes // flat.element_size())

        def post(i: int, slot: Tensor) -> None:
            _as(slot, pieces[i]).copy_(pieces[i])

        def read(i: int, slots: Sequence[Tensor]) -> None:
            _combine(pieces[i], [_as(slot, pieces[i]) for slot in slots], op)

        return self._start(_Operation(len(pieces), post, read))

    def all_gather(self, out: Tensor, part: Tensor) -> Pending:
        """out, flat, is the parts of all ranks in order; part may lie in its place in out."""
        per_round = self._slot_bytes // part.element_size()
        pieces = part.view(-1).split(per_round)
        places = [share.split(per_round) for share in out.view(self._size, -1).unbind()]

        def post(i: int, slot: Tensor) -> None:
            _as(slot, pieces[i]).copy_(pieces[i])

        def read(i: int, slots: Sequence[Tensor]) -> None:
            for rank, slot in enumerate(slots):
                place = places[rank][i]
                if place.data_ptr() != pieces[i].data_ptr():
                    place.copy_(_as(slot, place))

        return self._start(_Operation(len(pieces), post, read))

    def reduce_scatter(self, out: Tensor, full: Tensor) -> Pending:
        """out is this rank's share of the sum of all ranks' full; it may lie in its place in full."""
        shares = full.view(self._size, -1)
        per_round = self._slot_bytes // full.element_size() // self._size
        pieces, results = shares.split(per_round, dim=1), out.view(-1).split(per_round)

        def post(i: int, slot: Tensor) -> None:
            slot[: pieces[i].nbytes].view(full.dtype).view(pieces[i].shape).copy_(pieces[i])

        def read(i: int, slots: Sequence[Tensor]) -> None:
            count = results[i].numel()
            mine = slice(self._index * count * full.element_size(), (self._index + 1) * count * full.element_size())
            _combine(results[i], [slot[mine].view(full.dtype) for slot in slots], "sum")

        return self._start(_Operation(len(results), post, read))

    def _start(self, operation: _Operation) -> Pending:
        if self._pending and self._pending[-1].posted < self._pending[-1].rounds:
            self.finish(self._pending[-1])  # rounds of two operations do not mix
        self._pending.append(operation)
        self._post_next(operation)
        return _Handle(self, operation)

    def _post_next(self, operation: _Operation) -> None:
        """Fill this rank's slot of the next round, once everyone has read what was in it."""
        number = self._round
        while self._pending[0] is not operation and self._oldest() <= number - RING:
            self.finish(self._pending[0])
        for rank in range(self._size):
            self._read.wait_for(rank, number - RING + 1)
        operation.post(operation.posted, self._slots[number % RING][self._index])
        operation.posted += 1
        self._round = number + 1
        self._posted.raise_to(number + 1)

    def _oldest(self) -> int:
        """The first round that this rank has posted and not read."""
        return self._round - sum(operation.posted - operation.finished for operation in self._pending)

    def finish(self, operation: _Operation) -> None:
        """Carry out all operations up to this one; nothing if it is done."""
        while operation.finished < operation.rounds:
            oldest = self._pending[0]
            number = self._oldest()
            for rank in range(self._size):
                self._posted.wait_for(rank, number + 1)
            oldest.read(oldest.finished, self._slots[number % RING])
            oldest.finished += 1
            self._read.raise_to(number + 1)
            if oldest.finished == oldest.rounds:
                self._pending.popleft()
            elif oldest.posted < oldest.rounds:
                self._post_next(oldest)


def _as(slot: Tensor, like: Tensor) -> Tensor:
    """The beginning of a slot as a flat tensor like `like`."""
    return slot[: like.nbytes].view(like.dtype)


def _combine(out: Tensor, terms: Sequence[Tensor], op: str) -> None:
    """out = the terms combined in order."""
    if op == "max":
        torch.maximum(terms[0], terms[1], out=out)
        for term in terms[2:]:
            torch.maximum(out, term, out=out)
        return
    torch.add(terms[0], terms[1], out=out)
    for term in terms[2:]:
        out += term
