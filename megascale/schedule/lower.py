"""From a compute schedule to everything a rank does: sends, receives, gathers of weights, reductions of gradients.

Messages between two ranks form one channel in each direction, and arrive in the order in which they were sent. Receives
are therefore posted in the sender's order, which is known here for all ranks: no tags, no handshakes.
"""

from __future__ import annotations

from collections import defaultdict

from megascale.schedule.ir import Action, Kind, Order, Schedule

AHEAD = 2
"""Actions by which receives are posted before they are needed: with one, a message that takes longer than a forward is
waited for (docs/performance.md); each costs room for one more activation.
"""

Message = tuple[Kind, int, int]  # F or B, the virtual stage that consumes it, micro-batch
Channels = dict[tuple[int, int], dict[Message, int]]  # by sender and receiver the messages, numbered as they are sent


def lower(
    compute: Schedule, v: int, *, ahead: int | None = 1, training: bool = True, reduce_each: bool = False
) -> Schedule:
    """Add communication to a compute schedule of p ranks with v chunks each.

    `ahead`: compute actions by which a receive is posted before the one that needs it (0: directly before; None: no
    receives).
    `training`: add REDUCE after the last backward of a chunk, or after each backward if `reduce_each`.
    """
    p, sends = len(compute), _sends(compute, v)
    channels = _channels(sends)
    return [_lower_rank(rank, compute, sends, channels, v, ahead, training, reduce_each) for rank in range(p)]


def receives(compute: Schedule, rank: int, v: int, ahead: int) -> list[Order]:
    """What `lower` lets a rank post before each of its compute actions."""
    return _receive_posts(rank, len(compute), v, compute[rank], _channels(_sends(compute, v)), ahead)


def _sends(compute: Schedule, v: int) -> list[list[Message | None]]:
    """By rank what becomes of each action."""
    return [[_message(action, rank, len(compute), v) for action in order] for rank, order in enumerate(compute)]


def _channels(sends: list[list[Message | None]]) -> Channels:
    channels: Channels = defaultdict(dict)
    for rank, messages in enumerate(sends):
        for message in messages:
            if message is not None:
                channel = channels[rank, message[1] % len(sends)]
                channel[message] = len(channel)
    return channels


def _message(action: Action, rank: int, p: int, v: int) -> Message | None:
    """What an action's result becomes: a message to the virtual stage that needs it; None at the ends, or on one
    rank.
    """
    stage = action.chunk * p + rank
    target = stage + 1 if action.kind is Kind.F else stage - 1
    return (action.kind, target, action.microbatch) if p > 1 and 0 <= target < p * v else None


def _lower_rank(
    rank: int,
    compute: Schedule,
    sends: list[list[Message | None]],
    channels: Channels,
    v: int,
    ahead: int | None,
    training: bool,
    reduce_each: bool,
) -> Order:
    p, order = len(compute), compute[rank]
    posts = [[] for _ in order] if ahead is None else _receive_posts(rank, p, v, order, channels, ahead)
    last_backward = {a.chunk: a.microbatch for a in order if a.kind is Kind.B}
    gathered: set[int] = set()
    lowered: Order = []
    for index, action in enumerate(order):
        lowered += posts[index]
        if action.kind is Kind.F and action.chunk not in gathered:
            gathered.add(action.chunk)
            lowered.append(Action(Kind.GATHER, action.chunk, action.microbatch))
        lowered.append(action)
        if sends[rank][index] is not None:
            send = Kind.SEND_F if action.kind is Kind.F else Kind.SEND_B
            lowered.append(Action(send, action.chunk, action.microbatch))
        complete = reduce_each or last_backward.get(action.chunk) == action.microbatch
        if training and action.kind is Kind.B and complete:
            lowered.append(Action(Kind.REDUCE, action.chunk, action.microbatch))
    return lowered


def _receive_posts(rank: int, p: int, v: int, order: Order, channels: Channels, ahead: int) -> list[Order]:
    """For each compute action, the receives to post before it: those that it or the next `ahead` actions need, and
    those that were sent before them on the same channel.
    """
    posts: list[Order] = [[] for _ in order]
    posted: dict[int, int] = defaultdict(int)  # sender -> messages of its channel posted so far
    messages = {sender: list(channels[sender, rank]) for sender in range(p) if (sender, rank) in channels}
    for index, action in enumerate(order):
        stage = action.chunk * p + rank
        source = stage - 1 if action.kind is Kind.F else stage + 1
        if p == 1 or not 0 <= source < p * v:
            continue
        sender = source % p
        needed = channels[sender, rank][action.kind, stage, action.microbatch] + 1
        for kind, target, microbatch in messages[sender][posted[sender] : needed]:
            receive = Kind.RECV_F if kind is Kind.F else Kind.RECV_B
            posts[max(0, index - ahead)].append(Action(receive, target // p, microbatch))
        posted[sender] = max(posted[sender], needed)
    return posts
