"""The model of a run that every face shares: what its folder says now. `run_reader` reads it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from megascale.config.fault import FaultConfig
from megascale.config.run import RunConfig
from megascale.core.errors import Exit
from megascale.core.registry import MissingCardError
from megascale.core.units import format_count
from megascale.layout.parameters import parameter_count
from megascale.layout.topology import Topology, topology_of
from megascale.operate.driver.incidents import Incident, JobHistory
from megascale.operate.show.curves import Curves
from megascale.operate.show.signs import IDLE_S
from megascale.record.live_file import LiveState

_STAGES = {
    "takeover": "a new driver takes over", "gather": "waits for nodes", "open": "starts", "run": "runs",
    "settle": "a rank has ended", "collect": "stands still", "stop": "ends an attempt", "done": "ends",
}  # fmt: skip

Tone = Literal["good", "quiet", "warning", "bad"]
"""How good a state is: as it should be; nothing trains, as was asked or as far as is known; between; a failure."""

_ENDS = {int(Exit.OK): "done", int(Exit.STOPPED): "stopped", int(Exit.INTERRUPTED): "stopped"}


@dataclass(frozen=True)
class RunView:
    """A run at a moment. `config`: None before the run's first step. `history`: of incidents; empty without a driver.
    `standstill`: why no rank makes progress, "" while one does. `step_limit_s`: see there.
    """

    folder: Path
    config: RunConfig | None
    curves: Curves
    history: JobHistory
    states: LiveState
    standstill: str = ""
    step_limit_s: float = IDLE_S

    @property
    def fault(self) -> FaultConfig:
        """The settings of the fault policy; the defaults before the configuration is known."""
        return self.config.fault if self.config is not None else FaultConfig()

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
