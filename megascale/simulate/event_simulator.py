"""A discrete-event simulator of a pipeline step: streams of compute, of messages and of data-parallel collectives.

It plays a lowered schedule (`schedule.lower`) by the rules of the executor: a rank computes its actions in order, each
once its message and its weights have arrived; a message leaves when its tensor is computed; a chunk's gradients are
reduced after its last backward, its weights gathered before its first forward. Communication that a stack does not
overlap takes compute's time. Ranks that differ in tp or dp only do the same at the same time: one rank of each
pipeline stage is simulated. A schedule is compiled once, into steps in an order that respects every dependency; a
replay is one loop over them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from megascale.schedule.ir import Action, Kind, Order, Schedule
from megascale.simulate.profiles import Hides

Place = tuple[int, int]
"""A pipeline rank and one of its chunks."""


@dataclass(frozen=True)
class Times:
    """Durations in seconds, by pipeline rank and chunk.

    `message`: between neighbours; `hops`: compute time that a receiver spends on a message; `reduce`, `gather`: a
    chunk's collectives over data parallelism, in `buckets` (1 where not given); `drag`: share of an overlapped
    collective by which compute gets longer; `contends`: messages and collectives share a link.
    """

    forward: Mapping[Place, float]
    backward: Mapping[Place, float]
    message: float
    hops: float
    reduce: Mapping[Place, float]
    gather: Mapping[Place, float]
    buckets: Mapping[Place, int] = field(default_factory=dict)
    drag: float = 0.0
    contends: bool = False


class Span(NamedTuple):
    """An interval of a rank's stream `row`: compute, pp or dp. `waited`: the interval in which compute stood still for
    it, or was slowed down by it.
    """

    rank: int
    row: str
    action: Action
    start: float
    end: float
    waited: tuple[float, float] | None = None


Message = tuple[bool, int, int]
"""A message: whether it is a gradient, the stage that receives it, and the micro-batch."""


@dataclass(frozen=True)
class Program:
    """A compiled schedule of `p` ranks with `v` chunks each. `steps`: of each forward or backward its rank; the index
    of its duration, 2 x (rank x v + chunk), + 1 for a backward; the step that sends its input, or -1; the channel that
    takes its output, 2 x rank, + 1 for gradients, or -1; 1 for a forward that waits for its chunk's weights and for a
    backward after which gradients are reduced. `opens`: (rank, chunk) in the order in which weights are gathered.
    """

    p: int
    v: int
    steps: list[list[int]] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    opens: list[Place] = field(default_factory=list)


@dataclass(frozen=True)
class Replay:
    """The outcome. `end`, `reduced`: seconds at which each rank's compute and its reductions are done."""

    end: list[float]
    reduced: list[float]
    spans: list[Span]

    @property
    def last(self) -> float:
        """Seconds of the whole."""
        return max(*self.end, *self.reduced)


def compiled(schedule: Schedule, v: int) -> Program:
    """Compile a lowered schedule of ranks with `v` chunks each; its receives are not needed.

    Raises: RuntimeError if ranks wait for each other for ever.
    """
    program, sent, waiting = Program(len(schedule), v), dict[Message, int](), dict[Message, int]()
    walks = [_walk(program, rank, order, sent) for rank, order in enumerate(schedule)]
    ready = [*range(program.p)]
    while ready:
        rank = ready.pop()
        for message in walks[rank]:
            if message not in sent:
                waiting[message] = rank
                break
            if message in waiting:
                ready.append(waiting.pop(message))
    if waiting:
        raise RuntimeError(f"the schedule does not end: ranks {sorted(waiting.values())} wait for each other")
    return program


def _walk(program: Program, rank: int, order: Order, sent: dict[Message, int]) -> Iterator[Message]:
    """Add a rank's steps to a program; yield each message that it sends, or that it has to wait for."""
    p, last, gathers = program.p, program.p * program.v - 1, 0
    for action in order:
        kind, chunk, microbatch = action
        stage = chunk * p + rank
        if kind is Kind.F or kind is Kind.B:
            backward, source = kind is Kind.B, -1
            if p > 1 and stage != (last if backward else 0):
                message = backward, stage, microbatch
                if message not in sent:
                    yield message
                source = sent.pop(message)
            program.steps.append([rank, 2 * (rank * program.v + chunk) + backward, source, -1, gathers])
            program.actions.append(action)
            gathers = 0
        elif kind is Kind.SEND_F or kind is Kind.SEND_B:
            backward = kind is Kind.SEND_B
            message = backward, stage + (-1 if backward else 1), microbatch
            sent[message] = len(program.steps) - 1
            program.steps[-1][3] = 2 * rank + backward
            yield message
        elif kind is Kind.REDUCE:
            program.steps[-1][4] = 1
        elif kind is Kind.GATHER:
            program.opens.append((rank, chunk))
            gathers = 1


def replay(program: Program, times: Times, hides: Hides, *, spans: bool = False) -> Replay:
    """Simulate a step. `spans`: record what happens, which takes several times as long."""
    places = [divmod(place, program.v) for place in range(program.p * program.v)]
    seconds = [each[place] for place in places for each in (times.forward, times.backward)]
    dp = _Collectives(times, hides.dp, [0.0] * program.p)
    clock, until, message, hops = dp.gather(program.opens), dp.until, times.message, times.hops
    free, arrival = [0.0] * (2 * program.p), [-1.0] * (len(program.steps) + 1)  # of channels; of each step's message
    log = list[tuple[float, ...]]()
    for step, (rank, work, source, channel, collective) in enumerate(program.steps):
        begin = now = clock[rank]
        if collective and not work & 1:
            now = max(now, dp.gathered[places[work >> 1]])
        weights = now
        if source >= 0:
            if arrival[source] > now:
                now = arrival[source]
            now += hops
        start = sent = now
        now = done = now + seconds[work]
        if channel >= 0:
            sent = done if done > free[channel] else free[channel]
            end = sent + message
            if times.contends and until[rank] > sent:  # each has half of the link
                shared = min(message, until[rank] - sent)
                until[rank] += shared
                end += shared
            free[channel] = arrival[step] = end
            if not hides.pp:
                now = end
        if collective and work & 1:
            now = dp.reduce(rank, program.actions[step], now)
        clock[rank] = now
        if spans:
            log.append((begin, weights, start, done, sent))
    dp.finish(clock)
    found = itertools.chain(dp.spans, _spans(program, log, arrival, hides))
    return Replay(clock, until, [span for span in found if span.end > span.start])


@dataclass(frozen=True)
class _Collectives:
    """The data-parallel streams of all ranks. `until`: seconds until which each is busy; `gathered`: by place, when its
    first forward may begin; `late`: reductions that compute waits for.
    """

    times: Times
    hidden: bool
    until: list[float]
    gathered: dict[Place, float] = field(default_factory=dict)
    late: list[tuple[int, Action]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def behind(self, place: Place) -> float:
        """The share of a chunk's collectives that is all buckets but one."""
        return 1 - 1 / self.times.buckets.get(place, 1)

    def gather(self, places: list[Place]) -> list[float]:
        """Gather weights in the order of their use; when each rank may begin. A chunk's forward waits for the first of
        its buckets, and for the others no longer than they take beyond it.
        """
        for rank, chunk in places:
            place, took, start = (rank, chunk), self.times.gather.get((rank, chunk), 0.0), self.until[rank]
            self.until[rank] = end = start + took
            self.gathered[place] = end - min(took, self.times.forward[place]) * self.behind(place)
            waited = None if self.hidden else (start, end)
            self.spans.append(Span(rank, "dp", Action(Kind.GATHER, chunk, 0), start, end, waited))
        return [0.0 if self.hidden else busy for busy in self.until]

    def reduce(self, rank: int, action: Action, now: float) -> float:
        """Reduce a chunk's gradients behind its backward, which ends `now` and with it the last bucket; when compute
        goes on.
        """
        place = rank, action.chunk
        took, behind = self.times.reduce.get(place, 0.0), self.behind(place)
        if not self.hidden:
            self.late.append((rank, action))
            return now
        start = max(self.until[rank], now - self.times.backward[place] * behind)
        self.until[rank] = max(start + took, now + took * (1 - behind))
        return self._recorded(rank, action, start, now, now + took * behind * self.times.drag)

    def finish(self, clock: list[float]) -> None:
        """Do the reductions that compute waits for, once all else is done."""
        for rank, action in self.late:
            now, start = clock[rank], max(clock[rank], self.until[rank])
            self.until[rank] = start + self.times.reduce.get((rank, action.chunk), 0.0)
            clock[rank] = self._recorded(rank, action, start, now, self.until[rank])

    def _recorded(self, rank: int, action: Action, start: float, now: float, then: float) -> float:
        reduce = action._replace(kind=Kind.REDUCE)
        self.spans.append(Span(rank, "dp", reduce, start, self.until[rank], (now, then)))
        return then


def _spans(program: Program, log: list[tuple[float, ...]], arrival: list[float], hides: Hides) -> Iterator[Span]:
    """Record what each step of a rank waited for, computed and sent."""
    steps = zip(log, program.actions, program.steps, arrival, strict=False)
    for (begin, weights, start, done, sent), action, (rank, _, source, channel, _), end in steps:
        if weights > begin:
            yield Span(rank, "dp", action, begin, weights, (begin, weights))
        if arrival[source] > weights:
            yield Span(rank, "pp", action, weights, arrival[source], (weights, arrival[source]))
        yield Span(rank, "compute", action, start, done)
        if channel >= 0:
            send = action._replace(kind=Kind.SEND_F if action.kind is Kind.F else Kind.SEND_B)
            yield Span(rank, "pp", send, sent, end, None if hides.pp else (done, end))
