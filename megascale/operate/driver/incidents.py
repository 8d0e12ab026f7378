"""Incidents, and the log of a job: `incidents.jsonl` in the run's folder, to which the driver appends.

The log is the driver's state. Every decision is a line before it is carried out, and a driver that takes over reads
where the job stands: `JobHistory.apply` takes a new line and an old one alike.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

from megascale.core.append_file import AppendFile
from megascale.core.errors import Exit, MegascaleError
from megascale.core.files import exists
from megascale.core.rank import format_ranks

LOG_FILE = "incidents.jsonl"

IncidentClass = Literal[
    "process", "software", "data", "storage", "node", "network", "hang", "divergence", "unknown", "alert"
]
"""Classes of incidents:

- process: a rank was killed or crashed; software: a rank raised an error; data, storage: a dataset, a file system
- node: an agent was lost, or its hardware failed; network: nodes cannot reach each other
- hang: no rank made progress; divergence: loss, gradient or weights are not finite
- unknown: none of these can be shown; alert: a loss or a gradient norm above its recent band, nothing was done
"""

HANGS = ("hang: ", "storage: waiting", "network: waiting")
"""Beginnings of the signatures of incidents without progress, in which other ranks wait and have not failed."""

EVIDENCE_SHOWN = 3
"""Observations in the line for people; the log has all."""

ActionKind = Literal["restart", "replace", "replace_group", "shrink", "stop", "alert", "wait"]
"""Actions: restart the ranks in place; replace nodes by spares; replace all nodes of a parallel group; restart with
fewer replicas; stop the job; only report; wait for the network to recover.
"""


@dataclass(frozen=True)
class Culprit:
    """The first cause of an incident: ranks, the nodes they ran on, and a communication group; empty if unknown."""

    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    group: str = ""

    def __str__(self) -> str:
        names = []
        if self.ranks:
            names.append(format_ranks(self.ranks))
        elif self.group:
            names.append(f"group {self.group}")
        if self.nodes:
            nodes = ", ".join(self.nodes)
            names.append(f"on {nodes}" if names else f"node{'s' if len(self.nodes) > 1 else ''} {nodes}")
        return " ".join(names) or "no single culprit"


@dataclass(frozen=True)
class Action:
    """The driver's answer to an incident. `nodes`: nodes that leave the job; `status`: exit status of a stop;
    `wait_s`: longest wait.
    """

    kind: ActionKind
    reason: str = ""
    nodes: tuple[str, ...] = ()
    status: int = 0
    wait_s: float = 0.0


@dataclass(frozen=True)
class Incident:
    """One fault: what happened, to whom, since when, the verdict, the action, and the recovery.

    - `what`: a clause about the culprit; `evidence`: observations; `hint`: how a person fixes the cause
    - `signature`: equal for failures of the same way; `step`: last step that the job had completed
    - `since`, `verdict`, `recovered`: times of the fault, of the decision and of the first new step, in Unix seconds
    - `followers`: ranks whose failures are consequences, folded into this incident
    - `resumed_step`: step from which training continued; `steps_lost`: steps that were computed a second time
    """

    id: int
    class_: IncidentClass
    what: str
    culprit: Culprit
    evidence: tuple[str, ...]
    hint: str
    signature: str
    attempt: int
    step: int
    since: float
    verdict: float
    followers: tuple[int, ...] = ()
    action: Action = field(default_factory=lambda: Action("alert"))
    recovered: float | None = None
    resumed_step: int | None = None
    steps_lost: int | None = None

    @property
    def verdict_s(self) -> float:
        """Seconds from the fault to the verdict."""
        return self.verdict - self.since

    @property
    def recovery_s(self) -> float | None:
        """Seconds from the verdict to the first new step."""
        return None if self.recovered is None else self.recovered - self.verdict

    def to_dict(self) -> dict[str, Any]:
        """Return the incident as JSON values."""
        values = asdict(self)
        return {"id": values.pop("id"), "class": values.pop("class_"), **values}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build an incident from the values of `to_dict`. Raises: TypeError, KeyError or ValueError"""
        rest = dict(values)
        class_ = rest.pop("class")
        if class_ not in get_args(IncidentClass):
            raise ValueError(f"no class of incidents: {class_!r}")
        culprit, action = rest.pop("culprit"), rest.pop("action")
        rest |= {key: tuple(rest[key]) for key in ("evidence", "followers")}
        return cls(
            class_=class_,
            culprit=Culprit(tuple(culprit["ranks"]), tuple(culprit["nodes"]), culprit["group"]),
            action=Action(**{**action, "nodes": tuple(action["nodes"])}),
            **rest,
        )


def with_evidence(what: str, evidence: Sequence[str]) -> str:
    """Return what happened, with its evidence in brackets if there is any."""
    return f"{what} [{'; '.join(evidence)}]" if evidence else what


def describe(incident: Incident) -> str:
    """Return the line about an incident for people: what happened, evidence, action."""
    seen = f"noticed after {incident.verdict_s:.1f} s"
    verb = "waits" if incident.signature.startswith(HANGS) else "failed as a consequence"
    verb = "wait" if verb == "waits" and len(incident.followers) > 1 else verb
    followers = f"; {format_ranks(incident.followers)} {verb}" if incident.followers else ""
    head = f"incident {incident.id} ({incident.class_}) after step {incident.step}: {incident.what}, {seen}"
    hint = f"  -> {incident.hint}" if incident.hint else ""
    seen = with_evidence(f"{head}{followers}", incident.evidence[:EVIDENCE_SHOWN])
    return f"{seen}; {incident.action.reason}{hint}".replace("\n", " ")


def describe_recovery(incident: Incident) -> str:
    """Return the line about the first step after an incident, for people."""
    lost = incident.steps_lost
    steps = "" if lost is None else f", {lost} step{'s' if lost != 1 else ''} lost"
    first = f"first new step {incident.recovery_s:.1f} s after the verdict"
    return f"incident {incident.id}: training continues, {first}{steps}"


@dataclass
class JobHistory:
    """The content of the log: the nodes of the last attempt by place, excluded nodes, and all incidents.

    `overrides`: settings of a layout that has shrunk. `excluded`: by node, the end of the exclusion in Unix seconds.
    `step`: the last step known to be completed, at the end of an attempt or in an incident. `launched`: start of
    `megascale launch`; `attempts`, `drivers`: since then; `ended`: the job's status. `looked_at`: the last incident
    before a stop that called a person.
    """

    attempt: int = -1
    nodes: tuple[str, ...] = ()
    world: int = 0
    overrides: tuple[str, ...] = ()
    excluded: dict[str, float] = field(default_factory=dict)
    incidents: dict[int, Incident] = field(default_factory=dict)
    step: int = 0
    launched: float = 0.0
    attempts: int = 0
    drivers: int = 0
    ended: int | None = None
    looked_at: int = 0

    def apply(self, event: Mapping[str, Any]) -> None:
        """Add a line of the log. Raises: MegascaleError for a line of another kind."""
        kind = event["event"]
        if kind not in _APPLY:
            raise MegascaleError(f"no event of a job's log: {kind!r}", hint="another version of megascale wrote it")
        _APPLY[kind](self, event)

    @property
    def open(self) -> list[Incident]:
        """Incidents after which no new step has been seen yet, the oldest first."""
        return [incident for incident in self.incidents.values() if _awaits_step(incident)]

    @property
    def recent(self) -> list[Incident]:
        """Incidents since a person was called, the oldest first: who starts the job again has looked at the others."""
        return [incident for incident in self.incidents.values() if incident.id > self.looked_at]

    def next_id(self) -> int:
        """Return the id of the next incident, from 1."""
        return max(self.incidents, default=0) + 1


def _awaits_step(incident: Incident) -> bool:
    return incident.recovered is None and incident.action.kind not in ("stop", "alert", "wait")


def _apply_launch(history: JobHistory, event: Mapping[str, Any]) -> None:
    history.launched, history.attempts, history.drivers, history.ended = event["time"], 0, 0, None
    history.nodes, history.overrides = (), ()
    if event["scheduler"] == "local":
        history.excluded.clear()  # its nodes are named anew in each launch


def _apply_driver(history: JobHistory, event: Mapping[str, Any]) -> None:
    history.drivers += 1


def _apply_attempt(history: JobHistory, event: Mapping[str, Any]) -> None:
    history.attempt, history.nodes, history.world = event["attempt"], tuple(event["nodes"]), event["world"]
    history.overrides = tuple(event["overrides"])
    history.attempts += 1


def _apply_incident(history: JobHistory, event: Mapping[str, Any]) -> None:
    incident = Incident.from_dict(event["incident"])
    history.incidents[incident.id] = incident
    history.step = max(history.step, incident.step)


def _apply_recovered(history: JobHistory, event: Mapping[str, Any]) -> None:
    for id_ in event["incidents"]:
        history.incidents[id_] = replace(
            history.incidents[id_],
            recovered=event["time"],
            resumed_step=event["resumed_step"],
            steps_lost=event["steps_lost"],
        )


def _apply_excluded(history: JobHistory, event: Mapping[str, Any]) -> None:
    history.excluded[event["node"]] = event["until"]


def _apply_ended(history: JobHistory, event: Mapping[str, Any]) -> None:
    history.ended = event["status"]
    history.step = max(history.step, event["step"])
    if history.ended == Exit.DO_NOT_REQUEUE:
        history.looked_at = history.next_id() - 1


_APPLY = {
    "launch": _apply_launch,
    "driver": _apply_driver,
    "attempt": _apply_attempt,
    "incident": _apply_incident,
    "recovered": _apply_recovered,
    "excluded": _apply_excluded,
    "ended": _apply_ended,
}


class IncidentLog:
    """The log of a job, open for its one driver. A torn last line is removed. Raises: OSError"""

    def __init__(self, path: Path) -> None:
        _remove_torn_line(path)
        self._file = AppendFile(path, in_run=True)

    @property
    def pending(self) -> int:
        """Number of events that are not in the file yet."""
        return self._file.pending

    def append(self, event: Mapping[str, Any]) -> None:
        """Append an event, whole or not at all. Raises: OSError; the line is written with the next one then."""
        self._file.append(json.dumps(event).encode() + b"\n")

    def flush(self) -> None:
        """Write the pending events. Raises: OSError"""
        self._file.flush()


def read_history(path: Path) -> JobHistory:
    """Read the log of a job; an absent file is an empty log, and a torn last line is left out.

    Raises: MegascaleError naming the line that cannot be read.
    """
    history = JobHistory()
    for number, event in read_events(path):
        try:
            history.apply(event)
        except (KeyError, TypeError, ValueError) as error:
            raise _unreadable(path, number, repr(error)) from None
    return history


def read_events(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, event) of a log, without a torn last line. Raises: MegascaleError"""
    lines = path.read_bytes().split(b"\n")[:-1] if exists(path) else []
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
        except ValueError as error:
            raise _unreadable(path, number, str(error)) from None
        if not isinstance(event, dict) or "event" not in event:
            raise _unreadable(path, number, "not an event")
        yield number, event


def _unreadable(path: Path, number: int, found: str) -> MegascaleError:
    hint = "remove the line, or move the file away: the job then starts a new log"
    return MegascaleError(f"{path}:{number}: the line cannot be read: {found}", hint=hint)


def _remove_torn_line(path: Path) -> None:
    """Cut off a line without an end: its driver died while it wrote, and what it says was never carried out."""
    if exists(path) and (text := path.read_bytes()) and not text.endswith(b"\n"):
        os.truncate(path, text.rfind(b"\n") + 1)
