"""The model of a run that every face shares: what its folder says now. `RunReader` reads it again and again."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from megascale.config.fault import FaultConfig
from megascale.config.run import RunConfig
from megascale.config.section import ELSEWHERE
from megascale.core.errors import Exit, MegascaleError
from megascale.core.files import exists
from megascale.core.registry import MissingCardError
from megascale.core.units import format_count
from megascale.layout.topology import Topology, topology_of
from megascale.operate.diagnose.hang.hang import hang_verdict
from megascale.operate.driver.alerts import METRICS_FILE
from megascale.operate.driver.classify import classify_hang
from megascale.operate.driver.incidents import LOG_FILE, Incident, JobHistory, read_history, with_evidence
from megascale.operate.show.curves import Curves, MetricsFile
from megascale.operate.show.rank_states import RankStates, RankStatesReader
from megascale.operate.show.signs import IDLE_S, STARTING, idle_limit_s
from megascale.plan.account.parameters import parameter_count
from megascale.record.layout import Phase
from megascale.record.live_file import LIVE_FILE
from megascale.record.log_files import local_states, process_states
from megascale.record.rank_state import RankState

CONFIG_FILE = "config.toml"

RUN_FILES = (CONFIG_FILE, METRICS_FILE, LOG_FILE, LIVE_FILE)
"""Files any of which makes a folder a run's."""

_STAGES = {
    "takeover": "a new driver takes over", "gather": "waits for nodes", "open": "starts", "run": "runs",
    "settle": "a rank has ended", "collect": "stands still", "stop": "ends an attempt", "done": "ends",
}  # fmt: skip

Tone = Literal["good", "quiet", "warning", "bad"]
"""How good a state is: as it should be; nothing trains, as was asked or as far as is known; between; a failure."""

_ENDS = {int(Exit.OK): "done", int(Exit.STOPPED): "stopped", int(Exit.INTERRUPTED): "stopped"}


class RunFolderError(MegascaleError):
    """A folder that is not a run's, or a file in it that cannot be read."""

    exit_status = Exit.CONFIG


@dataclass(frozen=True)
class RunView:
    """A run at a moment. `config`: None before the run's first step. `history`: of incidents; empty without a driver.
    `standstill`: why no rank makes progress, "" while one does. `step_limit_s`: see there.
    """

    folder: Path
    config: RunConfig | None
    curves: Curves
    history: JobHistory
    states: RankStates
    standstill: str = ""
    step_limit_s: float = IDLE_S

    @property
    def name(self) -> str:
        """The run's name: that of its folder, which a copy of a run does not share."""
        return self.folder.resolve().name

    @cached_property
    def topology(self) -> Topology:
        """The topology; one data-parallel axis before the configuration is known."""
        return topology_of(self.config) if self.config is not None else Topology(dp=max(1, len(self.states.ranks)))

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.topology.world_size

    @cached_property
    def model(self) -> str:
        """The model in a few words."""
        if self.config is None:
            return ""
        m = self.config.model
        shape = f"{m.num_layers} layers of {m.hidden_size}, sequences of {m.seq_length}"
        try:
            size = f"{format_count(parameter_count(m))} parameters"
        except MissingCardError as error:
            size = f"an unknown number of parameters ({error.message})"
        return f"{size} in {self.config.train.precision}, {shape}"

    @property
    def layout(self) -> str:
        """The layout in a few words."""
        t, vpp = self.topology, self.config.parallel.vpp if self.config is not None else 1
        cp = f", cp {t.cp}" if t.cp > 1 else ""
        virtual = f" (vpp {vpp})" if vpp > 1 else ""
        return f"{self.world} rank{'s' if self.world > 1 else ''}: tp {t.tp}{cp}, pp {t.pp}{virtual}, dp {t.dp}"

    @property
    def step(self) -> int:
        """The newest known step."""
        return max(self.curves.last_step, self.states.step)

    @property
    def steps(self) -> int:
        """Steps of the whole run, 0 if unknown."""
        return self.config.train.steps if self.config is not None else 0

    @property
    def attempt(self) -> int:
        """The newest attempt, from 0."""
        return max(0, self.history.attempt, self.states.attempt)

    @property
    def step_time_s(self) -> float:
        """Seconds of recent steps; NaN before the first record."""
        return self.curves.last.get("step_time_s", float("nan"))

    @property
    def incidents(self) -> list[Incident]:
        """All incidents, the oldest first."""
        return sorted(self.history.incidents.values(), key=lambda incident: incident.id)

    @property
    def status(self) -> int | None:
        """The exit status of a job that has ended; None while it runs, and if nobody has said."""
        if self.states.status is not None or self.states.source:
            return self.states.status
        return self.history.ended

    @property
    def is_live(self) -> bool:
        """True if somebody says what the ranks do now."""
        return bool(self.states.source) and self.states.status is None and not self.states.stale

    @property
    def has_ended(self) -> bool:
        """True if the job is known to have ended."""
        return self.status is not None or self.state == "done"

    @property
    def state(self) -> str:
        """The state of the job in words."""
        if self.status is not None:
            return _ENDS.get(self.status, f"failed with status {self.status}")
        if self.states.stale:
            return f"no sign of life for {self.states.age_s:.0f} s"
        if not self.states.source:
            return "done" if 0 < self.steps <= self.curves.last_step else "not running, or on other hosts"
        if self.standstill:
            return "stands still"
        return _STAGES.get(self.states.stage, "runs")

    @property
    def tone(self) -> Tone:
        """The tone of the state."""
        if self.standstill or self.state.startswith("failed"):
            return "bad"
        if self.state in ("runs", "done"):
            return "good"
        return "warning" if self.status is None and self.states.source else "quiet"


class RunReader:
    """Reads the folder of a run; `read` costs little if little has changed. Raises: RunFolderError"""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        try:
            known, there = any(exists(folder / name) for name in RUN_FILES), exists(folder)
        except OSError as error:
            raise _unreadable(error, folder) from None
        if not known:
            problem = f"not a run's folder: it has no {CONFIG_FILE}" if there else "no such folder"
            raise RunFolderError(
                f"{folder}: {problem}", hint="give a run's folder: observe.dir/name of its configuration"
            )
        self.folder = folder
        self._metrics = MetricsFile(folder / METRICS_FILE)
        self._states = RankStatesReader(folder, clock)
        self._config: RunConfig | None = None
        self._config_version: tuple[int, int] | None = None
        self._history = JobHistory()
        self._history_version: tuple[int, int] | None = None

    def read(self) -> RunView:
        """Return what the folder says now. Raises: RunFolderError, MegascaleError for an unreadable log"""
        try:
            if (version := _version(self.folder / CONFIG_FILE)) != self._config_version:
                self._config, self._config_version = read_run_config(self.folder), version
            if (version := _version(self.folder / LOG_FILE)) != self._history_version:
                self._history, self._history_version = read_history(self.folder / LOG_FILE), version
            curves = self._metrics.read()
            states = self._states.read()
        except OSError as error:
            raise _unreadable(error, self.folder) from None
        except ValueError as error:
            raise RunFolderError(str(error), hint="remove the file, or give another folder") from None
        idle = any(rank.idle_s >= IDLE_S for rank in states.ranks)  # else no limit is reached
        records = local_states(self.folder) if idle and states.source else {}
        limit_s = step_limit_s(records.values(), self._config, curves, restarted=bool(self._history.open))
        standstill = self._standstill(states, records, limit_s)
        return RunView(self.folder, self._config, curves, self._history, states, standstill, limit_s)

    def _standstill(self, states: RankStates, records: Mapping[int, RankState], step_s: float) -> str:
        """Return why no rank makes progress, "" if one does; with the culprit if all ranks are on this host."""
        limit_s = standstill_limit_s({rank.phase for rank in states.ranks}, self._config, step_s)
        if not states.source or states.status is not None or states.stale or states.idle_s < limit_s:
            return ""
        text = f"no rank has made progress for {states.idle_s} s"
        if len(records) < len(states.ranks):
            return text
        finding = classify_hang(hang_verdict(records, process_states(records)), 0.0, {}, tuple(records), {})
        return with_evidence(f"{text}: {finding.what}", finding.evidence)


def _unreadable(error: OSError, folder: Path) -> RunFolderError:
    message = f"{error.filename or folder}: cannot be read: {error.strerror}"
    return RunFolderError(message, hint="check its permissions")


def read_run_config(folder: Path) -> RunConfig | None:
    """Return the resolved configuration in a run's folder; None before its first step. The files that it names need not
    be there, nor the plug-ins be installed. Raises: OSError; RunFolderError naming the file and the key
    """
    path = folder / CONFIG_FILE
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
        return RunConfig.model_validate(tree, context=ELSEWHERE).resolve(None)
    except FileNotFoundError:
        return None
    except ValidationError as error:
        detail = error.errors()[0]
        reason = f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}"
    except ValueError as error:
        reason = str(error).splitlines()[0]
    hint = "look at the run with the version of megascale that wrote it, or give another folder"
    raise RunFolderError(f"{path}: not a run's configuration: {reason}", hint=hint)


def _version(path: Path) -> tuple[int, int] | None:
    try:
        facts = path.stat()
    except FileNotFoundError:
        return None
    return facts.st_mtime_ns, facts.st_size


def step_limit_s(
    records: Collection[RankState], config: RunConfig | None, curves: Curves, *, restarted: bool = False
) -> float:
    """Return the seconds without progress from which a rank in a step makes none. `records`: of ranks, as far as known.
    `restarted`: no step is known since a restart.

    The first step of a process, which compiles, connects and allocates, may take as long as a start: until a record or
    a logged step tells that one has ended.
    """
    step_s = max((record.step_time_s for record in records), default=0.0) or curves.last.get("step_time_s", 0.0)
    if records:
        has_stepped = any(record.step_time_s > 0 or 0 < record.first_step < record.step for record in records)
    else:
        has_stepped = bool(curves.last) and not restarted
    start_s = (config.fault if config is not None else FaultConfig()).start_hang_s
    return max(idle_limit_s(step_s), 0.0 if has_stepped else start_s)


def standstill_limit_s(phases: Iterable[str], config: RunConfig | None, step_s: float) -> float:
    """Return the seconds without progress on any rank, with ranks in these phases, from which a job stands still.
    `step_s`: `step_limit_s`.
    """
    settings = config.fault if config is not None else FaultConfig()
    return max([step_s, *(_slow_phase_s(phase, settings) for phase in phases)])


def _slow_phase_s(phase: str, settings: FaultConfig) -> float:
    """Return the seconds that a phase other than a step may take without progress."""
    if phase == Phase.EVALUATION:
        return settings.evaluation_hang_s
    if phase == Phase.CHECKPOINT:
        return settings.checkpoint_hang_s
    return settings.start_hang_s if phase in (*STARTING, Phase.PROFILE) else 0.0
