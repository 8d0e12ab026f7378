"""Decisions about a job (`driver.job`): incidents and their actions, nodes to check, the first step after a fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megascale.operate.driver.classify import Finding, classify_lost_nodes
from megascale.operate.driver.commands import CheckNodes, Say
from megascale.operate.driver.incidents import Action, Culprit, Incident, describe, describe_recovery
from megascale.operate.driver.job_state import JobState
from megascale.operate.driver.roster import format_nodes
from megascale.record.metrics import Alert, RebuiltStages

SUSPECTED = ("hang", "network", "node", "storage", "unknown")
"""Classes of incidents that hardware causes: nodes are checked before ranks start on them again."""


def record(job: JobState, finding: Finding, action: Action, now: float) -> Incident:
    """Log and print an incident."""
    incident = Incident(
        job.history.next_id(), finding.class_, finding.what, finding.culprit, finding.evidence, finding.hint,
        finding.signature, job.history.attempt, completed_step(job), min(finding.since, now) or now, now,
        finding.followers, action,
    )  # fmt: skip
    job.log({"event": "incident", "time": now, "incident": incident.to_dict()})
    job.do(Say(describe(incident)))
    members, placement = job.roster.members, () if job.attempt is None else job.attempt.placement
    running = [node for node in placement if node in members and members[node].connected]
    if job.plan.checks and (nodes := nodes_in_doubt(incident, running)):
        report = incident.action.kind == "wait"
        for node in nodes if not report else ():  # no ranks are started there until the checks are done
            members[node].held = True
        job.do(CheckNodes(tuple(nodes), incident.class_ == "network", report))
    return incident


def nodes_in_doubt(incident: Incident, running: Sequence[str]) -> Sequence[str]:
    """Return nodes to check: all of `running` after a fault of the network, else the culprits, or all without any."""
    if incident.action.kind not in ("restart", "wait") or incident.class_ not in SUSPECTED:
        return ()
    culprits = () if incident.class_ == "network" else incident.culprit.nodes
    return [node for node in running if not culprits or node in culprits]


def ends_to_replace(job: JobState, links: Sequence[tuple[str, str]], others: int = 0) -> dict[str, str]:
    """Return nodes without which no link of `links` is used, and why they leave the job: for each link one of its ends,
    since nobody knows which is at fault. None if spares do not suffice, with `others` nodes that leave anyway.
    """
    reasons: dict[str, str] = {}
    left = list(links)
    while left:
        count = Counter(node for link in left for node in link)
        node = max(count, key=lambda node: (count[node], job.places.index(node) if node in job.places else -1))
        peers = sorted(set().union(*(link for link in left if node in link)) - {node})
        reasons[node] = f"its path to {', '.join(peers)} does not work, and a spare takes its place"
        left = [link for link in left if node not in link]
    suffices = job.plan.requestable or len(reasons) + others <= len(job.roster.spares(job.used))
    return reasons if suffices else {}


def alert(job: JobState, found: Alert | RebuiltStages, now: float) -> None:
    """Log and print an alert, unless the log has it."""
    what, name = f"{found}; it is of step {found.step}", "rebuilt"
    hint = "the loss rises: watch that it falls again; fault.rebuild_stage = 0 goes back to an exact state instead"
    if isinstance(found, Alert):
        what, name = str(found), found.alert
        hint = "a restart changes nothing; see the data of this step if it does not heal"
    signature = f"alert: {name}"
    if any((each.signature, each.what) == (signature, what) for each in job.history.incidents.values()):
        return
    finding = Finding("alert", what, Culprit(), now, signature, hint=hint)
    record(job, finding, Action("alert", "nothing is done"), now)


def summary(job: JobState) -> str:
    """Describe the incidents of this launch."""
    mine = [incident for incident in job.history.incidents.values() if incident.since >= job.history.launched]
    kinds = Counter(incident.action.kind.replace("_", " ") for incident in mine)
    actions = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    count = f"{len(mine)} incident{'s' if len(mine) != 1 else ''}{f' ({actions})' if mine else ''}"
    return f"{count}, the last attempt was {job.history.attempt}"


def completed_step(job: JobState) -> int:
    """Return the last completed step: in the present attempt, or before it if this one has not trained yet."""
    if job.attempt is None or not job.attempt.watch.step:
        return job.history.step
    return job.attempt.watch.step - (0 if job.attempt.has_left_in_order else 1)


def note_progress(job: JobState, now: float) -> None:
    """Log the recovery from incidents once the attempt has completed a step, and the end of a wait for the network."""
    assert job.attempt is not None
    watch = job.attempt.watch
    if job.waiting_since is not None and watch.idle_s(now) < job.settings.hang_s:
        waited = [i.id for i in job.history.incidents.values() if i.action.kind == "wait"][-1:]
        step = completed_step(job)
        job.log({"event": "recovered", "time": now, "incidents": waited, "resumed_step": step, "steps_lost": 0})
        job.do(Say("training continues: the network is back, nothing was restarted"))
        job.waiting_since = None
    if job.attempt.noted or not (watch.has_new_step or job.attempt.has_left_in_order):
        return
    job.attempt.noted = True
    for node in job.attempt.placement if watch.first_step_took is not None else ():
        job.first_steps[node] = max(job.first_steps.get(node, 0.0), watch.first_step_took or 0.0)
    awaiting = job.history.open
    if not awaiting:
        return
    known = watch.first_step > 0  # else the attempt has ended between two heartbeats
    resumed = watch.first_step - 1 if known else None
    lost = max(0, max(incident.step for incident in awaiting) - watch.first_step + 1) if known else None
    ids = [incident.id for incident in awaiting]
    job.log({"event": "recovered", "time": now, "incidents": ids, "resumed_step": resumed, "steps_lost": lost})
    job.do(*(Say(describe_recovery(job.history.incidents[id_])) for id_ in ids))


def has_silent_node(job: JobState, now: float) -> bool:
    """Return True if a node of the attempt has missed two heartbeats."""
    assert job.attempt is not None
    limit = 2 * job.settings.heartbeat_s
    members = [job.roster.members.get(node) for node in job.attempt.placement]
    return any(member is None or not member.connected or now - member.heard > limit for member in members)


def waits_for_network(job: JobState, now: float) -> bool:
    """Return True while a network in doubt has time to recover: links that flap heal without a restart."""
    assert job.attempt is not None
    verdict, wait = job.verdict, job.settings.link_recovery_s
    if verdict is None or verdict.kind != "network":
        return False
    if job.waiting_since is None:
        job.waiting_since = now
        reason = f"network, waiting up to {wait:g} s for a link that flaps"
        record(job, job.attempt.hang_finding(verdict), Action("wait", reason, wait_s=wait), now)
    return now - job.waiting_since < wait


def missing_nodes(job: JobState, nodes: Sequence[str], now: float) -> Finding:
    """Return the finding about nodes that have not joined; none: no node came for a place of the job."""
    if nodes:
        late, failed = "its agent did not join in time", job.roster.failed
        return classify_lost_nodes({node: failed.get(node, late) for node in nodes}, now)
    if not job.failed_checks:
        excluded = [node for node, until in job.history.excluded.items() if until > now]
        evidence: tuple[str, ...] = ()
        if excluded:
            evidence = (f"nodes replaced before, and excluded since: {format_nodes(excluded)}",)
        hint = "give the job more nodes; fault.node_exclusion_s is the time without a replaced node" if excluded else ""
        what = "no node came for a place of the job"
        return Finding("node", what, Culprit(), now, "node: missing", evidence, hint)
    evidence = tuple(f"{name}: {reason}" for name, reason in job.failed_checks.items())
    hint = "what the check names; for a slow host fault.check_timeout_s, or fault.check_nodes = false"
    what = "no node is left for a place of the job: nodes have failed their checks"
    return Finding("node", what, Culprit(), now, "node: missing", evidence, hint)
