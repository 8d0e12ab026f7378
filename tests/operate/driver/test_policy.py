"""The policy: restart in place, replace, stop with 93; budgets and spares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from megascale.config.fault import FaultConfig
from megascale.core.errors import Exit
from megascale.operate.driver.classify import Finding
from megascale.operate.driver.incidents import Action, Culprit, Incident
from megascale.operate.driver.policy import SparePool, decide

KILLED = Finding("process", "killed", Culprit((3,), ("b",)), 0.0, "process: SIGKILL of rank 3")
LOST = Finding("node", "lost", Culprit((2, 3), ("b",)), 0.0, "node: b")
HANG = Finding("hang", "hang", Culprit((), ("a", "b"), "dp"), 0.0, "hang: collective of group dp")
NETWORK = Finding("network", "apart", Culprit((), ("b",)), 0.0, "network: b")
SETTINGS = FaultConfig()
NOW = 1e6


def past(finding: Finding, count: int = 1, step: int = 1, ago: float = 60.0, action: Any = "restart") -> list[Incident]:
    """Return incidents of a finding, `ago` seconds before NOW."""
    one = Incident(
        1, finding.class_, finding.what, finding.culprit, (), "", finding.signature, 0, step, NOW - ago, NOW - ago, (),
        Action(action),
    )  # fmt: skip
    return [replace(one, id=index) for index in range(count)]


def action(finding: Finding, history: Sequence[Incident] = (), spares: int = 0, step: int = 9, **more: Any) -> Action:
    settings = SETTINGS.model_copy(update={k: v for k, v in more.items() if k in FaultConfig.model_fields})
    reserve = {k: v for k, v in more.items() if k not in FaultConfig.model_fields}
    return decide(finding, step, NOW, history, settings, SparePool(spares, **reserve))


def test_a_killed_rank_restarts_in_place_first_then_its_node_is_replaced() -> None:
    assert action(KILLED, spares=1).kind == "restart"
    second = action(KILLED, past(KILLED), spares=1)
    assert (second.kind, second.nodes) == ("replace", ("b",))
    assert action(KILLED, past(KILLED, ago=2 * SETTINGS.node_window_s), spares=1).kind == "restart"
    assert action(KILLED, past(KILLED), spares=1, restarts_in_place=2).kind == "restart"
    assert action(KILLED, past(KILLED), spares=0).kind == "restart", "better than to stop"


def test_a_lost_node_is_replaced_by_what_there_is() -> None:
    assert action(LOST, spares=1).kind == "replace"
    assert action(LOST, revivable=True).kind == "restart"
    waiting = action(LOST, requestable=True)
    assert (waiting.kind, waiting.wait_s) == ("replace", SETTINGS.replacement_wait_s)
    assert action(LOST, shrinkable=True, shrink=True).kind == "shrink"
    stop = action(LOST, shrinkable=True)
    assert (stop.kind, stop.status) == ("stop", Exit.DO_NOT_REQUEUE)


def test_of_nodes_that_are_lost_at_once_as_many_are_replaced_as_there_are_spares() -> None:
    lost = replace(LOST, culprit=Culprit((2, 3, 4, 5), ("b", "c")))
    assert action(lost, spares=2).nodes == ("b", "c")
    some = action(lost, spares=1, requestable=True)
    assert (some.kind, some.nodes) == ("replace", ("b",))
    assert some.reason == "replacing b by a spare, and waiting for c"
    assert action(lost, spares=1, revivable=True).kind == "restart"
    assert action(lost, requestable=True).nodes == ("b", "c")
    assert action(lost).kind == "stop"


@pytest.mark.parametrize("class_", ["divergence", "data", "software"])
def test_what_no_restart_mends_stops_the_job(class_: Any) -> None:
    finding = replace(KILLED, class_=class_, permanent=True)
    assert (action(finding, spares=3).kind, action(finding).status) == ("stop", 93)


def test_the_same_failure_in_the_same_step_stops_the_job() -> None:
    assert action(KILLED, past(KILLED, 1, step=9), spares=9).kind == "replace"
    third = action(KILLED, past(KILLED, 2, step=9), spares=9)
    assert (third.kind, third.status) == ("stop", 93)
    assert "step 10 has failed in this way 3 times" in third.reason
    assert action(KILLED, past(KILLED, 2, step=8), spares=9).kind == "replace", "another step"
    other = replace(KILLED, signature="process: SIGSEGV of rank 3")
    assert action(other, past(KILLED, 2, step=9), spares=9).kind == "replace", "another failure"
    assert action(KILLED, past(KILLED, 2, step=9), same_step_failures=4).kind == "restart"


def test_a_want_of_memory_stops_earlier() -> None:
    assert action(replace(KILLED, memory=True), past(KILLED, 1, step=9)).kind == "stop"


def test_the_budget_of_restarts() -> None:
    many = past(KILLED, SETTINGS.restarts_per_hour, step=1)
    assert action(LOST, many, spares=9).kind == "stop"
    assert action(LOST, past(KILLED, SETTINGS.restarts_per_hour, ago=3700.0), spares=9).kind == "replace"
    assert action(LOST, past(KILLED, 99, action="alert"), spares=9).kind == "replace", "alerts are free"


def test_a_hang_without_culprit_replaces_the_group_if_spares_suffice() -> None:
    group = action(HANG, spares=2)
    assert (group.kind, group.nodes) == ("replace_group", ("a", "b"))
    assert action(HANG, spares=1).kind == "restart"
    assert action(HANG, spares=2, replace_group=False).kind == "restart"


def test_a_network_that_flaps_twice_costs_its_node() -> None:
    assert action(NETWORK, spares=1).kind == "restart"
    assert action(NETWORK, past(NETWORK), spares=1).kind == "replace"
    assert action(NETWORK, past(NETWORK, ago=2 * SETTINGS.network_window_s), spares=1).kind == "restart"
