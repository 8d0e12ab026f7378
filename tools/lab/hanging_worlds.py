"""Flight records of simulated jobs in which a rank hangs: ranks make the calls of training until nobody can go on.

A rank's calls are those of its lowered schedule: receives posted ahead, tensor-parallel collectives in every layer of a
forward and a backward, sends, reductions over dp in the background; then an all-reduce of totals, and all-gathers of
weights that the next step waits for. On a device the host issues all of this and waits once in a step, for the totals.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megascale.layout.stages import looped
from megascale.layout.topology import Coord, Topology
from megascale.record.layout import COLLECTIVE, NEWEST, RECEIVE, SEND, Phase
from megascale.record.rank_state import FlightEvent, GroupState, RankRuns, RankState, Wait
from megascale.schedule.dependencies import neighbours
from megascale.schedule.interleaved import interleaved_1f1b
from megascale.schedule.ir import Action, Kind, build_schedule, each_action
from megascale.schedule.lower import lower
from megascale.schedule.one_f_one_b import one_f_one_b


class Call(NamedTuple):
    """A call of a rank: "data", an action of compute, a communication `name` in the group `key`, or the "wait" for an
    earlier one. `token`: of a communication that a later call waits for; without, the call itself waits, but for sends.
    """

    name: str
    key: str = ""
    part: str = ""
    layer: int = -1
    chunk: int = -1
    microbatch: int = -1
    token: tuple = ()
    bytes: int = 8


@dataclass(frozen=True)
class Fault:
    """A fault of `rank` at its call number `call`.

    `kind`: "stop", "lock" (computes with Python's lock), "sleep" (with the lock), "hang" before the call, "issue"
    (hangs while issuing), "skip", "skip_step" (all such calls to the end of the step), "extra" (makes the call twice),
    or "lose" (the rank's own data of the call).
    """

    kind: str
    rank: int
    call: int


class GroupFacts(NamedTuple):
    """A group of a rank, or a direction of messages to or from a peer."""

    name: str
    kind: str
    ranks: RankRuns
    peer: int = -1


@dataclass(frozen=True)
class Workload:
    """The work of a job: `vpp` chunks a rank with `layers` in each, `micro_batches` a step. `sequence`: all-gathers and
    reduce-scatters take turns, as in sequence parallelism, and a call of one kind does not pair with the other.
    `bucketed`: each layer's gradients are reduced within the last backward, as soon as they are complete. `experts`: in
    every layer ranks along ep exchange tokens.
    """

    vpp: int = 1
    layers: int = 2
    micro_batches: int = 4
    sequence: bool = False
    bucketed: bool = False
    experts: bool = False


def topology_groups(topology: Topology, rank: int) -> dict[str, GroupFacts]:
    """Return a rank's groups by key."""
    tp, dp, pp = (_group(topology, topology.coord(rank)._replace(**{axis: 0}), axis) for axis in ("tp", "dp", "pp"))
    stages = list(pp)
    groups = {"tp": GroupFacts("tp", COLLECTIVE, tp), "dp": GroupFacts("dp", COLLECTIVE, dp)}
    groups["ep"] = GroupFacts("ep", COLLECTIVE, RankRuns.from_ranks(topology.group(rank, "ep")))
    if topology.world_size <= 8:
        groups["world"] = GroupFacts("world", COLLECTIVE, RankRuns(((0, topology.world_size, 1),)))
    else:
        groups["world.dp"] = groups["dp"]._replace(name="world.dp")
        groups["world.tp"] = groups["tp"]._replace(name="world.tp")
        groups["world.pp"] = GroupFacts("world.pp", COLLECTIVE, pp)
    for peer in stages:
        for name, kind in (
            (("pp.up", SEND), ("pp.down", RECEIVE)) if peer > rank else (("pp.down", SEND), ("pp.up", RECEIVE))
        ):
            if peer != rank:
                groups[f"{name} {kind} {peer}"] = GroupFacts(name, kind, pp, peer)
    return {key: group for key, group in groups.items() if len(group.ranks) > 1}


@functools.lru_cache(maxsize=1 << 15)
def _group(topology: Topology, first: Coord, axis: str) -> RankRuns:
    """Return the group along an axis that begins at `first`: one value for all its ranks."""
    return RankRuns.from_ranks(topology.group(topology.rank(first), axis))


@functools.lru_cache(maxsize=64)
def _lowered(pp: int, work: Workload) -> list[list[Action]]:
    order = one_f_one_b if work.vpp == 1 else interleaved_1f1b
    lowered = lower(build_schedule(order, pp, work.vpp, work.micro_batches), looped(pp, work.vpp))
    return [[*each_action(actions)] for actions in lowered]


class _Program:
    """The calls of a step of a rank."""

    def __init__(self, topology: Topology, rank: int, work: Workload) -> None:
        self._groups = topology_groups(topology, rank)
        self._stages = list(_group(topology, topology.coord(rank)._replace(pp=0), "pp"))
        self._place, self._placement = self._stages.index(rank), looped(len(self._stages), work.vpp)
        self._work = work
        self._dp = topology.coord(rank).dp

    def calls(self) -> Iterator[Call]:
        yield Call("data")
        for action in _lowered(len(self._stages), self._work)[self._place]:
            (kind, chunk, microbatch), (source, target) = action, neighbours(action, self._place, self._placement)
            match kind:
                case Kind.RECV_F | Kind.RECV_B:
                    key, token = self._peer(source, RECEIVE), (kind is Kind.RECV_F, chunk, microbatch)
                    yield Call(RECEIVE, key, "", -1, chunk, microbatch, token)
                case Kind.SEND_F | Kind.SEND_B:
                    key = self._peer(target, SEND)
                    yield Call(SEND, key, "", -1, chunk, microbatch)
                case Kind.F | Kind.B:
                    yield Call(kind.value, "", "", -1, chunk, microbatch)
                    yield from self._tensor_parallel(kind is Kind.F, chunk, microbatch)
                case Kind.WAIT_PARAMS:
                    yield Call("wait", "dp", token=("gather", chunk))
                case Kind.REDUCE if not self._work.bucketed:
                    yield from self._in(
                        "dp", Call("reduce_scatter", "dp", f"chunk {chunk}", -1, chunk, microbatch, ("reduce", chunk))
                    )
        yield from self._step_end()

    def _step_end(self) -> Iterator[Call]:
        reduced: list[tuple] = [("reduce", chunk) for chunk in range(self._work.vpp)]
        if self._work.bucketed:
            reduced = [(*token, layer) for token in reduced for layer in range(self._work.layers)]
        yield from (Call("wait", "dp", token=token) for token in reduced)
        if self._dp == 0:  # only this shard has the norms' gradients
            yield from self._in("tp", Call("all_reduce", "tp", "chunk 0 partial gradients"))
        for key in ("world", "world.dp", "world.tp", "world.pp"):
            yield from self._in(key, Call("all_reduce" if key != "world.tp" else "all_gather", key, "totals"))
        yield Call("host wait")
        for chunk in range(self._work.vpp):
            yield from self._in("dp", Call("all_gather", "dp", f"chunk {chunk}", token=("gather", chunk)))

    def _in(self, key: str, *calls: Call) -> tuple[Call, ...]:
        return calls if key in self._groups else ()

    def _peer(self, stage: int | None, kind: str) -> str:
        assert stage is not None, "a message has another end"
        me, peer = (self._stages[place] for place in (self._place, self._placement.places[stage][0]))
        name = "pp.up" if (peer > me) == (kind == SEND) else "pp.down"
        return f"{name} {kind} {peer}"

    def _tensor_parallel(self, forward: bool, chunk: int, microbatch: int) -> Iterator[Call]:
        stage = self._placement.stage(self._place, chunk)
        if stage != (0 if forward else self._placement.count - 1):
            yield Call("wait", token=(forward, chunk, microbatch))
            yield from self._in("tp", Call("all_gather", "tp", "", -1, chunk, microbatch, bytes=16))
        layers = range(stage * self._work.layers, (stage + 1) * self._work.layers)
        for layer in layers if forward else reversed(layers):
            for part in ("out", "down") if forward else ("up gradient", "qkv gradient"):
                if self._work.sequence:
                    yield from self._in(
                        "tp", Call("all_gather", "tp", f"{part} input", layer, chunk, microbatch, bytes=32)
                    )
                    yield from self._in("tp", Call("reduce_scatter", "tp", part, layer, chunk, microbatch, bytes=64))
                else:
                    yield from self._in("tp", Call("all_reduce", "tp", part, layer, chunk, microbatch, bytes=64))
            for part in ("dispatch", "combine") if forward else ("combine gradient", "dispatch gradient"):
                if self._work.experts:
                    yield from self._in("ep", Call("all_to_all", "ep", part, layer, chunk, microbatch, bytes=128))
            if self._work.bucketed and not forward and microbatch == self._work.micro_batches - 1:
                number = layer - layers[0]
                yield from self._in(
                    "dp",
                    Call("reduce_scatter", "dp", f"chunk {chunk}.{number}", -1, chunk, microbatch,
                         ("reduce", chunk, number)),
                )  # fmt: skip


def step_calls(topology: Topology, rank: int, work: Workload) -> list[Call]:
    """Return the calls of a rank in a step."""
    return list(_Program(topology, rank, work).calls())


@dataclass
class _Rank:
    """A rank, at call number `at` of its `calls`, each with its step."""

    number: int
    calls: Sequence[tuple[int, Call]]
    groups: dict[str, GroupFacts]
    at: int = 0
    entered: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    issued: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    completed: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    known: dict[str, int] = field(default_factory=dict)  # completed, as the host of a device knows
    pending: dict[tuple, tuple[str, int]] = field(default_factory=dict)
    wait: Wait | None = None
    events: deque[tuple] = field(default_factory=lambda: deque(maxlen=NEWEST))

    @property
    def step(self) -> int:
        return self.calls[min(self.at, len(self.calls) - 1)][0]


class HangingWorld:
    """A job of `topology` with a fault, run until every rank waits or hangs. `fault.call` counts over all `steps`."""

    def __init__(
        self, topology: Topology, fault: Fault, work: Workload = Workload(), *, steps: int = 3, device: bool = False
    ) -> None:
        self.fault = fault
        self._device = device
        self._ranks = [
            _Rank(number, _calls(topology, number, work, steps), topology_groups(topology, number))
            for number in range(topology.world_size)
        ]
        culprit = self._ranks[fault.rank]
        culprit.calls = _with_fault(culprit.calls, fault)
        key = culprit.calls[fault.call][1].key
        before = [call for _, call in culprit.calls[: fault.call] if call.key == key and call.name != "wait"]
        self._lost = (fault.rank, key, len(before)) if fault.kind == "lose" else None
        self._arrived: defaultdict[tuple[str, RankRuns, int], list[int]] = defaultdict(list)  # bytes of each
        self._complete: set[tuple[str, RankRuns, int]] = set()
        self._ready = deque(range(len(self._ranks)))
        while self._ready:
            self._advance(self._ranks[self._ready.popleft()])
        if device:
            for rank in self._ranks:
                self._run_ahead(rank)

    def states(self) -> dict[int, str]:
        """The processes' states."""
        letters = {"stop": "T", "lock": "R", "sleep": "S"}
        return {r.number: letters.get(self.fault.kind, "S") if self._hangs(r) else "S" for r in self._ranks}

    def records(self, events: int = NEWEST) -> dict[int, RankState]:
        """The records of all ranks, with their newest `events`."""
        now = time.monotonic_ns()
        return {rank.number: self._record(rank, now, events) for rank in self._ranks}

    def _hangs(self, rank: _Rank) -> bool:
        hang = self.fault.kind in ("stop", "lock", "sleep", "hang", "issue")
        return hang and rank.number == self.fault.rank and rank.at == self.fault.call

    def _record(self, rank: _Rank, now: int, events: int) -> RankState:
        silent = self._hangs(rank) and self.fault.kind in ("stop", "lock", "sleep")
        completed = rank.known if self._device else rank.completed
        groups = {
            key: GroupState(*group[:3], rank.entered[key], rank.issued[key], completed.get(key, 0), group.peer)
            for key, group in rank.groups.items()
        }
        last = tuple(FlightEvent(*event) for event in list(rank.events)[-events:])
        at_data = rank.at < len(rank.calls) and rank.calls[rank.at][1].name == "data"
        beat, phase = now - (int(5e9) if silent else 0), Phase.DATA if at_data else Phase.STEP
        return RankState(
            "test", rank.number, len(self._ranks), 1, 0, 0.0, rank.at, beat, now - int(4e9), now, phase, now, rank.step,
            0.1, {}, groups, rank.wait, (), last,
        )  # fmt: skip

    def _advance(self, rank: _Rank) -> None:
        """Make a rank's calls up to one that waits, or to the fault."""
        while rank.at < len(rank.calls):
            hangs = self._hangs(rank)
            if hangs and self.fault.kind != "issue":
                return
            if not self._make(rank, rank.calls[rank.at][1], hangs):
                return
            rank.wait = None
            rank.at += 1

    def _make(self, rank: _Rank, call: Call, hangs: bool) -> bool:
        """Make a call; return False while the rank waits in it."""
        if call.name == "wait":
            return self._wait(rank, *rank.pending[call.token]) if call.token in rank.pending else True
        if call.name == "host wait":
            rank.known = dict(rank.completed)
        if not call.key:
            self._note(rank, call, -1)
            return True
        if rank.wait is None:
            sequence = self._enter(rank, call)
            if hangs:
                rank.wait = Wait("issuing", call.key, sequence, 1)
                return False
            rank.issued[call.key] += 1
            self._arrive(rank, call.key, sequence, call.bytes)
        elif rank.wait.kind == "issuing":
            return False
        return bool(call.token) or call.name == SEND or self._wait(rank, call.key, rank.entered[call.key] - 1)

    def _enter(self, rank: _Rank, call: Call) -> int:
        sequence = rank.entered[call.key]
        rank.entered[call.key] += 1
        self._note(rank, call, sequence)
        if call.token:
            rank.pending[call.token] = call.key, sequence
        return sequence

    def _note(self, rank: _Rank, call: Call, sequence: int) -> None:
        group = rank.groups.get(call.key)
        kind, peer = (group.kind, group.peer) if group is not None else ("action", -1)
        if group is not None or call.microbatch >= 0:
            rank.events.append(
                (kind, call.name, call.key, sequence, peer, rank.step, call.microbatch, call.chunk, 1, 0, 0,
                 call.bytes, call.part, call.layer)
            )  # fmt: skip

    def _wait(self, rank: _Rank, key: str, sequence: int) -> bool:
        if not self._is_complete(rank, key, sequence):
            rank.wait = Wait("waiting", key, sequence, 1)
            return False
        rank.completed[key] = max(rank.completed[key], sequence + 1)
        return True

    def _arrive(self, rank: _Rank, key: str, sequence: int, size: int) -> None:
        name, kind, runs, peer = rank.groups[key]
        if kind == COLLECTIVE:
            arrived = self._arrived[name, runs, sequence]
            arrived.append(size)
            if len(arrived) == len(runs):
                if len(set(arrived)) == 1:
                    self._complete.add((name, runs, sequence))
                self._ready.extend(runs)
        elif kind == SEND:
            self._complete.add((f"{name} {rank.number}-{peer}", runs, sequence))
            self._ready.append(peer)

    def _is_complete(self, rank: _Rank, key: str, sequence: int) -> bool:
        name, kind, runs, peer = rank.groups[key]
        if self._lost == (rank.number, key, sequence):
            return False
        return (name if kind == COLLECTIVE else f"{name} {peer}-{rank.number}", runs, sequence) in self._complete

    def _run_ahead(self, rank: _Rank) -> None:
        """Let the host of a rank whose device hangs issue the rest of its step, and wait for the device."""
        if self._hangs(rank):
            return
        rank.at += rank.wait is not None
        if rank.at >= len(rank.calls):  # nothing but its device holds a rank that has left out the totals
            rank.at, rank.wait = len(rank.calls) - 1, Wait("device", "", 0, 1)
            return
        while (call := rank.calls[rank.at][1]).name != "host wait":
            if call.key and call.name != "wait":
                self._enter(rank, call)
                rank.issued[call.key] += 1
            elif not call.key:
                self._note(rank, call, -1)
            rank.at += 1
        rank.wait = Wait("device", "", 0, 1)


@functools.lru_cache(maxsize=1 << 15)
def _calls(topology: Topology, rank: int, work: Workload, steps: int) -> list[tuple[int, Call]]:
    calls = step_calls(topology, rank, work)
    return [(step, call) for step in range(1, steps + 1) for call in calls]


def _with_fault(calls: Sequence[tuple[int, Call]], fault: Fault) -> list[tuple[int, Call]]:
    """Return the calls of the rank at fault, without those that are left out, or with a call too many."""
    step, key = calls[fault.call][0], calls[fault.call][1].key
    kept = [*calls[: fault.call]]
    if fault.kind == "skip":
        return [*kept, *calls[fault.call + 1 :]]
    if fault.kind == "skip_step":
        rest = calls[fault.call :]
        return kept + [(at, call) for at, call in rest if at != step or call.key != key or call.name == "wait"]
    return [*kept, calls[fault.call], *calls[fault.call :]] if fault.kind == "extra" else [*calls]
