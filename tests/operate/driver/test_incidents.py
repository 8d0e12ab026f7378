"""The log of incidents holds the driver's state: a new driver reads from it what the old one knew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megascale.core.errors import MegascaleError
from megascale.operate.driver.incidents import (
    Action,
    Culprit,
    Incident,
    JobHistory,
    describe,
    describe_recovery,
    open_log,
    read_history,
)

INCIDENT = Incident(
    id=1, class_="process", what="rank 3 on node1 was killed by SIGKILL", culprit=Culprit((3,), ("node1",)),
    evidence=("signal 9",), hint="", signature="process: SIGKILL of rank 3", attempt=0, step=17, since=100.0,
    verdict=100.6, followers=(0, 1, 2), action=Action("restart", "restarting the ranks in place"),
)  # fmt: skip
EVENTS: list[dict[str, Any]] = [
    {"event": "launch", "time": 90.0, "run": "r", "nodes": 2, "world": 4, "scheduler": "slurm"},
    {"event": "driver", "time": 90.0},
    {"event": "attempt", "time": 91.0, "attempt": 0, "nodes": ["node0", "node1"], "world": 4, "overrides": []},
    {"event": "incident", "time": 100.6, "incident": INCIDENT.to_dict()},
    {"event": "excluded", "time": 101.0, "node": "node1", "reason": "lost", "until": 500.0},
    {"event": "attempt", "time": 102.0, "attempt": 1, "nodes": ["node0", "node2"], "world": 4, "overrides": []},
    {"event": "recovered", "time": 106.6, "incidents": [1], "resumed_step": 16, "steps_lost": 1},
]


def log_of(path: Path, events: list[dict[str, Any]]) -> JobHistory:
    log = open_log(path)
    for event in events:
        log.append(json.dumps(event).encode() + b"\n")
    return read_history(path)


def test_history_is_rebuilt_from_the_log(tmp_path: Path) -> None:
    history = log_of(tmp_path / "incidents.jsonl", EVENTS)
    assert (history.attempt, history.nodes, history.drivers) == (1, ("node0", "node2"), 1)
    assert history.excluded == {"node1": 500.0}
    assert history.step == 17
    incident = history.incidents[1]
    assert (incident.recovered, incident.resumed_step, incident.steps_lost) == (106.6, 16, 1)
    assert incident.culprit == INCIDENT.culprit
    assert incident.action == INCIDENT.action
    assert history.open == []
    assert history.next_id() == 2


def test_an_incident_is_open_until_the_first_new_step(tmp_path: Path) -> None:
    assert [incident.id for incident in log_of(tmp_path / "a", EVENTS[:-1]).open] == [1]


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_torn_last_line_is_left_out_and_removed(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "incidents.jsonl"
    log_of(path, EVENTS)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert read_history(path).open, "its recovery was not written"
    open_log(path).append(json.dumps(EVENTS[-1]).encode() + b"\n")
    assert path.read_bytes() == whole


def test_a_spoilt_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "incidents.jsonl"
    log_of(path, EVENTS)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], "{}", *lines[4:]]) + "\n")
    with pytest.raises(MegascaleError, match=r"incidents.jsonl:4: .*not an event"):
        read_history(path)
    path.write_text(json.dumps({"event": "incident", "incident": {"class": "odd"}}) + "\n")
    with pytest.raises(MegascaleError, match=r":1: "):
        read_history(path)


def test_a_new_launch_forgets_drivers_and_the_nodes_of_this_host(tmp_path: Path) -> None:
    history = log_of(tmp_path / "slurm", [*EVENTS, {**EVENTS[0], "time": 200.0}])
    assert (history.drivers, history.nodes, history.attempt) == (0, (), 1)
    assert history.excluded, "hosts of a cluster keep their names"
    assert not log_of(tmp_path / "local", [*EVENTS, {**EVENTS[0], "scheduler": "local"}]).excluded


def test_an_incident_is_one_line_for_people() -> None:
    assert describe(INCIDENT) == (
        "incident 1 (process) after step 17: rank 3 on node1 was killed by SIGKILL, noticed after 0.6 s; ranks 0, 1, 2 "
        "failed as a consequence [signal 9]; restarting the ranks in place"
    )
    recovered = JobHistory()
    for event in EVENTS:
        recovered.apply(event)
    line = describe_recovery(recovered.incidents[1])
    assert line == "incident 1: training continues, first new step 6.0 s after the verdict, 1 step lost"
