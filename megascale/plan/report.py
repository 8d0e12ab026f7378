"""What a plan says: one value with all of it, for machines and as tables for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.table import Table

from megascale.config.run import RunConfig
from megascale.core.units import format_bytes, format_count, format_duration
from megascale.plan.estimate import Estimate, with_spans
from megascale.plan.failures import Losses
from megascale.plan.layouts import dropped
from megascale.plan.memory import RankBytes, rank_bytes
from megascale.plan.params import parameter_count
from megascale.plan.profiles import Hardware, Stack
from megascale.plan.search import DOUBLED, Found, Instead, Sized, legal_near
from megascale.plan.steps import Steps

WORDS = {
    "gemm": "matrix products",
    "attention": "attention",
    "elementwise": "element-wise",
    "recompute": "computed again",
    "host": "waiting for the host",
    "stragglers": "slowest device",
    "tp": "tp, exposed",
    "pp": "pp, exposed",
    "dp": "dp, exposed",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "other": "fixed time of a step",
    "cores": "other ranks' turns",
}

KINDS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")
"""What memory is for."""

Count = Literal["parallel.dp", "--gpus"]
"""How a command line says how many devices."""

FIXED = 0.1
"""The share of a step from which its fixed time is told."""

LEAST = 0.0005
"""Shares of a step that are less are not shown."""


@dataclass(frozen=True)
class Plan:
    """A configuration on some hardware with some stack. `ranks`: what a rank of each pipeline stage holds, by formulas;
    `exact`: what dry runs say of it (`dryrun.exact`).
    """

    config: RunConfig
    hardware: Hardware
    stack: Stack
    estimate: Estimate
    ranks: list[RankBytes]
    exact: Mapping[str, Any] | None = None

    @property
    def memory_by_stage(self) -> list[int]:
        """Bytes of a rank of each stage."""
        return self.exact["memory_bytes_by_stage"] if self.exact else [rank.total for rank in self.ranks]

    @property
    def fullest(self) -> int:
        """The pipeline stage whose ranks hold most."""
        return max(range(len(self.ranks)), key=self.memory_by_stage.__getitem__)

    @property
    def memory(self) -> Mapping[str, int]:
        """Bytes of the fullest rank by kind."""
        return self.exact["memory_bytes"] if self.exact else memory(self.ranks[self.fullest])

    @property
    def room(self) -> int:
        """Bytes that a device has for a rank's tensors."""
        return self.hardware.room(self.config.world)

    @property
    def fits(self) -> bool:
        return self.memory["total"] <= self.room


def plan(config: RunConfig, hardware: Hardware, stack: Stack, *, spans: bool = False) -> Plan:
    """Of a resolved configuration. `spans`: with all that happens in a step, however many micro-batches it has."""
    ranks = rank_bytes(config, shards_weights=stack.shards_weights)
    found = Steps(hardware, stack).estimate(config)
    if spans:
        found = dataclasses.replace(found, replay=with_spans(config, hardware, stack))
    return Plan(config, hardware, stack, found, ranks)


def with_exact(plan: Plan, exact: Mapping[str, Any]) -> Plan:
    """With memory as dry runs have it."""
    return dataclasses.replace(plan, exact=exact)


def layout(config: RunConfig, stack: Stack) -> dict[str, Any]:
    """The keys that a layout is made of; with a stack that shards weights, zero is 3."""
    p = config.parallel
    return {
        "tp": p.tp,
        "sp": p.sp,
        "pp": p.pp,
        "vpp": p.vpp,
        "dp": config.dp,
        "zero": 3 if stack.shards_weights else p.zero,
        "schedule": p.schedule,
        "micro": config.batch.micro,
        "global": config.batch.total,
        "recompute": config.train.recompute,
    }


def spread(config: RunConfig) -> str:
    """The layout in words."""
    p = config.parallel
    return f"tp {p.tp}{' sp' if p.sp else ''} x pp {p.pp}{f' (vpp {p.vpp})' if p.vpp > 1 else ''} x dp {config.dp}"


def memory(rank: RankBytes) -> dict[str, int]:
    """Bytes by kind when they are most. What is neither state nor gradient is activations and logits, as far as there
    are any, and buffers that operations work with.
    """
    state, peak = rank.state, rank.peak
    held = peak.kept + peak.working
    kept = max(peak.kept, min(rank.activations.peak, held))
    logits = min(rank.activations.logits, held - kept)
    return {
        "parameters": state.weights + rank.gathered,
        "gradients": state.gradients + peak.gradients,
        "optimizer": state.optimizer,
        "activations": kept,
        "logits": logits,
        "buffers": held - kept - logits,
        "total": rank.total,
    }


def as_json(plan: Plan, sweep: Sequence[Plan], tokens: float | None, lost: Losses) -> dict[str, Any]:
    """All of a plan, in seconds, bytes and shares."""
    e, config = plan.estimate, plan.config
    found: dict[str, Any] = {
        "name": config.name,
        "hardware": plan.hardware.name,
        "stack": plan.stack.name,
        "gpus": config.world,
        "parameters": parameter_count(config.model),
        "layout": layout(config, plan.stack),
        "fits": plan.fits,
        "room_bytes": plan.room,
        "memory_bytes": dict(plan.memory),
        "memory_bytes_by_stage": plan.memory_by_stage,
        "fullest_stage": plan.fullest,
        **_speed(e, config.world),
        "bubble": e.bubble,
        "exposed_s": e.exposed,
        "causes_s": e.causes,
        "notes": notes(plan),
        "failures": {"mean_s": lost.mean_s, "checkpoint_every_s": lost.every_s, "lost": lost.share},
    }
    if tokens:
        seconds = tokens / e.tokens_per_s
        longer = None if lost.share == 1 else lost.stretched(seconds)
        found["job"] = {
            "tokens": tokens,
            "days": seconds / 86400,
            "gpu_hours": seconds * config.world / 3600,
            "days_with_failures": None if longer is None else longer / 86400,
            "gpu_hours_with_failures": None if longer is None else longer * config.world / 3600,
        }
    if plan.exact:
        found["exact"] = {key: plan.exact[key] for key in ("exact_stages", "ranks")}
    if sweep:
        found["sweep"] = [
            {
                "gpus": each.config.world,
                "layout": layout(each.config, each.stack),
                "fits": each.fits,
                "memory_bytes": each.memory["total"],
                **_speed(each.estimate, each.config.world),
            }
            for each in sweep
        ]
    return found


def _speed(e: Estimate, devices: int) -> dict[str, float]:
    return {
        "step_time_s": e.step_s,
        "tokens_per_s": e.tokens_per_s,
        "tokens_per_s_per_gpu": e.tokens_per_s / devices,
        "mfu_full": e.mfu_full,
        "mfu_causal": e.mfu_causal,
    }


def tables(plan: Plan, sweep: Sequence[Plan], tokens: float | None, lost: Losses) -> Iterator[str | Table]:
    """For people: a summary, memory by kind, where the time goes, and the sweep."""
    config, e = plan.config, plan.estimate
    yield (
        f"{config.name}: {format_count(parameter_count(config.model))} parameters, {spread(config)} = {config.world} x "
        f"{plan.hardware.name}, {config.micro_batches} micro-batches of {config.batch.micro}, with {plan.stack.name}"
    )
    yield (
        f"step {e.step_s:.4g} s, {format_count(e.tokens_per_s)} tokens/s, {e.tokens_per_s / config.world:,.0f} a "
        f"device, MFU {e.mfu_full:.1%} full {e.mfu_causal:.1%} causal"
    )
    yield _memory_line(plan)
    yield causes_table(e)
    yield from notes(plan)
    if plan.exact:
        yield exact_table(plan.exact)
    if tokens:
        yield _job_line(plan, tokens, lost)
    if sweep:
        yield sweep_table(sweep)


def notes(plan: Plan) -> list[str]:
    """What should be known of a plan before it is believed, a line each."""
    config, hardware, stack, e = plan.config, plan.hardware, plan.stack, plan.estimate
    found = []
    if config.train.precision == "bf16" and not hardware.device.multiplies("bf16"):
        found.append(f"{hardware.name} multiplies no bf16: planned as fp16")
    for kind, profile in (("hardware", hardware), ("stack", stack)):
        if "attained" not in profile.model_fields_set:
            found.append(f"{kind} {profile.name}: no steps were fitted, what it attains of its rates is a usual value")
    if hardware.stack is None and e.causes["other"] >= FIXED * e.step_s:
        found.append(
            f"{e.causes['other'] / e.step_s:.0%} of the step is the fixed time that was fitted to published steps with "
            f"{stack.name}: steps unlike those may have another"
        )
    if config.model.dropout:
        found.append("attention with dropout forms all scores, as this trainer does: planned so in time and memory")
    elif stack.attention == "unfused":
        found.append(f"memory is this trainer's: the scores that {stack.name} keeps for backwards come on top")
    return found


def _memory_line(plan: Plan) -> str:
    parts = [f"{kind} {format_bytes(size)}" for kind, size in plan.memory.items() if size and kind != "total"]
    stages = plan.memory_by_stage
    where = f" on stage {plan.fullest}, the fullest of {len(stages)} (least {format_bytes(min(stages))})"
    how = "exact" if plan.exact else "by formulas"
    return (
        f"memory {format_bytes(plan.memory['total'])} of {format_bytes(plan.room)}{where if len(stages) > 1 else ''}, "
        f"{how}: {'fits' if plan.fits else 'does not fit'}; {', '.join(parts)}"
    )


def _job_line(plan: Plan, tokens: float, lost: Losses) -> str:
    seconds = tokens / plan.estimate.tokens_per_s
    line = (
        f"{format_count(tokens)} tokens: {format_duration(seconds)}, "
        f"{format_count(seconds * plan.config.world / 3600)} device hours; with a failure every "
        f"{format_duration(lost.mean_s)} "
    )
    if lost.share == 1:
        return line + "it never ends"
    return f"{line}and a checkpoint every {format_duration(lost.every_s)} {format_duration(lost.stretched(seconds))}"


def too_large(plan: Plan) -> str:
    """One line for a run that does not fit."""
    return (
        f"{plan.config.name} does not fit: a rank needs {format_bytes(plan.memory['total'])} of "
        f"{format_bytes(plan.room)} on {plan.hardware.name}"
    )


def settings(config: RunConfig, other: Sized, stack: Stack, count: Count | None) -> str:
    """What makes a configuration the other one on a command line. `count`: what says how many devices, if that must."""
    implied = {"parallel.zero"} if stack.shards_weights else set()
    implied |= set() if count == "parallel.dp" else {"parallel.dp"}
    keys = {key: value for key, value in other.layout.keys.items() if key not in implied}
    keys |= dict.fromkeys(dropped(config, other.config), "auto")
    words = [f"{key}={str(value).lower()}" for key, value in keys.items()]
    return " ".join([*words, f"--gpus {other.config.world}"] if count == "--gpus" else words)


def nothing_fits(
    config: RunConfig,
    devices: int,
    instead: Instead,
    room: int,
    hardware: Hardware,
    stack: Stack,
    fixed: Sequence[str],
    count: Count | None,
) -> str:
    """What would fit in place of `config`, or what is missing, in a line. `room`: what the search fills; `fixed`: keys
    that it leaves as they are; `count`: as in `settings`.
    """
    smallest, enough = instead.smallest, instead.larger
    if instead.fits:
        return f"{settings(config, instead.fits, stack, count)} would fit"
    given = f" with {', '.join(fixed)} as given" if fixed else ""
    others = f"other values of {', '.join(fixed)}, " if fixed else ""
    if smallest is None:
        near = legal_near(config, devices, fixed)
        number = f"{near} devices" if near else "another number of devices"
        return f"no layout on {devices} devices{given} is legal: {others}{number}, or another batch.global"
    least = f"the least is {format_bytes(smallest.memory.total)}, where a search fills {format_bytes(room)}"
    larger = f"{enough.config.world} devices would do, {settings(config, enough, stack, count)}, " if enough else ""
    if not enough:
        least += f", with {settings(config, smallest, stack, count)}"
        least += f", and {1 << DOUBLED} times as many devices would not do"
    return (
        f"no layout on {devices} x {hardware.name}{given} fits, {least}: {larger}{others}a shorter sequence, or a "
        "smaller model"
    )


def search_json(found: Found, stack: Stack) -> dict[str, Any]:
    """The fastest layouts, and how many there were."""
    return {
        "counts": vars(found.counts),
        "best": [
            {
                "layout": layout(each.config, stack),
                "memory_bytes": each.memory.total,
                **_speed(each.estimate, each.config.world),
                "lost": each.lost,
            }
            for each in found.best
        ],
    }


def search_table(found: Found, stack: Stack) -> Table:
    """The fastest layouts and why each is not the first."""
    counts = found.counts
    table = _table("layout", "micro", "zero", "recompute", "memory", "step s", "MFU full", "loses by")
    table.title = (
        f"{counts.legal} legal layouts: {counts.too_large} too large, {counts.pruned} too slow by a bound, "
        f"{counts.simulated} simulated"
    )
    for each in found.best:
        one = each.layout
        table.add_row(
            spread(each.config), str(one.micro), "3" if stack.shards_weights else str(one.zero), one.recompute,
            format_bytes(each.memory.total),
            f"{each.estimate.step_s:.4g}", f"{each.estimate.mfu_full:.1%}", each.lost,
        )  # fmt: skip
    return table


def causes_table(e: Estimate) -> Table:
    """Where the time of a step goes."""
    table = _table("where the time goes", "s", "share")
    for cause, seconds in e.causes.items():
        if seconds / e.step_s >= LEAST:
            table.add_row(WORDS[cause], f"{seconds:.4g}", f"{seconds / e.step_s:.1%}")
    return table


def exact_table(exact: Mapping[str, Any]) -> Table:
    """What each rank that was dry-run does."""
    table = _table("dry run of rank", "stage", "most bytes", "FLOPs", "calls", "bytes sent")
    for rank in exact["ranks"]:
        sent = rank["communication"].values()
        table.add_row(
            str(rank["rank"]), str(rank["stage"]), format_bytes(rank["memory_bytes"]["total"]),
            f"{sum(rank['flops'].values()):.4g}", str(sum(each["calls"] for each in sent)),
            format_bytes(sum(each["bytes"] for each in sent)),
        )  # fmt: skip
    return table


def sweep_table(plans: Sequence[Plan]) -> Table:
    """The same run on other numbers of devices."""
    table = _table("devices", "layout", "step s", "tokens/s", "MFU full", "memory")
    for each in plans:
        e, size = each.estimate, format_bytes(each.memory["total"])
        table.add_row(
            str(each.config.world), spread(each.config), f"{e.step_s:.4g}", format_count(e.tokens_per_s),
            f"{e.mfu_full:.1%}", size if each.fits else f"{size}: does not fit",
        )  # fmt: skip
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first)
    for heading in others:
        table.add_column(heading, justify="right")
    return table
