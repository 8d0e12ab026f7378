"""The model of a run that every face shares: what its folder says now. `run_reader` reads it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from megascale.config.run import RunConfig
from megascale.core.errors import Exit
from megascale.core.rank import format_ranks
from megascale.layout.topology import Topology, topology_of
from megascale.operate.driver.incidents import Incident, JobHistory
from megascale.operate.show.curves import Curves
from megascale.operate.show.run_config import model_words
from megascale.operate.show.signs import BAD_STATES, IDLE_S, SIGNS, letter_of
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
    def name(self) -> str:
        """The run's name: that of its folder, which a copy of a run does not share."""
        return self.folder.resolve().name

    @cached_property
    def topology(self) -> Topology:
        """The topology; one data-parallel axis before the configuration is known."""
        config = self.config
        return topology_of(config.parallel) if config is not None else Topology(dp=max(1, len(self.states.ranks)))

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.topology.world_size

    @cached_property
    def model(self) -> str:
        """The model in a few words."""
        return model_words(self.config.model, self.config.train.precision) if self.config is not None else ""

    @property
    def layout(self) -> str:
        """The layout in a few words."""
        t, vpp = self.topology, self.config.parallel.vpp if self.config is not None else 1
        cp = f", cp {t.cp}" if t.cp > 1 else ""
        virtual, ep = f" (vpp {vpp})" if vpp > 1 else "", f", ep {t.ep}" if t.ep > 1 else ""
        return f"{self.world} rank{'s' if self.world > 1 else ''}: tp {t.tp}{cp}, pp {t.pp}{virtual}, dp {t.dp}{ep}"

    @property
    def step(self) -> int:
        """The newest known step."""
        return max(self.curves.last_step, self.states.step)

    @property
    def steps(self) -> int:
        """Steps of the whole run, 0 if unknown."""
        return self.config.train.steps if self.config is not None else 0

    @property
    def progress(self) -> str:
        """The newest known step, of how many."""
        return f"{self.step:,}{f' of {self.steps:,}' if self.steps else ''}"

    @property
    def attempt(self) -> int:
        """The newest attempt, from 0."""
        return max(0, self.history.attempt, self.states.attempt)

    @property
    def step_time_s(self) -> float:
        """Seconds of recent steps; NaN before the first record."""
        return self.curves.last.get("step_time_s", float("nan"))

    @property
    def left_s(self) -> float:
        """Seconds to the last step at the recent speed; NaN before the first record."""
        return (self.steps - self.step) * self.step_time_s

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

    def letters(self, slowness: Sequence[float] | np.ndarray) -> list[str]:
        """Return the signs of all ranks. `slowness`: by rank, excess over its peers' compute time, or empty."""
        letters = ["?"] * self.world
        for rank, status in enumerate(() if self.states.stale else self.states.ranks[: self.world]):
            excess = slowness[rank] if rank < len(slowness) else math.nan
            letters[rank] = letter_of(status, excess, self.step_limit_s)
        return letters

    def verdict(self, findings: Sequence[str] | None, letters: Sequence[str] = ()) -> str:
        """Return the verdict about the run in a line: why it stands still, what it recovers from, which ranks are in a
        bad state, what was found, or what is known to be well. `findings`: the gravest first, None without analyses;
        `letters`: of the ranks.
        """
        if self.standstill:
            return self.standstill
        if self.status is None and self.history.open:
            incident = self.history.open[-1]
            return f"recovers from incident {incident.id}: {incident.what}; {incident.action.reason}"
        bad = {letter: [rank for rank, found in enumerate(letters) if found == letter] for letter in BAD_STATES}
        if any(bad.values()):
            texts = (f"{SIGNS[letter].meaning}: {format_ranks(ranks, 8)}" for letter, ranks in bad.items() if ranks)
            return "; ".join(texts)
        if findings:
            more = f" (and {len(findings) - 1} more: megascale diagnose --slow)" if len(findings) > 1 else ""
            return findings[0] + more
        if not self.is_live or self.has_ended:
            return "not analysed" if findings is None else "nothing is known to slow it down"
        silent = [rank for rank, state in enumerate(self.states.ranks) if not state.phase]
        if silent:
            return f"{format_ranks(silent, 8)} of {self.world} not begun"
        return f"all {self.world} ranks make progress" if self.world > 1 else "the rank makes progress"

    def is_ill(self, findings: Sequence[str] | None, letters: Sequence[str] = ()) -> bool:
        """Return True if `verdict` tells of something that is not as it should be."""
        recovers = self.status is None and bool(self.history.open)
        return bool(self.tone == "bad" or recovers or findings or set(BAD_STATES) & set(letters))
