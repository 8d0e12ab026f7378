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
from megascale.core.run_folder import TOKEN

LOG_FILE = "incidents.jsonl"

IncidentClass = Literal[
    "process", "software", "data", "storage", "node", "network", "hang", "divergence", "unknown", "alert"
]
"""Classes of incidents:

- process: a rank was killed or crashed; software: a rank raised an error; data, storage: a dataset, a file system
- node: an agent was lost, or its hardware failed; network: nodes cannot reach each other
- hang: no rank made progress; divergence: loss, gradient or weights are not finite
- unknown: none of these can be shown; alert: a loss or a gradient norm above its recent band, or a stage that the
  ranks have rebuilt; nothing was done
"""

HANGS = ("hang: ", "storage: waiting", "network: waiting")
"""Beginnings of the signatures of incidents without progress, in which other ranks wait and have not failed."""

EVIDENCE_SHOWN = 3  # observations in the line for people; the log has all

ActionKind = Literal["restart", "replace", "replace_group", "shrink", "stop", "alert", "wait"]
"""Actions: restart the ranks in place; replace nodes by spares; replace all nodes of a parallel group; restart with
fewer replicas; stop the job; only report; wait for the network to recover.
"""

RESTARTS = ("restart", "replace", "replace_group", "shrink")  # actions that start a new attempt


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
        match event["event"]:
            case "launch":
                self.launched, self.attempts, self.drivers, self.ended = event["time"], 0, 0, None
                self.nodes, self.overrides = (), ()
                if event["scheduler"] == "local":
                    self.excluded.clear()  # its nodes are named anew in each launch
            case "driver":
                self.drivers += 1
            case "attempt":
                self.attempt, self.nodes, self.world = event["attempt"], tuple(event["nodes"]), event["world"]
                self.overrides = tuple(event["overrides"])
                self.attempts += 1
            case "incident":
                incident = Incident.from_dict(event["incident"])
                self.incidents[incident.id] = incident
                self.step = max(self.step, incident.step)
            case "recovered":
                found = {"recovered": event["time"]} | {key: event[key] for key in ("resumed_step", "steps_lost")}
                self.incidents |= {id_: replace(self.incidents[id_], **found) for id_ in event["incidents"]}
            case "excluded":
                self.excluded[event["node"]] = event["until"]
            case "ended":
                self.ended = event["status"]
                self.step = max(self.step, event["step"])
                self.looked_at = self.next_id() - 1 if self.ended == Exit.DO_NOT_REQUEUE else self.looked_at
            case kind:
                raise MegascaleError(f"no event of a job's log: {kind!r}", hint="another version of megascale wrote it")

    @property
    def open(self) -> list[Incident]:
        """Incidents after which no new step has been seen yet, the oldest first."""
        each = self.incidents.values()
        return [one for one in each if one.recovered is None and one.action.kind not in ("stop", "alert", "wait")]

    @property
    def recent(self) -> list[Incident]:
        """Incidents since a person was called, the oldest first: who starts the job again has looked at the others."""
        return [incident for incident in self.incidents.values() if incident.id > self.looked_at]

    def next_id(self) -> int:
        """Return the id of the next incident, from 1."""
        return max(self.incidents, default=0) + 1

    @property
    def undone(self) -> Incident | None:
        """The last incident if no attempt has followed its decision."""
        last = self.incidents.get(max(self.incidents, default=0))
        if last is None or last.attempt != self.attempt or last.action.kind not in (*RESTARTS, "stop"):
            return None
        return last


def open_log(path: Path) -> AppendFile:
    """Open the log of a job for its one driver. A line without an end is cut off: its driver died while it wrote, and
    what it says was never carried out.

    Raises: MegascaleError
    """
    try:
        if exists(path) and (text := path.read_bytes()) and not text.endswith(b"\n"):
            os.truncate(path, text.rfind(b"\n") + 1)
        return AppendFile(path, in_run=True)
    except OSError as error:
        what = f"{path}: the log of incidents cannot be opened: {error.strerror or error}"
        raise MegascaleError(what, hint="see the file system of the run's folder") from None


def is_lost(path: Path) -> bool:
    """Return True if the run's folder, in which the log is, is not there any more."""
    return not exists(path.parent / TOKEN)


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
