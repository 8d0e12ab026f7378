"""The dependencies of compute actions: by the order of a rank's actions and by messages between ranks."""

from __future__ import annotations

from megascale.schedule.ir import Action, Kind, Schedule


class ScheduleDependencies:
    """The happens-before relation of a compute schedule of p ranks with v chunks per rank, for any durations.

    An action depends on the earlier actions of its rank, on the action of another rank that produces its input, and on
    their predecessors in turn. The last predecessor on a rank, given by index, implies all earlier predecessors there.
    Messages go between neighbours: on a line of ranks if v is 1, else on a ring.
    """

    def __init__(self, compute: Schedule, v: int) -> None:
        self.compute, self.v = compute, v
        self._indices: dict[int, dict[Action, int]] = {}
        self._received: dict[tuple[int, int], list[int]] = {}

    def index(self, rank: int) -> dict[Action, int]:
        """Map the actions of a rank to their indices."""
        if rank not in self._indices:
            self._indices[rank] = {action: index for index, action in enumerate(self.compute[rank])}
        return self._indices[rank]

    def consumer(self, action: Action, rank: int) -> tuple[int, Action] | None:
        """Return the (rank, action) that consumes an action's result; None at the pipeline's ends or if p is 1."""
        return self._neighbour(action, rank, 1 if action.kind is Kind.F else -1)

    def producer(self, action: Action, rank: int) -> tuple[int, Action] | None:
        """Return the (rank, action) that produces an action's input; None at the pipeline's ends or if p is 1."""
        return self._neighbour(action, rank, -1 if action.kind is Kind.F else 1)

    def _neighbour(self, action: Action, rank: int, offset: int) -> tuple[int, Action] | None:
        p, (kind, chunk, microbatch) = len(self.compute), action
        if kind is Kind.R:
            return None  # its input is on the rank, and its result stays there
        stage = chunk * p + rank + offset
        return (stage % p, Action(kind, stage // p, microbatch)) if p > 1 and 0 <= stage < p * self.v else None

    def last_predecessors(self, neighbour: int, own_rank: int) -> list[int]:
        """For every action of `own_rank`, give the index of its last predecessor on `neighbour`; -1 if there is none.

        Dependencies pass over the channel between the two ranks or, on a ring, through all other ranks. Two paths
        suffice: a path that turns back enters a rank no later than it leaves, and never reaches a later action than the
        straight path.
        """
        p = len(self.compute)
        direct = self._last_received(neighbour, own_rank)
        if self.v == 1 or p == 2:
            return direct
        step = 1 if (own_rank - neighbour) % p == 1 else -1  # away from `neighbour`, around the ring
        around, rank = [*range(len(self.compute[own_rank]))], own_rank
        while rank != neighbour:
            sender = (rank + step) % p
            received = [*self._last_received(sender, rank), -1]  # index -1 (no predecessor) gives -1
            around, rank = [received[index] for index in around], sender
        return [*map(max, direct, around)]

    def _last_received(self, sender: int, rank: int) -> list[int]:
        """For every action of a rank, give the sender's last action whose message has been consumed up to here."""
        if (sender, rank) not in self._received:
            received, last, index = list[int](), -1, self.index(sender)
            for action in self.compute[rank]:
                source = self.producer(action, rank)
                if source is not None and source[0] == sender:
                    last = max(last, index[source[1]])
                received.append(last)
            self._received[sender, rank] = received
        return self._received[sender, rank]
