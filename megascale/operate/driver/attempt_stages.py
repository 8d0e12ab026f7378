"""The life of an attempt (`driver.job`): nodes fill the places, the store opens, ranks start or are taken over. They
are watched, and a fault has time to show its first cause.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from megascale.core.errors import Exit
from megascale.operate.channel.messages import Collect, OpenStore, Prepare, RankEnd, Start
from megascale.operate.driver.attempt import Attempt, LostNode
from megascale.operate.driver.commands import Say, Send
from megascale.operate.driver.decisions import has_silent_node, missing_nodes, note_progress, waits_for_network
from megascale.operate.driver.end_stages import conclude, finish, join_s, stop_attempt, take_stop_request
from megascale.operate.driver.job_state import REJOIN_S, SETTLE_S, JobState, Stage
from megascale.operate.driver.roster import format_nodes, place_ranks
from megascale.record.layout import NEWEST
from megascale.record.rank_state import RankStatus

OPEN_S = 20.0  # seconds that rank 0's node has to open the job's store
RECONNECT_S = 2.0  # seconds that an agent whose ranks other ranks have lost has to connect again

LOOK_S = 0.2
"""Least seconds between two looks at all nodes or ranks: for a hang, or for a node whose connection was lost."""

FIND_S = 20.0
"""Seconds after the first ranks of a job are found in which the others should be, by the observers of their hosts."""

MOST_STACKS = 4  # most culprits whose stacks are collected

Found = tuple[str, RankStatus | RankEnd]
"""A rank of a job of another launcher that runs, or has ended, and its node."""


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
    if not job.history.attempts and job.places.count(None) == len(job.places) and now < job.begun + join_s(job):
        if sum(map(roster.is_idle, possible)) >= len(job.places):
            if sorted(possible) != sorted(job.arranged):  # not at every message
                job.arranged = job.plan.order.arrange(possible, len(job.places))
            first = job.arranged[: len(job.places)]
            if all(map(roster.is_idle, first)):
                job.places = [*first]  # else a node that joins late would be a spare, and the ranks out of order
    else:
        job.places = job.plan.order.fill(job.places, roster.spares(job.used))
    if all(node and roster.is_idle(node) for node in job.places):
        nodes = job.used
        job.do(*(Say(f"WARNING: {text}") for text in job.plan.order.warnings(nodes)))
        job.begin_attempt(nodes, place_ranks(nodes, job.plan.world), now)
        job.do(Send(nodes[0], OpenStore(job.history.attempt, reachable=len(nodes) > 1)))
        job.enter(Stage.OPEN, now + OPEN_S)
    elif broken or too_few or now >= job.deadline:
        busy = [node for node in job.used if not roster.is_idle(node)]
        missing = broken or ([] if too_few else [node for node in busy if node not in roster.members] or busy)
        job.attempt = None
        conclude(job, missing_nodes(job, missing, now), now)


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
    plan = job.plan
    logs = plan.logs if plan.alone else f"{plan.logs}/attempt-{attempt.number}"
    resuming = plan.resuming if job.history.attempts > 1 and job.history.step else ()
    arguments = (*plan.arguments, *plan.overrides, *resuming)
    for node, ranks in attempt.placement.items():
        member = job.roster.members[node]
        member.attempt, member.started, member.standby = attempt.number, now, 0
        job.do(Send(node, Start(attempt.number, plan.run, plan.world, ranks, store, arguments, logs, {})))
    longest = max(job.first_steps.get(node, math.inf) for node in attempt.placement)
    attempt.watch = job.new_watch(now, longest)
    job.enter(Stage.RUN, math.inf)


def prepare(job: JobState) -> None:
    """Have processes in standby on the nodes that may run ranks of the next attempt, once this one trains."""
    attempt, standby = job.attempt, job.settings.standby
    if job.plan.alone or job.stage != Stage.RUN or attempt is None or not attempt.noted or standby == "none":
        return
    ranks = attempt.world // len(attempt.placement)
    for node in [*job.roster.spares(attempt.placement), *(attempt.placement if standby == "nodes" else ())]:
        if (member := job.roster.members.get(node)) is not None and member.standby != ranks:
            member.standby = ranks
            job.do(Send(node, Prepare(ranks)))


def run(job: JobState, now: float) -> None:
    """Watch the ranks: their end, a failure, a hang, and the first step after an incident."""
    attempt = job.present_attempt
    if attempt.has_left_in_order:
        note_progress(job, now)
        finish(job, attempt.status, now)
    elif attempt.failed:
        job.enter(Stage.SETTLE, math.inf)
    elif not job.plan.alone and _hangs(job, attempt, now):
        collect_records(job, now)
    elif not attempt.noted or job.waiting_since is not None:
        note_progress(job, now)


def collect_records(job: JobState, now: float) -> None:
    """Ask all nodes for the flight records of their ranks."""
    attempt = job.present_attempt
    attempt.forget_answers()
    job.verdict = None
    job.do(*(Send(node, Collect(attempt.number)) for node in attempt.placement))
    job.enter(Stage.COLLECT, now + job.settings.diagnosis_timeout_s)


def _hangs(job: JobState, attempt: Attempt, now: float) -> bool:
    """Look at all ranks, at most every LOOK_S: heartbeats of 1,500 agents call this 1,500 times a second."""
    if now < job.next_look or not attempt.watch.is_idle(now):
        return False
    job.next_look = now + LOOK_S
    return attempt.watch.hangs(attempt.statuses(job.roster), now)


def settle(job: JobState, now: float) -> None:
    """Wait for the first cause of a failure: ranks that lost a peer may end before the lost peer is known."""
    attempt, settings = job.present_attempt, job.settings
    if attempt.causes or attempt.lost:
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
        conclude(job, attempt.finding(job.roster), now)


def collect(job: JobState, now: float) -> None:
    """Wait for the flight records, reach a verdict, then wait for the culprits' stacks."""
    attempt, settings = job.present_attempt, job.settings
    if attempt.failed:
        job.enter(Stage.SETTLE, math.inf)
    elif attempt.watch.idle_s(now) < settings.hang_s:
        job.enter(Stage.RUN, math.inf)
    elif job.verdict is None:
        if now < job.deadline and len(attempt.answered) < len(attempt.placement):
            return
        if has_silent_node(job, now):
            return  # a lost node explains it all: `tick` decides
        job.verdict = job.hang_verdict(attempt.records, attempt.states)
        if job.verdict.compare and not attempt.compared:
            _ask_longer_records(job, job.verdict.compare, now)
            return
        if waits_for_network(job, now):
            job.next_look = now + settings.heartbeat_s
            job.enter(Stage.RUN, math.inf)
            return
        culprits = [rank for rank in job.verdict.ranks if rank in attempt.node_of][:MOST_STACKS]
        for node in {attempt.node_of[rank] for rank in culprits} if settings.stacks else ():
            ranks = tuple(rank for rank in culprits if attempt.node_of[rank] == node)
            job.do(Send(node, Collect(attempt.number, stacks=True, ranks=ranks)))
        job.deadline = now + (settings.diagnosis_timeout_s / 2 if settings.stacks and culprits else 0.0)
    elif now >= job.deadline or attempt.stacks.keys() >= set(job.verdict.ranks[:MOST_STACKS]):
        conclude(job, attempt.hang_finding(job.verdict), now)


def _ask_longer_records(job: JobState, ranks: Sequence[int], now: float) -> None:
    """Ask for all events of ranks whose calls are to be compared, before a second verdict."""
    attempt = job.present_attempt
    by_node: dict[str, list[int]] = {}
    for rank in ranks:
        if (node := attempt.node_of.get(rank)) is not None:
            by_node.setdefault(node, []).append(rank)
    for node, asked in by_node.items():
        attempt.answered.discard(node)
        job.do(Send(node, Collect(attempt.number, ranks=tuple(asked), events=NEWEST)))
    attempt.compared, job.verdict = True, None
    job.deadline = now + job.settings.diagnosis_timeout_s


def observe(job: JobState, now: float) -> None:
    """Wait for ranks that another launcher starts, at first or again, for lost observers, and for progress after a
    hang.
    """
    attempt = job.attempt
    if attempt is not None and attempt.has_left_in_order:
        finish(job, attempt.status, now)
    if now < job.next_look or job.stage != Stage.OBSERVE:
        return
    job.next_look = now + LOOK_S
    members = job.roster.members
    running = [(node, status) for node, member in members.items() for status in member.statuses.values()]
    processes, found = {status.rank: status.pid for _, status in running}, list[Found](running)
    if attempt is None:  # ranks of a short job end before the others are found, or before this driver runs
        found += [(node, end) for node, member in members.items() for end in member.ended.values()]
    world = max((members[node].world for node, _ in found), default=0)
    is_known = attempt is not None and processes.items() <= attempt.processes.items()
    _say_if_incomplete(job, found, 0 if is_known else world, now)
    if found and len({each.rank for _, each in found}) == world and (attempt is None or processes != attempt.processes):
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


def _say_if_incomplete(job: JobState, found: Sequence[Found], world: int, now: float) -> None:
    """Say once that ranks of a job of `world` ranks are not found, which the driver waits for before it watches any."""
    ranks = {status.rank for _, status in found}
    if not ranks or not world or len(ranks) == world:
        job.incomplete_at = None
    elif job.incomplete_at is None:
        job.incomplete_at = now + FIND_S
    elif now >= job.incomplete_at:
        job.incomplete_at = math.inf
        nodes = format_nodes(sorted({node for node, _ in found}))
        hint = "run `megascale watch RUN --attach --driver HOST[:PORT]` on every host of the job, the same on all"
        job.do(Say(f"found {len(ranks)} of {world} ranks, on {nodes}: none is watched before all are found  -> {hint}"))


def _take_back(job: JobState, attempt: Attempt, processes: Mapping[int, int]) -> bool:
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


def _begin_observing(job: JobState, found: Sequence[Found], now: float) -> None:
    """Watch the ranks of a new attempt, all of which were found."""
    placement: dict[str, tuple[int, ...]] = {}
    for node, status in sorted(found, key=lambda each: each[1].rank):
        placement[node] = (*placement.get(node, ()), status.rank)
    job.plan = replace(job.plan, nodes=len(placement), world=len(found))
    attempt = job.begin_attempt(list(placement), placement, now)
    statuses = [status for _, status in found if isinstance(status, RankStatus)]
    attempt.processes = {status.rank: status.pid for status in statuses}
    attempt.watch.beat(statuses, now)
    for node in placement:
        attempt.add_ends(node, [*job.roster.members[node].ended.values()])
    job.enter(Stage.RUN, math.inf)
