"""Proofs of what a schedule must satisfy, for any shape: complete, messages that match, no deadlock.

A schedule is played to its end; an order that cannot be finished is a deadlock. There a posted receive holds nobody up.
On a GPU it is a kernel that occupies the device, and a host may wait for the device: `check_device_wait` shows that
such a wait ends.
"""

from __future__ import annotations

from collections import deque

from megascale.schedule.ir import Action, Kind, Schedule

Message = tuple[Kind, int, int]  # F or B, the virtual stage that consumes it, micro-batch


class ScheduleError(Exception):
    """A schedule that cannot be run, or does not compute what it should."""


def check_complete(schedule: Schedule, v: int, m: int) -> None:
    """Each rank runs each (chunk, micro-batch) once forward and then once backward.

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


def dependencies(action: Action, rank: int, p: int, v: int) -> list[tuple[Kind, int, int]]:
    """What must be done, as (kind, virtual stage, micro-batch), before a forward or backward can start."""
    stage, i = action.chunk * p + rank, action.microbatch
    if action.kind is Kind.F:
        return [(Kind.F, stage - 1, i)] if stage else []
    after = [(Kind.B, stage + 1, i)] if stage < p * v - 1 else []
    return [(Kind.F, stage, i), *after]


def check_messages(schedule: Schedule) -> None:
    """Run a lowered schedule's messages: between two ranks they arrive in the order in which they were sent, receives
    must be posted in that order, and no rank may wait for a message that is never sent.

    Raises: ScheduleError
    """
    p = len(schedule)
    channels: dict[tuple[int, int], deque[tuple[Kind, int, int]]] = {}
    position = [0] * p
    held: list[set[tuple[Kind, int, int]]] = [set() for _ in range(p)]  # messages posted, by what they carry
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
                    held[rank].add((Kind.F if action.kind is Kind.RECV_F else Kind.B, stage, i))
                elif action.kind in (Kind.F, Kind.B) and (action.kind, stage, i) in held[rank]:
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
    """In a lowered schedule a rank may wait for its device before any one action: all that it has posted ends.

    On NCCL a receive ends when its message has come, and a send when its receive runs. Each runs when the compute
    actions before it are done. So the wait of a rank before its action k does not end if one end of a message has been
    posted by then, and the other end stands behind a compute action that follows from k. The first k behind the end
    that is posted decides, so one comparison of vector clocks (Mattern 1989) for each end proves all positions.
    Reductions over dp need no proof: in every pipeline they stand behind the same action.

    One rank waits, and the hosts of the others go on. This says nothing of ranks that wait at the same time.

    Raises: ScheduleError, naming the action before which the wait does not end
    """
    compute = [[action for action in order if action.kind in (Kind.F, Kind.B)] for order in schedule]
    clocks = _clocks(compute, v)
    sends, receives = _ends(schedule)
    for message, sent in sends.items():
        posted = receives[message]
        for (rank, own), (other, behind) in ((sent, posted), (posted, sent)):
            if behind and clocks[other][behind - 1][rank] > own:
                end = "a send to" if rank == sent[0] else "a receive from"
                raise ScheduleError(
                    f"rank {rank}, waiting for its device before {compute[rank][own]}, waits for ever: {end} rank "
                    f"{other} is posted, whose other end is behind {compute[other][behind - 1]}, which follows from "
                    f"{compute[rank][own]}"
                )


def _clocks(compute: Schedule, v: int) -> list[list[list[int]]]:
    """For each action of each rank, by rank the number of actions that must be done when it is, itself included.

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
                needs = dependencies(action, rank, p, v)
                if not all(need in done for need in needs):
                    break
                before = clocks[rank][-1] if clocks[rank] else [0] * p
                clock = [*map(max, zip(before, *(done[need] for need in needs), strict=True))]
                clock[rank] += 1
                done[action.kind, action.chunk * p + rank, action.microbatch] = clock
                clocks[rank].append(clock)
                progress = True
    if any(len(found) < len(order) for found, order in zip(clocks, compute, strict=True)):
        raise ScheduleError("deadlock: the compute actions wait for each other")
    return clocks


def _ends(schedule: Schedule) -> tuple[dict[Message, tuple[int, int]], dict[Message, tuple[int, int]]]:
    """For each message the rank that sends it, and that which receives it, with the number of compute actions before.

    Raises: ScheduleError for a send that does not directly follow its action, for a rank might wait between them
    """
    p, sends, receives = len(schedule), dict[Message, tuple[int, int]](), dict[Message, tuple[int, int]]()
    for rank, order in enumerate(schedule):
        before, last = 0, None
        for action in order:
            kind, chunk, i = action
            stage, sent = chunk * p + rank, Kind.F if kind is Kind.SEND_F else Kind.B
            match kind:
                case Kind.F | Kind.B:
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
