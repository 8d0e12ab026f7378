"""Comparison of nodes: the slow and the wrong are named, the healthy never."""

from __future__ import annotations

import random

import pytest

from megascale.catalog.checks import CHECK_SETS, CHECKS
from megascale.operate.health.checks.result import CheckResult
from megascale.operate.health.compare import compare_digests, compare_high, compare_links, compare_same
from megascale.operate.health.node_verdicts import judge


def fleet(rng: random.Random, nodes: int, spread: float) -> dict[str, list[CheckResult]]:
    """Results of healthy nodes: values with the usual noise of each check, and sometimes far above the others."""
    results: dict[str, list[CheckResult]] = {}
    for index in range(nodes):
        results[f"n{index}"] = [healthy(rng, name, spread) for name in (*CHECK_SETS["full"], "clock")]
    return results


def healthy(rng: random.Random, name: str, spread: float) -> CheckResult:
    facts = CHECKS[name].facts
    if facts["better"] == "digest":
        return CheckResult(name, digest="5eed", platform="cpu")
    if facts["better"] == "zero":
        return CheckResult(name, value=0.0)
    if facts["better"] == "same":
        return CheckResult(name, value=rng.gauss(0, 1e-3))
    return CheckResult(name, value=1e9 * rng.gauss(1, spread * facts["noise"]) * rng.choice([1, 1, 1, 1.1]))


@pytest.mark.parametrize("nodes", [2, 3, 4, 8, 40])
def test_100_runs_of_healthy_nodes_have_no_finding(nodes: int) -> None:
    rng = random.Random(nodes)
    for _ in range(100):
        verdicts = judge(fleet(rng, nodes, spread=1.0))
        assert [verdict for verdict in verdicts if verdict.bad or verdict.kind == "undecided"] == []


@pytest.mark.parametrize("nodes", [2, 4, 40])
@pytest.mark.parametrize("name", ["memory", "loopback", "gemm", "all_to_all"])
def test_a_node_of_half_the_speed_is_named(nodes: int, name: str) -> None:
    rng = random.Random(0)
    for _ in range(20):
        results = fleet(rng, nodes, spread=0.5)
        results["n1"] = [CheckResult(one.name, value=0.5e9) if one.name == name else one for one in results["n1"]]
        assert [(v.node, v.check, v.kind) for v in judge(results) if v.bad] == [("n1", name, "low")]


def test_a_wrong_result_needs_no_comparison() -> None:
    verdicts = judge({"a": [CheckResult("known_gemm", value=3.0)]})
    assert [(v.node, v.kind) for v in verdicts] == [("a", "failed")]
    (failed,) = judge({"a": [CheckResult("disk", problem="OSError: no space")]})
    assert (failed.kind, failed.reason) == ("failed", "OSError: no space")
    (alone,) = judge({"a": [CheckResult("disk", value=1.0)]})
    assert (alone.kind, alone.bad) == ("alone", False)


def test_other_hardware_is_not_compared() -> None:
    rates = {"a": (1.0, "H100"), "b": (1.0, "H100"), "c": (0.4, "A100"), "d": (0.4, "A100")}
    results = {node: [CheckResult("gemm", value=value, platform=kind)] for node, (value, kind) in rates.items()}
    assert [v.kind for v in judge(results)] == ["ok"] * 4
    results["d"] = [CheckResult("gemm", value=0.1, platform="A100")]
    assert [v.node for v in judge(results) if v.bad] == ["d"]


def test_a_minority_of_digests_is_wrong() -> None:
    assert compare_digests({"a": "x", "b": "x", "c": "y"}) == {"a": "ok", "b": "ok", "c": "differs"}
    assert set(compare_digests({"a": "x", "b": "y"}).values()) == {"undecided"}
    assert set(compare_digests({"a": "x", "b": "x"}).values()) == {"ok"}


def test_a_clock_that_is_ahead_differs() -> None:
    compared = compare_same({"a": 0.0, "b": 0.001, "c": 2.0, "d": -0.001}, floor=0.1)
    assert [name for name, one in compared.items() if one.low] == ["c"]
    ahead = compare_same({"reference": 0.0, "b": -2.0, "c": -2.001}, floor=0.1)  # the reference itself is wrong
    assert [name for name, one in ahead.items() if one.low] == ["reference"]


def test_noise_of_the_others_excuses_a_value() -> None:
    quiet = {"a": 100.0, "b": 101.0, "c": 99.0, "d": 60.0}
    assert [name for name, one in compare_high(quiet, noise=0.02).items() if one.low] == ["d"]
    noisy = {"a": 100.0, "b": 70.0, "c": 140.0, "d": 60.0}
    assert not [name for name, one in compare_high(noisy, noise=0.02).items() if one.low]


def test_half_of_the_links_may_be_slow() -> None:
    rates = {("a", "b"): 10.0, ("a", "c"): 11.0, ("b", "c"): 100.0}  # a is slow
    assert [pair for pair, one in compare_links(rates, 0.05).items() if one.low] == [("a", "b"), ("a", "c")]
    assert compare_links({("a", "b"): 10.0}, 0.05) == {}
