"""A whole diagnosis of simulated nodes: every check of the plan runs, and the bad node or link is named."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from megascale.operate.channel.messages import Check, CheckDone
from megascale.operate.health.checks.result import CheckResult
from megascale.operate.health.checks.runner import checks_named
from megascale.operate.health.diagnose import FULL, Diagnosis, DiagnosisPlan, check_joining, diagnose
from megascale.operate.health.node_runs import CheckedNode
from megascale.operate.health.remote_checks import RemoteChecks


class Fleet:
    """Simulated nodes. Faults: `slow` checks by node, `slow_links`, `unreachable` pairs, `digests` by node."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self.nodes = [CheckedNode(f"n{index}", f"h{index}", 2) for index in range(count)]
        self.slow: dict[tuple[str, str], float] = {}
        self.slow_links: set[frozenset[str]] = set()
        self.unreachable: set[frozenset[str]] = set()
        self.digests: dict[str, str] = {}
        self.problems: dict[tuple[str, str], str] = {}
        self.calls: list[tuple[str, str]] = []
        self._rng = random.Random(seed)
        self._groups: dict[str, list[str]] = {}

    async def run(self, node: str, name: str, arguments: Mapping[str, Any], timeout_s: float) -> CheckResult:
        self.calls.append((node, name))
        await asyncio.sleep(0)
        if (node, name) in self.problems:
            return CheckResult(name, problem=self.problems[node, name])
        if name in ("open_endpoint", "close_endpoint"):
            return CheckResult(name, details={"address": f"{node}:1"})
        if name == "reach":
            lost = {peer: "timed out" for peer in arguments["peers"] if frozenset((node, peer)) in self.unreachable}
            return CheckResult(name, value=float(len(lost)), details={"unreached": lost})
        if name == "clock":
            return CheckResult(name, "s", self._rng.gauss(0, 1e-4))
        if name == "link":
            rates = {peer: self._rate(node, peer, "link") for peer in arguments["peers"]}
            return CheckResult(name, "byte/s", min(rates.values()), details={"rates": rates, "errors": {}})
        if "group" in arguments:
            return await self._run_in_group(node, name, arguments["group"])
        parts = [self._alone(node, card.name, str(card.facts["better"])) for card in checks_named(name)]
        return parts[0] if len(parts) == 1 else CheckResult(name, parts=tuple(parts))

    async def _run_in_group(self, node: str, name: str, group: Mapping[str, Any]) -> CheckResult:
        """Both nodes of a pair must run at the same time."""
        here = self._groups.setdefault(group["key"], [])
        here.append(node)
        assert group["ranks"] == ([0, 1] if len(here) == 1 else [2, 3])
        assert group["world"] == 4
        async with asyncio.timeout(5):
            while len(here) < 2:
                await asyncio.sleep(0)
        return CheckResult(name, "byte/s", self._rate(*here, name))

    def _rate(self, node: str, peer: str, name: str) -> float:
        factor = min(self.slow.get((one, name), 1.0) for one in (node, peer))
        if frozenset((node, peer)) in self.slow_links:
            factor *= 0.1
        return 1e9 * factor * self._rng.gauss(1, 0.03)

    def _alone(self, node: str, name: str, better: str) -> CheckResult:
        if (node, name) in self.problems:
            return CheckResult(name, problem=self.problems[node, name])
        if better == "digest":
            return CheckResult(name, digest=self.digests.get(node, "a"), platform="cpu")
        if better == "zero":
            return CheckResult(name, value=0.0)
        return CheckResult(name, value=1e9 * self.slow.get((node, name), 1.0) * self._rng.gauss(1, 0.03))

    def diagnose(self, plan: DiagnosisPlan = FULL) -> Diagnosis:
        self._groups.clear()
        return asyncio.run(diagnose(self.nodes, self.run, plan))


@pytest.mark.parametrize("count", [1, 2, 3, 16])
def test_healthy_nodes_pass_100_diagnoses(count: int) -> None:
    for seed in range(100 if count < 16 else 20):
        fleet = Fleet(count, seed)
        found = fleet.diagnose()
        assert found.ok, found
        assert fleet.calls.count(("n0", "open_endpoint")) == fleet.calls.count(("n0", "close_endpoint")) == (count > 1)


def test_two_bad_nodes_of_16_and_a_link_are_named() -> None:
    fleet = Fleet(16)
    fleet.slow = {("n3", "link"): 0.2, ("n9", "gemm"): 0.6, ("n9", "all_reduce"): 0.3}
    fleet.slow_links = {frozenset(("n4", "n12"))}
    found = fleet.diagnose()
    assert found.bad_nodes.keys() == {"n3", "n9"}
    assert found.bad_nodes["n3"][0].startswith("link: slow with n")
    assert [reason.partition(":")[0] for reason in found.bad_nodes["n9"]] == ["gemm", "all_reduce"]
    assert found.bad_links.keys() == {("n12", "n4")}


def test_a_value_that_is_low_once_names_nobody() -> None:
    fleet = Fleet(4)
    fleet.slow = {("n1", "memory"): 0.3}
    run, seen = fleet.run, []

    async def slow_once(node: str, name: str, arguments: Mapping[str, Any], timeout_s: float) -> CheckResult:
        result = await run(node, name, arguments, timeout_s)
        fleet.slow.clear()
        seen.append((node, name))
        return result

    plan = DiagnosisPlan(paths=False)
    assert asyncio.run(diagnose(fleet.nodes[1:] + fleet.nodes[:1], slow_once, plan)).ok
    assert seen == [("n1", "quick"), ("n2", "quick"), ("n3", "quick"), ("n0", "quick"), ("n1", "memory")]
    fleet.slow = {("n1", "memory"): 0.3}
    once = DiagnosisPlan(paths=False, repeats=0)
    assert asyncio.run(diagnose(fleet.nodes[1:] + fleet.nodes[:1], slow_once, once)).bad_nodes.keys() == {"n1"}


def test_a_joining_node_is_compared_with_the_job_s() -> None:
    fleet = Fleet(4)
    fleet.slow = {("n3", "memory"): 0.3}
    known: dict[str, list[CheckResult]] = {}

    async def others(results: Sequence[CheckResult]) -> Mapping[str, Sequence[CheckResult]]:
        return known

    for node in fleet.nodes:
        results, bad = asyncio.run(check_joining(node, fleet.run, others))
        assert [verdict.check for verdict in bad] == (["memory"] if node.node == "n3" else [])
        if not bad:
            known[node.node] = results
    fleet.problems = {("n0", "disk"): "OSError: no space"}
    _, bad = asyncio.run(check_joining(fleet.nodes[0], fleet.run, others))
    assert [(verdict.kind, verdict.reason) for verdict in bad] == [("failed", "OSError: no space")]


def test_corrupt_nodes_are_named_by_their_digest() -> None:
    fleet = Fleet(4)
    fleet.digests = {"n2": "b"}
    assert fleet.diagnose().bad_nodes.keys() == {"n2"}
    two = Fleet(2)
    two.digests = {"n1": "b"}
    found = two.diagnose()
    assert (found.bad_nodes, found.ok, len(found.undecided)) == ({}, False, 2)


def test_a_partial_network_names_the_node_or_the_link() -> None:
    fleet = Fleet(6)
    fleet.unreachable = {frozenset(("n2", f"n{index}")) for index in (0, 1, 3, 4, 5)}
    found = fleet.diagnose()
    assert found.bad_nodes.keys() == {"n2"}
    assert found.bad_nodes["n2"][0].startswith("reach: no connection with most other nodes: timed out")
    assert not found.bad_links
    fleet.unreachable = {frozenset(("n1", "n4"))}
    found = fleet.diagnose()
    assert (dict(found.bad_nodes), found.bad_links.keys()) == ({}, {("n1", "n4")})


def test_a_node_that_fails_by_itself_is_named() -> None:
    fleet = Fleet(3)
    fleet.problems = {("n0", "known_gemm"): "2 elements of 9 GEMMs have wrong bits", ("n1", "open_endpoint"): "died"}
    found = fleet.diagnose()
    assert found.bad_nodes == {
        "n0": ("known_gemm: 2 elements of 9 GEMMs have wrong bits",), "n1": ("reach: died",),
    }  # fmt: skip


def test_checks_through_agents() -> None:
    """Answers find their call, whatever their order; a lost node answers at once."""

    async def play() -> list[CheckResult]:
        orders: list[tuple[str, Check]] = []
        checks = RemoteChecks(lambda node, order: orders.append((node, order)))
        runs = [asyncio.ensure_future(checks.run(node, "disk", {}, 5.0)) for node in ("a", "b", "c", "d")]
        await asyncio.sleep(0)
        for (node, order), value in zip(reversed(orders[1:3]), (2.0, 1.0), strict=True):
            checks.receive(node, CheckDone(order.id, "disk", CheckResult("disk", value=value).to_dict()))
        checks.receive("a", CheckDone(orders[0][1].id, "disk", {}, "no such check"))
        checks.receive("a", CheckDone(99, "disk", {}))
        checks.lose("d")
        return await asyncio.gather(*runs)

    results = asyncio.run(play())
    assert [result.value for result in results] == [None, 1.0, 2.0, None]
    assert [result.problem for result in results] == ["no such check", "", "", "its agent was lost during the check"]
