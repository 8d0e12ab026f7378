"""A plan: what a configuration takes on some hardware with some stack, its step's time and its ranks' memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megascale.account import memory
from megascale.account.memory import RankMemory
from megascale.config.run import RunConfig
from megascale.search.space import Layout, layout_of
from megascale.simulate import step_time
from megascale.simulate.profiles import Hardware, Stack, expected_error, measured
from megascale.simulate.step_time import Estimate


@dataclass(frozen=True)
class Plan:
    """A resolved configuration on some hardware with some stack. Time and memory are computed when first asked for.
    `exact`: results of dry runs, as from `dryrun.exact`, which replace the formulas of memory.
    """

    config: RunConfig
    hardware: Hardware
    stack: Stack
    exact: Mapping[str, Any] | None = None

    @property
    def layout(self) -> Layout:
        """The layout of the configuration; zero is 3 with a stack that shards weights."""
        layout = layout_of(self.config)
        return layout._replace(zero=3) if self.stack.shards_weights else layout

    @cached_property
    def estimate(self) -> Estimate:
        """The step's time and its causes."""
        return step_time.estimate(self.config, self.hardware, self.stack)

    @cached_property
    def ranks(self) -> list[RankMemory]:
        """Memory of a rank of each pipeline stage, by formulas."""
        return memory.memory_by_stage(self.config, self.stack.holding)

    @property
    def memory_by_stage(self) -> list[int]:
        """Bytes of a rank of each stage."""
        return self.exact["memory_bytes_by_stage"] if self.exact else [rank.total for rank in self.ranks]

    @property
    def fullest(self) -> int:
        """The pipeline stage whose ranks need most memory."""
        return self.memory_by_stage.index(max(self.memory_by_stage))

    @cached_property
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
        """The mean relative error of step times of sources left out of the fit; None if unknown."""
        return expected_error(self.hardware, self.stack)

    @property
    def notes(self) -> list[str]:
        """Warnings to read before the plan is believed, a line each."""
        config, hardware, stack = self.config, self.hardware, self.stack
        lines = []
        if self.expected_error is None:
            lines.append(f"no published step tells the error of plans for {hardware.name}")
        elif not measured(hardware, stack):
            lines.append(f"{stack.name} was never measured on {hardware.name}: the error may be larger than expected")
        if config.train.precision == "bf16" and not hardware.device.multiplies("bf16"):
            lines.append(f"{hardware.name} multiplies no bf16: planned as fp16")
        if config.model.dropout:
            lines.append("attention with dropout forms all scores, as this trainer does: planned so in time and memory")
        elif stack.attention == "unfused":
            lines.append(f"memory is this trainer's: the scores that {stack.name} saves for backward come on top")
        return lines
