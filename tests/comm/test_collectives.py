"""Collectives through shared memory, by point-to-point messages and by gloo: equal results under any timing."""

from __future__ import annotations

import itertools
import os
import random
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from megascale.core.rank import Rank
from tests.marks import only_quick
from tests.runs import send_messages
from tests.worlds import run_world

TRANSPORTS = ("shared", "exchange", "gloo")
SLOT = 1 << 12


def open_by(transport: str, rank: Rank, name: str = "test") -> Any:
    """Open a group of all ranks with a given transport."""
    from megascale.comm import shared_memory
    from megascale.comm.open_group import open_group
    from megascale.record.recorder import Recorder

    group = open_group(name, range(rank.world_size), rank.rank, Recorder(), slot_bytes=SLOT)
    assert isinstance(group.transport, shared_memory.SharedMemoryTransport)
    if transport != "shared":
        send_messages(group, backend=transport == "gloo")
    return group


def values(rank: int, count: int, dtype: Any) -> Any:
    import torch

    return torch.randn(count, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def exercise(rank: Rank, transport: str) -> list[bytes]:
    """Run every operation on many sizes; return the results, to compare them over ranks."""
    import torch

    from megascale.comm.collectives import all_gather, all_reduce, reduce_scatter

    group, world = open_by(transport, rank), rank.world_size
    results = []
    sizes = (1, 3, 64, 1000, SLOT // 4, 5 * SLOT + 7)  # the last ones take several rounds of shared memory
    for count, dtype in itertools.product(sizes, (torch.float32, torch.float64, torch.bfloat16)):
        everyone = [values(r, count * world, dtype) for r in range(world)]
        mine, tolerance = everyone[rank.rank], 0.05 if dtype is torch.bfloat16 else 1e-5

        total = mine.clone()
        all_reduce(group, total)
        torch.testing.assert_close(total, sum(everyone), rtol=tolerance, atol=tolerance)
        results.append(total.double().numpy().tobytes())

        most = mine.clone()
        all_reduce(group, most, "max")
        assert torch.equal(most, torch.stack(everyone).amax(0))

        gathered = torch.empty(world * count * world, dtype=dtype)
        all_gather(group, gathered, mine)
        assert torch.equal(gathered, torch.cat(everyone))
        in_place = torch.zeros_like(gathered)
        part = in_place.view(world, -1)[rank.rank]
        part.copy_(mine)
        all_gather(group, in_place, part)
        assert torch.equal(in_place, gathered)

        share = torch.empty(count, dtype=dtype)
        reduce_scatter(group, share, mine.clone())
        expected = sum(everyone).view(world, -1)[rank.rank]
        torch.testing.assert_close(share, expected, rtol=tolerance, atol=tolerance)
        whole = mine.clone()
        reduce_scatter(group, whole.view(world, -1)[rank.rank], whole)
        assert torch.equal(whole.view(world, -1)[rank.rank], share)
        others = [r for r in range(world) if r != rank.rank]
        assert torch.equal(whole.view(world, -1)[others], mine.view(world, -1)[others]), "only the own share changes"
    return results


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", only_quick([2, 3, 4], 3))
def test_results(world: int, transport: str) -> None:
    results = run_world(world, exercise, transport)
    assert all(result == results[0] for result in results), "every rank has the same bits"


def overlap(rank: Rank, transport: str, seeds: Iterable[int]) -> None:
    """Run several operations in flight, started at random times and waited for in order."""
    group = open_by(transport, rank)
    for seed in seeds:
        overlap_at_random(group, rank, seed)


def overlap_at_random(group: Any, rank: Rank, seed: int) -> None:
    import torch

    from megascale.comm.collectives import all_gather, all_reduce, reduce_scatter

    same, own = random.Random(seed), random.Random(seed * 100 + rank.rank)
    pending: list[tuple[Any, Any, Any]] = []
    for number in range(60):
        count = same.choice((4, 100, SLOT // 8, SLOT))
        everyone = [torch.full((count * rank.world_size,), float(number + r)) for r in range(rank.world_size)]
        mine = everyone[rank.rank]
        operation = same.choice(("sum", "gather", "scatter"))
        if operation == "sum":
            out, expected = mine, sum(everyone)
            handle = all_reduce(group, out, wait=False)
        elif operation == "gather":
            out, expected = torch.empty(count * rank.world_size**2), torch.cat(everyone)
            handle = all_gather(group, out, mine, wait=False)
        else:
            out, expected = torch.empty(count), sum(everyone)[:count]
            handle = reduce_scatter(group, out, mine, wait=False)
        pending.append((handle, out, expected))
        if own.random() < 0.2:
            time.sleep(own.random() / 200)
        while len(pending) > same.randrange(7):
            handle, out, expected = pending.pop(0)
            handle.wait()
            assert torch.equal(out, expected)
    for handle, out, expected in pending:
        handle.wait()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_many_operations_under_way(transport: str) -> None:
    run_world(3, overlap, transport, range(3))


def report_the_dead(rank: Rank) -> str:
    """Check rank 0's error about a rank whose process has ended."""
    import torch

    from megascale.comm import shared_memory
    from megascale.comm.collectives import all_reduce

    group = open_by("shared", rank)
    transport = group.transport
    assert isinstance(transport, shared_memory.SharedMemoryTransport)
    if rank.rank == 0:
        gone = os.fork()
        if gone == 0:
            os._exit(0)
        os.waitpid(gone, 0)
        transport._posted._pids = [os.getpid(), gone]  # as if rank 1 had been the process that ended
        with pytest.raises(RuntimeError, match=f"of group .* lost rank 1: process {gone} has ended"):
            all_reduce(group, torch.ones(4))
    else:
        time.sleep(3)
        all_reduce(group, torch.ones(4))
    return "noticed"


def test_the_error_names_the_process() -> None:
    assert run_world(2, report_the_dead) == ["noticed", "noticed"]


def without_shared_memory(rank: Rank, fault: str) -> tuple[str, str]:
    """Transport and notices of a mesh on a host without memory for a ring, or whose other ranks cannot open it."""
    import contextlib
    import io

    import torch

    from megascale.comm import shared_memory
    from megascale.comm.collectives import all_reduce
    from megascale.comm.mesh import open_mesh
    from megascale.layout.topology import Topology

    @contextlib.contextmanager
    def full(size: int, slot_bytes: int) -> Any:
        raise OSError(28, "No space left on device")
        yield

    @contextlib.contextmanager
    def hidden(size: int, slot_bytes: int) -> Any:
        yield "/proc/1/fd/123456"

    shared_memory.allocated_ring = {"full": full, "hidden": hidden}[fault]
    with contextlib.redirect_stderr(io.StringIO()) as notices:
        group = open_mesh(Topology(dp=rank.world_size), rank.rank, tied=False).dp
    tensor = torch.ones(3)
    all_reduce(group, tensor)
    assert tensor.tolist() == [2.0, 2.0, 2.0]
    return type(group.transport).__name__, notices.getvalue()


@pytest.mark.parametrize(("fault", "why"), [("full", "No space left"), ("hidden", "No such file")])
def test_a_job_without_shared_memory_says_so_once(fault: str, why: str) -> None:
    transports, notices = zip(*run_world(2, without_shared_memory, fault), strict=True)
    assert transports == ("P2PTransport", "P2PTransport")
    assert notices[0].startswith(f"WARNING: group dp has no shared memory ({why}") and notices[0].count("\n") == 1
    assert notices[1] == ""


def shared_names(rank: Rank) -> list[str]:
    """Files in /dev/shm that this process has open or mapped, while a group has a ring."""
    from megascale.comm import shared_memory

    group = open_by("shared", rank)
    assert isinstance(group.transport, shared_memory.SharedMemoryTransport)
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    maps = Path("/proc/self/maps").read_text()
    assert "memfd:megascale-ring" in maps
    return [link for link in links if link.startswith("/dev/shm")] + re.findall("/dev/shm/.*", maps)


def test_rings_have_no_name_in_dev_shm() -> None:
    """A rank that is ended while it opens a group leaves nothing, and a full or small /dev/shm does not matter."""
    assert run_world(2, shared_names) == [[], []]


def alone(rank: Rank) -> dict[str, int]:
    """Run collectives in a group of one rank: nothing is sent or counted."""
    import torch

    from megascale.comm.collectives import all_gather, all_reduce, reduce_scatter
    from megascale.comm.group import single_rank_group as group_of_one

    group, tensor, out = group_of_one("alone"), torch.arange(4.0), torch.empty(4)
    all_reduce(group, tensor)
    all_gather(group, out, tensor)
    assert torch.equal(out, tensor)
    reduce_scatter(group, out.zero_(), tensor)
    assert torch.equal(out, tensor)
    return group.recorder.take_traffic()


def test_a_group_of_one() -> None:
    assert run_world(1, alone) == [{}]
