"""The start of an attempt (`driver.job`): nodes fill the places, the store opens, ranks start; or a takeover."""

from __future__ import annotations

import math

from megascale.operate.channel.messages import (
    OpenStore,
    Prepare,
    Start,
)
from megascale.operate.driver.attempt import Attempt, LostNode
from megascale.operate.driver.commands import Say, Send
from megascale.operate.driver.decisions import (
    missing_nodes,
    undone_decision,
)
from megascale.operate.driver.end_stages import (
    conclude,
    join_s,
    stop_attempt,
    take_stop_request,
)
from megascale.operate.driver.job_state import SETTLE_S, JobState, Stage
from megascale.operate.driver.roster import format_nodes, place_ranks
from megascale.operate.driver.watch import ProgressWatch

REJOIN_S = 8.0
"""Seconds that a new driver waits for the agents of a running attempt, but for those that are known to have ended."""


OPEN_S = 20.0
"""Seconds that rank 0's node has to open the job's store."""


def begin_takeover(job: JobState, now: float) -> None:
    """Take over from a driver that died: its attempt may still run, or its last decision may wait to be carried out."""
    history = job.history
    if not history.nodes:
        return
    job.places = [*history.nodes]
    job.attempt = Attempt(history.attempt, place_ranks(history.nodes, job.plan.world), ProgressWatch(job.settings, now))
    job.pending = undone_decision(history)
    job.enter(Stage.TAKEOVER, now + REJOIN_S)


def takeover(job: JobState, now: float) -> None:
    """Wait for the agents of the attempt that have not ended; go on if all of them run it, else end it and start
    another.
    """
    attempt = job.present_attempt
    joined = [node for node in attempt.placement if node in job.roster.members]
    missing = set(attempt.placement).difference(joined, attempt.lost)
    if not missing:
        job.deadline = min(job.deadline, now + SETTLE_S)  # what has ended since follows each Hello
    if now < job.deadline:
        return
    for node in missing:
        attempt.lose(LostNode(node, f"its agent has not joined the new driver within {REJOIN_S:.0f} s", now))
    if job.stop_requests:
        job.enter(Stage.RUN, math.inf)
        take_stop_request(job, now)
        return
    running = [node for node in joined if job.roster.members[node].attempt == attempt.number or attempt.is_free(node)]
    job.do(
        Say(f"a new driver takes over: {len(running)} of {len(attempt.placement)} nodes run attempt {attempt.number}")
    )
    if job.pending is None and len(running) == len(attempt.placement):
        job.enter(Stage.RUN, math.inf)
    elif job.pending is None and attempt.lost:
        job.enter(Stage.SETTLE, now)
    else:
        stop_attempt(job, now, job.settings.end_grace_s)


def gather(job: JobState, now: float) -> None:
    """Fill every place with an idle node, then begin an attempt."""
    roster = job.roster
    broken = [node for node in job.places if node in roster.failed]
    possible = [name for name in roster.order if name not in roster.excluded and name not in roster.failed]
    known = roster.failed or job.failed_checks or (job.history.attempt >= 0 and roster.order)
    too_few = known and len(possible) < job.plan.nodes and not job.plan.requestable
    if job.history.attempt < 0 and job.places.count(None) == len(job.places) and now < job.begun + join_s(job):
        first = possible[: job.plan.nodes]
        if len(first) == len(job.places) and all(map(roster.is_idle, first)):
            job.places = [*first]  # else a node that joins late would be a spare, and the ranks out of order
    else:
        idle = roster.spares(node for node in job.places if node)
        job.places = [node or (idle.pop(0) if idle else None) for node in job.places]
    if all(node and roster.is_idle(node) for node in job.places):
        begin_attempt(job, now)
    elif broken or too_few or now >= job.deadline:
        missing = broken or ([] if too_few else _missing(job))
        job.attempt = None
        conclude(job, missing_nodes(job, missing, now), now)


def _missing(job: JobState) -> list[str]:
    """Return nodes with a place whose agents have not joined, or else those that are not idle."""
    busy = [node for node in job.used if not job.roster.is_idle(node)]
    return [node for node in busy if node not in job.roster.members] or busy


def begin_attempt(job: JobState, now: float) -> None:
    """Begin an attempt: rank 0's node opens the job's store."""
    nodes = [node for node in job.places if node]
    number = job.history.attempt + 1
    job.log({"event": "attempt", "time": now, "attempt": number, "nodes": nodes, **job.plan.layout})
    placement = place_ranks(nodes, job.plan.world)
    job.attempt = Attempt(number, placement, ProgressWatch(job.settings, now))
    spares = job.roster.spares(nodes)
    more = f"; spare: {format_nodes(spares)}" if spares else ""
    job.do(Say(f"attempt {number}: {job.plan.world} ranks on {format_nodes(nodes)}{more}"))
    job.do(Send(nodes[0], OpenStore(number, reachable=len(nodes) > 1)))
    job.enter(Stage.OPEN, now + OPEN_S)


def open_store(job: JobState, now: float) -> None:
    """Wait for the store; `start_ranks` follows."""
    attempt = job.present_attempt
    if now >= job.deadline:
        job.lose(next(iter(attempt.placement)), f"it did not open the job's store within {OPEN_S:.0f} s", now)
    if attempt.lost:
        job.enter(Stage.SETTLE, now)


def start_ranks(job: JobState, store: str, now: float) -> None:
    """Start all ranks of the attempt, whose store listens."""
    attempt = job.present_attempt
    if job.stage != Stage.OPEN:
        return
    plan, logs = job.plan, f"{job.plan.logs}/attempt-{attempt.number}"
    resuming = plan.resuming if job.history.attempts > 1 and job.history.step else ()
    arguments = (*plan.arguments, *plan.overrides, *resuming)
    for node, ranks in attempt.placement.items():
        member = job.roster.members[node]
        member.attempt, member.started, member.standby = attempt.number, now, 0
        job.do(Send(node, Start(attempt.number, plan.run, plan.world, ranks, store, arguments, logs, {})))
    longest = max(job.first_steps.get(node, math.inf) for node in attempt.placement)
    attempt.watch = ProgressWatch(job.settings, now, longest)
    job.enter(Stage.RUN, math.inf)


def prepare(job: JobState) -> None:
    """Have processes in standby on the nodes that may run ranks of the next attempt, once this one trains."""
    attempt, standby = job.attempt, job.settings.standby
    if job.stage != Stage.RUN or attempt is None or not attempt.noted or standby == "none":
        return
    ranks = attempt.world // len(attempt.placement)
    for node in [*job.roster.spares(attempt.placement), *(attempt.placement if standby == "nodes" else ())]:
        if (member := job.roster.members.get(node)) is not None and member.standby != ranks:
            member.standby = ranks
            job.do(Send(node, Prepare(ranks)))
