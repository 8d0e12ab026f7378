"""Flight records of simulated jobs in which a rank hangs: every rank runs the calls of training until nobody can go on.

The calls of a step are data, forwards with tensor-parallel collectives between a receive and a send, the backwards,
reductions over dp, an all-reduce of totals over the job, and all-gathers over dp.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from megascale.core.flight_layout import COLLECTIVE, RECEIVE, SEND, Phase
from megascale.core.flight_record import FlightEvent, FlightRecord, GroupState, RankRuns, Wait
from megascale.layout.topology import Topology


class Call(NamedTuple):
    """A call of a rank: "data", "compute", or a communication `name` in the group `key`."""

    name: str
    key: str = ""
    part: str = ""
    waits: bool = True


@dataclass(frozen=True)
class Fault:
    """A fault of `rank` at its call number `call`.

    `kind`: "stop", "lock" (Python's), "hang" before the call, "issue" (hangs while issuing), "skip", or "lose" (a
    message to the rank, or its part of a collective).
    """

    kind: str
    rank: int
    call: int


@dataclass
class _Rank:
    number: int
    calls: list[Call]
    groups: dict[str, tuple[str, str, RankRuns, int]]  # name, kind, ranks, peer
    at: int = 0
    entered: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    issued: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    completed: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    phase: Phase = Phase.STEP
    wait: Wait | None = None
    events: deque[FlightEvent] = field(default_factory=lambda: deque(maxlen=32))


def topology_groups(topology: Topology, rank: int) -> dict[str, tuple[str, str, RankRuns, int]]:
    """Return a rank's groups by key: (name, kind, ranks, peer)."""
    runs = RankRuns.from_ranks
    groups = {
        "tp": ("tp", COLLECTIVE, runs(topology.group(rank, "tp")), -1),
        "dp": ("dp", COLLECTIVE, runs(topology.group(rank, "dp")), -1),
        "world": ("world", COLLECTIVE, RankRuns(((0, topology.world_size, 1),)), -1),
    }
    stages = list(topology.group(rank, "pp"))
    place = stages.index(rank)
    for name, kind, other in (
        ("pp.up", SEND, place + 1), ("pp.up", RECEIVE, place - 1), ("pp.down", SEND, place - 1),
        ("pp.down", RECEIVE, place + 1),
    ):  # fmt: skip
        if 0 <= other < len(stages):
            groups[f"{name} {kind} {stages[other]}"] = (name, kind, runs(stages), stages[other])
    return groups


def step_calls(groups: dict[str, tuple[str, str, RankRuns, int]], micro_batches: int, layers: int) -> list[Call]:
    """Return the calls of a step, in the order of GPipe."""

    def message(name: str, kind: str) -> list[Call]:
        return [Call(kind, key, waits=kind == RECEIVE) for key in groups if key.startswith(f"{name} {kind} ")]

    def layer_calls() -> list[Call]:
        tp = [Call("all_reduce", "tp", f"layer {layer}") for layer in range(layers)]
        return [Call("compute"), *(tp if len(groups["tp"][2]) > 1 else [])]

    calls = [Call("data")]
    for _ in range(micro_batches):
        calls += [*message("pp.up", RECEIVE), *layer_calls(), *message("pp.up", SEND)]
    for _ in range(micro_batches):
        calls += [*message("pp.down", RECEIVE), *layer_calls(), *message("pp.down", SEND)]
    buckets = 2 if len(groups["dp"][2]) > 1 else 0
    calls += [Call("reduce_scatter", "dp", f"chunk {bucket}") for bucket in range(buckets)]
    calls += [Call("all_reduce", "world", "totals")]
    return calls + [Call("all_gather", "dp", f"chunk {bucket}") for bucket in range(buckets)]


class HangingWorld:
    """A job of `topology` with a fault, run until every rank waits or hangs."""

    def __init__(
        self, topology: Topology, fault: Fault, *, steps: int = 3, micro_batches: int = 2, layers: int = 2
    ) -> None:
        self.fault = fault
        self.ranks = []
        for number in range(topology.world_size):
            groups = topology_groups(topology, number)
            self.ranks.append(_Rank(number, step_calls(groups, micro_batches, layers) * steps, groups))
        self._per_step = [len(rank.calls) // steps for rank in self.ranks]
        self._arrived: defaultdict[tuple[str, RankRuns, int], set[int]] = defaultdict(set)
        self._ready = deque(range(len(self.ranks)))
        while self._ready:
            self._advance(self.ranks[self._ready.popleft()])

    def states(self) -> dict[int, str]:
        """The processes' states."""
        letters = {"stop": "T", "lock": "R"}
        return {r.number: letters.get(self.fault.kind, "S") if self._is_at_fault(r) else "S" for r in self.ranks}

    def records(self) -> dict[int, FlightRecord]:
        now = time.monotonic_ns()
        return {rank.number: self._record(rank, now) for rank in self.ranks}

    def _step(self, rank: _Rank) -> int:
        return 1 + rank.at // self._per_step[rank.number]

    def _is_at_fault(self, rank: _Rank) -> bool:
        return rank.number == self.fault.rank and rank.at >= self.fault.call

    def _record(self, rank: _Rank, now: int) -> FlightRecord:
        silent = self._is_at_fault(rank) and self.fault.kind in ("stop", "lock")
        groups = {
            key: GroupState(name, kind, runs, rank.entered[key], rank.issued[key], rank.completed[key], peer)
            for key, (name, kind, runs, peer) in rank.groups.items()
        }
        return FlightRecord(
            "test", rank.number, len(self.ranks), 1, 0, 0.0, rank.at, now - (int(5e9) if silent else 0), now - int(4e9),
            now, rank.phase, now, self._step(rank), 0.1, {}, groups, rank.wait, (),
            tuple(rank.events),
        )  # fmt: skip

    def _advance(self, rank: _Rank) -> None:
        """Run a rank's calls up to one that waits, or to the fault."""
        while rank.at < len(rank.calls):
            call, fault = rank.calls[rank.at], self.fault
            faulty = rank.number == fault.rank and rank.at == fault.call
            rank.phase = Phase.DATA if call.name == "data" else Phase.STEP
            if faulty and fault.kind == "skip":
                rank.at += 1
                continue
            if faulty and (fault.kind in ("stop", "lock", "hang") or not call.key):
                return
            if call.key and not self._communicate(rank, call, faulty):
                return
            rank.wait = None
            rank.at += 1

    def _communicate(self, rank: _Rank, call: Call, faulty: bool) -> bool:
        """Enter, issue and complete a communication; return False while the rank waits in it."""
        key, sequence = call.key, rank.completed[call.key]
        if rank.wait is not None and rank.wait.kind == "issuing":
            return False
        if rank.entered[key] == sequence:
            rank.entered[key] += 1
            _, kind, _, peer = rank.groups[key]
            rank.events.append(
                FlightEvent(kind, call.name, key, sequence, peer, self._step(rank), -1, -1, 1, 0, 0, 8, call.part, -1)
            )
            if faulty and self.fault.kind == "issue":
                rank.wait = Wait("issuing", key, sequence, 1)
                return False
            rank.issued[key] += 1
            self._arrive(rank, key, sequence, lost=faulty and self.fault.kind == "lose")
        rank.wait = Wait("waiting", key, sequence, 1)
        if rank.wait is not None and call.waits and not self._is_complete(rank, key, sequence, faulty):
            return False
        rank.completed[key] += 1
        return True

    def _arrive(self, rank: _Rank, key: str, sequence: int, *, lost: bool) -> None:
        name, kind, runs, peer = rank.groups[key]
        if kind == COLLECTIVE:
            arrived = self._arrived[key, runs, sequence]
            arrived.add(rank.number)
            if len(arrived) == len(runs):
                self._ready.extend(runs)
        elif kind == SEND:
            self._arrived[f"{name} {rank.number}-{peer}", runs, sequence].add(rank.number)
            self._ready.append(peer)

    def _is_complete(self, rank: _Rank, key: str, sequence: int, lost: bool) -> bool:
        if lost and self.fault.kind == "lose":
            return False
        name, kind, runs, peer = rank.groups[key]
        if kind == COLLECTIVE:
            return len(self._arrived[key, runs, sequence]) == len(runs)
        return bool(self._arrived[f"{name} {peer}-{rank.number}", runs, sequence])
