"""The stages of a job (`driver.job`): each function acts on the job when something has changed, or time has passed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING

from megascale.core.errors import Exit
from megascale.core.flight_layout import EVENTS
from megascale.operate.channel.messages import Collect, Leave, OpenStore, Prepare, RankStatus, Start, Stop
from megascale.operate.driver import decisions
from megascale.operate.driver.attempt import Attempt
from megascale.operate.driver.commands import Exclude, Finish, Request, Say, Send
from megascale.operate.driver.roster import Member, format_nodes, place_ranks
from megascale.operate.driver.watch import ProgressWatch

if TYPE_CHECKING:
    from megascale.operate.driver.job import Job

SETTLE_S = 0.5
"""Seconds after a failure in which an earlier failure may become known."""

RECONNECT_S = 2.0
"""Seconds that an agent whose ranks other ranks have lost has to connect again."""

REJOIN_S = 8.0
"""Seconds that a new driver waits for the agents of a running attempt, but for those that are known to have ended."""

JOIN_S = 60.0
"""Seconds that an agent has to start and join, besides the time of its checks."""

OPEN_S = 20.0
"""Seconds that rank 0's node has to open the job's store."""

KILL_S = 10.0
"""Seconds beyond their grace in which a node must end its ranks."""

LOOK_S = 0.2
"""Least seconds between two looks at all nodes or ranks: for a hang, or for a node whose connection was lost."""

FIND_S = 20.0
"""Seconds after the first ranks of a job are found in which the others should be, by the observers of their hosts."""

MOST_STACKS = 4
"""Most culprits whose stacks are collected."""


class Stage(StrEnum):
    """The present occupation of a job."""

    TAKEOVER = "takeover"
    GATHER = "gather"
    OPEN = "open"
    RUN = "run"
    SETTLE = "settle"
    COLLECT = "collect"
    STOP = "stop"
    OBSERVE = "observe"
    DONE = "done"


def begin_takeover(job: Job, now: float) -> None:
    """Take over from a driver that died: its attempt may still run, or its last decision may wait to be carried out."""
    history = job.history
    if not history.nodes:
        return
    job.places = [*history.nodes]
    job.attempt = Attempt(history.attempt, place_ranks(history.nodes, job.plan.world), ProgressWatch(job.settings, now))
    job.pending = decisions.undone_decision(history)
    job.enter(Stage.TAKEOVER, now + REJOIN_S)


def takeover(job: Job, now: float) -> None:
    """Wait for the agents of the attempt that have not ended; go on if all of them run it, else end it and start
    another.
    """
    attempt = _attempt(job)
    joined = [node for node in attempt.placement if node in job.roster.members]
    missing = set(attempt.placement).difference(joined, attempt.lost)
    if not missing:
        job.deadline = min(job.deadline, now + SETTLE_S)  # what has ended since follows each Hello
    if now < job.deadline:
        return
    for node in missing:
        attempt.lose(decisions.never_joined(node, now))
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


def gather(job: Job, now: float) -> None:
    """Fill every place with an idle node, then begin an attempt."""
    roster = job.roster
    broken = [node for node in job.places if node in roster.failed]
    possible = [name for name in roster.order if name not in roster.excluded and name not in roster.failed]
    known = roster.failed or job.failed_checks or (job.history.attempt >= 0 and roster.order)
    too_few = known and len(possible) < job.plan.nodes and not job.plan.requestable
    if job.history.attempt < 0 and job.places.count(None) == len(job.places) and now < job.begun + _join_s(job):
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
        decisions.conclude(job, decisions.missing_nodes(job, missing, now), now)


def _missing(job: Job) -> list[str]:
    """Return nodes with a place whose agents have not joined, or else those that are not idle."""
    busy = [node for node in job.used if not job.roster.is_idle(node)]
    return [node for node in busy if node not in job.roster.members] or busy


def begin_attempt(job: Job, now: float) -> None:
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


def open_store(job: Job, now: float) -> None:
    """Wait for the store; `start_ranks` follows."""
    attempt = _attempt(job)
    if now >= job.deadline:
        job.lose(next(iter(attempt.placement)), f"it did not open the job's store within {OPEN_S:.0f} s", now)
    if attempt.lost:
        job.enter(Stage.SETTLE, now)


def start_ranks(job: Job, store: str, now: float) -> None:
    """Start all ranks of the attempt, whose store listens."""
    attempt = _attempt(job)
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


def run(job: Job, now: float) -> None:
    """Watch the ranks: their end, a failure, a hang, and the first step after an incident."""
    attempt = _attempt(job)
    if attempt.has_left_in_order:
        decisions.note_progress(job, now)
        finish(job, attempt.status, now)
    elif attempt.failed:
        job.enter(Stage.SETTLE, math.inf)
    elif _hangs(job, now):
        attempt.forget_answers()
        job.verdict = None
        job.do(*(Send(node, Collect(attempt.number)) for node in attempt.placement))
        job.enter(Stage.COLLECT, now + job.settings.evidence_s)
    elif not attempt.noted or job.waiting_since is not None:
        decisions.note_progress(job, now)


def prepare(job: Job) -> None:
    """Have processes in standby on the nodes that may run ranks of the next attempt, once this one trains."""
    attempt, standby = job.attempt, job.settings.standby
    if job.stage != Stage.RUN or attempt is None or not attempt.noted or standby == "none":
        return
    ranks = attempt.world // len(attempt.placement)
    for node in [*job.roster.spares(attempt.placement), *(attempt.placement if standby == "nodes" else ())]:
        if (member := job.roster.members.get(node)) is not None and member.standby != ranks:
            member.standby = ranks
            job.do(Send(node, Prepare(ranks)))


def _hangs(job: Job, now: float) -> bool:
    """Look at all ranks, at most every LOOK_S: heartbeats of 1,500 agents call this 1,500 times a second."""
    attempt = _attempt(job)
    if now < job.next_look or not attempt.watch.is_idle(now):
        return False
    job.next_look = now + LOOK_S
    return attempt.watch.hangs(attempt.statuses(job.roster), now)


def settle(job: Job, now: float) -> None:
    """Wait for the first cause of a failure: ranks that lost a peer may end before the lost peer is known."""
    attempt, settings = _attempt(job), job.settings
    if attempt.has_cause or attempt.lost:
        limit = now + SETTLE_S
    else:
        limit = now + settings.node_lost_s + settings.heartbeat_s
        look = now >= job.next_look
        job.next_look = now + LOOK_S if look else job.next_look
        for node in attempt.placement if look else ():
            member = job.roster.members.get(node)
            if member and not member.connected and now - member.heard > RECONNECT_S:
                job.lose(node, "its connection was lost, and its ranks were lost by others", now)
                limit = now + SETTLE_S
    job.deadline = min(job.deadline, limit)
    if now >= job.deadline:
        decisions.conclude(job, attempt.finding(job.roster), now)


def collect(job: Job, now: float) -> None:
    """Wait for the flight records, reach a verdict, then wait for the culprits' stacks."""
    attempt, settings = _attempt(job), job.settings
    if attempt.failed:
        job.enter(Stage.SETTLE, math.inf)
    elif attempt.watch.idle_s(now) < settings.hang_s:
        job.enter(Stage.RUN, math.inf)
    elif job.verdict is None:
        if now < job.deadline and len(attempt.answered) < len(attempt.placement):
            return
        if decisions.has_silent_node(job, now):
            return  # a lost node explains it all: `tick` decides
        job.verdict = job.hang_verdict(attempt.records, attempt.states)
        if job.verdict.compare and not attempt.compared:
            _ask_longer_records(job, job.verdict.compare, now)
            return
        if decisions.waits_for_network(job, now):
            job.next_look = now + settings.heartbeat_s
            job.enter(Stage.RUN, math.inf)
            return
        culprits = [rank for rank in job.verdict.ranks if rank in attempt.node_of][:MOST_STACKS]
        for node in {attempt.node_of[rank] for rank in culprits} if settings.stacks else ():
            ranks = tuple(rank for rank in culprits if attempt.node_of[rank] == node)
            job.do(Send(node, Collect(attempt.number, stacks=True, ranks=ranks)))
        job.deadline = now + (settings.evidence_s / 2 if settings.stacks and culprits else 0.0)
    elif now >= job.deadline or attempt.stacks.keys() >= set(job.verdict.ranks[:MOST_STACKS]):
        decisions.conclude(job, attempt.hang_finding(job.verdict), now)


def _ask_longer_records(job: Job, ranks: Sequence[int], now: float) -> None:
    """Ask for all events of ranks whose calls are to be compared, before a second verdict."""
    attempt = _attempt(job)
    by_node: dict[str, list[int]] = {}
    for rank in ranks:
        if (node := attempt.node_of.get(rank)) is not None:
            by_node.setdefault(node, []).append(rank)
    for node, asked in by_node.items():
        attempt.answered.discard(node)
        job.do(Send(node, Collect(attempt.number, ranks=tuple(asked), events=EVENTS)))
    attempt.compared, job.verdict = True, None
    job.deadline = now + job.settings.evidence_s


def observe(job: Job, now: float) -> None:
    """Wait for ranks that another launcher starts, at first or again, for lost observers, and for progress after a
    hang.
    """
    attempt = job.attempt
    if attempt is not None and attempt.has_left_in_order:
        finish(job, attempt.status, now)
    if now < job.next_look or job.stage != Stage.OBSERVE:
        return
    job.next_look = now + LOOK_S
    found = [(node, status) for node, member in job.roster.members.items() for status in member.statuses.values()]
    processes = {status.rank: status.pid for _, status in found}
    world = max((member.world for member in job.roster.members.values() if member.statuses), default=0)
    is_known = attempt is not None and processes.items() <= attempt.processes.items()
    _say_if_incomplete(job, found, 0 if is_known else world, now)
    if found and len(processes) == world and (attempt is None or processes != attempt.processes):
        _begin_observing(job, found, now)
    elif attempt is not None and _take_back(job, attempt, processes):
        job.enter(Stage.RUN, math.inf)
    elif attempt is not None and not attempt.failed and attempt.watch.idle_s(now) < job.settings.hang_s:
        job.do(Say("the ranks make progress again"))
        job.enter(Stage.RUN, math.inf)
    elif attempt is not None and found:
        job.deadline = now + job.settings.agent_grace_s
    elif now >= job.deadline:
        job.do(Say(f"the launcher has not started the ranks again within {job.settings.agent_grace_s:g} s"))
        finish(job, Exit.UNCLASSIFIED, now)


def _say_if_incomplete(job: Job, found: Sequence[tuple[str, RankStatus]], world: int, now: float) -> None:
    """Say once that ranks of a job of `world` ranks are not found, which the driver waits for before it watches any."""
    ranks = {status.rank for _, status in found}
    if not ranks or not world or len(ranks) == world:
        job.incomplete_at = None
    elif job.incomplete_at is None:
        job.incomplete_at = now + FIND_S
    elif now >= job.incomplete_at:
        job.incomplete_at = math.inf
        nodes = format_nodes(sorted({node for node, _ in found}))
        hint = "run `megascale observe` on every host of the job, with the same --driver HOST[:PORT]"
        job.do(Say(f"found {len(ranks)} of {world} ranks, on {nodes}: none is watched before all are found  -> {hint}"))


def _take_back(job: Job, attempt: Attempt, processes: Mapping[int, int]) -> bool:
    """Take back lost nodes whose ranks are seen again, and return True if that makes the attempt whole. `processes`: of
    all ranks that were found.
    """
    seen = processes.items() & attempt.processes.items()
    known = {rank for rank, _ in seen} | attempt.ends.keys()
    back = [node for node in attempt.lost if known.issuperset(attempt.placement[node])]
    for node in back:
        attempt.regain(node)
    if back:
        job.do(Say(f"the ranks on {format_nodes(back)} are seen again: they have run on"))
    return bool(back) and not attempt.failed


def _begin_observing(job: Job, found: Sequence[tuple[str, RankStatus]], now: float) -> None:
    """Watch the ranks of a new attempt, all of which were found."""
    placement: dict[str, tuple[int, ...]] = {}
    for node, status in sorted(found, key=lambda each: each[1].rank):
        placement[node] = (*placement.get(node, ()), status.rank)
    job.plan = replace(job.plan, nodes=len(placement), world=len(found))
    number, nodes = job.history.attempt + 1, list(placement)
    job.log({"event": "attempt", "time": now, "attempt": number, "nodes": nodes, **job.plan.layout})
    job.attempt = Attempt(number, placement, ProgressWatch(job.settings, now))
    job.attempt.processes = {status.rank: status.pid for _, status in found}
    job.attempt.watch.beat([status for _, status in found], now)
    job.do(Say(f"attempt {number}: {job.plan.world} ranks on {format_nodes(nodes)}"))
    job.enter(Stage.RUN, math.inf)


def stop_attempt(job: Job, now: float, grace_s: float, *, save: bool = False) -> None:
    """End the ranks of the attempt. `save`: they may finish their step and save."""
    attempt, members = job.attempt, job.roster.members
    running = [node for node in attempt.placement if node in members] if attempt is not None else []
    job.saves = save
    for node in running:
        if attempt is not None and not attempt.is_free(node):
            job.do(Send(node, Stop(attempt.number, grace_s, save)))
    job.enter(Stage.STOP, now + grace_s + KILL_S)


def stop_again(job: Job, node: str, now: float) -> None:
    """End ranks of the attempt on a node that has connected again, and may have missed the order: its connection was
    away, or the node was lost.
    """
    attempt = _attempt(job)
    if job.stage == Stage.TAKEOVER and job.stop_requests:
        save = job.stop_requests == 1
        job.do(Send(node, Stop(attempt.number, job.settings.stop_grace_s * save, save)))
    elif job.stage == Stage.STOP and job.saves:
        job.do(Send(node, Stop(attempt.number, max(0.0, job.deadline - KILL_S - now), save=True)))
    elif job.stage in (Stage.STOP, Stage.GATHER) or node in attempt.lost:
        job.do(Send(node, Stop(attempt.number, job.settings.end_grace_s)))


def stop(job: Job, now: float) -> None:
    """Wait until no rank of the attempt runs, then carry out the decision. A node whose ranks do not end is lost."""
    attempt, members = job.attempt, job.roster.members
    running = (node for node in (attempt.busy if attempt is not None else ()) if runs_ranks(members.get(node)))
    if attempt is not None and (now >= job.deadline or attempt.stuck):
        reason = "its ranks cannot be ended"
        for node in [node for node in running if now >= job.deadline or node in attempt.stuck]:
            job.lose(node, reason, now)
            exclude(job, node, reason, now)
        running = (node for node in attempt.busy if runs_ranks(members.get(node)))
    if next(running, None) is None:  # no list: every node's answer calls this function
        carry_out(job, now)


def runs_ranks(member: Member | None) -> bool:
    """Return True for a joined node that has ranks of any attempt."""
    return member is not None and member.attempt is not None


def carry_out(job: Job, now: float) -> None:
    """Carry out the decision about the last incident, or the user's request to stop."""
    attempt, incident = job.attempt, job.pending
    job.pending = None
    if job.stop_requests:
        ends = list(attempt.ends.values()) if attempt is not None else []
        if attempt is not None and not all(end.in_order for end in ends):
            job.do(Say(decisions.why_unsaved(job, attempt, now)))
        finish(job, decisions.status_of_stop(ends), now)
        return
    if incident is not None and incident.action.kind == "stop":
        finish(job, incident.action.status, now)
        return
    action = incident.action if incident is not None else None
    if action is not None and action.kind in ("replace", "replace_group"):
        for node in action.nodes:
            exclude(job, node, incident.what if incident else "", now)
    for node in [node for node in job.unfit if node in job.roster.members]:
        job.leave_out(node, job.unfit[node], now)
    job.unfit.clear()
    if action is not None and action.kind == "shrink":
        job.shrink(action.nodes)
    spares = len(job.roster.spares(job.used)) - job.places.count(None)
    if spares < 0:
        job.do(Request(-spares))
    lost = [node for node in job.used if node not in job.roster.members]
    if not job.plan.revivable:
        _give_places_to_spares(job, lost[: max(0, spares)])
    pause_s = job.start_agents(lost)
    wait_s = job.settings.replacement_wait_s if spares < 0 and job.plan.requestable else 0.0
    job.enter(Stage.GATHER, now + max(pause_s + _join_s(job), wait_s))


def _give_places_to_spares(job: Job, lost: Sequence[str]) -> None:
    """Free the places of nodes that were lost beside the culprits, and may not come back."""
    job.places = [None if node in lost else node for node in job.places]
    if lost:
        job.do(Say(f"a spare takes the place of {format_nodes(lost)}, lost meanwhile"))


def _join_s(job: Job) -> float:
    """Return the seconds that an agent has to join, checks included."""
    return JOIN_S + (job.settings.check_timeout_s if job.plan.checks else 0.0)


def exclude(job: Job, node: str, reason: str, now: float) -> None:
    """Take a node out of the job."""
    until = now + job.settings.exclude_s
    if node in job.roster.members:
        job.do(Send(node, Leave(f"node {node} is replaced: {reason}")))
    job.roster.exclude(node)
    job.places = [None if place == node else place for place in job.places]
    job.log({"event": "excluded", "time": now, "node": node, "reason": reason, "until": until})
    job.do(Exclude(node, reason, until))


def take_stop_request(job: Job, now: float) -> None:
    """End the job at its user's request."""
    if job.stage == Stage.DONE:
        return
    if job.stage == Stage.TAKEOVER:  # agents that join later are told then
        for node in [node for node in _attempt(job).placement if node in job.roster.members]:
            stop_again(job, node, now)
        return
    if job.stage in (Stage.GATHER, Stage.OPEN) or job.plan.observed:
        job.do(Say("stopping: the ranks are left alone" if job.plan.observed else "stopping: no ranks run"))
        finish(job, Exit.STOPPED, now)
    else:
        grace = job.settings.stop_grace_s if job.stop_requests == 1 else 0.0
        job.do(Say("stopping: the ranks finish their step and save" if grace else "stopping at once"))
        stop_attempt(job, now, grace, save=job.stop_requests == 1)


def finish(job: Job, status: int, now: float) -> None:
    """End the job with an exit status; all agents leave."""
    job.log({"event": "ended", "time": now, "status": int(status), "step": decisions.completed_step(job)})
    if job.history.incidents:
        job.do(Say(f"the job has ended with status {int(status)}: {decisions.summary(job)}"))
    elif job.plan.observed:
        job.do(Say(f"the job has ended with status {int(status)}, after step {decisions.completed_step(job)}"))
    job.do(*(Send(node, Leave("the job has ended")) for node in job.roster.members), Finish(int(status)))
    job.enter(Stage.DONE, math.inf)


def done(job: Job, now: float) -> None:
    """Nothing follows."""


def _attempt(job: Job) -> Attempt:
    assert job.attempt is not None  # in every stage after `gather`
    return job.attempt


ACT: Mapping[Stage, Callable[[Job, float], None]] = {
    Stage.TAKEOVER: takeover,
    Stage.GATHER: gather,
    Stage.OPEN: open_store,
    Stage.RUN: run,
    Stage.SETTLE: settle,
    Stage.COLLECT: collect,
    Stage.STOP: stop,
    Stage.OBSERVE: observe,
    Stage.DONE: done,
}
