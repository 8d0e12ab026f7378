"""What a rank sends in a step, from the configuration: calls and bytes by group and operation, as its ledger has them.

For N numbers in a rank's buckets, of a bytes in the format of accumulation and c in that of compute: data parallelism
all-reduces a N (zero = 0), or reduce-scatters a N, with zero = 2 for each micro-batch, and all-gathers c N; a pipeline
sends each boundary's activation once each way for each micro-batch. Tensor parallelism: `plan.tensor_traffic`. The
first step of a run has more where fp8 scales have no history yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from megascale.catalog.layers import BLOCKS
from megascale.catalog.optimizers import OPTIMIZERS
from megascale.catalog.precisions import PRECISIONS
from megascale.catalog.recipes import RECIPES
from megascale.config.run import RunConfig
from megascale.layout.buckets import Bucket, pack
from megascale.layout.chunks import chunk_buckets, eight_bit_layers, stages_of
from megascale.layout.recompute import recompute_of
from megascale.layout.tensors import TOKEN_EMBEDDING
from megascale.layout.topology import AT_ONCE, Coord
from megascale.plan.tensor_traffic import (
    FP32,
    Collective,
    TensorTraffic,
    embedding_traffic,
    head_traffic,
    layer_traffic,
)

FP64 = 8

TOTALS = 6
"""Numbers that a step sums over the job: loss, tokens, ranks that are to stop, two of checkpoints, the squared norm."""


class Volume(NamedTuple):
    """How often, and of how many bytes in all."""

    calls: int = 0
    bytes: int = 0


class Sent(NamedTuple):
    """A communication of a step in `group`, as often as `times`."""

    group: str
    collective: Collective
    times: int = 1


def step_traffic(config: RunConfig, coord: Coord) -> dict[tuple[str, str], Volume]:
    """By (group, operation) what the rank at `coord` of a resolved configuration sends and receives in a step.

    Bytes are those of the whole tensor concerned: of a gather's result and of what a reduction sums.
    """
    found: dict[tuple[str, str], Volume] = {}
    for group, each, times in sent(config, coord):
        calls, nbytes = found.get((group, each.operation), Volume())
        volume = Volume(calls + times * each.calls, nbytes + times * each.bytes)
        found[group, each.operation] = volume
    return found


def sent(config: RunConfig, coord: Coord) -> Iterator[Sent]:
    """All that `step_traffic` adds up."""
    yield from _tensor(config, coord)
    yield from _messages(config, coord)
    yield from _gradients(config, coord)
    yield from _optimizer(config, coord)
    yield from _totals(config)


def calls(config: RunConfig) -> float:
    """Communications of a rank in a step, the mean over a pipeline."""
    pp = config.parallel.pp
    each = (some for rank in range(pp) for some in sent(config, Coord(tp=0, cp=0, dp=0, pp=rank)))
    return sum(some.times * some.collective.calls for some in each) / pp


def message_bytes(config: RunConfig) -> int:
    """Of a message between two stages: a tp rank sends its part of the boundary's activation."""
    m, facts = config.model, PRECISIONS[config.train.precision].facts
    return m.seq_length * config.batch.micro * m.hidden_size * facts["compute_bytes"] // config.parallel.tp


def rank_buckets(config: RunConfig, pp_rank: int) -> list[list[Bucket]]:
    """The buckets of each chunk of a pipeline rank, as they are reduced and gathered; sizes are in numbers."""
    tp, shards = config.parallel.tp, config.dp * config.parallel.cp
    return [[pack(bucket, tp, shards) for bucket in chunk] for chunk in chunk_buckets(config, pp_rank)]


def _tensor(config: RunConfig, coord: Coord) -> Iterator[Sent]:
    """Of the parts of the network, and of activations that a stage collects from what its ranks have received."""
    p, layout, cast = config.parallel, stages_of(config), eight_bit_layers(config)
    parts: list[tuple[TensorTraffic, int]] = []
    for chunk in range(p.vpp):
        index, recompute = layout.index(coord.pp, chunk), recompute_of(config.train, chunk)
        layers = layout.layers(index)
        alike = Counter(layer in cast for layer in layers)
        parts += [
            (layer_traffic(config, next(layer for layer in layers if (layer in cast) is kind), recompute), count)
            for kind, count in alike.items()
        ]
        parts += [(embedding_traffic(config), 1)] if index == 0 else []
        parts += [(head_traffic(config), 1)] if index == layout.count - 1 else []
        neighbours = (index > 0) + (index < layout.count - 1)
        if p.tp > 1 and not p.sp and neighbours:
            whole = Collective("all_gather", message_bytes(config) * p.tp, "boundary")
            yield Sent("tp", whole, config.micro_batches * neighbours)
    for part, count in parts:
        for each in (*part.forward, *part.backward):
            yield Sent("tp", each, count * config.micro_batches)
        for each in part.once:
            yield Sent("tp", each, count)


def _messages(config: RunConfig, coord: Coord) -> Iterator[Sent]:
    """Between stages. Those to a later rank of the pipeline go up, those to an earlier one down."""
    layout, size = stages_of(config), message_bytes(config)
    if layout.pp == 1:
        return
    for chunk in range(layout.vpp):
        index = layout.index(coord.pp, chunk)
        for other in (index - 1, index + 1):
            if 0 <= other < layout.count:
                later = other % layout.pp > coord.pp
                yield Sent("pp.up" if later else "pp.down", Collective("send", size, "boundary"), config.micro_batches)
                yield Sent(
                    "pp.down" if later else "pp.up", Collective("receive", size, "boundary"), config.micro_batches
                )


def _gradients(config: RunConfig, coord: Coord) -> Iterator[Sent]:
    """Of each bucket: over data parallelism, of what every tp rank holds whole, and of a shared embedding."""
    p, facts = config.parallel, PRECISIONS[config.train.precision].facts
    compute, accumulate = facts["compute_bytes"], facts["accumulate_bytes"]
    for bucket in (bucket for chunk in rank_buckets(config, coord.pp) for bucket in chunk):
        low, high = bucket.shard(coord.dp) if p.zero else (0, bucket.size)
        if config.dp > 1:
            operation, times = (
                ("reduce_scatter" if p.zero else "all_reduce"),
                config.micro_batches if p.zero == 2 else 1,
            )
            yield Sent("dp", Collective(operation, accumulate * bucket.size, "gradients"), times)
            if p.zero:
                yield Sent("dp", Collective("all_gather", compute * bucket.size, "weights"))
        norms = min(bucket.whole[1], high) - max(bucket.whole[0], low)
        if p.sp and p.tp > 1 and norms > 0:
            yield Sent("tp", Collective("all_reduce", accumulate * norms, "norms"))
        if shared(config) and [slot.parameter.name for slot in bucket.slots] == [TOKEN_EMBEDDING]:
            yield Sent("tied", Collective("all_reduce", accumulate * (high - low), "embedding"))


def _optimizer(config: RunConfig, coord: Coord) -> Iterator[Sent]:
    """The squared norms of weights and of directions, where the update is scaled by them."""
    p = config.parallel
    if OPTIMIZERS[config.optimizer.name].facts["needs"] != "norms":
        return
    held = [slot.parameter for chunk in rank_buckets(config, coord.pp) for bucket in chunk for slot in bucket.slots]
    sums = Collective("all_reduce", 2 * FP64 * sum(parameter.decays for parameter in held), "parameter norms")
    if p.tp > 1:
        yield Sent("tp", sums)
    if p.zero and config.dp > 1:
        yield Sent("dp", sums)
    if shared(config) and coord.pp in (0, p.pp - 1):
        yield Sent("tied", Collective("all_reduce", 2 * FP64, "parameter norms"))


def _totals(config: RunConfig) -> Iterator[Sent]:
    """Of the whole job, in a large one over one axis after the other."""
    p, magnitudes = config.parallel, FP32 * _operands(config)
    axes = {"world.dp": config.dp * p.cp, "world.tp": p.tp, "world.pp": p.pp}
    groups = {"world": config.world} if config.world <= AT_ONCE else axes
    for number, (group, size) in enumerate(groups.items()):
        if size == 1:
            continue
        if magnitudes:
            yield Sent(group, Collective("all_reduce", magnitudes, "fp8 magnitudes"))
        operation, parts = ("all_gather", size) if number else ("all_reduce", 1)
        yield Sent(group, Collective(operation, FP64 * TOTALS * parts, "totals"))


def shared(config: RunConfig) -> bool:
    """Whether the two ends of the pipeline share the token embedding."""
    return config.model.tie_embeddings and config.parallel.pp > 1


def _operands(config: RunConfig) -> int:
    """How many operands in eight bits have a history: input, weight and gradient of each of a block's four layers, of
    which layers side by side share one input and one gradient.
    """
    if RECIPES[config.fp8.recipe].facts["scale"] != "history":
        return 0
    return len(eight_bit_layers(config)) * (10 if BLOCKS[config.model.block].facts["norms"] == 1 else 12)
