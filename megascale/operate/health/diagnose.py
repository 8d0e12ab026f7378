"""Diagnosis of the nodes of a job: which node or link is bad, by comparison with the others.

The caller passes `run`, which runs a check on a node: the driver sends Check to the node's agent, `megascale doctor
nodes` starts the check on this host or asks the doctor of another host.

1. Every node alone, at the same time: the set "quick" or "full". Values that are low are measured again: nobody is
   named for one measurement of speed. A wrong result is final.
2. All nodes together, through their endpoints: reach, clocks, then pairs (`health.pair_search`) by TCP, and in a full
   diagnosis also by an all-reduce of training's own transport.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megascale.catalog.checks import CHECKS
from megascale.operate.health.checks.result import CheckResult
from megascale.operate.health.checks.runner import CLOSE_ENDPOINT, OPEN_ENDPOINT
from megascale.operate.health.compare import TOLERANCE
from megascale.operate.health.node_runs import CheckedNode, NodeRuns, RunOnNode
from megascale.operate.health.node_verdicts import Kind, NodeVerdict, judge, judge_check
from megascale.operate.health.pair_rounds import PairRounds
from megascale.operate.health.pair_search import explain_broken

ENDPOINT_START_S = 15.0


@dataclass(frozen=True)
class DiagnosisPlan:
    """The extent of a diagnosis.

    - `checks`: the set or check of every node alone, "" for none; `repeats`: further measurements of a low value
    - `paths`: reach and clocks; `pairs`: then "link" and "all_reduce" by pairs, with `all_links` not only of neighbours
    - `at_once`: nodes have hosts of their own; otherwise they take turns. `timeout_s`: of a node's checks
    - `arguments`: of all checks
    """

    checks: str = "quick"
    paths: bool = True
    pairs: tuple[str, ...] = ("link",)
    all_links: bool = False
    repeats: int = 2
    tolerance: float = TOLERANCE
    at_once: bool = True
    timeout_s: float = 120.0
    arguments: Mapping[str, Any] = field(default_factory=dict)


FULL = DiagnosisPlan(checks="full", pairs=("link", "all_reduce"), all_links=True)


@dataclass(frozen=True)
class Diagnosis:
    """The result: verdicts on all checks, the bad nodes with evidence, and bad links between other nodes.

    `undecided`: findings without a culprit, such as two nodes that differ.
    """

    verdicts: tuple[NodeVerdict, ...]
    bad_nodes: Mapping[str, tuple[str, ...]]
    bad_links: Mapping[tuple[str, str], str]
    undecided: tuple[str, ...]
    duration_s: float

    @property
    def ok(self) -> bool:
        return not (self.bad_nodes or self.bad_links or self.undecided)


async def diagnose(nodes: Sequence[CheckedNode], run: RunOnNode, plan: DiagnosisPlan = DiagnosisPlan()) -> Diagnosis:
    """Diagnose `nodes`, in the order of their places in the network."""
    start = time.monotonic()
    places = {place.node: place for place in nodes}
    session = _Session(NodeRuns(places, run, plan.arguments, plan.timeout_s, plan.at_once), plan)
    if plan.checks:
        results = await _check_alone(session.nodes, plan)
        session.verdicts += (await _measure_low_again(session.nodes, plan, results, results))[1]
    if plan.paths and len(nodes) > 1:
        await session.check_together()
    return session.diagnosis(time.monotonic() - start)


Others = Callable[[Sequence[CheckResult]], Awaitable[Mapping[str, Sequence[CheckResult]]]]
"""Function (results of a node): results of the other nodes, by node."""


async def check_joining(
    node: CheckedNode, run: RunOnNode, others: Others, plan: DiagnosisPlan = DiagnosisPlan()
) -> tuple[list[CheckResult], list[NodeVerdict]]:
    """Check a node that joins a job; return its results, and the verdicts that keep it out.

    `others` is asked once the node's own results are there; the first node of a job has none to compare with.
    """
    nodes = NodeRuns({node.node: node}, run, plan.arguments, plan.timeout_s, plan.at_once)
    results = await _check_alone(nodes, plan)
    known = await others(results[node.node])
    results, verdicts = await _measure_low_again(nodes, plan, {**known, **results}, results)
    return results[node.node], [verdict for verdict in verdicts if verdict.bad]


async def _check_alone(nodes: NodeRuns, plan: DiagnosisPlan) -> dict[str, list[CheckResult]]:
    answers = await nodes.run_on(nodes.places, plan.checks)
    return {node: list(answer.flat) for node, answer in answers.items()}


async def _measure_low_again(
    nodes: NodeRuns, plan: DiagnosisPlan, results: Mapping[str, Sequence[CheckResult]], of: Collection[str]
) -> tuple[dict[str, list[CheckResult]], list[NodeVerdict]]:
    """Measure low values of the nodes `of` again, of which the best counts; return results, and verdicts on `of`."""
    best = {node: list(some) for node, some in results.items()}
    verdicts = judge(best, plan.tolerance, of)
    for _ in range(plan.repeats):
        low = [verdict for verdict in verdicts if verdict.kind == "low"]
        if not low:
            break
        for name in dict.fromkeys(verdict.check for verdict in low):
            for node, new in (await nodes.run_on([one.node for one in low if one.check == name], name)).items():
                best[node] = [_better(old, new) if old.name == name else old for old in best[node]]
        verdicts = judge(best, plan.tolerance, of)
    return best, verdicts


class _Session:
    """A running diagnosis: the findings so far."""

    def __init__(self, nodes: NodeRuns, plan: DiagnosisPlan) -> None:
        self.nodes = nodes
        self._plan = plan
        self.verdicts: list[NodeVerdict] = []
        self._links: dict[tuple[str, str], str] = {}
        self._undecided: list[str] = []

    async def check_together(self) -> None:
        """Check the paths between the nodes."""
        opened = await self.nodes.run_on(self.nodes.places, OPEN_ENDPOINT, timeout_s=ENDPOINT_START_S)
        endpoints = {node: str(one.details["address"]) for node, one in opened.items() if not one.problem}
        self.verdicts += [
            NodeVerdict(node, "reach", "failed", reason=one.problem) for node, one in opened.items() if one.problem
        ]
        try:
            reached = await self._check_reach(endpoints)
            if len(reached) > 1:
                reference = {"reference": next(iter(reached.values()))}
                results = await self.nodes.run_on(reached, "clock", dict.fromkeys(reached, reference))
                self.verdicts += judge_check("clock", results)
            for name in self._plan.pairs:
                await self._search(name, reached)
        finally:
            addresses = {node: {"address": address} for node, address in endpoints.items()}
            await self.nodes.run_on(endpoints, CLOSE_ENDPOINT, addresses)

    async def _check_reach(self, endpoints: Mapping[str, str]) -> dict[str, str]:
        """Connect every node to all others; return the endpoints of the nodes that are reached."""
        others = {
            node: {"peers": {peer: address for peer, address in endpoints.items() if peer != node}}
            for node in endpoints
        }
        results = await self.nodes.run_on(endpoints, "reach", others)
        unreached = {node: one.details.get("unreached", {}) for node, one in results.items()}
        broken = explain_broken(endpoints, ((node, peer) for node, peers in unreached.items() for peer in peers))
        for node, result in results.items():
            kind: Kind = "failed" if result.problem else "ok"
            reason = result.problem
            if node in broken.nodes:
                errors = [*unreached[node].values(), *(peers[node] for peers in unreached.values() if node in peers)]
                kind, reason = "failed", f"no connection with most other nodes: {errors[0]}"
            self.verdicts.append(
                NodeVerdict(node, "reach", kind, result.unit, result.value, 0.0, reason, result.duration_s)
            )
        for a, b in broken.links:
            self._links[a, b] = f"no connection: {unreached[a].get(b) or unreached[b][a]}"
        return {node: address for node, address in endpoints.items() if node not in broken.nodes}

    async def _search(self, name: str, endpoints: Mapping[str, str]) -> None:
        rounds = PairRounds(name, self.nodes, endpoints, self._plan.tolerance)
        culprits = await rounds.search(all_links=self._plan.all_links and name == "link")
        for node in endpoints:
            best, reference = rounds.best_rate(node), rounds.reference()
            bad = node in culprits.nodes
            reason = f"slow with {', '.join(rounds.slow_partners(node))}" if bad else ""
            unit = str(CHECKS[name].facts["unit"])
            self.verdicts.append(NodeVerdict(node, name, "low" if bad else "ok", unit, best, reference, reason))
        for a, b in culprits.links:
            self._links.setdefault((min(a, b), max(a, b)), f"{name}: {rounds.describe((a, b))}")
        self._undecided += [f"{a} - {b}: {name}: {rounds.describe((a, b))}" for a, b in culprits.undecided]

    def diagnosis(self, duration_s: float) -> Diagnosis:
        """Return the findings."""
        nodes: dict[str, tuple[str, ...]] = {}
        for verdict in self.verdicts:
            if verdict.bad:
                nodes[verdict.node] = (*nodes.get(verdict.node, ()), f"{verdict.check}: {verdict.reason}")
        undecided = [f"{v.node}: {v.check}: {v.reason}" for v in self.verdicts if v.kind == "undecided"]
        return Diagnosis(tuple(self.verdicts), nodes, self._links, (*undecided, *self._undecided), duration_s)


def _better(old: CheckResult, new: CheckResult) -> CheckResult:
    """Return the result with the higher value; a problem counts whenever it shows."""
    if new.problem or old.value is None:
        return new
    return old if new.value is None or old.value >= new.value else new
