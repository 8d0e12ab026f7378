"""Agreement of all ranks with rank 0, through the job's store, before the first process group opens.

Rank 0 publishes its record and the record's digest. Every other rank compares digests, and only where they differ reads
the record and publishes the differences. Rank 0 waits for all ranks, or a few seconds after the first difference, and
publishes the verdict, which all ranks read: with equal records five requests a rank, whatever the size of the records.
A rank that cannot start says so in the same way (`announce_failed_start`), so that no other waits for it.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed import PrefixStore, Store

from megascale.core.errors import HostsDisagreeError, LostPeerError
from megascale.core.rank import Rank, format_ranks, rendezvous_endpoint
from megascale.core.wait_notice import WaitNotice
from megascale.operate.channel.store_messages import REFUSED_KEY

Record = Mapping[str, str]
"""Values by key, which must be equal on all ranks."""

LATER_REPORTS_S = 3.0  # seconds after the first difference in which further ranks may report theirs
MAX_REPORTED = 64  # most differences that a rank reports, and most that a message lists
MAX_REPORTING_RANKS = 200  # most ranks that report differences: the store refuses a value of more than 8 MiB
MAX_VALUE_LENGTH = 120  # characters of a value in a message
MAX_REASON_LENGTH = 500  # characters of the reason for which a rank cannot start
UNSET = "unset"  # stands for a key that a rank's record lacks
START = "start"  # stands for the key of a rank that cannot start, whose value is the reason

FAILED_START_S = 10.0
"""Seconds for which rank 0, when it cannot start, keeps the reason for ranks that are on their way."""

_POLL_S_PER_RANK = 1e-5
_MIN_POLL_S, _MAX_POLL_S = 0.005, 0.5

_MISSING_HINT = "see whether they run, and with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE"

Difference = tuple[int, str, str, str, str]
"""Rank, host, key, rank 0's value, the rank's value."""


def check_agreement(store: Store, rank: Rank, record: Record) -> None:
    """Compare this rank's record with rank 0's. A collective of all ranks, which may differ in their world size.

    A rank that waits says now and then for whom.
    Raises: HostsDisagreeError on every rank, with all differences by key and host; LostPeerError if ranks do not arrive
    within the store's timeout.
    """
    shared = _of_this_start(store)
    text = _judge(shared, rank, record) if rank.rank == 0 else _compare(shared, rank, record)
    if text:
        raise HostsDisagreeError(text, hint="start every host with the same code, configuration and environment")


def announce_failed_start(store: Store, rank: Rank, reason: str) -> None:
    """End `check_agreement` on the other ranks with the reason for which this rank cannot start."""
    shared: Any = _of_this_start(store)
    difference = (rank.rank, rank.host, START, "", reason.partition("\n")[0][:MAX_REASON_LENGTH])
    if rank.rank != 0:
        _report(shared, rank, [difference])
        shared.add("read", 1)  # it needs no verdict: rank 0, which may not start either, does not wait for it
        return
    _publish(shared, rank, {})
    shared.set("verdict", describe_differences([difference], rank.host))
    _wait_for_readers(shared, rank.world_size - 1, FAILED_START_S)


def _of_this_start(store: Store) -> PrefixStore:
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun may keep its store over restarts
    return PrefixStore(f"agreement/{start}", store)


def _publish(store: Any, rank: Rank, record: Record) -> None:
    store.set("host", rank.host)
    store.set("record", zlib.compress(json.dumps(record).encode(), 1))
    store.set("digest", record_digest(record))


def _report(store: Any, rank: Rank, differences: Sequence[Difference]) -> None:
    """Report differences, and that this rank has come."""
    if differences:
        if store.add("reporting", 1) <= MAX_REPORTING_RANKS:
            store.append("differences", "".join(json.dumps(difference) + "\n" for difference in differences))
        store.add("different", 1)
    store.append("ranks", f"{rank.rank} ")
    store.add("arrived", 1)


def _wait_for_readers(store: Any, readers: int, seconds: float) -> None:
    """Let ranks read the verdict first: this process may host the store."""
    end = time.monotonic() + seconds
    while store.add("read", 0) < readers and time.monotonic() < end:
        time.sleep(_MIN_POLL_S)


def _judge(store: Any, rank: Rank, record: Record) -> str:
    """Publish rank 0's record, collect the differences of the other ranks, and publish the verdict."""
    _publish(store, rank, record)
    others, reported_at = rank.world_size - 1, float("inf")

    def all_reported() -> bool:
        nonlocal reported_at
        if reported_at == float("inf") and store.add("different", 0):
            reported_at = time.monotonic()
        return store.add("arrived", 0) >= others or time.monotonic() - reported_at > LATER_REPORTS_S

    _wait(store, rank, all_reported, lambda: _missing(store, rank.world_size))
    lines = store.get("differences").decode().splitlines() if store.add("different", 0) else []
    text = describe_differences([json.loads(line) for line in lines], rank.host)
    store.set("verdict", text)
    if text:
        _wait_for_readers(store, store.add("arrived", 0), LATER_REPORTS_S)
    return text


def _compare(store: Any, rank: Rank, record: Record) -> str:
    """Compare with rank 0's record, publish differences, and return rank 0's verdict."""
    _wait(store, rank, lambda: store.check(["digest"]), lambda: [0])
    differences: list[Difference] = []
    if store.get("digest").decode() != record_digest(record):
        expected = json.loads(zlib.decompress(store.get("record")))
        keys = [key for key in sorted({*expected, *record}) if expected.get(key) != record.get(key)]
        differences = [
            (rank.rank, rank.host, key, _short(expected.get(key)), _short(record.get(key)))
            for key in keys[:MAX_REPORTED]
        ]
    _report(store, rank, differences)
    _wait(store, rank, lambda: store.check(["verdict"]), lambda: [0])
    text = store.get("verdict").decode()
    store.add("read", 1)
    return str(text)


def record_digest(record: Record) -> str:
    """Return the digest of a record's canonical JSON."""
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def describe_differences(differences: Sequence[Difference], first_host: str) -> str:
    """Describe differences from rank 0 on `first_host`, a line for each key, and before them ranks that cannot start;
    empty without either.
    """
    by_key: dict[str, dict[str, list[tuple[int, str]]]] = defaultdict(lambda: defaultdict(list))
    expected = {}
    for rank, host, key, first_value, value in sorted(differences):  # ranks report as they arrive
        by_key[key][value].append((rank, host))
        expected[key] = first_value
    failed = [f"{_places(places)} cannot start: {reason}" for reason, places in by_key.pop(START, {}).items()]
    if not by_key:
        return "\n".join([*failed[:MAX_REPORTED], "nothing was trained"]) if failed else ""
    lines = [
        f"  {key}: {expected[key]} on {first_host} (rank 0), "
        + ", ".join(f"{value} on {_places(places)}" for value, places in values.items())
        for key, values in sorted(by_key.items())
    ]
    rest = [f"  and {len(lines) - MAX_REPORTED} more"] if len(lines) > MAX_REPORTED else []
    count = f"{len(lines)} setting{'s differ' if len(lines) > 1 else ' differs'}"
    return "\n".join(
        [*failed[:MAX_REPORTED], f"{count} from rank 0's; nothing was trained:", *lines[:MAX_REPORTED], *rest]
    )


def _places(places: Sequence[tuple[int, str]]) -> str:
    """Name hosts and ranks: 'host-b (ranks 8 and 9) and 3 more hosts'."""
    by_host: dict[str, list[int]] = defaultdict(list)
    for rank, host in places:
        by_host[host].append(rank)
    (host, ranks), *others = by_host.items()
    more = f" and {len(others)} more host{'s' if len(others) > 1 else ''}" if others else ""
    return f"{host} ({format_ranks(sorted(ranks))}){more}"


def _missing(store: Any, world: int) -> list[int]:
    arrived = set(map(int, store.get("ranks").decode().split())) if store.check(["ranks"]) else set()
    return [rank for rank in range(1, world) if rank not in arrived]


def _short(value: str | None) -> str:
    if value is None:
        return UNSET
    return value if len(value) <= MAX_VALUE_LENGTH else value[:MAX_VALUE_LENGTH] + "..."


def _wait(store: Any, rank: Rank, done: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
    """Poll in Python, where signals are heard; the store's own wait is deaf to them."""
    notice, limit = WaitNotice(rank), store.timeout.total_seconds() * (1 if rank.rank == 0 else 2)
    while not done():
        waited = notice.waited_s
        if waited > limit:
            awaited = f"{format_ranks(missing())} at the start of the job{_refusals(store, rank)}"
            text = f"timed out waiting {waited:.0f} s for {awaited}"
            raise LostPeerError(text, peers=missing(), hint=_MISSING_HINT)
        if rank.rank == 0:
            notice.print_if_due(lambda: f"{format_ranks(missing())}{_place(rank)}{_refusals(store, rank)}")
        elif rank.local_rank == 0:
            notice.print_if_due(lambda: f"the ranks for which rank 0 waits{_place(rank)}")
        time.sleep(min(max(_MIN_POLL_S, _POLL_S_PER_RANK * rank.world_size, waited / 8), _MAX_POLL_S))


def _refusals(store: Any, rank: Rank) -> str:
    """Say on rank 0 that the store has refused processes, which may be hosts with another secret; empty without any."""
    job = store.underlying_store
    return f"; {job.get(REFUSED_KEY).decode()}" if rank.rank == 0 and job.check([REFUSED_KEY]) else ""


def _place(rank: Rank) -> str:
    """Say where ranks meet, and which variables make this process one of them: they may have been set for another."""
    endpoint = rendezvous_endpoint()
    where = f", at {endpoint[0]}:{endpoint[1]}" if endpoint else ""
    return f"{where}; it is a rank by {rank.variables}" if rank.variables else where
