"""Checks of schedules, which tests run for every (p, v, m).

check_complete     every micro-batch runs forward, then backward, on every chunk
check_messages     receives are posted in send order, and every message is sent
check_chunks       dependent chunks of a sequence: forwards ascend, backwards descend, dropped forwards are recomputed
check_device_wait  no deadlock if a host waits for its device, where posted receives and sends are running kernels
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate, pairwise

from megascale.schedule.ir import Action, Kind, Schedule

Message = tuple[Kind, int, int]  # F or B, the virtual stage that consumes it, micro-batch


COMPUTE = (Kind.F, Kind.B, Kind.R)


class ScheduleError(Exception):
    """A schedule that deadlocks, or computes wrong results."""


def check_complete(schedule: Schedule, v: int, m: int) -> None:
    """Check that every rank runs every (chunk, micro-batch) once forward and later once backward.

    Raises: ScheduleError
    """
    expected = {(chunk, i) for chunk in range(v) for i in range(m)}
    for rank, order in enumerate(schedule):
        seen: set[tuple[int, int]] = set()
        for kind in (Kind.F, Kind.B):
            pairs = [(a.chunk, a.microbatch) for a in order if a.kind is kind]
            if len(pairs) != len(expected) or set(pairs) != expected:
                raise ScheduleError(
                    f"rank {rank}: {kind} covers {len(set(pairs))} of {len(expected)} pairs in {len(pairs)} actions"
                )
        for action in order:
            pair = (action.chunk, action.microbatch)
            if action.kind is Kind.F:
                seen.add(pair)
            elif action.kind is Kind.B and pair not in seen:
                raise ScheduleError(f"rank {rank}: {action} comes before its forward")


def check_chunks(schedule: Schedule, sequences: Sequence[int], keep: int) -> None:
    """Check the order of dependent chunks on every rank: a sequence of n chunks has n micro-batches in a row.

    A forward reads the keys and values of the chunks before, a backward the gradients that the chunks after leave for
    them. All chunks but the last `keep` are recomputed directly before their backward.

    Raises: ScheduleError
    """
    ends = [*accumulate(sequences)]
    for rank, order in enumerate(schedule):
        forwards, backwards = ([a.microbatch for a in order if a.kind is kind] for kind in (Kind.F, Kind.B))
        for end, chunks in zip(ends, sequences, strict=True):
            own = range(end - chunks, end)
            if [i for i in forwards if i in own] != [*own] or [i for i in backwards if i in own] != [*own][::-1]:
                raise ScheduleError(f"rank {rank}: the chunks {own.start} to {end - 1} of a sequence are not in order")
        dropped = {i for end, chunks in zip(ends, sequences, strict=True) for i in range(end - chunks, end - keep)}
        before = {b.microbatch for a, b in pairwise(order) if b.kind is Kind.B and a == (Kind.R, b.chunk, b.microbatch)}
        if before != dropped or sum(a.kind is Kind.R for a in order) != len(dropped):
            raise ScheduleError(
                f"rank {rank}: recomputes {sorted(before)} before their backwards, not {sorted(dropped)}"
            )


def dependencies(action: Action, rank: int, p: int, v: int) -> list[tuple[Kind, int, int]]:
    """List the dependencies of a compute action, as (kind, virtual stage, micro-batch)."""
    stage, i = action.chunk * p + rank, action.microbatch
    if action.kind is Kind.R:
        return [(Kind.F, stage, i)]
    if action.kind is Kind.F:
        return [(Kind.F, stage - 1, i)] if stage else []
    after = [(Kind.B, stage + 1, i)] if stage < p * v - 1 else []
    return [(Kind.F, stage, i), *after]


def check_messages(schedule: Schedule) -> None:
    """Check that a lowered schedule posts receives in send order, channel by channel, and that no rank waits for a
    message that is never sent.

    Raises: ScheduleError
    """
    p = len(schedule)
    channels: dict[tuple[int, int], deque[tuple[Kind, int, int]]] = {}
    position = [0] * p
    posted: list[set[tuple[Kind, int, int]]] = [set() for _ in range(p)]  # receives, by the action that consumes them
    sent: set[tuple[int, int, Kind, int, int]] = set()
    progress = True
    while progress:
        progress = False
        for rank, order in enumerate(schedule):
            while position[rank] < len(order):
                action = order[position[rank]]
                stage, i = action.chunk * p + rank, action.microbatch
                if action.kind in (Kind.SEND_F, Kind.SEND_B):
                    forward = action.kind is Kind.SEND_F
                    peer_stage = stage + 1 if forward else stage - 1
                    key = (Kind.F if forward else Kind.B, peer_stage, i)
                    channels.setdefault((rank, peer_stage % p), deque()).append(key)
                    sent.add((rank, peer_stage % p, *key))
                elif action.kind in (Kind.RECV_F, Kind.RECV_B):
                    posted[rank].add((Kind.F if action.kind is Kind.RECV_F else Kind.B, stage, i))
                elif action.kind in (Kind.F, Kind.B) and (action.kind, stage, i) in posted[rank]:
                    source = (stage - 1 if action.kind is Kind.F else stage + 1) % p
                    if (source, rank, action.kind, stage, i) not in sent:
                        break
                position[rank] += 1
                progress = True
    stuck = [f"rank {r} at {schedule[r][position[r]]}" for r in range(p) if position[r] < len(schedule[r])]
    if stuck:
        raise ScheduleError(f"deadlock: {', '.join(stuck)}")
    _check_channel_order(schedule, channels)


def _check_channel_order(schedule: Schedule, channels: dict[tuple[int, int], deque[tuple[Kind, int, int]]]) -> None:
    p = len(schedule)
    posted: dict[tuple[int, int], list[tuple[Kind, int, int]]] = {}
    for rank, order in enumerate(schedule):
        for action in order:
            stage, i = action.chunk * p + rank, action.microbatch
            if action.kind is Kind.RECV_F:
                posted.setdefault(((stage - 1) % p, rank), []).append((Kind.F, stage, i))
            elif action.kind is Kind.RECV_B:
                posted.setdefault(((stage + 1) % p, rank), []).append((Kind.B, stage, i))
    for channel in channels.keys() | posted.keys():
        if list(channels.get(channel, ())) != posted.get(channel, []):
            raise ScheduleError(
                f"ranks {channel[0]} -> {channel[1]}: receives are not posted in the order of the sends"
            )


def check_device_wait(schedule: Schedule, v: int) -> None:
    """Check that in a lowered schedule any single rank may wait for its device before any action without deadlock.

    On NCCL a receive ends when its message arrives, and a send when its receive runs; both run after the compute
    actions posted before them. A wait before action k deadlocks if one end of a message is posted by then, and the
    other end comes after a compute action that depends on k. The first k after the posted end decides: one comparison
    of vector clocks (Mattern 1989) per end proves all positions. Reductions over dp need no proof: all pipelines issue
    them after the same action.

    The hosts of the other ranks are assumed to continue. Simultaneous waits of several ranks are not covered.

    Raises: ScheduleError, naming the action before which the wait does not end
    """
    compute = [[action for action in order if action.kind in COMPUTE] for order in schedule]
    clocks = _clocks(compute, v)
    sends, receives = _message_ends(schedule)
    for message, send in sends.items():
        receive = receives[message]
        for (rank, position), (peer, peer_position) in ((send, receive), (receive, send)):
            if peer_position and clocks[peer][peer_position - 1][rank] > position:
                end = "a send to" if rank == send[0] else "a receive from"
                raise ScheduleError(
                    f"rank {rank}, waiting for its device before {compute[rank][position]}, never continues: {end} "
                    f"rank {peer} is posted, whose other end comes after {compute[peer][peer_position - 1]}, which "
                    f"depends on {compute[rank][position]}"
                )


def _clocks(compute: Schedule, v: int) -> list[list[list[int]]]:
    """Compute the vector clock of every action: by rank, the number of actions done when the action is done.

    Raises: ScheduleError on a deadlock
    """
    p = len(compute)
    clocks: list[list[list[int]]] = [[] for _ in compute]
    done: dict[tuple[Kind, int, int], list[int]] = {}
    progress = True
    while progress:
        progress = False
        for rank, order in enumerate(compute):
            for action in order[len(clocks[rank]) :]:
                inputs = dependencies(action, rank, p, v)
                if not all(need in done for need in inputs):
                    break
                previous = clocks[rank][-1] if clocks[rank] else [0] * p
                clock = [*map(max, zip(previous, *(done[need] for need in inputs), strict=True))]
                clock[rank] += 1
                done[action.kind, action.chunk * p + rank, action.microbatch] = clock
                clocks[rank].append(clock)
                progress = True
    if any(len(done_clocks) < len(order) for done_clocks, order in zip(clocks, compute, strict=True)):
        raise ScheduleError("deadlock: the compute actions wait for each other")
    return clocks


def _message_ends(schedule: Schedule) -> tuple[dict[Message, tuple[int, int]], dict[Message, tuple[int, int]]]:
    """Map every message to its send, and to its receive, both as (rank, number of compute actions before).

    Raises: ScheduleError for a send that does not directly follow its action: a host might wait between the two
    """
    p, sends, receives = len(schedule), dict[Message, tuple[int, int]](), dict[Message, tuple[int, int]]()
    for rank, order in enumerate(schedule):
        before, last = 0, None
        for action in order:
            kind, chunk, i = action
            stage, sent = chunk * p + rank, Kind.F if kind is Kind.SEND_F else Kind.B
            match kind:
                case Kind.F | Kind.B | Kind.R:
                    before += 1
                case Kind.SEND_F | Kind.SEND_B:
                    if last != (sent, chunk, i):
                        raise ScheduleError(f"rank {rank}: {action} does not directly follow {sent}{chunk}.{i}")
                    sends[sent, stage + 1 if sent is Kind.F else stage - 1, i] = rank, before
                case Kind.RECV_F:
                    receives[Kind.F, stage, i] = rank, before
                case Kind.RECV_B:
                    receives[Kind.B, stage, i] = rank, before
            last = action
    return sends, receives
