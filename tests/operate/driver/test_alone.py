"""A job on one host that its first fault ends: the first cause, its exit status, and what a stop explains."""

from __future__ import annotations

import math
import signal
from typing import Any

import pytest

from megascale.config.fault import FaultConfig
from megascale.core.errors import Exit
from megascale.core.process import STOP_ORDER
from megascale.operate.channel.messages import Collect, Hello, RankEnd, RanksEnded, Records, Start, Stop, StoreOpened
from megascale.operate.diagnose.hang.flight import Suspect
from megascale.operate.diagnose.hang.hang import Verdict
from megascale.operate.driver.alone import CAUSE_S, END_S
from megascale.operate.driver.commands import Command, Finish, Send
from megascale.operate.driver.incidents import JobHistory
from megascale.operate.driver.job import Job
from megascale.operate.driver.job_state import JobPlan, Stage

NOTHING_KNOWN = Verdict("unknown", confident=False)
WORLD = 5


class OneHost:
    """A job of five ranks that train on a node whose agent answers at once. `time`: 0 as they start."""

    def __init__(self, verdict: Verdict = NOTHING_KNOWN, suspect: Suspect | None = None) -> None:
        plan = JobPlan(
            "run", 1, WORLD, ("train",), "/logs", revivable=False, alone=True, find_suspect=lambda: suspect
        )  # fmt: skip
        self.time = 0.0
        self.job = Job(plan, FaultConfig(), JobHistory(), self.time)
        self.job.hang_verdict = lambda records, states: verdict
        self.commands: list[Command] = []
        self.hear(Hello("n", "n", "127.0.0.1", WORLD))
        self.hear(StoreOpened(0, "127.0.0.1:1"))

    def hear(self, message: Any) -> None:
        self._answer(self.job.receive("n", message, self.time))

    def stop(self, status: int = Exit.STOPPED) -> None:
        self._answer(self.job.request_stop(self.time, status))

    def tick(self, seconds: float) -> None:
        self.time += seconds
        self.job.roster.members["n"].heard = self.time
        self._answer(self.job.tick(self.time))

    def end(self, *ends: RankEnd) -> None:
        """Ranks end."""
        self.hear(RanksEnded(0, ends))

    def _answer(self, commands: list[Command]) -> None:
        self.commands += commands
        if any(isinstance(command, Send) and isinstance(command.message, Collect) for command in commands):
            self.hear(Records(0, {}, {}))

    def orders(self, kind: type) -> list[Any]:
        return [c.message for c in self.commands if isinstance(c, Send) and isinstance(c.message, kind)]

    @property
    def status(self) -> int | None:
        return next((command.status for command in self.commands if isinstance(command, Finish)), None)

    def culprit(self, *ends: RankEnd) -> tuple[int, int, str]:
        """Let ranks end; return the culprit's rank, the job's status and what the report says of it."""
        self.end(*ends)
        self.tick(CAUSE_S + 1.0)
        fault = self.job.fault
        assert fault is not None
        assert self.job.stage == Stage.STOP or len(ends) == WORLD
        stopped = (RankEnd(rank, -signal.SIGKILL, 9.0, stopped=True) for rank in range(WORLD))
        self.end(*(end for end in stopped if end.rank not in {end.rank for end in ends}))
        assert self.status == fault.status
        if fault.end is None:
            return fault.culprit.ranks[0], fault.status, fault.evidence[0]
        return fault.end.rank, fault.status, fault.end.error or str(fault.end.status)


def failed(rank: int, time: float = 1.0, status: int = 1, **more: Any) -> RankEnd:
    return RankEnd(rank, status, time, f"error of {rank}", "ValueError", exit_status=status, **more)


def lost(rank: int, time: float = 1.0, *peers: int) -> RankEnd:
    return failed(rank, time, peer_lost=True, peers=peers)


def aborted(*ranks: int) -> list[RankEnd]:
    return [RankEnd(rank, -signal.SIGABRT, 2.0) for rank in ranks]


def in_order(rank: int, status: int) -> RankEnd:
    return RankEnd(rank, status, 1.0, exit_status=status, in_order=True)


def test_ranks_start_once_with_their_logs_in_the_runs_folder() -> None:
    one = OneHost()
    (start,) = one.orders(Start)
    assert (start.logs, start.ranks, start.attempt) == ("/logs", tuple(range(WORLD)), 0)


def test_the_first_own_error_wins() -> None:
    assert OneHost().culprit(lost(0), failed(1, 3.0), failed(2, 2.0, status=3)) == (2, 3, "error of 2")


def test_of_equal_errors_the_lowest_rank_s_is_told() -> None:
    same = [RankEnd(rank, 93, 9.0 - rank, "nan", "DivergenceError", exit_status=93) for rank in (1, 2, 3)]
    assert OneHost().culprit(*same) == (1, 93, "nan")


@pytest.mark.parametrize(("status", "of_job"), [(7, 7), (0, 1), (143, 143), (-9, 1), (-11, 1)])
def test_the_first_to_leave_in_silence_is_the_cause_whatever_its_status(status: int, of_job: int) -> None:
    ends = lost(0), failed(2, 3.0), in_order(3, 0), RankEnd(4, 9, 2.5), RankEnd(1, status, 2.0)
    assert OneHost().culprit(*ends) == (1, of_job, str(status))


def test_an_error_before_a_silent_end() -> None:
    assert OneHost().culprit(RankEnd(1, 0, 2.0), failed(2)) == (2, 1, "error of 2")


def test_a_rank_that_follows_the_others_may_be_the_cause() -> None:
    one = OneHost()
    one.end(lost(0))
    one.tick(CAUSE_S / 2)
    assert one.job.fault is None
    assert one.culprit(failed(3, 0.5)) == (3, 1, "error of 3")


def test_without_a_cause_the_first_that_lost_a_peer() -> None:
    assert OneHost().culprit(lost(1, 2.0), lost(0)) == (0, 1, "error of 0")


def test_a_rank_that_does_not_answer_is_the_one_that_the_others_name() -> None:
    ends = lost(0, 1.0, 1, 2), lost(1, 2.0, 3), lost(2, 3.0, 0)
    assert OneHost().culprit(*ends) == (3, 1, "does not answer: error of 0")
    verdict = Verdict("stopped", (4,), "dp", ("rank 4 is in state T", "ranks 0, 1 wait"))
    assert OneHost(verdict).culprit(*ends) == (4, 1, "stopped: rank 4 is in state T; ranks 0, 1 wait")


def test_a_stuck_rank_before_those_whose_watchdogs_ended_them() -> None:
    one = OneHost(suspect=Suspect(3, None, "never joined"))
    assert one.culprit(*aborted(0, 1, 2)) == (3, 1, "never joined")
    one = OneHost(suspect=Suspect(3, None, "never joined"))
    assert one.culprit(*aborted(1, 3)) == (3, 1, "killed by SIGABRT; never joined"), "an abort of its own"


def test_without_dumps_the_first_that_aborted() -> None:
    waits = Verdict("collective", (3,), "dp", ("rank 3 is in no collective",))
    assert OneHost(waits).culprit(*aborted(0, 1, 2), lost(3)) == (0, 1, "-6")


@pytest.mark.parametrize("end", [RankEnd(2, -signal.SIGKILL, 2.0), RankEnd(2, -signal.SIGSEGV, 3.0), failed(2, 3.0)])
def test_an_own_end_before_what_the_watchdogs_say(end: RankEnd) -> None:
    one = OneHost(suspect=Suspect(3, None, "never joined"))
    assert one.culprit(*aborted(0, 1), end) == (2, 1, end.error or str(end.status))


def test_a_job_that_stands_still_is_left_alone() -> None:
    one = OneHost()
    one.tick(10**6)
    assert (one.job.stage, one.job.fault) == (Stage.RUN, None)


def test_a_job_ends_with_its_ranks() -> None:
    one = OneHost()
    one.end(*(in_order(rank, 0) for rank in range(WORLD)))
    assert (one.status, one.job.fault) == (0, None)


def test_a_stop_waits_for_ranks_that_save() -> None:
    one = OneHost()
    one.stop()
    one.tick(10**6)
    assert one.orders(Stop) == [Stop(0, math.inf, save=True)]
    one.end(*(in_order(rank, 143) for rank in range(WORLD)))
    assert (one.status, one.job.fault) == (Exit.STOPPED, None)


@pytest.mark.parametrize("status", [Exit.STOPPED, Exit.INTERRUPTED])
def test_a_stop_before_the_first_step(status: int) -> None:
    """Ranks that were stopped already are lost by others; some got the signal before they could hear the order."""
    one = OneHost()
    one.stop(status)
    one.end(RankEnd(0, 143, 1.0, "stopped before", exit_status=143), RankEnd(1, -STOP_ORDER, 1.0), lost(2))
    one.tick(10 * CAUSE_S)
    assert one.status is None
    one.end(RankEnd(3, -signal.SIGTERM, 1.0), RankEnd(4, 130, 1.0))
    assert (one.status, one.job.fault) == (status, None)


def test_a_stop_before_any_rank_runs() -> None:
    one = OneHost()
    one.stop(Exit.INTERRUPTED)
    one.end()
    assert one.status == Exit.INTERRUPTED


def test_a_second_request_kills() -> None:
    one = OneHost()
    one.stop(Exit.INTERRUPTED)
    one.stop(Exit.INTERRUPTED)
    assert one.orders(Stop)[-1] == Stop(0, 0.0)
    one.end(*(RankEnd(rank, -signal.SIGKILL, 1.0, stopped=True) for rank in range(WORLD)))
    assert (one.status, one.job.fault) == (Exit.STOPPED, None)


def test_a_rank_that_fails_to_save_ends_the_others() -> None:
    one = OneHost()
    one.stop()
    one.end(failed(3, status=4, stopped=True))
    assert one.orders(Stop)[-1] == Stop(0, END_S)
    one.end(*(RankEnd(rank, -signal.SIGKILL, 2.0, stopped=True) for rank in (0, 1, 2, 4)))
    assert one.status == 4
    assert one.job.fault is not None and one.job.fault.end is not None and one.job.fault.end.rank == 3


def test_a_request_to_stop_does_not_hide_a_failure_before() -> None:
    one = OneHost()
    one.end(failed(2, status=3))
    one.tick(1.0)
    one.stop()
    one.end(*(RankEnd(rank, -STOP_ORDER, 2.0, stopped=True) for rank in (0, 1, 3, 4)))
    assert one.status == 3
