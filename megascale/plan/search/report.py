"""Reports of plans and searches: lines and tables for users (`tables`, `search_tables`, `advice`, `too_large`), JSON
objects for programs (`plan_json`, `search_json`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.table import Column, Table

from megascale.core.units import format_bytes, format_count, format_duration
from megascale.layout.parameters import active_parameter_count, describe_parameters, parameter_count
from megascale.layout.recompute_policy import describe_policies
from megascale.plan.account.attended import describe_documents
from megascale.plan.account.site_traffic import describe_sites
from megascale.plan.search.memory_policy import MEMORY_FRACTION
from megascale.plan.search.plan import Plan
from megascale.plan.search.search import MAX_DOUBLINGS, SearchResult
from megascale.plan.search.space import DEPENDENT_KEYS, LAYOUT_KEYS, Space, value_of
from megascale.plan.simulate.failures import FailureCost

CAUSES = {
    "gemm": "GEMMs",
    "attention": "attention",
    "elementwise": "element-wise operations",
    "recompute": "recompute",
    "host": "waiting for the host",
    "offload": "copies to and from other memory, exposed",
    "tp": "tp communication, exposed",
    "cp": "cp communication, exposed",
    "ep": "ep communication, exposed",
    "pp": "pp communication, exposed",
    "dp": "dp communication, exposed",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "scale": "loss with scale",
    "other": "fixed time of a step",
    "cores": "other ranks' turns on a core",
}
"""Causes of step time, as shown to users."""

MIN_SHARE = 0.0005  # smallest share of a step to show
NAMED_SHARE = 0.2  # smallest share of a layout's lost seconds for a cause to be named
TIE = 5e-4  # relative difference up to which two steps count as equally fast


def tables(plan: Plan, sweep: Sequence[Plan], tokens: float | None, cost: FailureCost) -> Iterator[str | Table]:
    """Report a plan: summary, memory by kind, time by cause, notes, dry runs, the job, and the sweep."""
    config, e, error = plan.config, plan.estimate, plan.expected_error
    yield (
        f"{config.name}: {describe_parameters(config.model)}, {format_layout(plan)} = "
        f"{config.world_size} x {plan.hardware.name}, "
        f"{config.num_microbatches} micro-batch{'es' * (config.num_microbatches != 1)} of {config.batch.micro}, "
        f"with {plan.stack.name}"
    )
    yield (
        f"step {e.step_s:.4g} s ({'error unknown' if error is None else f'expected error {error:.0%}'}), "
        f"{format_count(e.tokens_per_s)} tokens/s, {e.tokens_per_s / config.world_size:,.0f} a device, "
        f"MFU {e.mfu_full:.1%} full {e.mfu_causal:.1%} causal"
    )
    sites = describe_sites(config.sites, config.model, config.train)
    yield from filter(None, (describe_documents(config.data), sites))
    stages, how = len(plan.memory_by_stage), "exact" if plan.exact else "by formulas"
    where = f" on stage {plan.fullest_stage}, the fullest of {stages}" if stages > 1 else ""
    sizes = {**vars(plan.memory), f"total, {'fits' if plan.fits else 'does not fit'}": plan.memory.total}
    rows = [(kind, format_bytes(size), f"{size / plan.memory_limit:.1%}") for kind, size in sizes.items()]
    yield plain_table((f"memory of a rank{where}, {how}", "bytes", f"of {format_bytes(plan.memory_limit)}"), rows)
    yield from _policies(plan)
    shown = [(cause, seconds) for cause, seconds in e.causes.items() if seconds >= MIN_SHARE * e.step_s]
    rows = [(CAUSES[cause], f"{seconds:.4g}", f"{seconds / e.step_s:.1%}") for cause, seconds in shown]
    yield plain_table(("where the time goes", "s", "share"), rows)
    yield from (f"note: {note}" for note in plan.notes)
    if plan.exact:
        yield _exact_table(plan.exact)
    if tokens:
        yield _job_line(plan, tokens, cost)
    if sweep:
        yield _sweep_table(sweep)


def _policies(plan: Plan) -> Iterator[str]:
    """Describe the policies of the layers, what they move, and the wear of drives."""
    if isinstance(policies := plan.config.train.memory, list):
        yield f"train.memory: {describe_policies(policies, plan.config.model.total_layers)}"
    if host := plan.job.most_moved("host"):
        yield f"saved tensors of a rank in host memory {format_bytes(host)}"
    if plan.wear:
        (step, day, days), drives = plan.wear, plan.hardware.node.drives
        yield (
            f"a rank writes {format_bytes(step)} a step to NVMe, a node {format_bytes(day)} a day: its {drives.count} "
            f"drives reach their rating of {drives.rated_bytes / 1e12:,.0f} TB each in {days:,.0f} days"
        )


def format_layout(plan: Plan) -> str:
    """Format a layout's parallelism, such as 'tp 8 sp x pp 4 (vpp 2) x dp 16 (ep 8 in 4 blocks)'."""
    p, blocks = plan.config.parallel, plan.config.moe.token_blocks
    sp, vpp = " sp" if p.sp and p.tp > 1 else "", f" (vpp {p.vpp})" if p.vpp > 1 else ""
    heads = f" {p.cp_a2a_size} x {p.cp_keys}" if p.cp_mode == "usp" else ""
    cp = f" x cp {p.cp} {p.cp_mode}{heads}" if p.cp > 1 else ""
    ep = f" (ep {p.ep}{f' in {blocks} blocks' if blocks > 1 else ''})" if max(p.ep, blocks) > 1 else ""
    far = " across islands" if p.far_axis == "dp" and plan.hardware.islands else ""
    return f"tp {p.tp}{sp}{cp} x pp {p.pp}{vpp} x dp {p.replicas}{far}{ep}"


def too_large_message(plan: Plan) -> str:
    """Say in a line by how much a run does not fit."""
    needed, limit = format_bytes(plan.memory.total), format_bytes(plan.memory_limit)
    return f"{plan.config.name} does not fit: a rank needs {needed} of {limit} on {plan.hardware.name}"


def advice(result: SearchResult, fixed: list[str], count: str | None) -> str:
    """Suggest a configuration that fits, in a line. `fixed`: the user's fixed keys; `count`: the option that sets the
    number of devices, parallel.dp or --gpus, if needed.
    """
    devices, smallest, larger = result.space.devices, result.smallest, result.larger
    if result.best:
        return f"{_settings(result.space, result.best[0], count)} would fit"
    given = f" with {', '.join(fixed)} as given" if fixed else ""
    alternatives = f"other values of {', '.join(fixed)}, " if fixed else ""
    if smallest is None:
        near = result.space.nearest_legal()
        number = f"{near} devices" if near else "another number of devices"
        return f"no layout on {devices} devices{given} is legal: {alternatives}{number}, or another batch.global"
    filled = format_bytes(MEMORY_FRACTION * smallest.memory_limit)
    least = f"{format_bytes(smallest.memory.total)}, where a search fills {filled}"
    if larger:
        least += f": {larger.config.world_size} devices would do, {_settings(result.space, larger, count)}"
    else:
        more = 1 << MAX_DOUBLINGS
        least += f", with {_settings(result.space, smallest, count)}, and {more} times as many devices would not do"
    return (
        f"no layout on {devices} x {smallest.hardware.name}{given} fits, the least is {least}{',' if larger else ':'} "
        f"{alternatives}a shorter sequence, or a smaller model"
    )


def _settings(space: Space, plan: Plan, count: str | None) -> str:
    """Format the command-line arguments from a space's configuration to the planned one. `count`: as in `advice`."""
    config = space.config
    implied = set() if count == "parallel.dp" else {"parallel.dp"}
    unused = {key for key in LAYOUT_KEYS if key.startswith("parallel.cp") and plan.layout.cp == config.parallel.cp == 1}
    unused |= set() if config.model.experts else {"parallel.ep", "moe.token_blocks"}
    rare = {"parallel.reshard", "parallel.dp_shard", "parallel.far_axis"}
    unused |= {key for key in rare if value_of(plan.config, key) == value_of(config, key)}
    keys: dict[str, Any] = {
        key: value for key, value in zip(LAYOUT_KEYS, plan.layout, strict=True) if key not in implied | unused
    }
    given = [key for key in DEPENDENT_KEYS if value_of(config, key) is not None]
    keys |= {key: "auto" for key in given if value_of(plan.config, key) is None}
    if plan.config.parallel.layers_per_chunk not in (None, config.parallel.layers_per_chunk):
        keys["parallel.layers_per_chunk"] = plan.config.parallel.layers_per_chunk
    arguments = [
        f"{key}={str('auto' if value is None else value).lower().replace(' ', '')}" for key, value in keys.items()
    ]
    return " ".join([*arguments, f"--gpus {plan.config.world_size}"] if count == "--gpus" else arguments)


def search_tables(result: SearchResult) -> Iterator[str | Table]:
    """Report the fastest layouts, with the causes of slower ones."""
    counts, first = result.counts, result.best[0]
    yield (
        f"{counts['legal']} legal layouts: {counts['too_large']} too large, {counts['pruned']} too slow by a bound, "
        f"{counts['simulated']} simulated"
    )
    rows = []
    for plan in result.best:
        keys, e = plan.layout, plan.estimate
        schedule = keys.schedule if keys.pp > 1 else ""
        zero = f"{keys.zero} {keys.reshard}" if keys.reshard else str(keys.zero)
        zero += f" in {keys.dp_shard}" if keys.dp_shard else ""
        cells = [schedule, str(keys.micro), zero, keys.recompute, format_bytes(plan.memory.total)]
        cells += [f"{e.step_s:.4g}", f"{e.mfu_full:.1%}", slowdown_causes(plan, first)]
        rows.append([format_layout(plan), *cells])
    headings = ("layout", "schedule", "micro", "zero", "recompute", "memory", "step s", "MFU full", "slower by")
    yield plain_table(headings, rows)
    for plan in result.best:
        policies = plan.config.train.memory
        if isinstance(policies, list) and any(policy != "keep" for policy in policies):
            yield f"{format_layout(plan)}: {describe_policies(policies, plan.config.model.total_layers)}"
        if sizes := plan.config.parallel.layers_per_chunk:
            yield f"{format_layout(plan)}: parallel.layers_per_chunk={sizes}"
    error = first.expected_error or 0.0
    near = sum(plan.estimate.step_s <= first.estimate.step_s * (1 + error) for plan in result.best)
    if error and near > 1:
        yield f"the first {near} differ by less than the expected error of {error:.0%}: measure them"


def slowdown_causes(plan: Plan, first: Plan) -> str:
    """Name the causes by which a plan is slower than the first, or its extra memory if as fast."""
    if plan is first:
        return ""
    slower = plan.estimate.step_s - first.estimate.step_s
    if slower <= TIE * first.estimate.step_s:
        larger = plan.memory.total - first.memory.total
        return f"as fast, {'+' if larger >= 0 else '-'}{format_bytes(abs(larger))}"
    excess = {cause: seconds - first.estimate.causes.get(cause, 0.0) for cause, seconds in plan.estimate.causes.items()}
    worse = sorted(((seconds, cause) for cause, seconds in excess.items() if seconds > 0), reverse=True)
    least = min(worse[0][0], NAMED_SHARE * sum(seconds for seconds, _ in worse))
    return ", ".join(f"{cause} +{seconds:.2g} s" for seconds, cause in worse if seconds >= least)


def _exact_table(exact: Mapping[str, Any]) -> Table:
    rows = []
    for rank in exact["ranks"]:
        sent, flops = rank["communication"].values(), f"{sum(rank['flops'].values()):.4g}"
        calls, size = str(sum(group["calls"] for group in sent)), format_bytes(sum(group["bytes"] for group in sent))
        peak = format_bytes(rank["memory_bytes"]["total"])
        rows.append((str(rank["rank"]), str(rank["stage"]), peak, flops, calls, size))
    return plain_table(("dry run of rank", "stage", "peak bytes", "FLOPs", "calls", "bytes sent"), rows)


def _sweep_table(plans: Sequence[Plan]) -> Table:
    rows = []
    for plan in plans:
        e, size = plan.estimate, format_bytes(plan.memory.total) + ("" if plan.fits else ": does not fit")
        speed = f"{e.step_s:.4g}", format_count(e.tokens_per_s), f"{e.mfu_full:.1%}"
        rows.append((str(plan.config.world_size), format_layout(plan), *speed, size))
    return plain_table(("devices", "layout", "step s", "tokens/s", "MFU full", "memory"), rows)


def _job_line(plan: Plan, tokens: float, cost: FailureCost) -> str:
    seconds = tokens / plan.estimate.tokens_per_s / plan.config.sites.count
    hours = format_count(tokens / plan.estimate.tokens_per_s * plan.config.world_size / 3600)
    at_sites = f" at {plan.config.sites.count} sites" if plan.config.sites.count > 1 else ""
    longer = f"and a checkpoint every {format_duration(cost.every_s)} {format_duration(cost.with_failures(seconds))}"
    return (
        f"{format_count(tokens)} tokens{at_sites}: {format_duration(seconds)}, {hours} device hours; "
        f"with a failure every {format_duration(cost.mean_s)} "
        f"{'it never ends' if cost.lost_share == 1 else longer}"
    )


def plain_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Make a table without lines, whose columns but the first are aligned to the right."""
    first, *numeric = headings
    table = Table(first, *(Column(heading, justify="right") for heading in numeric), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    return table


def plan_json(plan: Plan, sweep: Sequence[Plan], tokens: float | None, cost: FailureCost) -> dict[str, Any]:
    """Return a plan in seconds, bytes and shares."""
    e, config = plan.estimate, plan.config
    tree: dict[str, Any] = {
        "name": config.name,
        "hardware": plan.hardware.name,
        "stack": plan.stack.name,
        "gpus": config.world_size,
        "parameters": parameter_count(config.model),
        "active_parameters": active_parameter_count(config.model),
        "fits": plan.fits,
        "memory_limit_bytes": plan.memory_limit,
        **_summary(plan),
        "memory_bytes": {**vars(plan.memory), "total": plan.memory.total},
        "memory_bytes_by_stage": plan.memory_by_stage,
        "fullest_stage": plan.fullest_stage,
        "moved_bytes": {store: plan.job.most_moved(store) for store in ("host", "nvme")},
        "drive_wear": plan.wear and plan.wear._asdict(),
        "expected_error": plan.expected_error,
        "bubble": e.causes["bubble"] / e.step_s,
        "exposed_s": {axis: e.causes[axis] for axis in ("tp", "cp", "ep", "pp", "dp")},
        "causes_s": e.causes,
        "notes": plan.notes,
        "failures": {"mean_s": cost.mean_s, "checkpoint_every_s": cost.every_s, "lost_share": cost.lost_share},
    }
    if tokens:
        tree["job"] = {"tokens": tokens}
        seconds = tokens / e.tokens_per_s / config.sites.count
        for name, duration in (("", seconds), ("_with_failures", cost.with_failures(seconds))):
            ends = duration < math.inf
            tree["job"][f"days{name}"] = duration / 86400 if ends else None
            tree["job"][f"gpu_hours{name}"] = duration * config.world_size * config.sites.count / 3600 if ends else None
    if plan.exact:
        tree["exact"] = {key: plan.exact[key] for key in ("exact_stages", "ranks")}
    if sweep:
        tree["sweep"] = [{"gpus": swept.config.world_size, "fits": swept.fits, **_summary(swept)} for swept in sweep]
    return tree


def search_json(result: SearchResult) -> dict[str, Any]:
    """Return the fastest layouts and the counts of a search."""
    best = [{**_summary(plan), "slower_by": slowdown_causes(plan, result.best[0])} for plan in result.best]
    return {"counts": result.counts, "best": best}


def _summary(plan: Plan) -> dict[str, Any]:
    e = plan.estimate
    return {
        "layout": {**plan.layout._asdict(), "global": plan.config.batch.total},
        "layers_per_chunk": plan.config.parallel.layers_per_chunk,
        "memory_policies": plan.config.train.memory,
        "memory_bytes": plan.memory.total,
        "step_time_s": e.step_s,
        "tokens_per_s": e.tokens_per_s,
        "tokens_per_s_per_gpu": e.tokens_per_s / plan.config.world_size,
        "mfu_full": e.mfu_full,
        "mfu_causal": e.mfu_causal,
    }
