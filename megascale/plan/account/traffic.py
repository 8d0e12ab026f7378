"""Communication of a rank in a step, from the configuration: calls and bytes as in the event log (`step_traffic`)."""

from __future__ import annotations

from collections.abc import Iterator

from megascale.config.run import RunConfig
from megascale.layout.blocks import block_spec, fp8_operands
from megascale.layout.chunks import fp8_layers
from megascale.layout.parts.microbatch_sizes import FP32, CommOp
from megascale.layout.topology import MAX_FLAT_REDUCE_RANKS, Coord
from megascale.plan.account.bucket_traffic import FP64, BucketTraffic
from megascale.plan.account.sizes import data_ranks
from megascale.plan.account.stage_traffic import StageTraffic
from megascale.plan.account.step_totals import counted_weights, step_totals


def step_traffic(config: RunConfig, coord: Coord) -> dict[tuple[str, str], tuple[int, int]]:
    """Sum calls and bytes of a step on the rank at `coord` of a resolved configuration, by (group, operation). A run's
    first step has more where FP8 scales have no history.
    """
    traffic: dict[tuple[str, str], tuple[int, int]] = {}
    sent = *StageTraffic(config, coord.pp).all(), *BucketTraffic(config, coord).all(), *_totals(config)
    for each in sent:
        kind = each.group, each.operation
        count, nbytes = traffic.get(kind, (0, 0))
        traffic[kind] = count + each.times * each.calls, nbytes + each.times * each.bytes
    return traffic


def mean_calls(config: RunConfig) -> float:
    """Count the collectives and messages of a rank in a step, averaged over the pipeline."""
    pp = config.parallel.pp
    return sum(count for stage in range(pp) for count, _ in step_traffic(config, Coord(pp=stage)).values()) / pp


def _totals(config: RunConfig) -> Iterator[CommOp]:
    """List the all-reduces over the whole job; a large job reduces axis by axis."""
    model, delayed = config.model, config.fp8.facts["scaling"] == "delayed"
    layers = fp8_layers(config.model, config.train, config.fp8) if delayed else ()
    amaxes = FP32 * sum(len(list(fp8_operands(block_spec(config.model, layer)))) for layer in layers)
    sums = {"totals": FP64 * len(step_totals(config.model, config.batch, config.train, config.data))}
    if model.experts:
        sums["choices of experts"] = FP64 * (model.total_layers * model.experts + 1)
    terms = len(counted_weights(model, config.train))
    if terms or (model.experts and (config.moe.balance != "none" or config.moe.z_loss_weight)):
        sums["labels of the step"] = FP64 * (2 + terms)
    axes = {"world.dp": data_ranks(config.parallel), "world.tp": config.parallel.tp, "world.pp": config.parallel.pp}
    groups = {"world": config.world_size} if config.world_size <= MAX_FLAT_REDUCE_RANKS else axes
    for number, (group, size) in enumerate(groups.items()):
        if size > 1 and amaxes:
            yield CommOp(group, "all_reduce", amaxes, "fp8 amax")
        if size > 1:
            operation, parts = ("all_gather", size) if number else ("all_reduce", 1)
            yield from (CommOp(group, operation, nbytes * parts, label) for label, nbytes in sums.items())
