"""Metrics of a job in Prometheus' form, as its driver knows it: nodes, attempts and incidents."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

from megascale.operate.driver.incidents import ActionKind, Incident, IncidentClass
from megascale.operate.driver.job import Job
from megascale.operate.node.threads import call_in_loop
from megascale.operate.print_line import print_line
from megascale.operate.store.exporter import DRIVER, MetricsEndpoint, exporting
from megascale.operate.store.families import Labels, MetricFamily

LOOP_S = 2.0  # longest time that a scrape waits for the driver's event loop


def job_families(job: Job, now: float, labels: Labels) -> list[MetricFamily]:
    """Return the families of a job. `labels`: of all series."""
    nodes = MetricFamily("job_nodes", "gauge", "nodes of the job by state; missing: places without a node")
    members = job.roster.members
    training = sum(node in members and members[node].connected for node in job.used)
    states = {"training": training, "spare": len(job.roster.spares(job.used))}
    states |= {"excluded": sum(until > now for until in job.history.excluded.values())}
    states |= {"missing": len(job.places) - training}
    for state, number in states.items():
        nodes.add(number, labels | {"state": state})
    age = MetricFamily("job_node_heartbeat_age_seconds", "gauge", "time since the last message of a node's agent")
    for name, member in members.items():
        age.add(max(0.0, now - member.heard), labels | {"node": name})
    incidents = list(job.history.incidents.values())
    classes, actions = Counter(one.class_ for one in incidents), Counter(one.action.kind for one in incidents)
    by_class = MetricFamily("job_incidents", "counter", "incidents by class")
    for class_ in get_args(IncidentClass):  # from 0 on: the first incident must be an increase
        by_class.add(classes[class_], labels | {"class": class_})
    by_action = MetricFamily("job_actions", "counter", "the driver's answers to incidents")
    for action in get_args(ActionKind):
        by_action.add(actions[action], labels | {"action": action})
    recoveries = _recoveries(incidents)
    lost, recovery = "steps that were trained a second time", "time from faults to first new steps"
    waits = "incidents without a new step since"
    return [
        nodes,
        age,
        by_class,
        by_action,
        MetricFamily("job_stage", "gauge", "1: what the driver does now", [(labels | {"stage": str(job.stage)}, 1)]),
        _counter("job_attempts", "starts of all ranks", job.history.attempt + 1, labels),
        _counter("job_driver_starts", "drivers of this launch", job.history.drivers, labels),
        _counter("job_steps_lost", lost, sum(steps for _, steps in recoveries), labels),
        _counter("job_recovery_seconds", recovery, sum(seconds for seconds, _ in recoveries), labels),
        MetricFamily("job_incidents_open", "gauge", waits, [(labels, len(job.history.open))]),
    ]


def exporting_job(job: Job, clock: Callable[[], float]) -> contextlib.AbstractContextManager[str | None]:
    """Serve the metrics of a job during a `with` block in its driver, which asks this event loop for them."""
    loop, plan = asyncio.get_running_loop(), job.plan
    endpoint = MetricsEndpoint(
        plan.metrics_address, plan.metrics_port, plan.run, Path(plan.folder), DRIVER, socket.gethostname()
    )
    return exporting(
        lambda: call_in_loop(loop, lambda: job_families(job, clock(), endpoint.labels), LOOP_S), endpoint, print_line
    )


def _recoveries(incidents: Sequence[Incident]) -> list[tuple[float, int]]:
    """Return seconds and lost steps of each recovery: one new step ends all incidents that were open, once."""
    ended: dict[float, list[Incident]] = {}
    for one in incidents:
        if one.recovered is not None:
            ended.setdefault(one.recovered, []).append(one)
    return [
        (time - min(one.since for one in some), max(one.steps_lost or 0 for one in some))
        for time, some in ended.items()
    ]


def _counter(name: str, help_text: str, value: float, labels: Labels) -> MetricFamily:
    return MetricFamily(name, "counter", help_text, [(labels, value)])
