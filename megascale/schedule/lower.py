"""Lowering: adds sends, receives, weight all-gathers and gradient reductions to a compute schedule.

    1F1B, p = 2, m = 2, rank 0   F0 F1 B0 B1
    lowered with lookahead 1     WAIT_PARAMS F0 SEND_F0 RECV_B0 F1 SEND_F1 RECV_B1 B0 B1 REDUCE

Messages between two ranks form a channel per direction and arrive in send order. Receives are posted in the order of
the sender, known here for all ranks, without tags or handshakes.

On a GPU a posted receive is a kernel that runs until its message arrives, and a send is a kernel that runs until its
receive is posted. A host that waits for its device (to load a kernel, free cached memory, or tune a kernel) waits for
both, and posts nothing meanwhile. Two rules place receives such that no rank waits for its own later actions
(proved by `check.check_device_wait`). A receive is posted

- after the last action of the receiving rank that the message depends on;
- before the first action of the receiving rank that depends on an action of the sender after the send.
"""

from __future__ import annotations

from bisect import bisect_left

from megascale.schedule.dependencies import ScheduleDependencies
from megascale.schedule.ir import Action, Kind, RankSchedule, Schedule

RECV_LOOKAHEAD = 2
"""Compute actions between the posting of a receive and its consumer, if the rules permit. With 1, a message slower than
a forward is exposed (docs/performance.md). Every further action costs memory for an activation.
"""


def lower(
    compute: Schedule, v: int, *, lookahead: int = 1, training: bool = True, reduce_each: bool = False
) -> Schedule:
    """Add communication to a compute schedule of p ranks with v chunks per rank.

    `lookahead`: post a receive at most this number of compute actions before its consumer's turn (0: directly before
    the consumer). `training`: add REDUCE after a chunk's last backward, or after every backward
    with `reduce_each`.
    """
    precedence = ScheduleDependencies(compute, v)
    return [
        lower_rank(precedence, rank, lookahead=lookahead, training=training, reduce_each=reduce_each)
        for rank in range(len(compute))
    ]


def lower_rank(
    precedence: ScheduleDependencies, rank: int, *, lookahead: int, training: bool = True, reduce_each: bool = False
) -> RankSchedule:
    """Add communication to the actions of one rank, as `lower` does."""
    order, p = precedence.compute[rank], len(precedence.compute)
    stages = p * precedence.v
    posts = place_receives(precedence, rank, lookahead)
    last_backward = {a.chunk: a.microbatch for a in order if a.kind is Kind.B}
    gathered: set[int] = set()
    lowered: RankSchedule = []
    for index, action in enumerate(order):
        lowered += posts[index]
        if action.kind is Kind.F and action.chunk not in gathered:
            gathered.add(action.chunk)
            lowered.append(Action(Kind.WAIT_PARAMS, action.chunk, action.microbatch))
        lowered.append(action)
        kind, chunk, microbatch = action
        target = chunk * p + rank + (1 if kind is Kind.F else -1)
        if p > 1 and kind is not Kind.R and 0 <= target < stages:  # another stage needs the result
            lowered.append(Action(Kind.SEND_F if kind is Kind.F else Kind.SEND_B, chunk, microbatch))
        complete = reduce_each or last_backward.get(action.chunk) == action.microbatch
        if training and action.kind is Kind.B and complete:
            lowered.append(Action(Kind.REDUCE, action.chunk, action.microbatch))
    return lowered


def place_receives(precedence: ScheduleDependencies, rank: int, lookahead: int) -> list[RankSchedule]:
    """List, for every compute action of a rank, the receives to post before the action.

    These are the receives of the action and the next `lookahead` actions, if the rules permit, and of messages sent
    before on the same channel.
    """
    p = len(precedence.compute)
    posts: list[RankSchedule] = [[] for _ in precedence.compute[rank]]
    receives = [
        post
        for sender in sorted({(rank - 1) % p, (rank + 1) % p} - {rank})
        for post in _channel_receives(precedence, sender, rank, lookahead)
    ]
    for place, _, receive in sorted(receives, key=lambda post: post[:2]):  # stable: keeps the order of a channel
        posts[place].append(receive)
    return posts


def _channel_receives(
    precedence: ScheduleDependencies, sender: int, rank: int, lookahead: int
) -> list[tuple[int, int, Action]]:
    """List a channel's receives in order, as (index to post before, index wanted without the rules, receive)."""
    messages = [
        (sent, target[1])
        for sent, action in enumerate(precedence.compute[sender])
        if (target := precedence.consumer(action, sender)) is not None and target[0] == rank
    ]
    if not messages:
        return []
    index = precedence.index(rank)
    sender_needs = precedence.last_predecessors(rank, sender)  # by action of the sender
    rank_needs = precedence.last_predecessors(sender, rank)  # by action of this rank
    receives, wanted = [], len(rank_needs)
    for sent, action in reversed(messages):
        needed = index[action]
        wanted = min(wanted, needed - lookahead)  # a later message of the channel may be wanted earlier
        place = min(max(0, wanted, sender_needs[sent] + 1), bisect_left(rank_needs, sent + 1), needed)
        receive = Kind.RECV_F if action.kind is Kind.F else Kind.RECV_B
        receives.append((place, wanted, Action(receive, action.chunk, action.microbatch)))
    return receives[::-1]
