"""The stages of a job that is only observed: torchrun or srun starts its ranks, and starts them again after a fault.

    gather -> run -> (settle | collect) -> stop -> run                   the ranks go on by themselves
                                                -> gather -> ...         their launcher has started them again

- gather: wait until agents watch every rank of the job
- stop: the incident is logged and nothing is done; wait for progress, for new ranks, or for the end of all

Settle and collect are those of a job that the driver starts (`fault.stages`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from megascale.core.errors import Exit
from megascale.fault import decisions, stages
from megascale.fault.attempt import Attempt
from megascale.fault.commands import Say
from megascale.fault.roster import format_nodes
from megascale.fault.stages import Stage
from megascale.fault.watch import ProgressWatch

if TYPE_CHECKING:
    from megascale.fault.job import Job


def gather(job: Job, now: float) -> None:
    """Wait until agents watch every rank, then begin an attempt."""
    members = {name: member for name, member in job.roster.members.items() if member.statuses}
    ranks = {rank for member in members.values() for rank in member.statuses}
    if len(ranks) < job.plan.world:
        if now >= job.deadline:
            job.deadline = math.inf
            hint = "start `megascale agent --observe` on every host"
            job.do(Say(f"{len(ranks)} of {job.plan.world} ranks are watched: no verdict before all are  -> {hint}"))
        return
    placement = {name: tuple(sorted(members[name].statuses)) for name in job.roster.order if name in members}
    number = job.history.attempt + 1
    job.log({"event": "attempt", "time": now, "attempt": number, "nodes": list(placement), **job.plan.layout})
    numbers = {name: member.attempt for name, member in members.items() if member.attempt is not None}
    job.attempt = Attempt(number, placement, ProgressWatch(job.settings, now), numbers=numbers)
    job.do(Say(f"attempt {number}: {job.plan.world} ranks on {format_nodes([*placement])} are watched"))
    job.enter(Stage.RUN, math.inf)


def run(job: Job, now: float) -> None:
    """Watch the ranks, also of a launcher that has started them again without a fault in sight."""
    if _has_new_ranks(job):
        _gather_again(job, now)
    else:
        stages.run(job, now)


def stop(job: Job, now: float) -> None:
    """Wait for what becomes of the job after an incident."""
    attempt, members = job.attempt, job.roster.members
    assert attempt is not None
    if _has_new_ranks(job):
        _gather_again(job, now)
    elif attempt.lost and all(name in members and members[name].statuses for name in attempt.placement):
        _gather_again(job, now)  # the agent is back
    elif attempt.failed:
        if any(member.statuses for member in members.values()):
            job.deadline = now + stages.RANKS_S
        elif now >= job.deadline:
            stages.finish(job, Exit.UNCLASSIFIED, now)
    elif attempt.watch.idle_s(now) < job.settings.hang_s:
        _note_end_of_hang(job, now)
        job.enter(Stage.RUN, math.inf)


def _has_new_ranks(job: Job) -> bool:
    """Return True if a node runs ranks of another start than those of the attempt."""
    attempt, members = job.attempt, job.roster.members
    assert attempt is not None
    return any(
        member.statuses and member.attempt != attempt.number_on(name)
        for name, member in members.items()
        if name in attempt.placement
    )


def _gather_again(job: Job, now: float) -> None:
    job.attempt = None
    job.enter(Stage.GATHER, now + stages.JOIN_S)


def _note_end_of_hang(job: Job, now: float) -> None:
    waiting = [incident.id for incident in job.history.open if incident.attempt == job.history.attempt]
    step = decisions.completed_step(job)
    job.log({"event": "recovered", "time": now, "incidents": waiting, "resumed_step": step, "steps_lost": 0})
    job.do(Say("training continues: the ranks went on by themselves"))


ACT: Mapping[Stage, Callable[[Job, float], None]] = {
    **stages.ACT,
    Stage.GATHER: gather,
    Stage.RUN: run,
    Stage.STOP: stop,
}
