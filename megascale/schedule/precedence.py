"""Which actions of a neighbour an action follows from: by the order of every rank, and by the messages between them."""

from __future__ import annotations

from megascale.schedule.ir import Action, Kind, Schedule


class Precedence:
    """What happens before what in a compute schedule of p ranks with v chunks each, however long its actions take.

    An action follows from all actions of its rank before it, from the action of another rank that makes its input, and
    from all that these follow from. Of its predecessors on one rank the last, given by its index, stands for all.
    Messages go between neighbours: on a line of ranks if v is 1, else on a ring.
    """

    def __init__(self, compute: Schedule, v: int) -> None:
        self.compute, self.v = compute, v
        self._indices: dict[int, dict[Action, int]] = {}
        self._heard: dict[tuple[int, int], list[int]] = {}

    def index(self, rank: int) -> dict[Action, int]:
        """Where each action of a rank stands."""
        if rank not in self._indices:
            self._indices[rank] = {action: index for index, action in enumerate(self.compute[rank])}
        return self._indices[rank]

    def target(self, action: Action, rank: int) -> tuple[int, Action] | None:
        """The rank that needs an action's result and its action that does; None at the ends, or on one rank."""
        return self._along(action, rank, 1 if action.kind is Kind.F else -1)

    def source(self, action: Action, rank: int) -> tuple[int, Action] | None:
        """The rank that sends an action its input and its action that makes it; None at the ends, or on one rank."""
        return self._along(action, rank, -1 if action.kind is Kind.F else 1)

    def _along(self, action: Action, rank: int, stages: int) -> tuple[int, Action] | None:
        p, (kind, chunk, microbatch) = len(self.compute), action
        stage = chunk * p + rank + stages
        return (stage % p, Action(kind, stage // p, microbatch)) if p > 1 and 0 <= stage < p * self.v else None

    def last(self, of: int, at: int) -> list[int]:
        """For each action of rank `at` the last one of its neighbour `of` that it follows from; -1 if there is none.

        Paths lead over the channel between them or, on a ring, through all other ranks. None that turns back on its
        way reaches later actions than one that goes straight on, for it enters each rank earlier than it leaves it.
        """
        p = len(self.compute)
        direct = self._last_heard(of, at)
        if self.v == 1 or p == 2:
            return direct
        step = 1 if (at - of) % p == 1 else -1  # from `of` to `at`; the other ranks are beyond `at`
        around, rank = [*range(len(self.compute[at]))], at
        while rank != of:
            before = (rank + step) % p
            heard = [*self._last_heard(before, rank), -1]  # -1 at index -1
            around, rank = [heard[index] for index in around], before
        return [*map(max, direct, around)]

    def _last_heard(self, sender: int, rank: int) -> list[int]:
        """For each action of a rank the last one of a sender's whose message it or an action before it has used."""
        if (sender, rank) not in self._heard:
            found, last, index = list[int](), -1, self.index(sender)
            for action in self.compute[rank]:
                source = self.source(action, rank)
                if source is not None and source[0] == sender:
                    last = max(last, index[source[1]])
                found.append(last)
            self._heard[sender, rank] = found
        return self._heard[sender, rank]
