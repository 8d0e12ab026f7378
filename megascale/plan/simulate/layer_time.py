"""Forward and backward times of model chunks, by cause, for one micro-batch on one rank (`chunk_times`, `LayerTimes`).

Blocks (`layout.blocks`) consist of GEMMs, attention, passes over memory, and collectives of tensor parallelism
(Korthikanti et al. 2022, 4.2), overlapped by a stack as in `profiles.Overlaps`. Backward of a linear layer has two
GEMMs, dgrad and wgrad; backward of an element-wise operation takes twice the forward.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Self

from megascale.catalog.precisions import PRECISIONS
from megascale.catalog.recipes import RECIPES
from megascale.config.run import RunConfig
from megascale.layout import blocks
from megascale.layout.chunks import fp8_layers, stages_of
from megascale.layout.pieces import MAX_PIECES
from megascale.layout.recompute_policy import RecomputePolicy, recompute_policy
from megascale.layout.stages import Place
from megascale.layout.tensors import padded_vocab
from megascale.plan.account.attended import expected_documents
from megascale.plan.simulate.context_time import ContextRoutes
from megascale.plan.simulate.gemm_time import KernelTimes
from megascale.plan.simulate.link_time import Route, group_route
from megascale.plan.simulate.profiles import Hardware, Stack

CASTS = {"current": 6, "delayed": 4, "static": 4, "row": 6, "block": 4}
"""Bytes moved to quantize an element, by origin of the scale: a 16-bit read and two FP8 writes, one transposed. Current
and row-wise scales take another pass for the amax.
"""

LOSS_PASSES = 4  # passes over the logits in forward of the fp32 loss, and in backward


class _Sum:
    """Field-wise addition and scaling."""

    def __add__(self, other: Self) -> Self:
        return type(self)(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __mul__(self, factor: float) -> Self:
        return type(self)(*(value * factor for value in vars(self).values()))


@dataclass(frozen=True)
class Seconds(_Sum):
    """Seconds of a rank by cause. `host`: waits for launches; `tp`, `cp`, `dp`: exposed communication, for dp of
    ZeRO-3; `offload`: exposed copies of block inputs to and from host memory.
    """

    gemm: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    recompute: float = 0.0
    host: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    dp: float = 0.0
    offload: float = 0.0

    @property
    def total(self) -> float:
        return sum(vars(self).values())


@dataclass(frozen=True)
class PassTimes(_Sum):
    """A forward and a backward."""

    forward: Seconds = Seconds()
    backward: Seconds = Seconds()


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
    """Times of a model's units and their parts on one tensor-parallel rank, for one micro-batch, or one of its `tiles`
    of tokens.
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
        routes = ContextRoutes.from_config(config, hardware)
        return cls(config, kernels, TpCollectives(route, p.tp, p.sp, activation, overlaps, slowdown), routes)

    @property
    def tokens(self) -> int:
        return self.config.batch.micro * self.config.row_tokens // self.tiles

    @property
    def stream(self) -> int:
        """Elements of the residual stream on this rank."""
        p = self.config.parallel
        return (self.tokens // p.tp if p.sp else self.tokens) * self.config.model.hidden_size

    def block(self, parts: blocks.BlockSpec, fp8: bool, recompute: RecomputePolicy) -> PassTimes:
        """Time a block with recomputation. `fp8`: the linear layers run FP8 GEMMs."""
        tiled = blocks.tile_mlp(parts, recompute.mlp_tiles)
        pairs = [self.part(part, fp8) for part in tiled]
        fixed = self.kernels.measured.layer_s if self.kernels.measured else 0.0
        total = sum(pairs, PassTimes(Seconds(elementwise=fixed), Seconds(elementwise=2 * fixed)))
        recomputed = self._recomputed(tiled, pairs, recompute)
        if recompute.full:
            early, timed = self.kernels.stack.stops_early, zip(tiled, pairs, strict=True)
            skipped = (pair.forward for part, pair in timed if early and blocks.is_skippable(parts, part))
            recomputed = total.forward + sum(skipped, Seconds()) * -1
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

    def part(self, part: blocks.BlockPart, fp8: bool) -> PassTimes:
        """Time a part of a block, with exposed communication of tensor parallelism."""
        m, tp = self.config.model, self.config.parallel.tp
        match part:
            case blocks.LinearGroup():
                return self._linears(part, fp8)
            case blocks.AttentionSpec():
                seconds = self._attention(self.config.batch.micro * part.heads // tp, part)
                moved = self._passes(2 * self.tokens * part.qkv_width // tp)  # q, k, v transposed to [b, heads, s, d]
                exposed = (self.context.exposed(self.config, part, s, back) for back, s in enumerate(seconds))
                attended = (Seconds(attention=s, cp=sent) for s, sent in zip(seconds, exposed, strict=True))
                return moved + self._qk_norm(part) + PassTimes(*attended)
            case blocks.ActivationSpec():
                return self._passes(self.tokens * (part.inputs + part.outputs) // tp)
            case blocks.NormSpec():
                return self._passes(2 * self.stream)
            case blocks.TiledMLP():
                return self._tiled(part, fp8)
            case blocks.ResidualAdd():
                return self._passes((7 if m.dropout else 3) * self.stream)

    def _tiled(self, mlp: blocks.TiledMLP, fp8: bool) -> PassTimes:
        """Time an MLP in tiles. The backward of a tile repeats its forward, or where a stack stops early all of it but
        the last GEMM.
        """
        exchange = replace(self.exchange, size=self.exchange.size // mlp.tiles)
        tile = replace(self, tiles=self.tiles * mlp.tiles, exchange=exchange)
        first, last = tile.part(mlp.columns, fp8) + tile.part(mlp.activation, fp8), tile.part(mlp.rows, fp8)
        again = first.forward + (Seconds() if self.kernels.stack.stops_early else last.forward)
        repeated = Seconds(recompute=again.total - again.tp, tp=again.tp)
        return (first + last + PassTimes(Seconds(), repeated)) * mlp.tiles

    def _attention(self, heads: int, part: blocks.AttentionSpec) -> tuple[float, float]:
        """Time the attention of `heads` in forward and backward, document by document; unfused with all scores. Ranks
        that share sequences have equal shares of it, as chunks are taken to have.
        """
        m, lengths = self.config.model, Counter(expected_documents(self.config))
        if self.kernels.stack.attention == "unfused":
            times = [self.kernels.attention(heads, m.seq_length, part.window, part.head_dim)]
        else:
            times = [
                self.kernels.attention(count * heads, keys, min(part.window or keys, keys), part.head_dim)
                for keys, count in lengths.items()
            ]
        parts = m.seq_length / self.config.row_tokens
        return sum(forward for forward, _ in times) / parts, sum(backward for _, backward in times) / parts

    def _qk_norm(self, part: blocks.AttentionSpec) -> PassTimes:
        """Time the norms of q and k, a read and a write each; over all heads with sums over tp."""
        tp, passes = self.config.parallel.tp, PassTimes()
        if part.qk_norms:
            passes = self._passes(2 * self.tokens * (part.heads + part.kv_heads) * part.head_dim // tp)
        if part.qk_norm != "full":
            return passes
        wide = PRECISIONS[self.config.train.precision].facts["accumulate_bytes"]
        sums = self.exchange.route.collective("all_reduce", 2 * self.tokens * wide, tp)
        return passes + PassTimes(Seconds(tp=sums), Seconds(tp=sums))

    def embedding(self) -> PassTimes:
        """Time the token embedding."""
        return self._passes(2 * self.stream, 1) + PassTimes(Seconds(tp=self.exchange.exposed(0.0, enters=False)))

    def head(self) -> PassTimes:
        """Time the head's GEMMs and the loss."""
        m, tp = self.config.model, self.config.parallel.tp
        columns, gather = padded_vocab(m, tp) // tp, self.exchange.gather() if self.config.parallel.sp else 0.0
        loss = self._passes(LOSS_PASSES * self.tokens * columns, 1)
        gathers = PassTimes(Seconds(tp=gather), Seconds(tp=2 * gather))
        return self._gemms(columns, m.hidden_size, fp8=False) + loss + gathers

    def _passes(self, elements: float, backward: int = 2) -> PassTimes:
        """Time element-wise operations with `elements` moved in forward, and `backward` times as many in backward."""
        seconds = self.kernels.elementwise(elements * self.kernels.bytes)
        return PassTimes(Seconds(elementwise=seconds), Seconds(elementwise=backward * seconds))

    def _linears(self, group: blocks.LinearGroup, fp8: bool) -> PassTimes:
        """Time linear layers with a common collective."""
        enters, tp = isinstance(group, blocks.ColumnParallel), self.config.parallel.tp
        rows, columns = (tp, 1) if enters else (1, tp)  # shards of a weight [outputs, inputs]
        shapes = [(layer.outputs // rows, layer.inputs // columns) for layer in group.layers]
        gemms = sum((self._gemms(*shape, fp8) for shape in shapes), PassTimes())
        wgrad = gemms.backward.gemm / 2  # dgrad takes as long
        forward = self.exchange.exposed(gemms.forward.gemm, enters=enters)
        backward = self.exchange.exposed(wgrad, enters=not enters, backward=True)
        backward += self.exchange.regathered(wgrad) if enters else 0.0
        return gemms + PassTimes(Seconds(tp=forward), Seconds(tp=backward))

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

    def _recomputed(self, parts: blocks.BlockSpec, pairs: Sequence[PassTimes], recompute: RecomputePolicy) -> Seconds:
        """Time the forward of selectively recomputed operations: norms only before column-parallel layers."""
        total = Seconds()
        for part, after, pair in zip(parts, (*parts[1:], None), pairs, strict=True):
            linear = isinstance(after, blocks.ColumnParallel | blocks.TiledMLP)
            norm = recompute.norm and isinstance(part, blocks.NormSpec) and linear
            if norm or (recompute.activation and isinstance(part, blocks.ActivationSpec)):
                total += pair.forward
            elif recompute.attention and isinstance(part, blocks.AttentionSpec):
                total += Seconds(attention=pair.forward.attention, cp=pair.forward.cp)
        return total


def chunk_times(config: RunConfig, hardware: Hardware, stack: Stack) -> dict[Place, PassTimes]:
    """Time every model chunk of every pipeline rank, for a resolved configuration."""
    layers, stages, fp8 = LayerTimes.from_config(config, hardware, stack), stages_of(config), fp8_layers(config)
    distinct, numbers = blocks.distinct_blocks(config.model)
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
