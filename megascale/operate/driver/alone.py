"""The stages of a job on one host that nothing restarts: its first fault ends it, with the first culprit's exit status.

A hang is left to the user, who may debug a rank; ranks that wait end by the timeout of a collective, or by the watchdog
of NCCL. They name no culprit of their own then: torch's flight recorder does, else the ranks' flight records.
"""

from __future__ import annotations

import math
import signal
from collections import Counter
from dataclasses import replace

from megascale.core.errors import Exit
from megascale.core.process import STOP_ORDER
from megascale.operate.channel.messages import RankEnd
from megascale.operate.driver.attempt import Attempt
from megascale.operate.driver.attempt_stages import collect_records
from megascale.operate.driver.classify import Finding, classify_ends, is_cascade
from megascale.operate.driver.end_stages import finish, runs_ranks, stop_attempt
from megascale.operate.driver.incidents import Culprit
from megascale.operate.driver.job_state import SETTLE_S, JobState

END_S = 10.0  # seconds that the other ranks have to end, before they are killed

CAUSE_S = 3.0
"""Seconds after the first end of a rank that lost another, or was aborted, in which the first cause may end."""

STOPS = (Exit.STOPPED, Exit.INTERRUPTED, *(-n for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, STOP_ORDER)))
"""Statuses of ranks that a stop ended before the first step, by an order or by the signal of which they got one too."""


def settle(job: JobState, now: float) -> None:
    """Wait for the first cause of a failure, then end the job; without any ask for the flight records."""
    attempt = job.present_attempt
    # a rank that was aborted may have waited for others
    is_clear = bool(attempt.lost) or any(attempt.ends[rank].status != -signal.SIGABRT for rank in attempt.causes)
    wait_s = 0.0 if len(attempt.ends) == attempt.world else SETTLE_S if is_clear else CAUSE_S
    job.deadline = min(job.deadline, now + wait_s)
    if now < job.deadline:
        return
    if is_clear:
        if attempt.lost:
            _end(job, attempt.finding(job.roster), now)
            return
        ends = attempt.ends.items()  # one of which has ended on its own account: an abort is a consequence then
        waited = {rank: replace(end, peer_lost=end.peer_lost or end.status == -signal.SIGABRT) for rank, end in ends}
        _end(job, classify_ends(waited, attempt.node_of), now)
    else:
        collect_records(job, now)


def collect(job: JobState, now: float) -> None:
    """Wait for the flight records, then end the job because of the rank that others waited for."""
    attempt = job.present_attempt
    if attempt.answered or now >= job.deadline:
        job.verdict = job.hang_verdict(attempt.records, attempt.states)
        _end(job, _finding_of_waits(job), now)


def stop(job: JobState, now: float) -> None:
    """Wait for the ends of the ranks. If one fails instead of saving, the others, which may wait for it, are ended."""
    attempt, members = job.attempt, job.roster.members
    if job.saves and job.fault is None and (fault := _fault_of_stop(job, now)) is not None:
        _end(job, fault, now)
    running = attempt is not None and any(runs_ranks(members.get(node)) for node in attempt.busy)
    if attempt is None or not running or attempt.stuck or now >= job.deadline:
        finish(job, _status(job), now)


def _end(job: JobState, fault: Finding, now: float) -> None:
    job.fault = fault
    stop_attempt(job, now, END_S)


def _finding_of_waits(job: JobState) -> Finding:
    """Return the finding about ranks that lost another, or were aborted: the rank that they waited for, if one is
    known.
    """
    attempt, verdict = job.present_attempt, job.verdict
    first = classify_ends(attempt.ends, attempt.node_of)
    if (suspect := job.plan.find_suspect()) is not None:
        rank, reason = suspect.rank, suspect.reason
        is_aborted = rank in attempt.ends and attempt.ends[rank].status == -signal.SIGABRT
        reason = f"killed by SIGABRT; {reason}" if is_aborted else reason
        return _finding_about(attempt, rank, reason, first.since)
    if attempt.causes or verdict is None:  # it was aborted, and nothing shows that it waited
        return first
    if verdict.confident and verdict.ranks:
        return _finding_about(attempt, verdict.ranks[0], f"{verdict.kind}: {'; '.join(verdict.evidence)}", first.since)
    # the rank that has not ended and that most others name as lost, none of which names another
    named = Counter(end.peers[0] for end in attempt.ends.values() if end.error and len(end.peers) == 1)
    stuck = next((rank for rank, _ in named.most_common() if rank not in attempt.ends), None)
    if first.end is not None and stuck is not None:
        return _finding_about(attempt, stuck, f"does not answer: {first.end.error}", first.since)
    return first


def _finding_about(attempt: Attempt, rank: int, evidence: str, since: float) -> Finding:
    culprit = Culprit((rank,), (attempt.node_of[rank],))
    followers = tuple(sorted(attempt.failures - {rank}))
    what = f"{culprit} was waited for in vain"
    return Finding("hang", what, culprit, since, f"hang: rank {rank}", (evidence,), followers=followers)


def _fault_of_stop(job: JobState, now: float) -> Finding | None:
    """Return what keeps ranks from ending as they were asked to; None as long as nothing is known to."""
    ends = job.present_attempt.ends
    failed = {rank: replace(end, stopped=False) for rank, end in ends.items() if not _follows_stop(job, end)}
    has_cause = not all(map(is_cascade, failed.values()))
    lost_a_stopped_rank = any(not end.in_order and _follows_stop(job, end) for end in ends.values())
    is_late = bool(failed) and now >= CAUSE_S + min(end.time for end in failed.values())
    if has_cause or (is_late and not lost_a_stopped_rank):
        return classify_ends(failed, job.present_attempt.node_of)
    return None


def _follows_stop(job: JobState, end: RankEnd) -> bool:
    """Return True for a rank that ended as it was asked to: in order, before its first step, or killed at the second
    request.
    """
    return end.in_order or end.status in STOPS or (job.stop_requests > 1 and end.status == -signal.SIGKILL)


def _status(job: JobState) -> int:
    """Return the exit status of a job all of whose ranks have ended, and keep its fault if there is one."""
    ends = job.attempt.ends.values() if job.attempt is not None else ()
    if job.fault is None and ends:
        job.fault = _fault_of_stop(job, math.inf)
    if job.fault is not None:
        return job.fault.status
    if any(end.in_order for end in ends):
        return max(end.status for end in ends if end.status is not None)
    return Exit.STOPPED if job.stop_requests > 1 else job.stop_status
