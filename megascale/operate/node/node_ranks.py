"""The ranks of one attempt on a node: started, watched without their help, and ended in bounded time by their agent."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megascale.core.errors import MegascaleError
from megascale.core.limits import os_error_hint
from megascale.core.network import is_loopback
from megascale.core.rank import NODE_VARIABLE
from megascale.core.run_folder import TOKEN_VARIABLE, LostFolderError
from megascale.core.wait_notice import WaitNotice
from megascale.operate.channel.messages import RankEnd, Start
from megascale.operate.health.observations import OomKills
from megascale.operate.node.failure import ERROR_FILE_NAME
from megascale.operate.node.node_place import NodePlace
from megascale.operate.node.rank_ends import STORAGE_ERROR, check_space, describe_end, failed_start, unread_end
from megascale.operate.node.ranks import call_at_end, rank_status
from megascale.operate.node.threads import call_in_thread
from megascale.operate.node.workers import Launch, Worker, ending
from megascale.record.log_files import ATTEMPT_VARIABLE, FLIGHT_RECORD_VARIABLE, log_path, remove_left_logs, remove_log
from megascale.record.log_reader import read_state
from megascale.record.rank_state import UNORDERED_SIGNAL, LogError, RankState, RankStatus

if TYPE_CHECKING:
    from megascale.operate.node.standby_process import StandbyProcess

LOG_NAME = "rank-{}.log"
"""Name of the file of a rank's output, in the attempt's folder of logs."""

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"

FILES_S = 5.0
"""Seconds that the file system of the run's folder has to answer: when ranks start, and for the files of one that has
ended. Heartbeats go on meanwhile.
"""

AGAIN_S = 0.5
"""Seconds between two looks for the run's folder."""

RESTORE_S = 5.0
"""Seconds more that a node waits for the run's folder, which another node may make anew."""


@dataclass
class _LocalRank:
    """A rank that was started. `record`: the head of its flight record when it was last read."""

    worker: Worker
    record_path: Path
    oom_kills: OomKills
    started: float
    record: RankState | None = None


class NodeRanks:
    """The ranks of `order` on the node at `place`. `secret`: descriptor of the job's secret. `on_end` is called in the
    event loop with each end, as soon as the process has ended.
    """

    def __init__(self, order: Start, place: NodePlace, secret: int, on_end: Callable[[RankEnd], None]) -> None:
        self.attempt, self.world = order.attempt, order.world
        self.ends: dict[int, RankEnd] = {}
        self.order = order
        self._node = place.node
        self._alone = place.alone
        self._logs = Path(order.logs)
        self._secret = secret
        self._on_end = on_end
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
                await call_in_thread(functools.partial(self._prepare_logs, restore=waited_s >= wait_s), FILES_S)
            except (OSError, RuntimeError, MegascaleError) as found:
                if self._stopped:  # another attempt may have begun
                    return
                error = found if isinstance(found, MegascaleError) else _unusable(self._logs, found)
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

    def _prepare_logs(self, *, restore: bool) -> None:
        """Find the run's folder, with space for the files of ranks; make the folder of logs, and remove what ranks of
        these numbers wrote of their ends. `restore`: a folder that is lost is made anew, if copies in memory are here.

        Raises: OSError, CheckpointError
        """
        if (folder := self.order.folder) is not None:
            try:
                folder.read_again()
            except LostFolderError:
                if not (restore and folder.restore(self._node)):
                    raise
        self._logs.mkdir(parents=True, exist_ok=True)
        check_space(self._logs)
        for rank in self.order.ranks:
            (self._logs / ERROR_FILE_NAME.format(rank)).unlink(missing_ok=True)

    def _start_all(self, listener: socket.socket | None, standby: list[StandbyProcess]) -> None:
        order = self.order
        remove_left_logs(records_name(order.run, self._node))
        token = {TOKEN_VARIABLE: order.folder.token} if order.folder else {}
        restarts = {} if self._alone else {NODE_VARIABLE: self._node, ATTEMPT_VARIABLE: str(order.attempt)}
        env = {**restarts, **token, **order.env}
        if is_loopback(order.store.rpartition(":")[0]):
            env.setdefault(GLOO_INTERFACE, os.environ.get(GLOO_INTERFACE, "lo"))
        launch = Launch(order.arguments, order.world, order.ranks, order.store, self._secret, self._logs, env)
        start_ns = time.time_ns()
        for rank in order.ranks:
            path = log_path(records_name(order.run, self._node), start_ns, rank)
            try:
                worker = self._start(launch, rank, path, listener if rank == 0 else None, standby)
            except MegascaleError as error:
                self._add_end(failed_start(rank, error))
                continue
            self._ranks[rank] = _LocalRank(worker, path, OomKills(worker.process.pid), time.monotonic())
            call_at_end(worker.process.pid, functools.partial(self._look_for_end, rank))

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
            error_file = self._logs / ERROR_FILE_NAME.format(rank)
            return describe_end(rank, end.status, end.time, error_file, log, oom_killed=oom_killed, stopped=stopped)

        try:
            found = await call_in_thread(describe, FILES_S)
        except Exception as error:  # whatever its files hold, the rank has ended
            why = str(error) or f"no answer within {FILES_S:g} s"
            found = unread_end(rank, end.status, end.time, why, oom_killed=oom_killed, stopped=stopped)
        local = self._ranks[rank]
        with contextlib.suppress(LogError, OSError):
            local.record = read_state(local.record_path)
        if (record := local.record) is not None:
            found = replace(found, step=record.step, unordered=int(record.totals.get(UNORDERED_SIGNAL, 0)))
        self._add_end(found)

    def _add_end(self, end: RankEnd) -> None:
        self.ends[end.rank] = end
        self._on_end(end)

    @property
    def record_paths(self) -> dict[int, Path]:
        """The paths of the flight records by rank."""
        return {rank: local.record_path for rank, local in self._ranks.items()}

    @property
    def running(self) -> tuple[int, ...]:
        """The ranks of whose ends nothing is known."""
        return tuple(rank for rank in self._ranks if rank not in self.ends)

    def poll(self) -> None:
        """Read the heads of the flight records of the running ranks."""
        for rank in self.running:
            local = self._ranks[rank]
            self._look_for_end(rank)
            local.oom_kills.follow()
            with contextlib.suppress(LogError, OSError):
                local.record = read_state(local.record_path, head_only=True)

    def statuses(self) -> tuple[RankStatus, ...]:
        """Return the states of the running ranks, as of the last `poll`."""
        found = ((rank, self._ranks[rank]) for rank in self.running)
        return tuple(rank_status(rank, one.worker.process.pid, one.record, one.started) for rank, one in found)

    def records(self, ranks: Sequence[int] | None = None) -> dict[int, RankState]:
        """Read the flight records of ranks, by default of all, also of those that have ended."""
        found = {}
        for rank in self._ranks if ranks is None else ranks:
            with contextlib.suppress(LogError, OSError, KeyError):
                found[rank] = read_state(self._ranks[rank].record_path)
        return found

    def processes(self, ranks: Sequence[int] | None = None) -> dict[int, int]:
        """Return the process ids of running ranks, by default of all."""
        wanted = self.running if ranks is None else [rank for rank in ranks if rank in self.running]
        return {rank: self._ranks[rank].worker.process.pid for rank in wanted}

    async def stop(self, grace_s: float, *, save: bool = False) -> tuple[int, ...]:
        """End the ranks within `grace_s` seconds, and return those that do not end even when killed."""
        self._stopped = True
        for pause in ending([local.worker for local in self._ranks.values()], grace_s, save=save):
            await asyncio.sleep(pause)
        for rank in self._ranks:
            self._look_for_end(rank)
        if self._describing:
            await asyncio.wait(self._describing.values())
        return self.running

    def close(self) -> None:
        """Remove the flight records."""
        for local in self._ranks.values():
            remove_log(local.record_path)


def _unusable(logs: Path, error: OSError | RuntimeError) -> MegascaleError:
    why = getattr(error, "strerror", None) or str(error) or f"no answer within {FILES_S:g} s"
    hint = os_error_hint(error, "see the file system") if isinstance(error, OSError) else "see the file system"
    what = f"the folder of logs cannot be used: {why}: {getattr(error, 'filename', None) or logs}"
    return MegascaleError(what, hint=hint)


def records_name(run: str, node: str) -> str:
    """Return the name of a run's flight records on a node: several nodes may share a host."""
    return f"{run}@{node}"


def remove_lost_records(run: str) -> None:
    """Remove the flight records of ended ranks of all nodes on this host: a lost node has not removed its own."""
    remove_left_logs(records_name(run, ""), nodes="*")
