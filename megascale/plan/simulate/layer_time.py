"""Forward and backward times of model chunks, by cause, for one micro-batch on one rank (`chunk_times`, `LayerTimes`).

The parts of a block (`layout.parts`) consist of GEMMs, attention, passes over memory, and collectives of tensor
parallelism (Korthikanti et al. 2022, 4.2), overlapped by a stack as in `profiles.Overlaps`. Backward of a linear layer
has two GEMMs, dgrad and wgrad; backward of an element-wise operation takes twice the forward.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from megascale.catalog.precisions import PRECISIONS
from megascale.catalog.recipes import RECIPES
from megascale.config.run import RunConfig
from megascale.layout.blocks import BlockSpec, distinct_blocks, is_skippable, tile_mlp
from megascale.layout.chunks import fp8_layers, stages_of
from megascale.layout.parts.microbatch_sizes import CommOp, MicroBatchSizes
from megascale.layout.parts.times import PassTimes, Seconds
from megascale.layout.pieces import MAX_PIECES
from megascale.layout.recompute_policy import RecomputePolicy, recompute_policy
from megascale.layout.stages import Place
from megascale.layout.tensors import padded_vocab
from megascale.plan.account.attended import expected_documents
from megascale.plan.account.sizes import micro_batch_sizes
from megascale.plan.simulate.gemm_time import KernelTimes
from megascale.plan.simulate.link_time import ContextRoutes, Route, group_route
from megascale.plan.simulate.profiles import Hardware, Stack

CASTS = {"current": 6, "delayed": 4, "static": 4, "row": 6, "block": 4}
"""Bytes moved to quantize an element, by origin of the scale: a 16-bit read and two FP8 writes, one transposed. Current
and row-wise scales take another pass for the amax.
"""

LOSS_PASSES = 4  # passes over the logits in forward of the fp32 loss, and in backward


@dataclass(frozen=True)
class TpCollectives:
    """Tensor-parallel collectives on activations of `size` bytes, with `Overlaps.tp` and `StageTimes.slowdown`."""

    route: Route
    tp: int
    sp: bool
    size: int
    overlaps: str
    slowdown: float

    def gather(self) -> float:
        """Time an all-gather."""
        return self.route.collective("all_gather", self.size, self.tp)

    def exposed(self, gemm: float, *, enters: bool, backward: bool = False) -> float:
        """Exposed seconds of a collective on the input (`enters`) or the output of a GEMM of `gemm` seconds."""
        overlaps_all = self.overlaps == "all"
        overlaps = overlaps_all or (self.overlaps == "backward" and backward and not enters)
        if self.sp:
            return self._exposed(self.gather(), gemm, overlaps, pieces=overlaps_all)
        # without sequence parallelism inputs are replicated
        return 0.0 if enters else self._exposed(self.route.collective("all_reduce", self.size, self.tp), gemm, overlaps)

    def regathered(self, wgrad: float) -> float:
        """Exposed seconds of an input's all-gather for wgrad. `wgrad`: seconds of the GEMM."""
        return self._exposed(self.gather(), wgrad, self.overlaps != "none") if self.sp else 0.0

    def _exposed(self, sent: float, gemm: float, overlaps: bool, pieces: bool = False) -> float:
        least = max(1 / MAX_PIECES if pieces else 0.0, self.slowdown)
        return max(least * sent, sent - gemm) if overlaps else sent


@dataclass(frozen=True)
class LayerTimes:
    """Times of a model's units and their operations (`layout.parts.times.OperationTimes`) on one tensor-parallel rank,
    for one micro-batch, or one of its `tiles` of tokens.
    """

    config: RunConfig
    kernels: KernelTimes
    exchange: TpCollectives
    context: ContextRoutes
    tiles: int = 1

    @classmethod
    def from_config(cls, config: RunConfig, hardware: Hardware, stack: Stack) -> LayerTimes:
        """Build from a resolved configuration. With dropout attention is unfused, as in this trainer."""
        p, m, precision = config.parallel, config.model, config.train.precision
        stack = stack.model_copy(update={"attention": "unfused"}) if m.dropout else stack
        size = PRECISIONS[precision].facts["compute_bytes"]
        kernels = KernelTimes(hardware, stack, "bf16" if config.train.quantizes else precision, size)
        route = group_route(hardware, p.tp, 1, config.world_size, together=p.tp)
        overlaps = stack.overlaps.tp if config.overlap.tp else "none"
        activation = config.batch.micro * config.row_tokens * m.hidden_size * size
        slowdown = 1 - hardware.attained.overlap
        context = ContextRoutes.of_layout(hardware, p, config.world_size, config.overlap.cp)
        return cls(config, kernels, TpCollectives(route, p.tp, p.sp, activation, overlaps, slowdown), context)

    @property
    def tokens(self) -> int:
        return self.config.batch.micro * self.config.row_tokens // self.tiles

    @property
    def stream(self) -> int:
        p = self.config.parallel
        return (self.tokens // p.tp if p.sp else self.tokens) * self.config.model.hidden_size

    @property
    def stops_early(self) -> bool:
        return self.kernels.stack.stops_early

    @cached_property
    def sizes(self) -> MicroBatchSizes:
        return micro_batch_sizes(self.config)

    def in_tiles(self, tiles: int) -> LayerTimes:
        exchange = replace(self.exchange, size=self.exchange.size // tiles)
        return replace(self, tiles=self.tiles * tiles, exchange=exchange)

    def block(self, block: BlockSpec, fp8: bool, recompute: RecomputePolicy) -> PassTimes:
        """Time a block with recomputation. `fp8`: the linear layers run FP8 GEMMs."""
        parts = tile_mlp(block, recompute.mlp_tiles)
        pairs = [part.seconds(self, fp8) for part in parts]
        fixed = self.kernels.measured.layer_s if self.kernels.measured else 0.0
        total = sum(pairs, PassTimes(Seconds(elementwise=fixed), Seconds(elementwise=2 * fixed)))
        timed = [(part, pair.forward) for part, pair in zip(parts, pairs, strict=True)]
        if recompute.full:
            skipped = (taken for part, taken in timed if self.stops_early and is_skippable(block, part))
            recomputed = total.forward + sum(skipped, Seconds()) * -1
        else:
            after = zip(timed, (*parts[1:], None), strict=True)
            recomputed = sum((part.recomputed_seconds(s, recompute, then) for (part, s), then in after), Seconds())
        sent = Seconds(tp=recomputed.tp, cp=recomputed.cp)
        backward = total.backward + Seconds(recompute=recomputed.total - sent.total) + sent
        launched = self._launched(total.forward, 1), self._launched(backward, 3 if recompute.full else 2)
        copied = self._copied() if recompute.offload else 0.0  # behind a block's forward, and behind its backward
        return PassTimes(*(work + Seconds(offload=max(0.0, copied - work.total)) for work in launched))

    def _copied(self) -> float:
        """Time the copy of a block's input over the link to host memory; zero if its bandwidth is unknown."""
        hardware, link = self.kernels.hardware, self.kernels.hardware.device.host_bandwidth
        return self.stream * self.kernels.bytes / (link * hardware.attained.link) if link else 0.0

    def _launched(self, work: Seconds, passes: int) -> Seconds:
        """Add the wait for the host, which launches the operations of `passes` forwards."""
        host = passes * self.kernels.stack.host_s
        return work + Seconds(host=host if self.kernels.stack.launch_blocking else max(0.0, host - work.total))

    def embedding(self) -> PassTimes:
        """Time the token embedding."""
        return self.passes(2 * self.stream, 1) + PassTimes(Seconds(tp=self.exchange.exposed(0.0, enters=False)))

    def head(self) -> PassTimes:
        """Time the head's GEMMs and the loss."""
        m, tp = self.config.model, self.config.parallel.tp
        columns, gather = padded_vocab(m, tp) // tp, self.exchange.gather() if self.config.parallel.sp else 0.0
        loss = self.passes(LOSS_PASSES * self.tokens * columns, 1)
        gathers = PassTimes(Seconds(tp=gather), Seconds(tp=2 * gather))
        return self._gemms(columns, m.hidden_size, fp8=False) + loss + gathers

    def passes(self, elements: float, backward: int = 2) -> PassTimes:
        seconds = self.kernels.elementwise(elements * self.kernels.bytes)
        return PassTimes(Seconds(elementwise=seconds), Seconds(elementwise=backward * seconds))

    def sums(self, nbytes: int) -> PassTimes:
        seconds = self.exchange.route.collective("all_reduce", nbytes, self.config.parallel.tp)
        return PassTimes(Seconds(tp=seconds), Seconds(tp=seconds))

    def linears(self, shapes: Iterable[tuple[int, int]], fp8: bool, enters: bool) -> PassTimes:
        gemms = sum((self._gemms(*shape, fp8) for shape in shapes), PassTimes())
        wgrad = gemms.backward.gemm / 2  # dgrad takes as long
        forward = self.exchange.exposed(gemms.forward.gemm, enters=enters)
        backward = self.exchange.exposed(wgrad, enters=not enters, backward=True)
        backward += self.exchange.regathered(wgrad) if enters else 0.0
        return gemms + PassTimes(Seconds(tp=forward), Seconds(tp=backward))

    def attention(self, heads: int, window: int | None, width: int, exchanges: Sequence[Iterable[CommOp]]) -> PassTimes:
        """Time attention document by document; unfused with all scores. Ranks that share sequences have equal shares of
        it, as chunks are taken to have.
        """
        m, heads = self.config.model, self.config.batch.micro * heads // self.config.parallel.tp
        if self.kernels.stack.attention == "unfused":
            times = [self.kernels.attention(heads, m.seq_length, window, width)]
        else:
            times = [
                self.kernels.attention(count * heads, keys, min(window or keys, keys), width)
                for keys, count in Counter(expected_documents(m, self.config.data)).items()
            ]
        parts = m.seq_length / self.config.row_tokens
        taken = [sum(passes) / parts for passes in zip(*times, strict=True)]
        sent = map(self.context.exposed, exchanges, taken)
        return PassTimes(*(Seconds(attention=s, cp=exposed) for s, exposed in zip(taken, sent, strict=True)))

    def _gemms(self, outputs: int, inputs: int, fp8: bool) -> PassTimes:
        """Time a linear layer Y = X W^T of this rank: Y, dgrad dX = dY W, wgrad dW = dY^T X, quantized operands."""
        facts, gemm, moved = RECIPES[self.config.fp8.recipe].facts, self.kernels.gemm, self.kernels.elementwise
        m, n, k, grain = self.tokens, outputs, inputs, facts["granularity"] if fp8 else None
        cast = CASTS[facts["scaling"] if grain == "tensor" else grain] if grain else 0
        backward = gemm(m, k, n, grain=grain) + gemm(n, k, m, grain=grain)
        count = max(1, self.config.num_microbatches) if self.kernels.stack.gradient_bytes == 2 else 1
        # 16-bit gradients are added in a pass: two reads, one write; an fp32 wgrad GEMM accumulates by itself
        added = 3 * 2 * n * k * (count - 1) / count
        casts = moved(cast * m * n) + self.kernels.stream(added)
        return PassTimes(Seconds(gemm(m, n, k, grain=grain), 0.0, moved(cast * m * k)), Seconds(backward, 0.0, casts))


def chunk_times(config: RunConfig, hardware: Hardware, stack: Stack) -> dict[Place, PassTimes]:
    """Time every model chunk of every pipeline rank, for a resolved configuration."""
    layers, stages, fp8 = LayerTimes.from_config(config, hardware, stack), stages_of(config), fp8_layers(config)
    distinct, numbers = distinct_blocks(config.model)
    kinds = [(number, layer in fp8) for layer, number in enumerate(numbers)]
    block = cache(lambda number, fp8, recompute: layers.block(distinct[number], fp8, recompute))

    @cache
    def chunk(
        layer_kinds: tuple[tuple[int, bool], ...], recompute: RecomputePolicy, first: bool, last: bool
    ) -> PassTimes:
        ends = (layers.embedding() if first else PassTimes()) + (layers.head() if last else PassTimes())
        return sum((block(*kind, recompute) * count for kind, count in Counter(layer_kinds).items()), ends)

    times = dict[Place, PassTimes]()
    for place in itertools.product(range(config.parallel.pp), range(config.parallel.vpp)):
        stage, recompute = stages.index(*place), recompute_policy(config.train, place[1])
        layer_kinds = tuple(kinds[layer] for layer in stages.layers(stage))
        times[place] = chunk(layer_kinds, recompute, stage == 0, stage == stages.count - 1)
    return times
