"""Steps of trainers with experts that this one is not: what their systems do otherwise (`PublishedStep`).

- FP8 in the GEMMs of experts, which may be fused with activation and quantization
- exchanges that send a row once to a rank with several of its experts (DeepEP, HybridEP), and once to a node
- exchanges that overlap with the compute of another micro-batch
- layers in stages as the source gives them, of equal time
- experts that tp shards as well: their rows are gathered and reduced over tp (Megatron-Core before folding)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from megascale.layout.parts.microbatch_sizes import CommOp
from megascale.layout.parts.times import PassTimes, Seconds
from megascale.layout.stages import Place
from megascale.plan.simulate.layer_time import LayerTimes, cast_bytes
from megascale.plan.simulate.link_time import Buckets, ExpertRoute
from megascale.plan.simulate.step_time import StepParts

Overlapped = Literal["none", "ep", "all"]


@dataclass(frozen=True)
class System:
    """A trainer of experts. `deduplicates`: a row travels once to a rank, and over the network once to a node;
    `overlaps`: exchanges of experts overlap with compute, or all communication between the ranks of a layer; `shards`:
    ranks that share each expert; `fused`: GEMMs of experts with the activation between them and what quantizes its
    operands and results; `balanced`: stages of equal time.
    """

    deduplicates: bool = False
    overlaps: Overlapped = "none"
    shards: int = 1
    fused: bool = False
    balanced: bool = False


def distinct_targets(experts: int, chosen: int, targets: int) -> float:
    """Return the expected number of targets that have any of a token's experts, of `targets` with equally many:
    n (1 - C(E - E/n, k) / C(E, k)).
    """
    none = math.comb(experts - experts // targets, chosen) / math.comb(experts, chosen)
    return targets * (1 - none)


@dataclass(frozen=True)
class DeduplicatedRoute(ExpertRoute):
    """The links of an exchange of deduplicated rows. `rank_share`, `node_share`: rows to a rank, and to a node, over
    the chosen experts.
    """

    rank_share: float = 1.0
    node_share: float = 1.0

    def seconds(self, sent: CommOp) -> float:
        across = (self.ranks - self.inside) / (self.ranks - 1)
        slower = max(self.rank_share / self.node, across * self.node_share / self.network)
        return sent.bytes * slower + sent.calls * self.latency


@dataclass(frozen=True)
class PublishedLayers(LayerTimes):
    """Times of the operations of a published system."""

    system: System = System()

    def grouped_linears(self, shapes: Iterable[tuple[int, int]], experts: int, rows: float, fp8: bool) -> PassTimes:
        (up, hidden), (_, width) = shapes
        n, recipe = self.system.shards, self.config.fp8.facts
        rows, up, width = rows * n, up // n, width // n
        if not self.config.train.quantizes:
            return super().grouped_linears([(up, hidden), (hidden, width)], experts, rows, fp8)
        total, grain = PassTimes(), recipe["granularity"]
        cast = cast_bytes(recipe["input"], from_codes=False)
        own = 0 if self.system.fused else cast  # of what lies between the two GEMMs
        for outputs, inputs, quantized in ((up, hidden, (cast, own)), (hidden, width, (own, cast))):
            forward, wgrad = self.kernels.grouped_gemm(experts, rows, outputs, inputs, grain, grain)
            dgrad, _ = self.kernels.grouped_gemm(experts, rows, inputs, outputs, grain)
            moved = quantized[0] * inputs, quantized[1] * outputs
            casts = [self.kernels.elementwise(experts * rows * size) for size in moved]
            casts[1] += self._added(experts * outputs * inputs)
            total += PassTimes(
                Seconds(gemm=forward, elementwise=casts[0]), Seconds(gemm=dgrad + wgrad, elementwise=casts[1])
            )
        return total + self.passes(experts * rows * (up + width)) * (-1 if self.system.fused else 0)

    def exchanges(self, sent: Sequence[Iterable[CommOp]], beside: PassTimes) -> PassTimes:
        passes, shards, ep = [list(each) for each in sent], self.system.shards, self.sizes.ep
        total = super().exchanges(passes, beside)
        if shards > 1:
            rows = [sum(op.bytes for op in each) * ep / (ep - 1) * shards for each in passes]
            gathered = (self.exchange.route.collective("all_gather", size, shards) for size in rows)
            total += PassTimes(*(Seconds(ep=seconds) for seconds in gathered))
        return total


@dataclass(frozen=True)
class PublishedStep(StepParts):
    """A step of a published system."""

    system: System = System()

    @cached_property
    def layers(self) -> LayerTimes:
        layers, model = super().layers, self.config.model
        route, chosen = layers.experts, model.experts_per_token
        if self.system.shards > 1:  # ranks along ep are `shards` apart
            route = replace(route, inside=max(1, route.inside // self.system.shards))
        elif self.system.deduplicates and route.ranks > 1:
            targets = route.ranks, route.ranks // route.inside
            shares = [distinct_targets(model.experts, chosen, number) / chosen for number in targets]
            route = DeduplicatedRoute(**vars(route), rank_share=shares[0], node_share=shares[1])
        return PublishedLayers(**(vars(layers) | {"experts": route}), system=self.system)

    @cached_property
    def modules(self) -> dict[Place, tuple[Buckets, ...]]:
        def shared(buckets: Buckets) -> Buckets:
            shards = {axes: self.system.shards if axes == ("edp",) else 1 for axes, _, _ in buckets}
            return tuple((axes, n // shards[axes], sent // shards[axes]) for axes, n, sent in buckets)

        return {place: tuple(map(shared, modules)) for place, modules in super().modules.items()}

    @cached_property
    def pairs(self) -> dict[Place, PassTimes]:
        pairs = super().pairs
        if self.system.balanced:
            pairs = dict.fromkeys(pairs, sum(pairs.values(), PassTimes()) * (1 / len(pairs)))
        if self.system.overlaps != "none":
            pairs = {
                place: PassTimes(self._overlapped(pair.forward), self._overlapped(pair.backward), pair.weights)
                for place, pair in pairs.items()
            }
        return pairs

    def _overlapped(self, work: Seconds) -> Seconds:
        sent = work.sent if self.system.overlaps == "all" else Seconds(ep=work.ep)
        hidden = min(self.hardware.attained.overlap * sent.total, work.total - work.sent.total)
        return work + sent * (-hidden / sent.total) if sent.total else work
