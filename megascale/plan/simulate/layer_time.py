"""Times of the operations of a layer's parts, for one micro-batch on one rank (`LayerTimes`).

The parts of a block (`layout.parts`) consist of GEMMs, attention, passes over memory, and collectives of tensor
parallelism (Korthikanti et al. 2022, 4.2), overlapped by a stack as in `profiles.Overlaps`. Backward of a linear layer
has two GEMMs, dgrad and wgrad; backward of an element-wise operation takes twice the forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megascale.catalog.recipes import TENSOR, QuantizerSpec
from megascale.config.run import RunConfig
from megascale.config.sparse_pattern import Reach
from megascale.layout.freezing import matches
from megascale.layout.gpu_overlap import Operand, overlaps_on_gpus
from megascale.layout.parts.microbatch_sizes import CommOp, MicroBatchSizes
from megascale.layout.parts.part import Part
from megascale.layout.parts.times import PassTimes, Seconds
from megascale.layout.tensors import HEAD, TOKEN_EMBEDDING, padded_vocab
from megascale.plan.account.sizes import micro_batch_sizes
from megascale.plan.simulate.gemm_time import HOST_WAIT_S, KernelTimes
from megascale.plan.simulate.link_time import ContextRoutes, ExpertRoute, TpCollectives, group_route
from megascale.plan.simulate.profiles import Hardware, Stack

CAST_ONCE = 3  # bytes moved to quantize an element of experts, whose wgrad is not in FP8

LOSS_PASSES = 4  # passes over the logits in forward of the fp32 loss, and in backward


def cast_bytes(spec: QuantizerSpec, from_codes: bool) -> int:
    """Count the bytes moved to quantize an element for GEMMs in both directions: 16-bit reads, and writes of codes. A
    current scale of the tensor takes another read for its amax; a transpose with other scales a cast of its own, and
    `from_codes`, which are decoded, also an amax of whole rows. Other kernels spare some (`LayerTimes.spared`).
    """
    amax = 2 if spec.amax_block == TENSOR and spec.scaling == "current" else 0
    casts, decoded = 1 if spec.block.serves_transpose else 2, 0
    if spec.requantises and from_codes:
        decoded = 3 + (2 if spec.block.k is None else 0)
    return casts * (2 + amax) + spec.row_bytes(2)[0] + decoded


@dataclass(frozen=True)
class LayerTimes:
    """Times of a model's units and their operations (`layout.parts.times.OperationTimes`) on one tensor-parallel rank,
    for one micro-batch, or one of its `tiles` of tokens. `frozen`: as of `MicroBatchSizes`.
    """

    config: RunConfig
    kernels: KernelTimes
    exchange: TpCollectives
    context: ContextRoutes
    experts: ExpertRoute
    tiles: int = 1
    frozen: frozenset[str] = frozenset()

    @classmethod
    def from_config(cls, config: RunConfig, hardware: Hardware, stack: Stack) -> LayerTimes:
        """Build from a resolved configuration. With dropout attention is unfused, as in this trainer."""
        p, m, precision = config.parallel, config.model, config.train.precision
        stack = stack.model_copy(update={"attention": "unfused"}) if m.dropout else stack
        size = config.train.element_bytes[0]
        kernels = KernelTimes(hardware, stack, "bf16" if config.train.quantizes else precision, size)
        route = group_route(hardware, p.tp, 1, config.world_size, together=p.tp)
        overlaps: str = stack.overlaps.tp if config.overlap.tp else "none"
        if config.overlap.tp == "domino" and overlaps != "none":
            overlaps = "domino"
        activation = config.batch.micro * config.row_tokens * m.hidden_size * size
        slowdown = 1 - hardware.attained.overlap
        context = ContextRoutes.of_layout(hardware, p, config.world_size, config.overlap.cp)
        experts = ExpertRoute.of_layout(hardware, p, config.world_size)
        return cls(config, kernels, TpCollectives(route, p.tp, p.sp, activation, overlaps, slowdown), context, experts)

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
        return replace(micro_batch_sizes(self.config, self.kernels.stack.imbalance), frozen=self.frozen)

    def of_half(self) -> LayerTimes:
        """Return the times of half of a micro-batch's sequences."""
        config = self.config.changed(batch={"micro": self.config.batch.micro // 2})
        return replace(self, config=config, exchange=replace(self.exchange, size=self.exchange.size // 2))

    def in_tiles(self, tiles: int) -> LayerTimes:
        exchange = replace(self.exchange, size=self.exchange.size // tiles)
        return replace(self, tiles=self.tiles * tiles, exchange=exchange)

    def launched(self, work: Seconds, passes: int) -> Seconds:
        """Add the wait for the host, which launches the operations of `passes` forwards."""
        host = passes * self.kernels.stack.host_s
        return work + Seconds(host=host if self.kernels.stack.launch_blocking else max(0.0, host - work.total))

    def embedding(self) -> PassTimes:
        """Time the token embedding."""
        return self.passes(2 * self.stream, 1) + PassTimes(Seconds(tp=self.exchange.exposed(0.0, enters=False)))

    def vocabulary(self, barriers: int) -> PassTimes:
        """Time VS and VT, on the rows of one of all stages; lookups are not counted. With one barrier VS has dgrad."""
        head = self.head(self.config.parallel.pp)
        dgrad = Seconds(head.backward.gemm / 2 if barriers == 1 else 0.0)
        return PassTimes(head.forward + dgrad, head.backward + dgrad * -1)

    def head(self, stages: int = 1) -> PassTimes:
        """Time the head's GEMMs and the loss. `stages`: that share its rows."""
        m, ranks = self.config.model, self.config.parallel.tp * stages
        columns, gather = padded_vocab(m, ranks) // ranks, self.exchange.gather() if self.config.parallel.sp else 0.0
        loss = self.passes(LOSS_PASSES * self.tokens * columns, 1)
        gathers = PassTimes(Seconds(tp=gather), Seconds(tp=2 * gather))
        gemms = self._gemms(columns, m.hidden_size, fp8=False)
        if matches(TOKEN_EMBEDDING if m.tie_embeddings else HEAD, self.config.train.freeze):
            gemms += PassTimes(backward=gemms.weights * -1)
        return PassTimes(gemms.forward, gemms.backward) + loss + gathers  # the loss has its wgrad beside it

    def passes(self, elements: float, backward: int = 2) -> PassTimes:
        seconds = self.kernels.elementwise(elements * self.kernels.bytes)
        return PassTimes(Seconds(elementwise=seconds), Seconds(elementwise=backward * seconds))

    def spared(self, part: Part, after: Part | None) -> PassTimes:
        """Return the time of a cast's reads that the kernels of a part spare, negative. `after`: the next part."""
        facts = self.config.fp8.facts
        if not self.kernels.stack.spares_reads or facts["input"].block != TENSOR:
            return PassTimes()
        reads = part.spared_reads(self.sizes, after, facts["scaling"] == "current")
        return PassTimes(*(Seconds(elementwise=-self.kernels.elementwise(nbytes)) for nbytes in reads))

    def sums(self, nbytes: int) -> PassTimes:
        seconds = self.exchange.route.collective("all_reduce", nbytes, self.config.parallel.tp)
        return PassTimes(Seconds(tp=seconds), Seconds(tp=seconds))

    def linears(self, shapes: Iterable[tuple[int, int]], fp8: bool, enters: bool, width: int) -> PassTimes:
        shapes = list(shapes)
        exchange = self._exchange(width, "input", 1 if enters else len(shapes), fp8)
        gemms = sum((self._gemms(*shape, fp8) for shape in shapes), PassTimes())
        wgrad, split = gemms.backward.gemm / 2, self.sizes.split  # dgrad takes as long
        forward = exchange.exposed(gemms.forward.gemm, enters=enters)
        beside = 0.0 if split and enters else wgrad  # in I no wgrad hides the reduction of dX
        backward = self._exchange(width, "gradient", 1, fp8).exposed(beside, enters=not enters, backward=True)
        again = exchange.regathered(wgrad) if enters or split else 0.0
        return gemms + PassTimes(Seconds(tp=forward), Seconds(tp=backward + again), Seconds(tp=again))

    def attention(
        self, heads: int, window: Reach | None, width: int, exchanges: Sequence[Iterable[CommOp]]
    ) -> PassTimes:
        """Time attention document by document; unfused with all scores. Ranks that share sequences have equal shares of
        it, as chunks are taken to have.
        """
        m, heads = self.config.model, self.config.batch.micro * heads // self.config.parallel.tp
        if self.kernels.stack.attention == "unfused":
            times = [self.kernels.attention(heads, m.seq_length, window, width)]
        else:
            times = [
                self.kernels.attention(count * heads, keys, window, width)
                for keys, count in Counter(self.sizes.documents or [m.seq_length]).items()
            ]
        parts = m.seq_length / self.config.row_tokens
        return self._attended([sum(passes) / parts for passes in zip(*times, strict=True)], exchanges)

    def linear_attention(self, heads: int, width: int, block: int, exchanges: Sequence[Iterable[CommOp]]) -> PassTimes:
        """Time the GEMMs of each block: of scores, of their result, of the state that a block adds, and of a result by
        the state. Backward has those of scores and states again, and the gradients of both factors of each.
        """
        count = max(1, self.tokens * heads // (self.config.parallel.tp * block))
        shapes = (block, block, width), (block, width, block), (width, width, block), (block, width, width)
        scores, results, added, by_state = (self.kernels.gemm(*shape, count=count) for shape in shapes)
        backward = 2 * scores + 3 * results + 2 * added + 3 * by_state
        return self._attended([scores + results + added + by_state, backward], exchanges)

    def _attended(self, taken: Sequence[float], exchanges: Sequence[Iterable[CommOp]]) -> PassTimes:
        sent = map(self.context.exposed, exchanges, taken)
        return PassTimes(*(Seconds(attention=s, cp=exposed) for s, exposed in zip(taken, sent, strict=True)))

    def local_linear(self, outputs: int, inputs: int) -> PassTimes:
        return self._gemms(outputs, inputs, fp8=False, tokens=self.stream // self.config.model.hidden_size)

    def grouped_linears(self, shapes: Iterable[tuple[int, int]], experts: int, rows: float, fp8: bool) -> PassTimes:
        facts, total = self.config.fp8.facts, PassTimes()
        grain = facts["granularity"] if fp8 and facts["serves_experts"] else None
        cast, of_wgrad = CAST_ONCE * experts * rows if grain else 0, grain if facts["free_borders"] else None
        for outputs, inputs in shapes:
            forward, wgrad = self.kernels.grouped_gemm(experts, rows, outputs, inputs, grain, of_wgrad)
            dgrad, _ = self.kernels.grouped_gemm(experts, rows, inputs, outputs, grain)
            before, after = (self.kernels.elementwise(cast * width) for width in (inputs, outputs))
            turned = cast_bytes(facts["input"], True) * experts * rows * (inputs + outputs) if of_wgrad else 0
            added = self._added(experts * outputs * inputs)
            weights = Seconds(wgrad, elementwise=added + self.kernels.elementwise(turned))
            total += PassTimes(
                Seconds(forward, elementwise=before), Seconds(dgrad, elementwise=after) + weights, weights
            )
        return total

    def exchanges(self, sent: Sequence[Iterable[CommOp]], beside: PassTimes) -> PassTimes:
        """Time the exchanges, which with an all-to-all wait for the rank with most rows. A split backward has no wgrad
        beside them.
        """
        if self.sizes.ep == 1:
            return PassTimes()
        uneven = 1 if self.sizes.gathers_tokens else self.sizes.imbalance
        gemms = beside.forward.gemm, beside.backward.gemm - (beside.weights.gemm if self.sizes.split else 0.0)
        exposed = (
            self.experts.exposed(passed, gemm / uneven) * uneven for passed, gemm in zip(sent, gemms, strict=True)
        )
        return PassTimes(*(Seconds(ep=each) for each in exposed))

    def host_wait(self) -> PassTimes:
        return PassTimes(Seconds(host=0.0 if self.kernels.measured else HOST_WAIT_S))

    def _exchange(self, width: int, operand: Operand, inputs: int, fp8: bool) -> TpCollectives:
        """Return the collectives of activations of `width` beside the GEMMs of an operand (`overlaps_on_gpus`)."""
        hidden, overlaps, node = self.config.model.hidden_size, self.exchange.overlaps, self.kernels.hardware.node
        if overlaps == "large":
            rows = self.stream // hidden
            p, recipe = self.config.parallel, self.config.fp8.facts if fp8 else None
            large = overlaps_on_gpus(p, node.devices, rows, operand, inputs=inputs, fp8=recipe)
            overlaps = "all" if large else "backward"
        return replace(self.exchange, size=self.exchange.size * width // hidden, overlaps=overlaps)

    def _gemms(self, outputs: int, inputs: int, fp8: bool, tokens: int | None = None) -> PassTimes:
        """Time a linear layer Y = X W^T of this rank: Y, dgrad dX = dY W, wgrad dW = dY^T X, quantized operands.
        `tokens`: of X, by default of the whole sequence.
        """
        facts, gemm, moved = self.config.fp8.facts, self.kernels.gemm, self.kernels.elementwise
        m, n, k, grain = tokens or self.tokens, outputs, inputs, facts["granularity"] if fp8 else None
        ours = self.kernels.stack.spares_reads  # Transformer Engine casts both directions from 16 bits
        of_input, of_gradient = (cast_bytes(facts[name], ours) if fp8 else 0 for name in ("input", "gradient"))
        forward = Seconds(gemm(m, n, k, grain=grain), 0.0, moved(of_input * m * k))
        weights = Seconds(gemm(n, k, m, grain=grain), 0.0, self._added(n * k))
        return PassTimes(
            forward, Seconds(gemm(m, k, n, grain=grain), 0.0, moved(of_gradient * m * n)) + weights, weights
        )

    def _added(self, elements: int) -> float:
        """Time the addition of a micro-batch's gradients of a weight: 16-bit ones are added in a pass, with two reads
        and a write; an fp32 wgrad GEMM accumulates by itself.
        """
        count = max(1, self.config.num_microbatches) if self.kernels.stack.gradient_bytes == 2 else 1
        return self.kernels.stream(3 * 2 * elements * (count - 1) / count)
