"""A plan: step time and memory of a configuration on some hardware with some stack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from megascale.config.run import RunConfig
from megascale.config.run_warnings import run_warnings
from megascale.layout.gpu_overlap import exposed_collectives
from megascale.plan.account.memory import JobMemory, RankMemory
from megascale.plan.search.memory_policy import with_policies
from megascale.plan.search.space import Layout, layout_of
from megascale.plan.simulate.host_update import host_update
from megascale.plan.simulate.islands import outer_seconds, stage_islands
from megascale.plan.simulate.profiles import Hardware, Stack, expected_error, measured
from megascale.plan.simulate.step_time import Estimate, StepParts

MIN_EXPOSED = 0.01  # smallest share of a step that tp has exposed, for a note to tell why
MIN_DEVICES = 64  # fewest devices of the publications by which errors are known
DAY_S = 86400


class DriveWear(NamedTuple):
    """Bytes of saved tensors that a rank writes in a `step`, and a node to its NVMe drives in a `day`; `days` until
    they have been written to as often as they are rated for.
    """

    step: int
    day: float
    days: float


@dataclass(frozen=True)
class Plan:
    """A resolved configuration on some hardware with some stack; time and memory are computed on first access.
    `exact`: results of dry runs (`dryrun.exact_costs`), in place of the formulas of memory.
    """

    config: RunConfig
    hardware: Hardware
    stack: Stack
    exact: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, config: RunConfig, hardware: Hardware, stack: Stack) -> Plan:
        """Plan a configuration, with the choice of `train.memory = "auto"`. Raises: ConfigError if nothing fits"""
        return cls(with_policies(config, hardware, stack), hardware, stack)

    @property
    def layout(self) -> Layout:
        return layout_of(self.config)

    @cached_property
    def parts(self) -> StepParts:
        return StepParts(self.config, self.hardware, self.stack)

    @cached_property
    def estimate(self) -> Estimate:
        return self.parts.estimate

    @cached_property
    def job(self) -> JobMemory:
        """Memory of the ranks by formulas."""
        return JobMemory(self.config, self.stack.storage, self.stack.imbalance)

    @cached_property
    def ranks(self) -> list[RankMemory]:
        """Memory of a rank of every pipeline stage, by formulas."""
        return self.job.by_stage()

    def fullest(self, limit: float) -> int:
        """Bytes of the fullest rank by formulas, or of the first over `limit`."""
        return self.job.fullest(limit).total

    @property
    def memory_by_stage(self) -> list[int]:
        """Bytes of a rank of every stage."""
        return self.exact["memory_bytes_by_stage"] if self.exact else [rank.total for rank in self.ranks]

    @property
    def fullest_stage(self) -> int:
        return self.memory_by_stage.index(max(self.memory_by_stage))

    @cached_property
    def memory(self) -> RankMemory:
        if not self.exact:
            return self.ranks[self.fullest_stage]
        sizes = dict(self.exact["memory_bytes"])
        transient = sizes.pop("logits") + sizes.pop("buffers")
        sizes.pop("total")
        return RankMemory(**sizes, transient=transient)

    @cached_property
    def wear(self) -> DriveWear | None:
        """The wear of a node whose ranks are of the stage that writes most; None if no tensors move to drives."""
        node = self.hardware.node
        step = max(self.job.moved_in_step(stage, "nvme") for stage in range(self.config.parallel.pp))
        day = step * min(node.devices, self.config.world_size) * DAY_S / self.estimate.step_s
        return DriveWear(step, day, node.drives.count * node.drives.rated_bytes / day) if step else None

    @property
    def memory_limit(self) -> int:
        """Bytes of a device for a rank's tensors."""
        return self.hardware.memory_limit(self.config.world_size)

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.memory_limit

    @property
    def expected_error(self) -> float | None:
        """Mean relative error of step time for sources left out of the fit; None if unknown."""
        return expected_error(self.hardware) if self.config.world_size >= MIN_DEVICES else None

    @property
    def notes(self) -> list[str]:
        """Warnings about the plan's accuracy and assumptions, in a line per warning."""
        config, hardware, stack = self.config, self.hardware, self.stack
        lines = []
        if self.expected_error is None:
            lines.append(f"no published step tells the error of plans for {config.world_size} x {hardware.name}")
        elif not measured(hardware, stack):
            lines.append(f"{stack.name} was never measured on {hardware.name}: the error may be larger than expected")
        by_stage = stage_islands(hardware, config.parallel, config.world_size)
        if hardware.islands and by_stage[-1].stop > 1:
            p, stage = config.parallel, config.world_size // config.parallel.pp
            inside, axes = stage // max(map(len, by_stage)), (("tp", p.tp), ("cp", p.tp * p.cp), ("dp", stage))
            axis = next((axis for axis, ranks in axes if ranks > inside), "pp")
            names = ", ".join(hardware.islands.hardware) or hardware.name
            lines.append(f"{axis} crosses {by_stage[-1].stop} islands of {hardware.islands.devices} devices: {names}")
        if config.model.experts and self.expected_error is not None:
            lines.append("the expected error is of dense models: docs/results/planner.md has those of experts")
        if config.train.precision == "bf16" and not hardware.device.multiplies("bf16"):
            lines.append(f"{hardware.name} multiplies no bf16: planned as fp16")
        if self.parts.streams:
            least, own = self.parts.hiding_tokens, self.parts.layers.tokens
            lines.append(f"gathers of weights hide from {least:,.0f} tokens a micro-batch on: it has {own:,}")
        if config.model.dropout:
            lines.append("attention with dropout forms all scores, as this trainer does: planned so in time and memory")
        elif stack.attention == "unfused":
            lines.append(f"memory is this trainer's: the scores that {stack.name} saves for backward come on top")
        if stack.overlaps.tp == "large" and self.estimate.causes["tp"] >= MIN_EXPOSED * self.estimate.step_s:
            lines += map(str, exposed_collectives(config, hardware.node.devices))
        return [*lines, *self._host_updates(), *self._recipes(), *self._outer_steps(), *run_warnings(config)]

    def _host_updates(self) -> Iterator[str]:
        """Describe the update of state in host memory."""
        settings, what = self.config.optimizer, "the update of state in host memory"
        if update := host_update(self.config, self.hardware):
            best, given = update.best_stride, settings.offload_stride
            other = "" if given in (None, best) else f"; {update.seconds(given):.3g} s with {given} as given"
            yield f"{what} takes {update.seconds(best):.3g} s with the best offload_stride, {best}{other}"
        elif settings.offload != "none":
            rates = "device.host_bandwidth or node.memory_bandwidth"
            yield f"{what} is planned as on the device: {self.hardware.name} states no {rates}"

    def _recipes(self) -> Iterator[str]:
        """Say where the speed of quantized GEMMs is not that of the run."""
        fp8 = self.config.fp8
        if self.config.train.quantizes and fp8.schedule:
            yield f"the step is of fp8.recipe = {fp8.recipe}, before the changes of fp8.schedule"
        if self.config.train.quantizes and fp8.facts["whole"]:
            yield f"{fp8.recipe} is emulated: its GEMMs are planned as those of other recipes, and run as in bf16"
        if self.config.train.quantizes:
            bf16 = replace(self, config=self.config.changed(train={"precision": "bf16"})).estimate.step_s
            if bf16 <= self.estimate.step_s:
                yield f"bf16 is planned no slower, at {bf16:.3g} s: casts take what small GEMMs save"

    def _outer_steps(self) -> Iterator[str]:
        """Describe the seconds of outer steps, and of them those that steps wait for."""
        sites, sent, step_s = self.config.sites, outer_seconds(self.hardware, self.config), self.estimate.step_s
        if sites.count > 1 and sent is None:
            yield f"the step is without outer steps: no [islands] of {self.hardware.name} as large as a site"
        elif sites.count > 1 and sent is not None:
            waits = max(0.0, sent - sites.fragments * sites.overlap * step_s) / sites.every
            took = f"{sent:.3g} s every {sites.every} steps, of which each waits for {waits:.3g} s"
            yield f"the step is without outer steps: they take {took}, {waits / step_s:.1%}"
