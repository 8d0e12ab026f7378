"""Seconds of a model chunk's forward and backward for one micro-batch on one rank, by cause.

They follow from the description of blocks (`layout.blocks`): GEMMs, attention, passes over memory, and the collectives
of tensor parallelism (Korthikanti et al. 2022, 4.2), which a stack overlaps as `profiles.Hides` says. A linear layer's
backward has two GEMMs, dgrad and wgrad; element-wise operations take twice as long in a backward.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Self

from megascale.catalog.precisions import PRECISIONS
from megascale.catalog.recipes import RECIPES
from megascale.config.run import RunConfig
from megascale.layout.blocks import Activation, Attention, Block, Columns, Linears, Norm, Part, Residual, kinds, unread
from megascale.layout.chunks import eight_bit_layers, stages_of
from megascale.layout.pieces import PIECES
from megascale.layout.recompute import Recompute, recompute_of
from megascale.layout.tensors import padded_vocab
from megascale.simulate.event_simulator import Place
from megascale.simulate.gemm_time import Kernels
from megascale.simulate.link_time import Route, group_route
from megascale.simulate.profiles import Hardware, Stack

CASTS = {"current": 6, "history": 4, "static": 4, "row": 6, "block": 4}
"""Bytes that quantizing an element moves, by origin of the scale: an element is read in 16 bits, and written in FP8
twice, once transposed. A current scale takes a pass of its own, as do rows and columns.
"""

LOSS_PASSES = 4
"""Passes over the logits in the forward of a loss in fp32, and as many in its backward."""


class _Sum:
    """Values whose fields add up one by one."""

    def __add__(self, other: Self) -> Self:
        return type(self)(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __mul__(self, factor: float) -> Self:
        return type(self)(*(value * factor for value in vars(self).values()))


@dataclass(frozen=True)
class Seconds(_Sum):
    """Seconds of a rank by cause. `host`: waits for launches; `tp`, `dp`: exposed collectives, dp those of ZeRO 3."""

    gemm: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    recompute: float = 0.0
    host: float = 0.0
    tp: float = 0.0
    dp: float = 0.0

    @property
    def total(self) -> float:
        return sum(vars(self).values())


@dataclass(frozen=True)
class Pair(_Sum):
    """A forward and its backward."""

    forward: Seconds = Seconds()
    backward: Seconds = Seconds()


@dataclass(frozen=True)
class Exchange:
    """Tensor-parallel collectives on activations of `size` bytes. `hides`: as `Hides.tp`; `drag`: as in `Times`."""

    route: Route
    tp: int
    sp: bool
    size: int
    hides: str
    drag: float

    def gather(self) -> float:
        """Seconds of an all-gather."""
        return self.route.collective("all_gather", self.size, self.tp)

    def exposed(self, gemm: float, *, enters: bool, backward: bool = False) -> float:
        """Exposed seconds of a collective on a GEMM's input if it `enters`, else output. `gemm`: the GEMM's seconds."""
        every = self.hides == "all"
        overlaps = every or (self.hides == "backward" and backward and not enters)
        if self.sp:
            return self._exposed(self.gather(), gemm, overlaps, pieces=every)
        # without sequence parallelism every rank has the input
        return 0.0 if enters else self._exposed(self.route.collective("all_reduce", self.size, self.tp), gemm, overlaps)

    def regathered(self, wgrad: float) -> float:
        """Exposed seconds of the second all-gather of an input, for a wgrad of `wgrad` seconds."""
        return self._exposed(self.gather(), wgrad, self.hides != "none") if self.sp else 0.0

    def _exposed(self, sent: float, gemm: float, overlaps: bool, pieces: bool = False) -> float:
        least = max(1 / PIECES if pieces else 0.0, self.drag)
        return max(least * sent, sent - gemm) if overlaps else sent


@dataclass(frozen=True)
class Layers:
    """The parts of a network on one rank of tensor parallelism, for one micro-batch."""

    config: RunConfig
    kernels: Kernels
    exchange: Exchange

    @classmethod
    def of(cls, config: RunConfig, hardware: Hardware, stack: Stack) -> Layers:
        """The parts of a resolved configuration's network. With dropout attention is unfused, as in this trainer."""
        p, m, precision = config.parallel, config.model, config.train.precision
        stack = stack.model_copy(update={"attention": "unfused"}) if m.dropout else stack
        size = PRECISIONS[precision].facts["compute_bytes"]
        kernels = Kernels(hardware, stack, "bf16" if precision == "fp8" else precision, size)
        route = group_route(hardware, p.tp, 1, config.world, together=p.tp)
        hides = stack.hides.tp if config.overlap.tp else "none"
        activation = config.batch.micro * m.seq_length * m.hidden_size * size
        return cls(config, kernels, Exchange(route, p.tp, p.sp, activation, hides, 1 - hardware.attained.hiding))

    @property
    def tokens(self) -> int:
        return self.config.batch.micro * self.config.model.seq_length

    @property
    def stream(self) -> int:
        """Elements of the residual stream on this rank."""
        p = self.config.parallel
        return (self.tokens // p.tp if p.sp else self.tokens) * self.config.model.hidden_size

    def block(self, parts: Block, fp8: bool, recompute: Recompute) -> Pair:
        """A block, with its linear layers in FP8 or not, and its recomputation."""
        pairs = [self.part(part, fp8) for part in parts]
        fixed = self.kernels.measured.layer_s if self.kernels.measured else 0.0
        total = sum(pairs, Pair(Seconds(elementwise=fixed), Seconds(elementwise=2 * fixed)))
        recomputed = self._recomputed(parts, pairs, recompute)
        if recompute.full:
            last = unread(parts) if self.kernels.stack.stops_early else None
            recomputed = total.forward + (self._linears(last, fp8).forward * -1 if last else Seconds())
        backward = total.backward + Seconds(recompute=recomputed.total - recomputed.tp, tp=recomputed.tp)
        return Pair(self._launched(total.forward, 1), self._launched(backward, 3 if recompute.full else 2))

    def _launched(self, work: Seconds, passes: int) -> Seconds:
        """Add the wait for a host that launches the operations of `passes` forwards."""
        host = passes * self.kernels.stack.host_s
        return work + Seconds(host=host if self.kernels.stack.launch_blocking else max(0.0, host - work.total))

    def part(self, part: Part, fp8: bool) -> Pair:
        """A part of a block, with the exposed communication of tensor parallelism."""
        m, tp = self.config.model, self.config.parallel.tp
        match part:
            case Linears():
                return self._linears(part, fp8)
            case Attention():
                heads = self.config.batch.micro * part.heads // tp
                seconds = self.kernels.attention(heads, m.seq_length, part.window, part.width)
                moved = self._passes(2 * self.tokens * part.qkv // tp)  # q, k and v into attention's order
                return moved + Pair(*(Seconds(attention=pass_s) for pass_s in seconds))
            case Activation():
                return self._passes(self.tokens * (part.inputs + part.outputs) // tp)
            case Norm():
                return self._passes(2 * self.stream)
            case Residual():
                return self._passes((7 if m.dropout else 3) * self.stream)

    def embedding(self) -> Pair:
        """The token embedding."""
        return self._passes(2 * self.stream, 1) + Pair(Seconds(tp=self.exchange.exposed(0.0, enters=False)))

    def head(self) -> Pair:
        """The projection to the vocabulary and the loss."""
        m, tp = self.config.model, self.config.parallel.tp
        columns, gather = padded_vocab(m, tp) // tp, self.exchange.gather() if self.config.parallel.sp else 0.0
        loss = self._passes(LOSS_PASSES * self.tokens * columns, 1)
        return self._gemms(columns, m.hidden_size, fp8=False) + loss + Pair(Seconds(tp=gather), Seconds(tp=2 * gather))

    def _passes(self, elements: float, backward: int = 2) -> Pair:
        """Element-wise operations that read and write `elements` in a forward, and `backward` times those after."""
        seconds = self.kernels.elementwise(elements * self.kernels.bytes)
        return Pair(Seconds(elementwise=seconds), Seconds(elementwise=backward * seconds))

    def _linears(self, group: Linears, fp8: bool) -> Pair:
        """Linear layers side by side, with the collectives that they share."""
        enters, tp = isinstance(group, Columns), self.config.parallel.tp
        cut = (tp, 1) if enters else (1, tp)
        gemms = sum((self._gemms(one.outputs // cut[0], one.inputs // cut[1], fp8) for one in group.layers), Pair())
        wgrad = gemms.backward.gemm / 2  # dgrad takes as long
        forward = self.exchange.exposed(gemms.forward.gemm, enters=enters)
        backward = self.exchange.exposed(wgrad, enters=not enters, backward=True)
        backward += self.exchange.regathered(wgrad) if enters else 0.0
        return gemms + Pair(Seconds(tp=forward), Seconds(tp=backward))

    def _gemms(self, outputs: int, inputs: int, fp8: bool) -> Pair:
        """A linear layer of this rank: its GEMM, then dgrad and wgrad, and the quantization of their operands."""
        facts, gemm, moved = RECIPES[self.config.fp8.recipe].facts, self.kernels.gemm, self.kernels.elementwise
        m, n, k, grain = self.tokens, outputs, inputs, facts["grain"] if fp8 else None
        cast = CASTS[facts["scale"] if grain == "tensor" else grain] if grain else 0
        backward = gemm(m, k, n, grain=grain) + gemm(n, k, m, grain=grain)
        count = max(1, self.config.micro_batches) if self.kernels.stack.gradient_bytes == 2 else 1
        added = (
            3 * 2 * n * k * (count - 1) / count
        )  # gradients in 16 bits: two are read, one is written; fp32 wgrad adds
        casts = moved(cast * m * n) + self.kernels.stream(added)
        return Pair(Seconds(gemm(m, n, k, grain=grain), 0.0, moved(cast * m * k)), Seconds(backward, 0.0, casts))

    def _recomputed(self, parts: Block, pairs: Sequence[Pair], recompute: Recompute) -> Seconds:
        """The forward of selectively recomputed operations, of norms those before column-parallel layers."""
        total = Seconds()
        for part, then, pair in zip(parts, (*parts[1:], None), pairs, strict=True):
            norm = recompute.norm and isinstance(part, Norm) and isinstance(then, Columns)
            if norm or (recompute.activation and isinstance(part, Activation)):
                total += pair.forward
            elif recompute.attention and isinstance(part, Attention):
                total += Seconds(attention=pair.forward.attention)
        return total


def chunk_times(config: RunConfig, hardware: Hardware, stack: Stack) -> dict[Place, Pair]:
    """The times of every chunk of every pipeline rank of a resolved configuration."""
    layers, stages, fp8 = Layers.of(config, hardware, stack), stages_of(config), eight_bit_layers(config)
    distinct, numbers = kinds(config.model)
    block_kinds = [(number, layer in fp8) for layer, number in enumerate(numbers)]
    block = cache(lambda number, fp8, recompute: layers.block(distinct[number], fp8, recompute))

    @cache
    def chunk(blocks: tuple[tuple[int, bool], ...], recompute: Recompute, first: bool, last: bool) -> Pair:
        ends = (layers.embedding() if first else Pair()) + (layers.head() if last else Pair())
        return sum((block(*kind, recompute) * count for kind, count in Counter(blocks).items()), ends)

    times = dict[Place, Pair]()
    for place in itertools.product(range(config.parallel.pp), range(config.parallel.vpp)):
        stage, recompute = stages.index(*place), recompute_of(config.train, place[1])
        blocks = tuple(block_kinds[layer] for layer in stages.layers(stage))
        times[place] = chunk(blocks, recompute, stage == 0, stage == stages.count - 1)
    return times
