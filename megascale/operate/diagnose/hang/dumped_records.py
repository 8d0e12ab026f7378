"""States of ranks, made of the dumps of torch's flight recorder: for the same verdict, chain and picture.

A dump has the operations that a rank has started, and those that have not ended, with the numbers that torch gives
them. What the host waits for is not in it: a rank with one operation that others have not started waits there, a rank
with several waits for its device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from megascale.operate.diagnose.hang.flight import FlightDump, FlightOperation, read_waits
from megascale.record.layout import COLLECTIVE, RECEIVE, SEND, Phase
from megascale.record.rank_state import FlightEvent, GroupState, RankRuns, RankState, Wait

MADE_OF_DUMP = 0
"""The `pid` of a state that is made of a dump."""


def read_dumped_records(folder: Path, run: str, world: int) -> dict[int, RankState]:
    """Return the states of ranks in groups in which a rank waits. Empty without such a rank, if every awaited rank
    waits itself, which dumps alone do not resolve, or if a dump cannot be read.
    """
    found = read_waits(folder)
    if found is None or None in found.dumps.values():
        return {}
    if all(found.waits.get(missing) for waits in found.waits.values() for missing, _ in waits):
        return {}
    dumps = {rank: dump for rank, dump in found.dumps.items() if dump is not None}
    written_s = max(dump.written_at for dump in dumps.values())
    return {
        rank: _record(rank, dump, found.operations(rank), run, world, written_s) for rank, dump in sorted(dumps.items())
    }


def _record(
    rank: int, dump: FlightDump, awaiting: Sequence[FlightOperation], run: str, world: int, written_s: float
) -> RankState:
    """Return the state of a rank. `awaiting`: its operations that others have not started."""
    read_ns, updated_ns = round(written_s * 1e9), round(dump.last_started_at * 1e9)
    places = dict.fromkeys(_place(operation, rank) for operation in awaiting)
    wait = None
    if places:
        since_ns = round(min(operation.started_at for operation in awaiting) * 1e9)
        wait = Wait("waiting", *next(iter(places)), since_ns) if len(places) == 1 else Wait("device", "", 0, since_ns)
    events = tuple(_event(operation, rank) for operation in dump.unfinished)
    return RankState(
        run, rank, world, MADE_OF_DUMP, 0, 0.0, 0, read_ns, updated_ns, read_ns, Phase.STEP, updated_ns, 0, 0.0, {},
        _groups(rank, dump), wait, events, events, node=dump.host,
    )  # fmt: skip


def _groups(rank: int, dump: FlightDump) -> Mapping[str, GroupState]:
    """Return the states of a rank's groups, and of messages in flight. Numbers of collectives are torch's; those of
    messages count the ones in flight, whose first is the same at both ends.
    """
    states = []
    for group, last in dump.last_collective_id.items():
        began = [each.sequence_id for each in dump.unfinished if each.group == group and each.endpoints is None]
        ranks = RankRuns.from_ranks(dump.groups.get(group, ()))
        name = _name(dump.descriptions[group])
        states.append(GroupState(name, COLLECTIVE, ranks, last + 1, last + 1, min(began, default=last + 1)))
    messages = Counter((each.description, each.members, each.endpoints) for each in dump.unfinished if each.endpoints)
    for (description, members, ends), count in messages.items():
        assert ends is not None
        kind, peer = (SEND, ends[1]) if ends[0] == rank else (RECEIVE, ends[0])
        states.append(GroupState(_name(description), kind, RankRuns.from_ranks(members), count, count, 0, peer))
    return {state.key: state for state in states}


def _name(description: str) -> str:
    return description.replace(" ", "_")


def _place(operation: FlightOperation, rank: int) -> tuple[str, int]:
    """Return the key of an operation's group in the record, and its number there."""
    if operation.endpoints is None:
        return _name(operation.description), operation.sequence_id
    sender, receiver = operation.endpoints
    side = f"{SEND} {receiver}" if sender == rank else f"{RECEIVE} {sender}"
    return f"{_name(operation.description)} {side}", 0


def _event(operation: FlightOperation, rank: int) -> FlightEvent:
    """Return an operation that has not ended."""
    (key, number), ends = _place(operation, rank), operation.endpoints
    peer = -1 if ends is None else ends[1] if ends[0] == rank else ends[0]
    kind = COLLECTIVE if ends is None else SEND if ends[0] == rank else RECEIVE
    started_ns = round(operation.started_at * 1e9)
    return FlightEvent(kind, operation.name, key, number, peer, 0, -1, -1, started_ns, started_ns, 0)
