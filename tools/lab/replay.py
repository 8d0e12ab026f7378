"""Published failures replayed through the driver's state machine and policy in simulated time.

Failures of a mix strike a job at random. The driver's observations follow from the cause; which node is at fault, and
whether the fault persists there, only the replay knows. Results: effective training time, nodes replaced without a
fault, spares used, stops that need a person; and the same failures under restart by requeue.
"""

from __future__ import annotations

import bisect
import functools
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lab.failure_mixes import Cause, FailureMix
from lab.simulation import Simulation, Timing
from megascale.config.fault import FaultConfig
from megascale.operate.channel.messages import RankEnd
from megascale.operate.diagnose.hang.hang import Verdict
from megascale.operate.driver.job_state import JobPlan

DAY_S = 86_400.0
RANKS_PER_NODE = 8

RESTART_S = {2_048: 46.0, 4_096: 51.0, 8_192: 54.0, 16_384: 65.0}
"""Seconds of a restart on nodes that stay, by GPUs (ByteRobust, arXiv 2509.16293, table 7)."""

REQUEUE_S = {2_048: 454.0, 4_096: 545.0, 8_192: 635.0, 16_384: 768.0}
"""Seconds of a restart by requeue, by GPUs (the same table)."""

HANG_TIMEOUT_S = 600.0
"""Seconds until the timeout of a process group ends a hang, without a driver."""

CHECKPOINT_S = 1_800.0
"""Seconds between checkpoints, without copies in memory."""

PERSON_S = 3_600.0
"""Seconds until a person has started a job once more that has stopped with 93."""

RECURRENCE_S = 120.0
"""Mean seconds of training until a fault that persists on a node strikes again."""


@dataclass(frozen=True)
class ReplayPlan:
    """A job of `gpus` for `days`. `spares`: None for `spare_nodes`; `refill_s`: until a spare replaces a used one;
    `named`: share of hangs in which the verdict names the right rank, in the others a random one. `restart`: factor on
    the published seconds of a restart on nodes that stay.
    """

    gpus: int
    days: float = 54.0
    spares: int | None = None
    step_s: float = 10.0
    refill_s: float = 3_600.0
    named: float = 0.95
    restart: float = 1.0
    seed: int = 1


@dataclass(frozen=True)
class ReplayResult:
    """Results of a replay. Shares are of the total time; `stops`: ends that a person had to look at; `replaced`: nodes,
    of which `healthy` were without a fault; `most_out`: most of them that no new spare had followed yet;
    `requeue_share`: effective training time under restart by requeue.
    """

    gpus: int
    spares: int
    failures: int
    incidents: int
    effective_share: float
    requeue_share: float
    replaced: int
    healthy: int
    most_out: int
    stops: int
    actions: dict[str, int]


def spare_nodes(nodes: int, daily_rate: float, quantile: float = 0.99) -> int:
    """Return the spares that cover a day's lost nodes with probability `quantile`: of Binomial(nodes, daily_rate)."""
    probability = total = (1 - daily_rate) ** nodes
    lost = 0
    while total < quantile:
        probability *= (nodes - lost) / (lost + 1) * daily_rate / (1 - daily_rate)
        lost += 1
        total += probability
    return lost


def seconds_for(gpus: int, table: dict[int, float]) -> float:
    """Interpolate a time over the logarithm of the number of GPUs; constant outside of the table."""
    sizes = sorted(table)
    if gpus <= sizes[0] or gpus >= sizes[-1]:
        return table[sizes[0] if gpus <= sizes[0] else sizes[-1]]
    above = next(size for size in sizes if size >= gpus)
    below = max(size for size in sizes if size <= gpus)
    share = math.log(gpus / below) / math.log(above / below) if above != below else 0.0
    return table[below] + share * (table[above] - table[below])


def most_within(times: Sequence[float], seconds: float) -> int:
    """Return the most of the sorted `times` that lie within `seconds` of each other."""
    return max((bisect.bisect_left(times, time + seconds) - first for first, time in enumerate(times)), default=0)


class Replay:
    """Failures of a mix on a job."""

    def __init__(self, mix: FailureMix, plan: ReplayPlan, settings: FaultConfig) -> None:
        self._mix = mix
        self._plan = plan
        self._random = random.Random(plan.seed)
        self._settings = settings
        self._nodes = plan.gpus // RANKS_PER_NODE
        self._total_s = plan.days * DAY_S
        self._daily_rate = RANKS_PER_NODE * 24 / mix.device_hours * mix.node_share
        spares = plan.spares
        self.spares = spare_nodes(self._nodes, self._daily_rate) if spares is None else spares
        self._bad: dict[str, Cause] = {}
        self._was_bad: set[str] = set()
        self._actions: Counter[str] = Counter()
        self._stops = self._steps = self._replaced = self._healthy = self._most_out = 0
        self.failures = self._draw()

    def run(self) -> ReplayResult:
        """Replay all failures, through stops and new starts by a person."""
        start = 0.0
        while start < self._total_s:
            sim = self._simulate(start)
            self._steps += sim.steps
            self._actions.update(incident.action.kind for incident in sim.job.history.incidents.values())
            self._replaced += len(sim.excluded)
            self._healthy += sum(node not in self._was_bad for node in sim.excluded)
            self._most_out = max(self._most_out, most_within(sorted(sim.excluded.values()), self._plan.refill_s))
            start += sim.now
            if sim.status is not None:
                self._stops += 1
                start += PERSON_S
        return ReplayResult(
            self._plan.gpus,
            self.spares,
            len(self.failures),
            sum(self._actions.values()),
            self._steps * self._plan.step_s / self._total_s,
            self._requeue_share(),
            self._replaced,
            self._healthy,
            self._most_out,
            self._stops,
            dict(self._actions),
        )

    def _draw(self) -> list[tuple[float, Cause]]:
        """Draw (time, cause) of all failures: independent, at the mix's rate."""
        mean = self._mix.device_hours * 3600 / self._plan.gpus
        weights = [cause.count for cause in self._mix.causes]
        found, time = [], self._random.expovariate(1 / mean)
        while time < self._total_s:
            found.append((time, self._random.choices(self._mix.causes, weights)[0]))
            time += self._random.expovariate(1 / mean)
        return found

    def _simulate(self, start: float) -> Simulation:
        """Run the job from a start of the launch to its end, or to the end of the replay."""
        gpus = self._plan.gpus
        restart_s = self._plan.restart * seconds_for(gpus, RESTART_S)
        timing = Timing(self._plan.step_s, restart_s, refill_s=self._plan.refill_s)
        plan = JobPlan("replay", self._nodes, gpus, (), "", requestable=True, revivable=False)
        sim = Simulation(plan, self._settings, self.spares, timing, more_nodes=self._nodes)
        sim.lose_steps = 1
        self._bad.clear()
        self._was_bad.clear()
        sim.on_start = lambda: self._recur(sim)
        for time, cause in self.failures:
            if time >= start:
                sim.at(time - start, functools.partial(self._strike, sim, cause))
        sim.run(self._total_s - start)
        return sim

    def _strike(self, sim: Simulation, cause: Cause, node: str | None = None) -> None:
        """Let a failure strike a node, by default any."""
        if not sim.trains or sim.job.attempt is None:
            return  # the job was down
        node = node or self._random.choice(list(sim.job.attempt.placement))
        if cause.at_node:
            self._was_bad.add(node)
            if self._random.random() < cause.persists:
                self._bad[node] = cause
        rank = self._random.choice(sim.job.attempt.placement[node])
        self._show(sim, cause, node, rank)

    def _recur(self, sim: Simulation) -> None:
        """After a start, faults that persist on nodes of the job strike again."""
        assert sim.job.attempt is not None
        number = sim.job.attempt.number
        for node, cause in self._bad.items():
            if node in sim.job.attempt.placement:
                again = sim.now + self._random.expovariate(1 / RECURRENCE_S)
                sim.at(again, functools.partial(self._strike_if, sim, number, cause, node))

    def _strike_if(self, sim: Simulation, attempt: int, cause: Cause, node: str) -> None:
        if sim.job.attempt is not None and sim.job.attempt.number == attempt and node in sim.job.attempt.placement:
            self._strike(sim, cause, node)

    def _show(self, sim: Simulation, cause: Cause, node: str, rank: int) -> None:
        """Let the driver see what the cause looks like."""
        now, name = sim.now, cause.name
        assert sim.job.attempt is not None
        match cause.symptom:
            case "node":
                sim.lose_node(node)
            case "hang":
                named = rank if self._random.random() < self._plan.named else self._random.randrange(self._plan.gpus)
                bound = max(self._settings.hang_s, self._settings.hang_step_times * self._plan.step_s)
                sim.hang(Verdict("collective", (named,), "dp", (name,)), bound + self._settings.heartbeat_s)
            case "network":
                others = self._random.sample(list(sim.job.attempt.placement), min(4, self._nodes))
                ranks = [sim.job.attempt.placement[other][0] for other in others if other != node]
                sim.end_ranks([_lost_peer(other, now, rank) for other in ranks] + [_lost_peer(rank, now, *ranks[:1])])
            case _:
                sim.end_ranks([_END[cause.symptom](rank, now, name)])

    def _requeue_share(self) -> float:
        """Return the effective training time if every failure ends in a requeue, from the last checkpoint."""
        down, free = 0.0, 0.0
        restart = seconds_for(self._plan.gpus, REQUEUE_S)
        for time, cause in self.failures:
            if time < free:
                continue  # the job was down
            notice = HANG_TIMEOUT_S if cause.symptom == "hang" else PERSON_S if cause.symptom == "divergence" else 0.0
            lost = min(time - free, self._random.uniform(0, CHECKPOINT_S))
            down += notice + restart + lost
            free = time + notice + restart
        return max(0.0, 1 - down / self._total_s)


def _lost_peer(rank: int, now: float, *peers: int) -> RankEnd:
    return RankEnd(rank, 1, now, "Connection closed by peer", "LostPeerError", peer_lost=True, peers=peers)


_END = {
    "killed": lambda rank, now, name: RankEnd(rank, -9, now),
    "hardware": lambda rank, now, name: RankEnd(rank, 1, now, name, "RuntimeError", patterns=("gpu_hardware_fault",)),
    "software": lambda rank, now, name: RankEnd(rank, 1, now, name, "RuntimeError"),
    "storage": lambda rank, now, name: RankEnd(rank, 1, now, name, "OSError", patterns=("storage_error",)),
    "memory": lambda rank, now, name: RankEnd(rank, -9, now, patterns=("linux_oom_kill",)),
    "divergence": lambda rank, now, name: RankEnd(rank, 93, now, name, "DivergenceError", exit_status=93),
}


def replay(mix: FailureMix, plans: Sequence[ReplayPlan], settings: FaultConfig) -> list[ReplayResult]:
    """Replay a mix for several sizes of a job."""
    return [Replay(mix, plan, settings).run() for plan in plans]
