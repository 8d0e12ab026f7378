"""Ranks that made other calls than the rest: found where every rank of a hang waits for another.

A rank has left out a call, or made a call too many, where its calls go on otherwise than they should. For each step
from a call x to the next call y, the rank is compared with its kin: the other ranks of its role in its nearest group,
the tensor-parallel group.

1. Kin have gone from x to y, too: nothing is wrong.
2. Several have gone from x to z, or several ranks in the group of y or z have: the rank is wrong.
3. One has (a group of two), or none has come so far. Precedents decide between y and z: the calls after x in earlier
   steps of these ranks, on other ranks of the role, for other micro-batches, and in other layers.

Where x is older than the records, the same call has another sequence number on the rank than on its kin.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice, pairwise
from typing import NamedTuple

from megascale.core.rank import format_ranks
from megascale.operate.diagnose.hang.call_sequence import (
    Call,
    CallMatch,
    CallSequence,
    Follower,
    Role,
    follower,
    resolve,
    role_of,
)
from megascale.operate.diagnose.hang.waits import WaitGraph
from megascale.record.layout import COLLECTIVE
from megascale.record.rank_state import RankRuns

MOST_KIN = 16  # most ranks of a group that a rank is compared with
MOST_COMPARED = 64  # most ranks whose longer records are asked for
FEWEST_PRECEDENTS = 3  # fewest other micro-batches or layers, all alike, that speak against a rank without its kin
_SEVERAL_KIN, _ONE_AND_PRECEDENTS, _PRECEDENTS, _UNDECIDED = 3, 2, 1, 0  # certainties

_WORDS = {
    CallMatch.OTHER_STEP: "in earlier steps",
    CallMatch.SAME: "on other ranks",
    CallMatch.OTHER_MICROBATCH: "for other micro-batches",
    CallMatch.OTHER_LAYER: "in other layers",
}
"""Precedents in words, in the order of their weight."""


class Divergence(NamedTuple):
    """Ranks that made other calls, several if one of them did. `certain`: a single rank, and more than a guess.
    `compare`: ranks whose longer records would tell more.
    """

    ranks: tuple[int, ...]
    evidence: tuple[str, ...]
    certain: bool
    compare: tuple[int, ...]


class _Turn(NamedTuple):
    """A place in which the calls of a rank go on otherwise."""

    certainty: int
    rank: int
    text: str


def divergent_ranks(graph: WaitGraph) -> Divergence:
    """Return the ranks that made other calls than the rest, among those that wait for each other or for devices."""
    comparison = _Comparison(graph, sorted({*graph.cycle(), *graph.on_device}))
    turns = [turn for rank in comparison.suspects if (turn := _wrong_turn(rank, comparison)) is not None]
    certainty = max((turn.certainty for turn in turns), default=_UNDECIDED)
    found = [turn for turn in turns if turn.certainty == certainty]
    if certainty == _UNDECIDED and (shifted := list(_shifted_ranks(comparison))):
        found, certainty = shifted, _SEVERAL_KIN
    ranks = tuple(sorted(turn.rank for turn in found)) or tuple(sorted(comparison.suspects))
    evidence = [turn.text for turn in found[:2]]
    if certainty == _UNDECIDED or len(ranks) > 1:
        evidence.insert(0, f"one of {format_ranks(ranks)} made other calls than the rest")
    certain = certainty > _UNDECIDED and len(ranks) == 1
    compare = comparison.worth_reading(ranks if certainty > _PRECEDENTS else ())
    return Divergence(ranks, tuple(evidence), certain, compare)


class _Comparison:
    """The calls of ranks in a hang, of their kin, and of all ranks of their roles."""

    def __init__(self, graph: WaitGraph, suspects: Iterable[int]) -> None:
        self.records = graph.records
        self.suspects = [rank for rank in suspects if rank in graph.records]
        self._role_of = {rank: role_of(record) for rank, record in graph.records.items()}
        self._ranks_of: defaultdict[Role, list[int]] = defaultdict(list)
        for rank, role in self._role_of.items():
            self._ranks_of[role].append(rank)
        self._kin: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
        self.groups: defaultdict[int, set[tuple[str, RankRuns]]] = defaultdict(set)
        for name, members, ranks in graph.contested():
            for rank in ranks:
                self.groups[rank].add((name, members))
        self._programs: dict[int, CallSequence] = {}
        self._everywhere: dict[Role, defaultdict[Call, Counter[Follower]]] = {}

    def program(self, rank: int) -> CallSequence:
        """Return the calls of a rank."""
        if rank not in self._programs:
            self._programs[rank] = CallSequence(self.records[rank])
        return self._programs[rank]

    def kin(self, rank: int) -> list[tuple[str, tuple[int, ...]]]:
        """Return the names of the groups of a rank, the nearest first, with other ranks of its role there."""
        if rank not in self._kin:
            role, states = self._role_of[rank], self.records[rank].groups.values()
            groups = [(s.name, s.ranks) for s in states if s.kind == COLLECTIVE and s.ranks is not None]
            alike = {
                name: tuple(islice((m for m in ranks if m != rank and self._role_of.get(m) == role), MOST_KIN))
                for name, ranks in sorted(groups, key=_span)
            }
            self._kin[rank] = [(name, kin) for name, kin in alike.items() if kin]
        return self._kin[rank]

    def is_of_role(self, rank: int, *calls: Call) -> bool:
        """Return True for calls that all ranks of a role make. Outside of micro-batches the calls of the nearest group
        may differ: a dp rank sums over tp only gradients of its own shard.
        """
        nearest = next((name for name, _ in self.kin(rank)), "")
        return all(call.microbatch >= 0 or call.group[0] != nearest for call in calls)

    def after(self, call: Call, ranks: Iterable[int]) -> Counter[Follower]:
        """Return the counts of calls after a call on ranks."""
        found: Counter[Follower] = Counter()
        for rank in ranks:
            found.update(self.program(rank).after(call))
        return found

    def everywhere(self, rank: int) -> Mapping[Call, Counter[Follower]]:
        """Return the counts of calls after each call, over all ranks of the role of a rank."""
        role = self._role_of[rank]
        if role not in self._everywhere:
            self._everywhere[role] = defaultdict(Counter)
            for mate in self._ranks_of[role]:
                for call, following in pairwise(self.program(mate).calls):
                    self._everywhere[role][call][following] += 1
        return self._everywhere[role]

    def precedents(self, step: _Step, likeness: CallMatch, kin: tuple[int, ...]) -> Counter[Follower]:
        """Return the counts of calls after calls like the first of a step, before the step: later calls may be wrong
        themselves. `kin`: ranks whose calls count besides the rank's own.
        """
        rank, place, call, following = step
        if likeness is CallMatch.SAME:
            elsewhere = self.everywhere(rank)[call] - self.after(call, kin) - Counter([following])
            return Counter(elsewhere if self.is_of_role(rank, following, *map(Call._make, elsewhere)) else ())
        found = self.program(rank).after(call, likeness, place)
        for member in kin:
            program = self.program(member)
            found.update(program.after(call, likeness, program.place(call)))
        return found

    def turn(self, certainty: int, step: _Step, usual: Call, precedent: str) -> _Turn | None:
        """Return the turn of a rank away from the `usual` call; None if the turn explains no wait."""
        rank, _, call, following = step
        contested = {name for name, _ in self.groups[rank]}  # in which it waits, or others wait for it
        if usual.group[0] in contested:
            text = f"left out {usual} in step {usual.step}: after {call} it went on to {following}"
        elif following.group[0] in contested:
            text = f"made {following} in step {following.step}, where {usual} follows {call}"
        else:
            return None
        return _Turn(certainty, rank, f"rank {rank} {text}, otherwise than {precedent}")

    def worth_reading(self, found: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks whose longer records would tell more: the ranks found, else the suspects in the smallest
        groups; with their nearest kin, and other ranks of their roles.
        """
        by_group = sorted(self.suspects, key=lambda rank: min((len(m) for _, m in self.groups[rank]), default=0))
        ranks: dict[int, None] = {}
        for rank in list(found)[:MOST_COMPARED] or by_group[:MOST_COMPARED]:
            nearest = [kin[:3] for _, kin in self.kin(rank)[:1]]
            ranks |= dict.fromkeys((rank, *chain(*nearest), *self._ranks_of[self._role_of[rank]][:3]))
        return tuple(sorted(islice(ranks, MOST_COMPARED)))


def _span(group: tuple[str, RankRuns]) -> tuple[int, str]:
    """Return the distance of a group's first and last rank: ranks of a tensor-parallel group are the nearest."""
    name, ranks = group
    return max((first + (count - 1) * distance for first, count, distance in ranks.runs), default=0) - min(
        (first for first, _, _ in ranks.runs), default=0
    ), name


def _wrong_turn(rank: int, comparison: _Comparison) -> _Turn | None:
    """Return the most certain turn of a rank; the first of several: later precedents may be wrong themselves."""
    everywhere = comparison.everywhere(rank)
    best = None
    for place, (call, following) in enumerate(pairwise(comparison.program(rank).calls)):
        seen = everywhere[call]
        if len(seen) == 1 and seen[following] > 1:
            continue  # all ranks of the role agree
        turn = _judge(_Step(rank, place, call, following), comparison)
        if turn is not None and (best is None or turn.certainty > best.certainty):
            best = turn
    return best


class _Step(NamedTuple):
    """A step of a rank, from the call at `place` of its record to the next call."""

    rank: int
    place: int
    call: Call
    following: Call


def _judge(step: _Step, comparison: _Comparison) -> _Turn | None:
    """Return the turn of a rank if its step is wrong, or may be."""
    rank, _, call, following = step
    groups = comparison.kin(rank)
    nearest = groups[0][1] if groups else ()
    seen = comparison.after(call, nearest)
    if following in seen:
        return None
    if not seen:
        return _judge_by_precedents(step, nearest, None, comparison)
    usual = Call(*max(seen, key=lambda other: (seen[other], other)))
    names = {usual.group[0], following.group[0]} if comparison.is_of_role(rank, usual, following) else {}
    for ranks in (nearest, *(ranks for name, ranks in groups if name in names)):
        agreeing = comparison.after(call, ranks)
        if agreeing[usual] > 1 and following not in agreeing:
            return comparison.turn(_SEVERAL_KIN, step, usual, f"on {format_ranks(ranks)}")
    return _judge_by_precedents(step, nearest, usual, comparison)


def _judge_by_precedents(
    step: _Step, kin: tuple[int, ...], usual: Call | None, comparison: _Comparison
) -> _Turn | None:
    """Return the turn of a rank if its step has no precedent. `usual`: the next call of one of its kin, if known."""
    for likeness, words in _WORDS.items():
        if likeness is CallMatch.SAME and not comparison.is_of_role(step.rank, usual or step.following):
            continue
        precedents = comparison.precedents(step, likeness, kin)
        known = follower(step.call, step.following, likeness) in precedents
        if usual is None:
            likely = (resolve(step.call, one, likeness) for one, _ in precedents.most_common(1))
            expected = next(filter(comparison.program(step.rank).may_have, likely), None)
        else:
            expected = usual if follower(step.call, usual, likeness) in precedents else None
        if known:
            if usual is None or expected is None:
                return None
        elif expected is not None:
            if usual is not None:
                return comparison.turn(_ONE_AND_PRECEDENTS, step, expected, words)
            if likeness <= CallMatch.OTHER_STEP or (len(precedents) == 1 and precedents.total() >= FEWEST_PRECEDENTS):
                return comparison.turn(_PRECEDENTS, step, expected, words)
    return None if usual is None else comparison.turn(_UNDECIDED, step, usual, f"on {format_ranks(kin)}")


def _shifted_ranks(comparison: _Comparison) -> Iterator[_Turn]:
    """Yield the ranks on which a call has another sequence number in its group than on most ranks of the group."""
    for name, members in {group for rank in comparison.suspects for group in comparison.groups[rank]}:
        ranks = [rank for rank in members if rank in comparison.records]
        numbers: defaultdict[Call, dict[int, int]] = defaultdict(dict)
        for rank in ranks:
            program = comparison.program(rank)
            for call, sequence in zip(program.calls, program.numbers, strict=True):
                if call.group[:2] == (name, COLLECTIVE):
                    numbers[call][rank] = sequence
        for call, by_rank in reversed(numbers.items()):
            (usual, count), *others = Counter(by_rank.values()).most_common()
            odd = [rank for rank, number in by_rank.items() if number != usual]
            if others and len(odd) == 1 and count > 1:
                text = (
                    f"{call} has number {by_rank[odd[0]]} on rank {odd[0]}, and number {usual} on the rest of its group"
                )
                yield _Turn(_SEVERAL_KIN, odd[0], text)
                break
