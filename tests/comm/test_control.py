"""The control channel: values, keys in the store, and the errors of ranks that wait for lost ranks."""

from __future__ import annotations

import datetime
import random
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import megascale
from megascale.core.rank import Rank
from megascale.operate.node.failure import is_peer_lost
from tests.worlds import run_world


def control(rank: Rank, name: str = "test") -> Any:
    """Open a control channel of all ranks."""
    from megascale.comm.control import ControlChannel

    return ControlChannel(name, range(rank.world_size), rank.rank)


def exchange(rank: Rank) -> list[Any]:
    """The result of every kind of call."""
    group = control(rank)
    group.barrier("start")
    return [
        group.all_gather({"rank": rank.rank, "pair": (1, None)}, "all-gather"),
        group.gather(f"from {rank.rank}", "gather"),
        group.broadcast([rank.rank, 0.1], "broadcast"),
        group.scatter([number**2 for number in range(rank.world_size)] if rank.rank == 0 else None, "scatter"),
        group.all_gather(float("nan") if rank.rank == 1 else 1e-300, "numbers")[0],
    ]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_results_of_every_call(world: int) -> None:
    for rank, found in enumerate(run_world(world, exchange)):
        assert found == [
            [{"rank": other, "pair": [1, None]} for other in range(world)],
            [f"from {other}" for other in range(world)] if rank == 0 else None,
            [0, 0.1],
            rank**2,
            1e-300,
        ]


def large(rank: Rank, size: int, piece: int) -> bool:
    """Check that values of `size` random bytes arrive in requests of `piece` bytes, also from several ranks at once."""
    from megascale.comm import control as module

    module.MAX_REQUEST_BYTES = piece
    everyone = [random.Random(other).randbytes(size).hex() for other in range(rank.world_size)]
    return bool(control(rank).all_gather(everyone[rank.rank], "large") == everyone)


def test_values_that_are_larger_than_a_request() -> None:
    assert run_world(3, large, 20_000, 1 << 10) == [True] * 3


@pytest.mark.slow
def test_values_that_are_larger_than_the_store_takes() -> None:
    """The store closes the connection of a request of more than 8 MiB."""
    from megascale.comm.control import MAX_REQUEST_BYTES

    assert run_world(2, large, 9 << 20, MAX_REQUEST_BYTES) == [True] * 2


def often(rank: Rank, seed: int) -> tuple[bool, int, int]:
    """Make many calls in groups of the same ranks, at a random pace per rank. Returns whether all values were right,
    and the numbers of keys in the store after the opening of the groups and at the end.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    pace, right = random.Random(seed + rank.rank), True
    groups = [control(rank) for _ in range(3)]
    for group in groups:
        group.barrier("opened")
    dist.barrier()
    before = _get_default_store().num_keys()
    dist.barrier()
    for number in range(60):
        group = groups[number % 3]
        time.sleep(pace.choice((0, 0, 0, 0.002)))
        right &= group.broadcast(number, "a") == number
        right &= group.all_gather([number, rank.rank], "b") == [[number, other] for other in range(rank.world_size)]
        gathered = group.gather(-number, "c")
        right &= gathered is None or gathered == [-number] * rank.world_size
        right &= group.scatter([number] * rank.world_size, "d") == number
    dist.barrier()
    after = _get_default_store().num_keys()
    dist.barrier()
    return right, before, after


def test_calls_do_not_mix_and_leave_no_keys() -> None:
    for right, before, after in run_world(4, often, 0):
        assert right
        assert after <= before + 4  # those of torch's own barriers


def waits_in_vain(rank: Rank, late: list[int], prepare: Callable[[Rank], None], timeout_s: float) -> Any:
    """The error of a rank that waits for late ranks at a call, and the seconds of the wait."""
    from torch.distributed.distributed_c10d import _get_default_store

    group = control(rank)
    group.barrier("opened")
    _get_default_store().set_timeout(datetime.timedelta(seconds=timeout_s))
    if rank.rank in late:
        prepare(rank)
        return None
    start = time.monotonic()
    try:
        group.all_gather(1, "the plan")
    except RuntimeError as error:
        return type(error).__name__, str(error), is_peer_lost(error), time.monotonic() - start
    return "nobody was missing"


def nothing(rank: Rank) -> None:
    """Stay alive, and do not call."""


def ends(rank: Rank) -> None:
    """Register the id of an ended process for this rank."""
    from torch.distributed.distributed_c10d import _get_default_store

    from megascale.comm.control import _process_key
    from megascale.comm.host_ranks import host_key

    process = subprocess.Popen(["true"])
    process.wait()
    _get_default_store().set(_process_key(rank.rank), f"{process.pid} {host_key()} here")


def leaves(rank: Rank) -> None:
    """Announce an error of this rank, as `train.entry` does."""
    from megascale.comm.control import announce_exit

    announce_exit(f"{rank}: no space")


CASES: dict[str, tuple[list[int], Callable[[Rank], None], float, float, str]] = {
    "late": ([1, 3], nothing, 1.0, 4.0, r"timed out waiting \d+ s for ranks 1, 3 at 'the plan'"),
    "first late": ([0], nothing, 0.5, 4.0, r"timed out waiting \d+ s for rank 0 at 'the plan'"),
    "killed": ([2], ends, 60.0, 3.0, "remote process exited: rank 2 did not reach 'the plan'"),
    "first killed": ([0], ends, 60.0, 3.0, "remote process exited: rank 0 did not reach 'the plan'"),
    "failed": ([2], leaves, 60.0, 3.0, "remote process exited: rank 2 of 4 on localhost: no space"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_error_of_a_wait_names_the_missing_ranks(case: str) -> None:
    late, prepare, timeout_s, within, message = CASES[case]
    for rank, found in enumerate(run_world(4, waits_in_vain, late, prepare, timeout_s)):
        if rank in late:
            continue
        kind, text, lost, seconds = found
        assert kind == "LostPeerError" and lost
        assert re.fullmatch(message, text), text
        assert seconds < within


def last_words(rank: Rank) -> float:
    """The seconds that a rank takes to leave; the last rank is late."""
    from megascale.comm import control

    time.sleep(0.5 if rank.rank == rank.world_size - 1 else 0.0)
    start = time.monotonic()
    control.leave_job()
    return time.monotonic() - start


def test_the_rank_that_has_the_store_leaves_last() -> None:
    first, second, third = run_world(3, last_words)
    assert first > 0.4 and second < 0.4 and third < 0.4


def test_no_object_collective_of_torch_is_used() -> None:
    """Object collectives pickle, and on a GPU they go through NCCL."""
    names = ("gather_object(", "_object_list(", "dcp.load(", "dcp.save(")
    for path in Path(megascale.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not any(name in text for name in names), path


def test_a_rank_that_came_before_its_end_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at who is missing and the look at its process a rank may come, and end."""
    from types import SimpleNamespace

    from megascale.comm import control as module
    from megascale.core.errors import LostPeerError

    timeout = datetime.timedelta(seconds=60)
    store = SimpleNamespace(check=lambda keys: False, set=lambda key, value: None, timeout=timeout)
    monkeypatch.setattr(module, "_job", lambda: store)
    monkeypatch.setattr(module, "_has_ended", lambda job, rank: rank in (1, 2))
    channel = module.ControlChannel("test", range(4), 0)
    channel._check("here", [1, 3], 0.0, lambda: [3])
    with pytest.raises(LostPeerError, match="rank 2 did not reach 'here'"):
        channel._check("here", [1, 2, 3], 0.0, lambda: [2, 3])
