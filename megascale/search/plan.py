"""A plan: what a configuration takes on some hardware with some stack, its step's time and its ranks' memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megascale.account.memory import RankMemory, memory_by_stage
from megascale.config.run import RunConfig
from megascale.simulate.event_simulator import Replay
from megascale.simulate.profiles import Hardware, Stack, expected_error, measured
from megascale.simulate.step_time import Estimate, estimate, with_spans


@dataclass(frozen=True)
class Plan:
    """A resolved configuration on some hardware with some stack. `ranks`: the memory of a rank of each pipeline stage
    by formulas; `replay`: every event of a step; `exact`: what dry runs say of it (`dryrun.exact`).
    """

    config: RunConfig
    hardware: Hardware
    stack: Stack
    estimate: Estimate
    ranks: list[RankMemory]
    replay: Replay | None = None
    exact: Mapping[str, Any] | None = None

    @property
    def memory_by_stage(self) -> list[int]:
        """Bytes of a rank of each stage."""
        return self.exact["memory_bytes_by_stage"] if self.exact else [rank.total for rank in self.ranks]

    @property
    def fullest(self) -> int:
        """The pipeline stage whose ranks need most memory."""
        return max(range(len(self.ranks)), key=self.memory_by_stage.__getitem__)

    @property
    def memory(self) -> RankMemory:
        """Memory of the fullest rank."""
        if not self.exact:
            return self.ranks[self.fullest]
        sizes = dict(self.exact["memory_bytes"])
        transient = sizes.pop("logits") + sizes.pop("buffers")
        sizes.pop("total")
        return RankMemory(**sizes, transient=transient)

    @property
    def room(self) -> int:
        """Bytes that a device has for a rank's tensors."""
        return self.hardware.room(self.config.world)

    @property
    def fits(self) -> bool:
        """True if the fullest rank has room."""
        return self.memory.total <= self.room

    @property
    def expected_error(self) -> float | None:
        """The mean error of the step's time, as a share of it, for sources that no fit has seen; None if unknown."""
        return expected_error(self.hardware, self.stack)


def plan(config: RunConfig, hardware: Hardware, stack: Stack, *, spans: bool = False) -> Plan:
    """Plan a resolved configuration. `spans`: with every event of the step, however many micro-batches it has."""
    ranks, replay = memory_by_stage(config, stack.holding), with_spans(config, hardware, stack) if spans else None
    return Plan(config, hardware, stack, estimate(config, hardware, stack), ranks, replay)


def notes(plan: Plan) -> list[str]:
    """Warnings to read before the plan is believed, a line each."""
    config, hardware, stack = plan.config, plan.hardware, plan.stack
    found = []
    if plan.expected_error is None:
        found.append(f"no published step tells the error of plans for {hardware.name}")
    elif not measured(hardware, stack):
        found.append(f"{stack.name} was never measured on {hardware.name}: the error may be larger than expected")
    if config.train.precision == "bf16" and not hardware.device.multiplies("bf16"):
        found.append(f"{hardware.name} multiplies no bf16: planned as fp16")
    if config.model.dropout:
        found.append("attention with dropout forms all scores, as this trainer does: planned so in time and memory")
    elif stack.attention == "unfused":
        found.append(f"memory is this trainer's: the scores that {stack.name} saves for backward come on top")
    return found
