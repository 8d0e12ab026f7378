"""Vocabulary parallelism in a pipeline (Yeung et al. 2024, arXiv:2411.05288): every rank has rows of the embedding and
of the head, and runs passes over them for every micro-batch, besides the actions of its stages:

    EMBED        before F of the first stage    the ranks' rows for the tokens are summed
    HIDDEN       after F of the last stage      its output goes to all ranks
    VS                                          logits, their maximum, sum of exponentials, and label's logit
    STATS        after all VS, the barrier      the statistics go to all ranks
    VT                                          the loss; with two barriers the gradient of HIDDEN; those of the rows
    HIDDEN_GRAD  before B of the last stage     that gradient is summed: after all VT, the second barrier; with a single
                                                barrier, where VS has computed it up to a factor, right after STATS
    EMBED_GRAD   after B of the first stage     the gradient of EMBED goes to all ranks

As a barrier takes about the time of a micro-batch's actions, every rank runs the forwards of as many micro-batches more
before its first backward, as there are barriers.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from megascale.layout.stages import Placement
from megascale.schedule.dependencies import Result, dependencies, results
from megascale.schedule.ir import Action, Kind, RankSchedule, Schedule, ScheduleError

ACTION, PASS, MESSAGE = 5, 2, 1
"""Ticks of an action of a stage, of a pass over a rank's rows, and of a message, by which passes are placed."""


def delay_backwards(order: RankSchedule, by: int) -> RankSchedule:
    """Move the backwards of a rank behind `by` more forwards, as far as there are any."""
    forwards = [action for action in order if action.kind is Kind.F]
    delayed, before, taken = RankSchedule(), 0, 0
    for action in order:
        if action.kind is Kind.F:
            before += 1
        else:
            delayed += [*forwards[taken : before + by], action]
            taken = max(taken, min(before + by, len(forwards)))
    return delayed + forwards[taken:]


def with_passes(compute: Schedule, placement: Placement) -> Schedule:
    """Add VS and VT to a compute schedule of all ranks, each as soon as the rank is free and what it needs has arrived;
    without vocabulary parallelism return the schedule itself.

    Raises: ScheduleError if the ranks wait for each other
    """
    if not placement.barriers:
        return compute
    count = 1 + max(action.microbatch for order in compute for action in order)
    passes = [[Action(kind, placement.v, i) for i in reversed(range(count))] for kind in (Kind.VT, Kind.VS)]
    delayed = [delay_backwards(order, placement.barriers)[::-1] for order in compute]
    return _Placer(placement, [[*(list(own) for own in passes), order] for order in delayed]).run()


@dataclass
class _Placer:
    """A clock over the ranks. `left`: by rank VT, VS and the actions of its stages to come, the next one last; where
    several can start at once, the first of them does. `ready`: starts, with the list, the rank, and its version.
    """

    placement: Placement
    left: list[list[RankSchedule]]
    ends: dict[Result, int] = field(default_factory=dict)
    waiting: defaultdict[Result, set[int]] = field(default_factory=lambda: defaultdict(set))
    ready: list[tuple[int, int, int, int]] = field(default_factory=list)
    versions: Counter[int] = field(default_factory=Counter)
    clock: Counter[int] = field(default_factory=Counter)

    def run(self) -> Schedule:
        placed: Schedule = [[] for _ in self.left]
        for rank in range(len(self.left)):
            self._consider(rank)
        while self.ready:
            start, at, rank, version = heapq.heappop(self.ready)
            if version != self.versions[rank]:
                continue  # the rank has run another action, or can run one earlier
            action = self.left[rank][at].pop()
            placed[rank].append(action)
            self.clock[rank] = start + (PASS if action.chunk == self.placement.v else ACTION)
            made = results(action, rank, self.placement)
            self.ends.update(dict.fromkeys(made, self.clock[rank]))
            for other in sorted({rank}.union(*(self.waiting.pop(result, ()) for result in made))):
                self._consider(other)
        stuck = [f"rank {rank} at {own[-1]}" for rank, lists in enumerate(self.left) for own in lists if own]
        if stuck:
            raise ScheduleError(f"the schedule deadlocks: {', '.join(stuck)}")
        return placed

    def _consider(self, rank: int) -> None:
        """Note when a rank can start the next action of each of its lists, or what it waits for."""
        self.versions[rank] += 1
        for at, own in enumerate(self.left[rank]):
            needs = dependencies(own[-1], rank, self.placement) if own else []
            missing = next((need for need in needs if need not in self.ends), None)
            if missing is not None:
                self.waiting[missing].add(rank)
            elif own:
                arrivals = (self.ends[need] + MESSAGE * (self.placement.rank(need[1]) != rank) for need in needs)
                start = max([self.clock[rank], *arrivals])
                heapq.heappush(self.ready, (start, at, rank, self.versions[rank]))


@dataclass
class Exchanges:
    """The exchanges of all ranks for `count` micro-batches, which lowering adds; none without vocabulary parallelism.
    `passed`: ranks that have run a pass, by kind and micro-batch.
    """

    placement: Placement
    count: int
    training: bool
    passed: Counter[tuple[Kind, int]] = field(default_factory=Counter)

    @property
    def at_the_start(self) -> RankSchedule:
        v = self.placement.v
        return [Action(Kind.WAIT_PARAMS, v, 0), Action(Kind.EMBED, v, 0)] if self.placement.barriers else []

    @property
    def at_the_end(self) -> RankSchedule:
        reduces = self.training and self.placement.barriers
        return [Action(Kind.REDUCE, self.placement.v, self.count - 1)] if reduces else []

    def after(self, action: Action, stage: int) -> RankSchedule:
        """List the exchanges that follow an action of a stage in the global order."""
        kind, _, i = action
        kinds: list[Kind] = []
        if not self.placement.barriers:
            return []
        if kind in (Kind.VS, Kind.VT):
            self.passed[kind, i] += 1
            if self.passed[kind, i] == self.placement.p:
                kinds = [Kind.STATS] if kind is Kind.VS else []
                barrier = Kind.VS if self.placement.barriers == 1 else Kind.VT
                kinds += [Kind.HIDDEN_GRAD] if self.training and kind is barrier else []
        elif kind is Kind.F:
            kinds = [Kind.HIDDEN] if stage == self.placement.count - 1 else []
            if stage == 0 and i + 1 < self.count:  # one micro-batch ahead
                return [Action(Kind.EMBED, self.placement.v, i + 1)]
        elif kind in (Kind.B, Kind.I) and stage == 0:
            kinds = [Kind.EMBED_GRAD]
        return [Action(joint, self.placement.v, i) for joint in kinds]
