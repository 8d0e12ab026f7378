"""Control data through the store: what arrives, what is left behind, and what becomes of who waits in vain."""

from __future__ import annotations

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
from megascale.launch.failure import peer_was_lost
from tests.worlds import run_world


def control(rank: Rank, name: str = "test") -> Any:
    """Of all ranks."""
    from megascale.comm.control import Control

    return Control(name, range(rank.world), rank.rank)


def exchange(rank: Rank) -> list[Any]:
    """A result of each kind of call."""
    group = control(rank)
    group.barrier("start")
    return [
        group.gather({"rank": rank.rank, "pair": (1, None)}, "gather"),
        group.collect(f"from {rank.rank}", "collect"),
        group.broadcast([rank.rank, 0.1], "broadcast"),
        group.scatter([number**2 for number in range(rank.world)] if rank.rank == 0 else None, "scatter"),
        group.gather(float("nan") if rank.rank == 1 else 1e-300, "numbers")[0],
    ]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_what_ranks_are_told(world: int) -> None:
    for rank, found in enumerate(run_world(world, exchange)):
        assert found == [
            [{"rank": other, "pair": [1, None]} for other in range(world)],
            [f"from {other}" for other in range(world)] if rank == 0 else None,
            [0, 0.1],
            rank**2,
            1e-300,
        ]


def large(rank: Rank, size: int, piece: int) -> bool:
    """Whether values of so many random bytes arrive, in such pieces, also of several ranks at once."""
    from megascale.comm import control as module

    module.PIECE = piece
    everyone = [random.Random(other).randbytes(size).hex() for other in range(rank.world)]
    return bool(control(rank).gather(everyone[rank.rank], "large") == everyone)


def test_values_that_are_larger_than_a_request() -> None:
    assert run_world(3, large, 20_000, 1 << 10) == [True] * 3


@pytest.mark.slow
def test_values_that_are_larger_than_the_store_takes() -> None:
    """8 MiB: more closes its connection."""
    from megascale.comm.control import PIECE

    assert run_world(2, large, 9 << 20, PIECE) == [True] * 2


def often(rank: Rank, seed: int) -> tuple[bool, int, int]:
    """Many calls in groups that are opened again and again, each rank at its own pace. Whether all values were right;
    the keys in the store when the groups had been opened, and at the end.
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
        right &= group.gather([number, rank.rank], "b") == [[number, other] for other in range(rank.world)]
        collected = group.collect(-number, "c")
        right &= collected is None or collected == [-number] * rank.world
        right &= group.scatter([number] * rank.world, "d") == number
    dist.barrier()
    after = _get_default_store().num_keys()
    dist.barrier()
    return right, before, after


def test_calls_do_not_mix_and_leave_no_keys() -> None:
    for right, before, after in run_world(4, often, 0):
        assert right
        assert after <= before + 4  # those of torch's own barriers


def waits_in_vain(rank: Rank, late: list[int], prepare: Callable[[Rank], None], timeout_s: float) -> Any:
    """What a rank that waits for others at a call is told, and after how many seconds."""
    import datetime

    from torch.distributed.distributed_c10d import _get_default_store

    group = control(rank)
    group.barrier("opened")
    _get_default_store().set_timeout(datetime.timedelta(seconds=timeout_s))
    if rank.rank in late:
        prepare(rank)
        return None
    start = time.monotonic()
    try:
        group.gather(1, "the plan")
    except RuntimeError as error:
        return type(error).__name__, str(error), peer_was_lost(error), time.monotonic() - start
    return "nobody was missing"


def nothing(rank: Rank) -> None:
    """It lives, and does not come."""


def ends(rank: Rank) -> None:
    """The process that this rank said it was is no more."""
    from torch.distributed.distributed_c10d import _get_default_store

    from megascale.comm.control import _place
    from megascale.comm.shared import host_key

    process = subprocess.Popen(["true"])
    process.wait()
    _get_default_store().set(_place(rank.rank), f"{process.pid} {host_key()}")


def leaves(rank: Rank) -> None:
    """It has an error of its own, as `train.entry` says."""
    from megascale.comm.control import announce

    announce(f"{rank}: no space")


CASES: dict[str, tuple[list[int], Callable[[Rank], None], float, float, str]] = {
    "late": ([1, 3], nothing, 1.0, 4.0, r"timed out waiting \d+ s for ranks 1, 3 at 'the plan'"),
    "first late": ([0], nothing, 0.5, 4.0, r"timed out waiting \d+ s for rank 0 at 'the plan'"),
    "killed": ([2], ends, 60.0, 3.0, "remote process exited: rank 2 did not come to 'the plan'"),
    "first killed": ([0], ends, 60.0, 3.0, "remote process exited: rank 0 did not come to 'the plan'"),
    "failed": ([2], leaves, 60.0, 3.0, "remote process exited: rank 2 of 4 on localhost: no space"),
}


@pytest.mark.parametrize("case", CASES)
def test_who_waits_in_vain_is_told_for_whom(case: str) -> None:
    late, prepare, timeout_s, within, message = CASES[case]
    for rank, found in enumerate(run_world(4, waits_in_vain, late, prepare, timeout_s)):
        if rank in late:
            continue
        kind, text, lost, seconds = found
        assert kind == "LostRankError" and lost
        assert re.fullmatch(message, text), text
        assert seconds < within


def last_words(rank: Rank) -> float:
    """Seconds that a rank takes to leave; the last comes late."""
    from megascale.comm import init

    time.sleep(0.5 if rank.rank == rank.world - 1 else 0.0)
    start = time.monotonic()
    init.control.part()
    return time.monotonic() - start


def test_the_rank_that_has_the_store_leaves_last() -> None:
    first, second, third = run_world(3, last_words)
    assert first > 0.4 and second < 0.4 and third < 0.4


def test_no_object_collective_of_torch_is_used() -> None:
    """They pickle, and on a GPU they pass through NCCL."""
    names = ("gather_object(", "_object_list(", "dcp.load(", "dcp.save(")
    for path in Path(megascale.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not any(name in text for name in names), path
