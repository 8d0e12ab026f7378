"""The ranks of one attempt on a node: started, watched without their help, and ended in bounded time by their agent."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megascale.core.errors import MegascaleError
from megascale.core.wait_notice import WaitNotice
from megascale.operate.channel.messages import RankEnd, Start
from megascale.operate.health.observations import OomKills
from megascale.operate.node.rank_ends import (
    STORAGE_ERROR,
    describe_end,
    error_file,
    failed_start,
    prepare_logs,
    unread_end,
    unusable_logs,
)
from megascale.operate.node.ranks import NodePlace, Ranks, WatchedRank, read_log
from megascale.operate.node.threads import call_at_end, call_in_thread
from megascale.operate.node.workers import Launch, Worker, ending
from megascale.record.log_files import FLIGHT_RECORD_VARIABLE, log_path, remove_left_logs, remove_log
from megascale.record.rank_state import UNORDERED_SIGNAL, RankState

if TYPE_CHECKING:
    from megascale.operate.node.standby_process import StandbyProcess

LOG_NAME = "rank-{}.log"  # name of the file of a rank's output, in the attempt's folder of logs

FILES_S = 5.0
"""Seconds that the file system of the run's folder has to answer: when ranks start, and for the files of one that has
ended. Heartbeats go on meanwhile.
"""

AGAIN_S = 0.5  # seconds between two looks for the run's folder
RESTORE_S = 5.0  # seconds more that a node waits for the run's folder, which another node may make anew


@dataclass
class _LocalRank(WatchedRank):
    """A rank that was started."""

    worker: Worker
    oom_kills: OomKills


class NodeRanks(Ranks):
    """The ranks of `order` on the node at `place`. `secret`: descriptor of the job's secret. `on_end` is called in the
    event loop with each end, as soon as the process has ended.
    """

    def __init__(self, order: Start, place: NodePlace, secret: int, on_end: Callable[[RankEnd], None]) -> None:
        super().__init__(order.attempt, order.world, on_end)
        self.order = order
        self._node = place.node
        self._alone = place.alone
        self._logs = Path(order.logs)
        self._secret = secret
        self._ranks: dict[int, _LocalRank] = {}
        self._describing: dict[int, asyncio.Task[None]] = {}
        self._stopped = False

    async def start(self, listener: socket.socket | None, standby: list[StandbyProcess]) -> None:
        """Start the ranks. `listener`: the socket of the job's store, for rank 0. `standby`: processes that wait for
        ranks; those that get one are taken out. A rank that cannot be started has ended, with the error.
        """
        notice, wait_s = WaitNotice(f"node {self._node}"), self.order.folder.wait_s if self.order.folder else 0.0
        while not self._stopped:  # by an order, or a signal
            waited_s = notice.waited_s
            try:
                prepare = functools.partial(prepare_logs, self.order, self._node, restore=waited_s >= wait_s)
                await call_in_thread(prepare, FILES_S)
            except (OSError, RuntimeError, MegascaleError) as found:
                if self._stopped:  # another attempt may have begun
                    return
                why = str(found) or f"no answer within {FILES_S:g} s"
                error = found if isinstance(found, MegascaleError) else unusable_logs(self._logs, found, why)
            else:
                if not self._stopped:
                    self._start_all(listener, standby)
                return
            if waited_s >= wait_s + RESTORE_S * bool(wait_s):
                for rank in self.order.ranks:
                    self._add_end(failed_start(rank, error, STORAGE_ERROR))
                return
            notice.print_if_due(functools.partial(str, error))
            await asyncio.sleep(AGAIN_S)

    def _start_all(self, listener: socket.socket | None, standby: list[StandbyProcess]) -> None:
        order = self.order
        remove_left_logs(records_name(order.run, self._node))
        launch = Launch.of_order(order, "" if self._alone else self._node, self._secret)
        start_ns = time.time_ns()
        for rank in order.ranks:
            path = log_path(records_name(order.run, self._node), start_ns, rank)
            try:
                worker = self._start(launch, rank, path, listener if rank == 0 else None, standby)
            except MegascaleError as error:
                self._add_end(failed_start(rank, error))
                continue
            pid = worker.process.pid
            self._ranks[rank] = _LocalRank(pid, path, time.monotonic(), None, worker, OomKills(pid))
            self.paths[rank] = path
            with contextlib.suppress(OSError):  # `poll` sees the end later
                call_at_end(pid, functools.partial(self._look_for_end, rank))

    def _start(
        self, launch: Launch, rank: int, record: Path, listener: socket.socket | None, standby: list[StandbyProcess]
    ) -> Worker:
        env = {FLIGHT_RECORD_VARIABLE: str(record)}
        log = None if self._alone and rank == 0 else self._logs / LOG_NAME.format(rank)
        while standby and log is not None:
            process = standby.pop()
            try:
                return launch.start_in(process, rank, listener=listener, log=log, env=env)
            except OSError:  # it has ended, or does not read
                process.close()
        return launch.start(rank, listener=listener, log=log, env=env)

    def _look_for_end(self, rank: int) -> None:
        local = self._ranks[rank]
        if rank not in self._describing and (end := local.worker.ended()) is not None:
            oom_killed = local.oom_kills.have_risen()
            describing = self._describe(rank, end, oom_killed=oom_killed, stopped=self._stopped)
            self._describing[rank] = asyncio.ensure_future(describing)

    async def _describe(self, rank: int, end: RankEnd, *, oom_killed: bool, stopped: bool) -> None:
        """Take the end of a rank, once its files are read or do not answer."""
        log = self._ranks[rank].worker.log

        def describe() -> RankEnd:
            file = error_file(self._logs, rank)
            return describe_end(rank, end.status, end.time, file, log, oom_killed=oom_killed, stopped=stopped)

        try:
            found = await call_in_thread(describe, FILES_S)
        except Exception as error:  # whatever its files hold, the rank has ended
            why = str(error) or f"no answer within {FILES_S:g} s"
            found = unread_end(rank, end.status, end.time, why, oom_killed=oom_killed, stopped=stopped)
        local = self._ranks[rank]
        local.record = record = read_log(local.path) or local.record
        if record is not None:
            found = replace(found, step=record.step, unordered=int(record.totals.get(UNORDERED_SIGNAL, 0)))
        self._add_end(found)

    def poll(self) -> None:
        for rank in self.running:
            local = self._ranks[rank]
            self._look_for_end(rank)
            local.oom_kills.follow()
            local.record = read_log(local.path, head_only=True) or local.record

    def records(self, ranks: Sequence[int] | None = None) -> dict[int, RankState]:
        wanted = self._ranks if ranks is None else [rank for rank in ranks if rank in self._ranks]
        found = {rank: read_log(self._ranks[rank].path) for rank in wanted}
        return {rank: record for rank, record in found.items() if record is not None}

    async def stop(self, grace_s: float, *, save: bool = False) -> tuple[int, ...]:
        self._stopped = True
        for pause in ending([local.worker for local in self._ranks.values()], grace_s, save=save):
            await asyncio.sleep(pause)
        for rank in self._ranks:
            self._look_for_end(rank)
        if self._describing:
            await asyncio.wait(self._describing.values())
        return self.running

    def close(self) -> None:
        for path in self.paths.values():
            remove_log(path)


def records_name(run: str, node: str) -> str:
    """Return the name of a run's flight records on a node: several nodes may share a host."""
    return f"{run}@{node}"


def remove_lost_records(run: str) -> None:
    """Remove the flight records of ended ranks of all nodes on this host: a lost node has not removed its own."""
    remove_left_logs(records_name(run, ""), nodes="*")
