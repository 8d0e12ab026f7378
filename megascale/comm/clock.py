"""The offset of a host's clock from rank 0's, to lay the events of many hosts on one timeline.

Every host except rank 0's asks rank 0 for the time through the store, ROUND_TRIPS times, and trusts the shortest round
trip: rank 0 answered half-way, within half of the trip (Cristian 1989). Ranks of a host share a clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch.distributed import PrefixStore, Store

from megascale.comm.group import Group

ROUND_TRIPS = 8


def clock_offset(
    world: Group, store: Store, label: str, host: str, now: Callable[[], float] = time.perf_counter
) -> tuple[float, float]:
    """Return (this rank's time, seconds by which rank 0's clock is ahead). A collective of all ranks, with the same
    unused `label`. Ranks that share a clock pass the same `host`.
    """
    if world.size == 1:
        return now(), 0.0
    shared = PrefixStore(f"clock/{label}", store)
    if world.index == 0:
        shared.set("origin", host)
    elsewhere = shared.get("origin").decode() != host
    asks = elsewhere and shared.add(f"ranks of {host}", 1) == 1
    number = shared.add("hosts", 1) if asks else 0
    world.control.barrier(f"clock {label}")
    if world.index == 0:
        for asker in range(1, shared.add("hosts", 0) + 1):
            for turn in range(ROUND_TRIPS):
                shared.get(f"{asker} asks {turn}")
                shared.set(f"answer {turn} to {asker}", repr(now()))
    if asks:
        shared.set(f"offset of {host}", repr(_ask(shared, number, now)))
    return now(), float(shared.get(f"offset of {host}")) if elsewhere else 0.0


def _ask(store: Store, number: int, now: Callable[[], float]) -> float:
    trips = []
    for turn in range(ROUND_TRIPS):
        before = now()
        store.set(f"{number} asks {turn}", "")
        answer = float(store.get(f"answer {turn} to {number}"))
        after = now()
        trips.append((after - before, answer - (before + after) / 2))
    return min(trips)[1]
