"""The end of an attempt, and of a job (`driver.job`): ranks are ended, then the decision is carried out."""

from __future__ import annotations

import math

from megascale.core.errors import Exit
from megascale.operate.channel.messages import Leave, Stop
from megascale.operate.driver.classify import Finding
from megascale.operate.driver.commands import Finish, Request, Say, Send
from megascale.operate.driver.decisions import completed_step, record, summary
from megascale.operate.driver.incidents import Action
from megascale.operate.driver.job_state import JobState, Stage
from megascale.operate.driver.policy import SparePool, decide
from megascale.operate.driver.roster import Member, format_nodes

KILL_S = 10.0  # seconds beyond their grace in which a node must end its ranks
JOIN_S = 60.0  # seconds that an agent has to start and join, besides the time of its checks


def conclude(job: JobState, finding: Finding, now: float) -> None:
    """Reach the verdict about a fault: log and print the incident, and end the attempt."""
    if job.plan.observed:
        job.waiting_since = None
        record(job, finding, Action("alert", "nothing is done: another launcher runs the ranks"), now)
        job.enter(Stage.OBSERVE, now + job.settings.agent_grace_s)
        return
    kept = [node for node in job.places if node and node not in finding.culprit.nodes]
    reserve = SparePool(
        len(job.roster.spares(node for node in job.places if node)),
        job.plan.requestable,
        job.plan.revivable,
        shrinkable=job.settings.shrink and job.plan.smaller(len(kept)) is not None,
    )
    step = completed_step(job)
    action = decide(finding, step, now, job.history.recent, job.settings, reserve)
    job.waiting_since = None
    job.pending = record(job, finding, action, now)
    stop_attempt(job, now, job.settings.end_grace_s)


def stop_attempt(job: JobState, now: float, grace_s: float, *, save: bool = False) -> None:
    """End the ranks of the attempt. `save`: they may finish their step and save."""
    attempt, members = job.attempt, job.roster.members
    running = [node for node in attempt.placement if node in members] if attempt is not None else []
    job.saves = save
    for node in running:
        if attempt is not None and not attempt.is_free(node):
            job.do(Send(node, Stop(attempt.number, grace_s, save)))
    job.enter(Stage.STOP, now + grace_s + KILL_S)


def stop_again(job: JobState, node: str, now: float) -> None:
    """End ranks of the attempt on a node that has connected again, and may have missed the order: its connection was
    away, or the node was lost.
    """
    attempt = job.present_attempt
    if job.stage == Stage.TAKEOVER and job.stop_requests:
        save = job.stop_requests == 1
        job.do(Send(node, Stop(attempt.number, job.settings.stop_grace_s * save, save)))
    elif job.stage == Stage.STOP and job.saves:
        job.do(Send(node, Stop(attempt.number, max(0.0, job.deadline - KILL_S - now), save=True)))
    elif job.stage in (Stage.STOP, Stage.GATHER) or node in attempt.lost:
        job.do(Send(node, Stop(attempt.number, job.settings.end_grace_s)))


def stop(job: JobState, now: float) -> None:
    """Wait until no rank of the attempt runs, then carry out the decision. A node whose ranks do not end is lost."""
    attempt, members = job.attempt, job.roster.members
    running = (node for node in (attempt.busy if attempt is not None else ()) if runs_ranks(members.get(node)))
    if attempt is not None and (now >= job.deadline or attempt.stuck):
        reason = "its ranks cannot be ended"
        for node in [node for node in running if now >= job.deadline or node in attempt.stuck]:
            job.lose(node, reason, now)
            job.exclude(node, reason, now)
        running = (node for node in attempt.busy if runs_ranks(members.get(node)))
    if next(running, None) is None:  # no list: every node's answer calls this function
        carry_out(job, now)


def runs_ranks(member: Member | None) -> bool:
    """Return True for a joined node that has ranks of any attempt."""
    return member is not None and member.attempt is not None


def carry_out(job: JobState, now: float) -> None:
    """Carry out the decision about the last incident, or the user's request to stop."""
    attempt, incident = job.attempt, job.pending
    job.pending = None
    if job.stop_requests:
        if attempt is not None and not all(end.in_order for end in attempt.ends.values()):
            late = now >= job.deadline - KILL_S
            limit = f" within fault.stop_grace_s = {job.settings.stop_grace_s:g}" if late else ""
            job.do(Say(attempt.why_unsaved(limit, at_once=job.stop_requests > 1)))
        finish(job, Exit.STOPPED if attempt is None else attempt.status_of_stop, now)
        return
    if incident is not None and incident.action.kind == "stop":
        finish(job, incident.action.status, now)
        return
    action = incident.action if incident is not None else None
    if action is not None and action.kind in ("replace", "replace_group"):
        for node in action.nodes:
            job.exclude(node, incident.what if incident else "", now)
    for node in [node for node in job.unfit if node in job.roster.members]:
        job.leave_out(node, job.unfit[node], now)
    job.unfit.clear()
    if action is not None and action.kind == "shrink":
        job.shrink(action.nodes)
    spares = len(job.roster.spares(job.used)) - job.places.count(None)
    if spares < 0:
        job.do(Request(-spares))
    lost = [node for node in job.used if node not in job.roster.members]
    left = [] if job.plan.revivable else lost[: max(0, spares)]  # lost beside the culprits, and may not come back
    if left:
        job.places = [None if node in left else node for node in job.places]
        job.do(Say(f"a spare takes the place of {format_nodes(left)}, lost meanwhile"))
    pause_s = job.start_agents(lost)
    wait_s = job.settings.replacement_wait_s if spares < 0 and job.plan.requestable else 0.0
    job.enter(Stage.GATHER, now + max(pause_s + join_s(job), wait_s))


def join_s(job: JobState) -> float:
    """Return the seconds that an agent has to join, checks included."""
    return JOIN_S + (job.settings.check_timeout_s if job.plan.checks else 0.0)


def take_stop_request(job: JobState, now: float) -> None:
    """End the job at its user's request."""
    if job.stage == Stage.DONE:
        return
    if job.stage == Stage.TAKEOVER:  # agents that join later are told then
        for node in [node for node in job.present_attempt.placement if node in job.roster.members]:
            stop_again(job, node, now)
        return
    if job.stage in (Stage.GATHER, Stage.OPEN) or job.plan.observed:
        job.do(Say("stopping: the ranks are left alone" if job.plan.observed else "stopping: no ranks run"))
        finish(job, job.stop_status, now)
    else:
        wait_s = math.inf if job.plan.alone else job.settings.stop_grace_s
        grace = wait_s if job.stop_requests == 1 else 0.0
        job.do(Say("stopping: the ranks finish their step and save" if grace else "stopping at once"))
        stop_attempt(job, now, grace, save=job.stop_requests == 1)


def finish(job: JobState, status: int, now: float) -> None:
    """End the job with an exit status; all agents leave."""
    job.log({"event": "ended", "time": now, "status": int(status), "step": completed_step(job)})
    if job.history.incidents:
        job.do(Say(f"the job has ended with status {int(status)}: {summary(job)}"))
    elif job.plan.observed:
        job.do(Say(f"the job has ended with status {int(status)}, after step {completed_step(job)}"))
    reason = "" if job.plan.alone else "the job has ended"
    job.do(*(Send(node, Leave(reason)) for node in job.roster.members), Finish(int(status)))
    job.enter(Stage.DONE, math.inf)
