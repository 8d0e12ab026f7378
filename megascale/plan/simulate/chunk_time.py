"""Forward and backward times of model chunks, by cause, for one micro-batch on one rank (`chunk_times`)."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache

from megascale.layout.blocks import BlockSpec, distinct_blocks, frozen_names, is_skippable, tile_mlp
from megascale.layout.chunks import count_heads, fp8_layers, stages_of
from megascale.layout.parts.times import PassTimes, Seconds
from megascale.layout.recompute_policy import RecomputePolicy, recompute_policy
from megascale.layout.stages import Place
from megascale.plan.account.activations import block_bytes
from megascale.plan.simulate.layer_time import LayerTimes


def block_times(layers: LayerTimes, block: BlockSpec, fp8: bool, recompute: RecomputePolicy) -> PassTimes:
    """Time a block with recomputation. `fp8`: the linear layers run FP8 GEMMs."""
    parts = tile_mlp(block, recompute.mlp_tiles, recompute.stored_tiles)
    pairs = [part.seconds(layers, fp8) for part in parts]
    fixed = layers.kernels.measured.layer_s if layers.kernels.measured else 0.0
    total = sum(pairs, PassTimes(Seconds(elementwise=fixed), Seconds(elementwise=2 * fixed)))
    if fp8:
        total += sum(map(layers.spared, parts, (*parts[1:], None)), PassTimes())
    timed = [(part, pair.forward) for part, pair in zip(parts, pairs, strict=True)]
    if recompute.full:
        skipped = (taken for part, taken in timed if layers.stops_early and is_skippable(block, part))
        recomputed = total.forward + sum(skipped, Seconds()) * -1
    else:
        after = zip(timed, (*parts[1:], None), strict=True)
        recomputed = sum((part.recomputed_seconds(s, recompute, then) for (part, s), then in after), Seconds())
    backward = total.backward + Seconds(recompute=recomputed.total - recomputed.sent.total) + recomputed.sent
    launched = layers.launched(total.forward, 1), layers.launched(backward, 3 if recompute.full else 2)
    moved = block_bytes(layers.sizes, block, fp8, recompute).moved if recompute.store != "device" else 0
    rates = layers.kernels.hardware.store_rates(recompute.store)
    copies = ((work, moved / rate) for work, rate in zip(launched, rates, strict=True))  # behind the block's compute
    forward, back = (work + Seconds(offload=max(0.0, copied - work.total)) for work, copied in copies)
    return PassTimes(forward, back, total.weights)


def layer_times(layers: LayerTimes) -> Callable[[int, RecomputePolicy], PassTimes]:
    """Return a function that times a layer by its number, with recomputation; equal blocks are timed once."""
    c = layers.config
    (distinct, numbers), fp8 = distinct_blocks(c.model, tuple(c.train.freeze)), fp8_layers(c.model, c.train, c.fp8)
    part, parts = (layers.of_half(), 2) if c.overlap.tp == "domino" else (layers, 1)
    of_kinds = [
        replace(part, frozen=frozen_names(c.model, numbers.index(kind), c.train.freeze))
        for kind in range(len(distinct))
    ]
    times = cache(lambda kind, fp8, recompute: block_times(of_kinds[kind], distinct[kind], fp8, recompute) * parts)
    return lambda layer, recompute: times(numbers[layer], layer in fp8, recompute)


def chunk_times(layers: LayerTimes) -> dict[Place, PassTimes]:
    """Time every model chunk of every pipeline rank."""
    config, layer_time, times = layers.config, layer_times(layers), dict[Place, PassTimes]()
    stages, shared = stages_of(config.model, config.parallel), config.parallel.vocab_pp
    embedding, head = cache(layers.embedding), cache(layers.head)
    for place in itertools.product(range(config.parallel.pp), range(config.parallel.vpp)):
        stage = stages.index(*place)
        own = Counter(layer_time(layer, recompute_policy(config.train, layer)) for layer in stages.layers(stage))
        ends = embedding() if stage == 0 and not shared else PassTimes()
        if heads := count_heads(config.model, stages, stage):
            ends += head() * heads
        times[place] = sum((each * count for each, count in own.items()), ends)
    for rank in range(config.parallel.pp) if shared else ():
        times[rank, config.parallel.vpp] = layers.vocabulary(shared)
    return times
