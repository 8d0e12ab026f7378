"""A plan and a search for people, as lines and tables, and for machines, as JSON objects."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from megascale.account.parameters import parameter_count
from megascale.config.run import RunConfig
from megascale.core.units import format_bytes, format_count, format_duration
from megascale.search.plan import Plan, notes
from megascale.search.search import DOUBLED, FILLED, Candidate, Found, Sized, legal_near
from megascale.search.space import VARIED, dropped, layout_of
from megascale.simulate.failures import Losses
from megascale.simulate.profiles import Hardware, Stack

CAUSES = {
    "gemm": "GEMMs",
    "attention": "attention",
    "elementwise": "element-wise operations",
    "recompute": "recompute",
    "host": "waiting for the host",
    "tp": "tp communication, exposed",
    "pp": "pp communication, exposed",
    "dp": "dp communication, exposed",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "scale": "loss with scale",
    "other": "fixed time of a step",
    "cores": "other ranks' turns on a core",
}
"""The causes of a step's time, in the field's words."""

LEAST = 0.0005
"""Smaller shares of a step are not shown."""


def tables(plan: Plan, sweep: Sequence[Plan], tokens: float | None, lost: Losses) -> Iterator[str | Table]:
    """Report a plan: a summary, memory by kind, where the time goes, notes, and the sweep."""
    config, e, error = plan.config, plan.estimate, plan.expected_error
    yield (
        f"{config.name}: {format_count(parameter_count(config.model))} parameters, {spread(config)} = {config.world} x "
        f"{plan.hardware.name}, {config.micro_batches} micro-batches of {config.batch.micro}, with {plan.stack.name}"
    )
    yield (
        f"step {e.step_s:.4g} s ({'error unknown' if error is None else f'expected error {error:.0%}'}), "
        f"{format_count(e.tokens_per_s)} tokens/s, {e.tokens_per_s / config.world:,.0f} a device, "
        f"MFU {e.mfu_full:.1%} full {e.mfu_causal:.1%} causal"
    )
    yield memory_table(plan)
    shown = [(cause, seconds) for cause, seconds in e.causes.items() if seconds >= LEAST * e.step_s]
    rows = [(CAUSES[cause], f"{seconds:.4g}", f"{seconds / e.step_s:.1%}") for cause, seconds in shown]
    yield _table(("where the time goes", "s", "share"), rows)
    yield from (f"note: {note}" for note in notes(plan))
    if plan.exact:
        yield exact_table(plan.exact)
    if tokens:
        yield _job_line(plan, tokens, lost)
    if sweep:
        yield sweep_table(sweep)


def spread(config: RunConfig) -> str:
    """The layout in words."""
    p = config.parallel
    return f"tp {p.tp}{' sp' if p.sp else ''} x pp {p.pp}{f' (vpp {p.vpp})' if p.vpp > 1 else ''} x dp {config.dp}"


def memory_table(plan: Plan) -> Table:
    """The memory of the fullest rank by kind, and whether it fits."""
    stages, how = len(plan.memory_by_stage), "exact" if plan.exact else "by formulas"
    where = f" on stage {plan.fullest}, the fullest of {stages}" if stages > 1 else ""
    sizes = {**vars(plan.memory), f"total, {'fits' if plan.fits else 'does not fit'}": plan.memory.total}
    rows = [(kind, format_bytes(size), f"{size / plan.room:.1%}") for kind, size in sizes.items()]
    return _table((f"memory of a rank{where}, {how}", "bytes", f"of {format_bytes(plan.room)}"), rows)


def too_large(plan: Plan) -> str:
    """One line for a run that does not fit."""
    return (
        f"{plan.config.name} does not fit: a rank needs {format_bytes(plan.memory.total)} of {format_bytes(plan.room)} "
        f"on {plan.hardware.name}"
    )


def advice(
    config: RunConfig, devices: int, found: Found, on: Hardware, stack: Stack, fixed: list[str], count: str | None
) -> str:
    """Say in a line what a search `found` in place of `config`. `fixed`: keys that it left as they are; `count`: as in
    `settings`.
    """
    if found.best:
        return f"{settings(config, found.best[0], stack, count)} would fit"
    given = f" with {', '.join(fixed)} as given" if fixed else ""
    others = f"other values of {', '.join(fixed)}, " if fixed else ""
    smallest, larger = found.smallest, found.larger
    if smallest is None:
        near = legal_near(config, devices, fixed)
        number = f"{near} devices" if near else "another number of devices"
        return f"no layout on {devices} devices{given} is legal: {others}{number}, or another batch.global"
    room = format_bytes(FILLED * on.room(devices))
    least = f"the least is {format_bytes(smallest.memory.total)}, where a search fills {room}"
    if larger:
        least += f": {larger.config.world} devices would do, {settings(config, larger, stack, count)}, "
    else:
        doubled = f"{1 << DOUBLED} times as many devices would not do: "
        least += f", with {settings(config, smallest, stack, count)}, and {doubled}"
    return f"no layout on {devices} x {on.name}{given} fits, {least}{others}a shorter sequence, or a smaller model"


def settings(config: RunConfig, other: Sized, stack: Stack, count: str | None) -> str:
    """List the arguments that turn a configuration into the other one. `count`: parallel.dp or --gpus, which sets the
    number of devices, if it must be set.
    """
    implied = {"parallel.zero"} if stack.shards_weights else set()
    implied |= set() if count == "parallel.dp" else {"parallel.dp"}
    keys = {key: value for key, value in zip(VARIED, other.layout, strict=True) if key not in implied}
    keys |= dict.fromkeys(dropped(config, other.config), "auto")
    words = [f"{key}={str(value).lower()}" for key, value in keys.items()]
    return " ".join([*words, f"--gpus {other.config.world}"] if count == "--gpus" else words)


def search_tables(found: Found, plan: Plan) -> Iterator[str | Table]:
    """Report the fastest layouts and why each is not the first, which is `plan`."""
    counts, error = found.counts, plan.expected_error
    yield (
        f"{counts['legal']} legal layouts: {counts['too_large']} too large, {counts['pruned']} too slow by a bound, "
        f"{counts['simulated']} simulated"
    )
    rows = []
    for each in found.best:
        keys, e = layout(each.config, plan.stack), each.estimate
        cells = [str(keys[name]) for name in ("micro", "zero", "recompute")]
        cells += [format_bytes(each.memory.total), f"{e.step_s:.4g}", f"{e.mfu_full:.1%}", each.lost]
        rows.append([spread(each.config), *cells])
    yield _table(("layout", "micro", "zero", "recompute", "memory", "step s", "MFU full", "loses by"), rows)
    near = sum(each.estimate.step_s <= found.best[0].estimate.step_s * (1 + (error or 0.0)) for each in found.best)
    if error and near > 1:
        yield f"the first {near} differ by less than the expected error of {error:.0%}: measure them"


def exact_table(exact: Mapping[str, Any]) -> Table:
    """Report each rank that was dry-run."""
    rows = []
    for rank in exact["ranks"]:
        sent, flops = rank["communication"].values(), f"{sum(rank['flops'].values()):.4g}"
        calls, size = str(sum(each["calls"] for each in sent)), format_bytes(sum(each["bytes"] for each in sent))
        most = format_bytes(rank["memory_bytes"]["total"])
        rows.append((str(rank["rank"]), str(rank["stage"]), most, flops, calls, size))
    return _table(("dry run of rank", "stage", "most bytes", "FLOPs", "calls", "bytes sent"), rows)


def sweep_table(plans: Sequence[Plan]) -> Table:
    """The run on other numbers of devices."""
    rows = []
    for each in plans:
        e, size = each.estimate, format_bytes(each.memory.total) + ("" if each.fits else ": does not fit")
        speed = f"{e.step_s:.4g}", format_count(e.tokens_per_s), f"{e.mfu_full:.1%}"
        rows.append((str(each.config.world), spread(each.config), *speed, size))
    return _table(("devices", "layout", "step s", "tokens/s", "MFU full", "memory"), rows)


def _job_line(plan: Plan, tokens: float, lost: Losses) -> str:
    seconds = tokens / plan.estimate.tokens_per_s
    hours = format_count(seconds * plan.config.world / 3600)
    longer = f"and a checkpoint every {format_duration(lost.every_s)} {format_duration(lost.stretched(seconds))}"
    return (
        f"{format_count(tokens)} tokens: {format_duration(seconds)}, {hours} device hours; with a failure every "
        f"{format_duration(lost.mean_s)} {'it never ends' if lost.share == 1 else longer}"
    )


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for at, heading in enumerate(headings):
        table.add_column(heading, justify="right" if at else "left")
    for row in rows:
        table.add_row(*row)
    return table


def plan_json(plan: Plan, sweep: Sequence[Plan], tokens: float | None, lost: Losses) -> dict[str, Any]:
    """A plan in seconds, bytes and shares."""
    e, config = plan.estimate, plan.config
    found: dict[str, Any] = {
        "name": config.name,
        "hardware": plan.hardware.name,
        "stack": plan.stack.name,
        "gpus": config.world,
        "parameters": parameter_count(config.model),
        "fits": plan.fits,
        "room_bytes": plan.room,
        **_summary(plan, plan.stack),
        "memory_bytes": {**vars(plan.memory), "total": plan.memory.total},
        "memory_bytes_by_stage": plan.memory_by_stage,
        "fullest_stage": plan.fullest,
        "expected_error": plan.expected_error,
        "bubble": e.bubble,
        "exposed_s": e.exposed,
        "causes_s": e.causes,
        "notes": notes(plan),
        "failures": {"mean_s": lost.mean_s, "checkpoint_every_s": lost.every_s, "lost": lost.share},
    }
    if tokens:
        seconds = {"": tokens / e.tokens_per_s}
        seconds["_with_failures"] = lost.stretched(seconds[""])
        found["job"] = {"tokens": tokens}
        for name, each in seconds.items():  # None: it never ends
            found["job"][f"days{name}"] = each / 86400 if each < math.inf else None
            found["job"][f"gpu_hours{name}"] = each * config.world / 3600 if each < math.inf else None
    if plan.exact:
        found["exact"] = {key: plan.exact[key] for key in ("exact_stages", "ranks")}
    if sweep:
        found["sweep"] = [{"gpus": one.config.world, "fits": one.fits, **_summary(one, one.stack)} for one in sweep]
    return found


def search_json(found: Found, stack: Stack) -> dict[str, Any]:
    """The fastest layouts, and how many there were."""
    return {"counts": found.counts, "best": [{**_summary(one, stack), "lost": one.lost} for one in found.best]}


def layout(config: RunConfig, stack: Stack) -> dict[str, Any]:
    """The keys that a layout is made of; with a stack that shards weights, zero is 3."""
    found = {**layout_of(config)._asdict(), "global": config.batch.total}
    return found | {"zero": 3} if stack.shards_weights else found


def _summary(one: Plan | Candidate, stack: Stack) -> dict[str, Any]:
    e = one.estimate
    return {
        "layout": layout(one.config, stack),
        "memory_bytes": one.memory.total,
        "step_time_s": e.step_s,
        "tokens_per_s": e.tokens_per_s,
        "tokens_per_s_per_gpu": e.tokens_per_s / one.config.world,
        "mfu_full": e.mfu_full,
        "mfu_causal": e.mfu_causal,
    }
