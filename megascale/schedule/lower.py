"""From a compute schedule to everything a rank does: sends, receives, gathers of weights, reductions of gradients.

Messages between two ranks form one channel in each direction, and arrive in the order in which they were sent. Receives
are therefore posted in the sender's order, which is known here for all ranks: no tags, no handshakes.

On a GPU a posted receive is a kernel that runs until its message has come, and a send one that runs until its receive
is posted. A rank that waits for its device (the driver loads a kernel, the allocator frees memory to get some, a kernel
is tuned) waits for both, and starts nothing meanwhile. So two rules say when a receive may be posted, such that no rank
waits for what it has yet to do itself (`check.check_device_wait` proves it):

- behind the last action of its own rank that its message follows from;
- before the first action of its own rank that follows from what the sender does after it has sent.
"""

from __future__ import annotations

from bisect import bisect_left

from megascale.schedule.ir import Action, Kind, Order, Schedule
from megascale.schedule.precedence import Precedence

AHEAD = 2
"""Actions by which receives are posted before they are needed, where the rules let them: with one, a message that takes
longer than a forward is waited for (docs/performance.md); each costs room for one more activation.
"""


def lower(compute: Schedule, v: int, *, ahead: int = 1, training: bool = True, reduce_each: bool = False) -> Schedule:
    """Add communication to a compute schedule of p ranks with v chunks each.

    `ahead`: compute actions by which a receive is posted before the one that needs it, at most (0: directly before).
    `training`: add REDUCE after the last backward of a chunk, or after each backward if `reduce_each`.
    """
    precedence = Precedence(compute, v)
    return [
        lower_rank(precedence, rank, ahead=ahead, training=training, reduce_each=reduce_each)
        for rank in range(len(compute))
    ]


def lower_rank(
    precedence: Precedence, rank: int, *, ahead: int, training: bool = True, reduce_each: bool = False
) -> Order:
    """What `lower` makes of one rank's actions."""
    order, p = precedence.compute[rank], len(precedence.compute)
    stages = p * precedence.v
    posts = receives(precedence, rank, ahead)
    last_backward = {a.chunk: a.microbatch for a in order if a.kind is Kind.B}
    gathered: set[int] = set()
    lowered: Order = []
    for index, action in enumerate(order):
        lowered += posts[index]
        if action.kind is Kind.F and action.chunk not in gathered:
            gathered.add(action.chunk)
            lowered.append(Action(Kind.GATHER, action.chunk, action.microbatch))
        lowered.append(action)
        kind, chunk, microbatch = action
        if p > 1 and 0 <= chunk * p + rank + (1 if kind is Kind.F else -1) < stages:  # another stage needs the result
            lowered.append(Action(Kind.SEND_F if kind is Kind.F else Kind.SEND_B, chunk, microbatch))
        complete = reduce_each or last_backward.get(action.chunk) == action.microbatch
        if training and action.kind is Kind.B and complete:
            lowered.append(Action(Kind.REDUCE, action.chunk, action.microbatch))
    return lowered


def receives(precedence: Precedence, rank: int, ahead: int) -> list[Order]:
    """For each compute action of a rank, the receives to post before it: as a rule those that it or the next `ahead`
    actions need, and those that were sent before them on the same channel.
    """
    p = len(precedence.compute)
    posts: list[Order] = [[] for _ in precedence.compute[rank]]
    found = [
        post
        for sender in sorted({(rank - 1) % p, (rank + 1) % p} - {rank})
        for post in _posts(precedence, sender, rank, ahead)
    ]
    for place, _, receive in sorted(found, key=lambda post: post[:2]):  # stable: a channel stays in order
        posts[place].append(receive)
    return posts


def _posts(precedence: Precedence, sender: int, rank: int, ahead: int) -> list[tuple[int, int, Action]]:
    """A channel's receives in its order: the index of the action to post each before, that to post it before if there
    were no rules, and the receive.
    """
    messages = [
        (sent, target[1])
        for sent, action in enumerate(precedence.compute[sender])
        if (target := precedence.target(action, sender)) is not None and target[0] == rank
    ]
    if not messages:
        return []
    index, followed, follows = precedence.index(rank), precedence.last(rank, sender), precedence.last(sender, rank)
    found, wanted = [], len(follows)
    for sent, action in reversed(messages):
        needed = index[action]
        wanted = min(wanted, needed - ahead)  # those behind it on the channel may be wanted sooner
        place = min(max(0, wanted, followed[sent] + 1), bisect_left(follows, sent + 1), needed)
        receive = Kind.RECV_F if action.kind is Kind.F else Kind.RECV_B
        found.append((place, wanted, Action(receive, action.chunk, action.microbatch)))
    return found[::-1]
