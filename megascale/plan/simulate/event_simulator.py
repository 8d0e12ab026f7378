"""A discrete-event simulator of a pipeline step, with streams for compute, messages and data-parallel collectives.

`simulate` runs a compute schedule by the executor's rules. A rank runs its actions in order; an action starts after its
message and its weights have arrived. Weights of a chunk are gathered at the step's start, or if they are sharded where
`schedule.resharding` says; gradients are reduced after the last backward. Communication without overlap blocks compute.
1F1B on two ranks, where a backward takes twice a forward and R reduces the last gradient bucket:

    rank 0  F0 F1 .. .. B0 B0 F2 B1 B1 .. B2 B2 R
    rank 1  .. F0 B0 B0 F1 B1 B1 F2 B2 B2 R

One rank per pipeline stage is simulated, as a coroutine that stops at a message not yet sent; ranks at other tp and dp
coordinates act at equal times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import NamedTuple

from megascale.layout.stages import Place, Placement
from megascale.plan.simulate.profiles import Overlaps
from megascale.record.label import BACKWARD
from megascale.schedule.dependencies import RESULTS, dependencies, neighbours, results
from megascale.schedule.ir import (
    COMPUTE_KINDS,
    Action,
    Kind,
    Overlap,
    RankSchedule,
    Schedule,
    ScheduleError,
    each_action,
)
from megascale.schedule.resharding import GATHERS, Reshard, place_gathers

Message = int
"""2 x (micro-batch x (stages + 1) + receiving stage), + 1 for a gradient. With vocabulary parallelism also what all
ranks await: the output of the last stage is a message to a further stage, all VS are its gradient, and all VT the
gradient of the last stage.
"""

FORWARD = Kind.F  # looking up a member of an enum takes 0.2 us, a fifth of an action's simulation


@dataclass(frozen=True)
class StageTimes:
    """Durations in seconds, by pipeline rank and chunk.

    `message`: between neighbours, `far` between those in different `islands`, by rank; `receive`: compute time of a
    receiver per message; `reduce`, `gather`: a chunk's collectives over dp, in `buckets` (default 1); `slowdown`:
    slowdown of compute, as a share of an overlapped collective's time; `share_link`: messages and collectives share a
    link. `scales`: by micro-batch, factors of compute and of messages, for micro-batches of unequal lengths; empty: all
    equal. `weight_gradient`: the part of a backward that a schedule may run apart. `hidden`: by rank and the chunks of
    an Overlap's forward and backward, the seconds that it takes less than both. `exchange`: of an activation among all
    stages in vocabulary parallelism, whose passes take the times of a chunk.
    """

    forward: Mapping[Place, float]
    backward: Mapping[Place, float]
    message: float
    receive: float
    reduce: Mapping[Place, float]
    gather: Mapping[Place, float]
    buckets: Mapping[Place, int] = field(default_factory=dict)
    slowdown: float = 0.0
    share_link: bool = False
    scales: Sequence[tuple[float, float]] = ()
    weight_gradient: Mapping[Place, float] = field(default_factory=dict)
    hidden: Mapping[tuple[int, int, int], float] = field(default_factory=dict)
    exchange: float = 0.0
    far: float = 0.0
    islands: Sequence[range] = ()

    def hop(self, one: int, other: int) -> float:
        """Return the duration of a message between two ranks."""
        return self.far if self.islands and self.islands[one] != self.islands[other] else self.message

    def seconds(self, kind: Kind, place: Place) -> float:
        """Return the duration of a compute action."""
        match kind:
            case Kind.W:
                return self.weight_gradient[place]
            case Kind.I:
                return self.backward[place] - self.weight_gradient[place]
        return (self.backward if kind in (Kind.B, Kind.VT) else self.forward)[place]


class Span(NamedTuple):
    """An interval of a rank's `row`: compute, pp or dp. `waited`: the interval of stalled or slowed compute."""

    rank: int
    row: str
    action: Action
    start: float
    end: float
    waited: tuple[float, float] | None = None


class Simulation(NamedTuple):
    """A simulated pipeline: the second at which the `last` rank ends, and the recorded spans."""

    last: float
    spans: list[Span]


def simulate(
    compute: Schedule, placement: Placement, times: StageTimes, overlaps: Overlaps, *, reduce_each: bool = False,
    reshard: Reshard | None = None, spans: bool = False,
) -> Simulation:  # fmt: skip
    """Simulate a compute schedule. `reduce_each`: reduce gradients after every backward; `reshard`: when chunks of
    sharded weights are gathered; `spans`: record all events, several times as slow.

    Raises: ScheduleError for a deadlock
    """
    messages = _Messages([*range(len(compute))], {}, defaultdict(list), defaultdict(list))
    ranks = [_Rank(rank, order, placement, times, overlaps, reshard) for rank, order in enumerate(compute)]
    plays = [rank.play(messages, reduce_each, spans) for rank in ranks]
    while messages.ready:
        next(plays[messages.ready.pop()], None)
    if messages.waiting:
        stuck = sorted(chain(*messages.waiting.values()))
        raise ScheduleError(f"the schedule does not end: ranks {stuck} wait for each other")
    events = [span for rank in ranks for span in rank.spans if span.end > span.start]
    return Simulation(max(max(rank.end, rank.until) for rank in ranks), events)


class _Messages(NamedTuple):
    """Ranks that are ready, arrival times of sent messages, and the ranks that wait by what has not arrived. `ends`: of
    the actions of all ranks that leave a message together.
    """

    ready: list[int]
    arrival: dict[Message, float]
    waiting: defaultdict[Message, list[int]]
    ends: defaultdict[Message, list[float]]

    def join(self, message: Message, count: int, end: float) -> None:
        """Note the end of one of `count` actions that leave a message together."""
        self.ends[message].append(end)
        if len(self.ends[message]) == count:
            self.arrival[message] = max(self.ends.pop(message))
            self.ready.extend(self.waiting.pop(message, ()))


class _Route(NamedTuple):
    """The `seconds` of an action of a chunk, and its messages of micro-batch 0: received, and sent; None without.
    `completes`: the gradients of the chunk's weights. `hop`: seconds of the message sent. Of the one received,
    `receive`: seconds of compute, `exchange`: of an exchange of all ranks. `joint`: ranks that send it together, or 0.
    """

    seconds: float
    received: Message | None
    sent: Message | None
    backward: bool
    completes: bool
    hop: float
    receive: float
    exchange: float = 0.0
    joint: int = 0


@dataclass
class _Rank:
    """A pipeline rank. `end`, `until`: seconds at which compute and collectives over dp are done."""

    rank: int
    order: RankSchedule
    placement: Placement
    times: StageTimes
    overlaps: Overlaps
    reshard: Reshard | None
    end: float = 0.0
    until: float = 0.0
    spans: list[Span] = field(default_factory=list)

    def play(self, messages: _Messages, reduce_each: bool, record: bool) -> Iterator[None]:
        """Run the actions of this rank; yield to wait for a message."""
        rank, times, overlaps_pp, overlaps_dp = self.rank, self.times, self.overlaps.pp, self.overlaps.dp
        (ready, arrival, waiting, *_), stride = messages, 2 * self.placement.count + 2
        steps = [*self._steps()]
        last = {action.chunk: action for action, route in steps if route.completes}
        gathered, reductions = self._gathered(), list[Action]()
        gathers = {*chain(*place_gathers(self.order, self.reshard)[0].values())} if self.reshard else set[Action]()
        now, free = 0.0 if overlaps_dp else self.until, [0.0, 0.0]  # free: when both directions can send
        for action, (seconds, enters, leaves, backward, completes, hop, receive, exchange, joint) in steps:
            kind, chunk, microbatch = action
            begin, first = now, stride * microbatch
            if gathers and (due := action._replace(kind=GATHERS.get(kind, kind))) in gathers:
                gathers.remove(due)
                gathered[chunk] = self._gather(due, now, seconds)
            weights = received = now = max(now, gathered[chunk])
            work, size = times.scales[microbatch] if times.scales else (1.0, 1.0)
            if enters is not None:
                message = enters + first
                while message not in arrival:
                    waiting[message].append(rank)
                    yield
                received = max(now, arrival[message]) + exchange * size
                now = received + receive * size
            start = now
            now = done = sent = arrives = start + seconds * work
            if leaves is not None and joint:
                messages.join(leaves + first, joint, done)
            elif leaves is not None:
                message = leaves + first
                sent, taken = done if done > free[backward] else free[backward], hop * size
                arrives = sent + taken
                if times.share_link and self.until > sent:  # message and collective have half of the link
                    shared = min(taken, self.until - sent)
                    self.until, arrives = self.until + shared, arrives + shared
                free[backward] = arrival[message] = arrives
                ready += waiting.pop(message, ())
                now = done if overlaps_pp else arrives
            if record:
                self._record(action, begin, weights, received, start, done, sent, arrives)
            if completes and (reduce_each or action is last[chunk]):
                reductions.append(action)
                now = self._reduce(action, now, last=action is steps[-1][0]) if overlaps_dp else now
        self.end = self._finish(now, [] if overlaps_dp else reductions)

    def _finish(self, now: float, reductions: list[Action]) -> float:
        """Reduce the gradients that are left at the end, last those of the vocabulary; return the end."""
        shared = [Action(Kind.VT, self.placement.v, 0)] if self.placement.barriers else []
        for action in reductions + shared:
            now = self._reduce(action, now, last=True)
        return now

    def _steps(self) -> Iterator[tuple[Action, _Route]]:
        """Yield the actions with their routes. A pair waits for what both need, and then sends what both leave."""
        route, paths = cache(self._route), len(self.placement.paths)
        for entry in self.order:
            if isinstance(entry, Overlap):
                forward, backward = entry
                one, two = (route(kind, chunk, i % paths) for kind, chunk, i in entry)
                less = self.times.hidden.get((self.rank, forward.chunk, backward.chunk), 0.0) / 2
                yield backward, two._replace(seconds=0.0, sent=None, completes=False)
                yield forward, one._replace(seconds=one.seconds - less, sent=None)
                yield backward, two._replace(seconds=two.seconds - less, received=None, sent=None, completes=False)
                yield forward, one._replace(seconds=0.0, received=None)
                yield backward, two._replace(seconds=0.0, received=None)
            else:
                yield entry, route(entry.kind, entry.chunk, entry.microbatch % paths)

    def _route(self, kind: Kind, chunk: int, path: int) -> _Route:
        placement, action, backward = self.placement, Action(kind, chunk, path), COMPUTE_KINDS[kind].runs == BACKWARD
        source, target = neighbours(action, self.rank, placement)
        received = None if source is None else 2 * placement.stage(self.rank, chunk) + backward
        sent = None if target is None else 2 * target + backward
        completes, seconds = Kind.W in RESULTS[kind], self.times.seconds(kind, (self.rank, chunk))
        hop = 0.0 if target is None else self.times.hop(self.rank, placement.places[target][0])
        route = _Route(seconds, received, sent, backward, completes, hop, self.times.receive)
        if not placement.barriers:
            return route
        count, needs = placement.count, dependencies(action, self.rank, placement)
        joint = {(Kind.F, count - 1): 2 * count, (Kind.VS, count): 2 * count + 1, (Kind.VT, count): 2 * count - 1}
        if needs and needs[-1][:2] in joint:
            exchange = 0.0 if kind is Kind.VT else self.times.exchange  # the statistics of a barrier take no time
            route = route._replace(received=joint[needs[-1][:2]], receive=0.0, exchange=exchange)
        made = results(action, self.rank, placement)[0][:2]
        together = 1 if kind is FORWARD else placement.p
        return route._replace(sent=joint[made], joint=together) if made in joint else route

    def _gathered(self) -> dict[int, float]:
        """All-gather weights in the order of first use; return the earliest start of forwards by chunk."""
        shared = [self.placement.v] if self.placement.barriers else []
        forwards = (action.chunk for action in each_action(self.order) if action.kind is FORWARD)
        chunks = dict.fromkeys([*shared, *forwards])
        if self.reshard:
            return dict.fromkeys(chunks, 0.0)
        first, forward = Action(Kind.WAIT_PARAMS, 0, 0), self.times.forward
        return {at: self._gather(first._replace(chunk=at), 0.0, forward[self.rank, at]) for at in chunks}

    def _gather(self, action: Action, now: float, work: float) -> float:
        """All-gather a chunk's weights from `now` on; return when a pass of `work` seconds can start. It waits for the
        first bucket, and computes while later buckets arrive. Those of sharded weights, which may be gathered all the
        time, slow it down.
        """
        taken, start = self.times.gather.get((self.rank, action.chunk), 0.0), max(self.until, now)
        self.until = start + taken
        waited = None if self.overlaps.dp else (start, self.until)
        self.spans.append(Span(self.rank, "dp", action, start, self.until, waited))
        slowdown = self.times.slowdown if self.reshard else 0.0
        return self.until - min(taken, work) * self._overlap(action.chunk) * (1 - slowdown)

    def _reduce(self, action: Action, now: float, *, last: bool) -> float:
        """Reduce a chunk's gradients, the last bucket at the backward's end `now`; return when compute goes on. The
        buckets before it slow the backward down, and unless it is the `last`, the last bucket the next actions.
        """
        place, overlap = (self.rank, action.chunk), self._overlap(action.chunk)
        taken = self.times.reduce.get(place, 0.0)
        start = max(self.until, now - self.times.seconds(action.kind, place) * overlap)
        self.until = max(start + taken, now + taken * (1 - overlap))
        beside = taken * (overlap if last else 1.0)
        then = now + beside * self.times.slowdown if self.overlaps.dp else self.until
        self.spans.append(Span(self.rank, "dp", action._replace(kind=Kind.REDUCE), start, self.until, (now, then)))
        return then

    def _overlap(self, chunk: int) -> float:
        """Return the share of a chunk's collectives overlapped by the chunk's compute: all buckets but one."""
        return 1 - 1 / max(1, self.times.buckets.get((self.rank, chunk), 1)) if self.overlaps.dp else 0.0

    def _record(self, action: Action, *at: float) -> None:
        """Record an action's waits, computation and message."""
        begin, weights, received, start, done, sent, arrives = at
        send = action._replace(kind=Kind.SEND_F if action.kind is FORWARD else Kind.SEND_B)
        self.spans += [
            Span(self.rank, "dp", action, begin, weights, (begin, weights)),
            Span(self.rank, "pp", action, weights, received, (weights, received)),
            Span(self.rank, "compute", action, start, done),
            Span(self.rank, "pp", send, sent, arrives, None if self.overlaps.pp else (done, arrives)),
        ]
