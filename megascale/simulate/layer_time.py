"""Seconds of a model chunk's forward and backward for one micro-batch on one rank, by cause.

A block's time follows from its description (`layout.blocks`): GEMMs, the core of attention, and passes over memory, and
between them the collectives of tensor parallelism (Korthikanti et al. 2022, 4.2), of which a stack overlaps what
`profiles.Hides` says. A linear layer's backward has two GEMMs, dgrad and wgrad; what is element-wise takes twice as
long in a backward.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

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
"""Bytes that quantizing an element moves, by where the scale is from: it is read in 16 bits, and written in FP8 as it
is and transposed. A tensor's largest magnitude is found in a pass before; rows and columns are quantized apart.
"""

LOSS_PASSES = 4
"""Times that logits pass through memory in the forward of a loss in 32 bits, and again in its backward."""


@dataclass(frozen=True)
class Seconds:
    """Seconds of one rank by cause. `host`: the device waits for work to be launched; `tp`,
    `dp`: exposed communication, dp only where weights are gathered layer by layer.
    """

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

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(*(own + others for own, others in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __mul__(self, factor: float) -> Seconds:
        return Seconds(*(own * factor for own in vars(self).values()))


@dataclass(frozen=True)
class Pair:
    """A forward and its backward."""

    forward: Seconds = Seconds()
    backward: Seconds = Seconds()

    def __add__(self, other: Pair) -> Pair:
        return Pair(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, factor: float) -> Pair:
        return Pair(self.forward * factor, self.backward * factor)


@dataclass(frozen=True)
class Exchange:
    """The collectives of tensor parallelism for an activation of `size` bytes. `hides`: as in `profiles.Hides.tp`;
    `drag`: share of an overlapped collective by which compute gets longer.
    """

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
        """Exposed seconds of a collective beside a GEMM of `gemm` seconds: of its input if it `enters`, else of its
        output. Without sequence parallelism each rank has the input.
        """
        every = self.hides == "all"
        if self.sp:
            under = every or (self.hides == "backward" and backward and not enters)
            return self._left(self.gather(), gemm, under, pieces=every)
        whole = 0.0 if enters else self.route.collective("all_reduce", self.size, self.tp)
        return self._left(whole, gemm, every or (self.hides == "backward" and backward))

    def regathered(self, wgrad: float) -> float:
        """Exposed seconds of gathering an input once more for its wgrad, where it was not kept."""
        return self._left(self.gather(), wgrad, self.hides != "none") if self.sp else 0.0

    def _left(self, travel: float, gemm: float, under: bool, pieces: bool = False) -> float:
        least = max(1 / PIECES if pieces else 0.0, self.drag)
        return max(least * travel, travel - gemm) if under else travel


@dataclass(frozen=True)
class Layers:
    """The parts of a network on one rank of tensor parallelism, for one micro-batch."""

    config: RunConfig
    stack: Stack
    kernels: Kernels
    exchange: Exchange

    @classmethod
    def of(cls, config: RunConfig, hardware: Hardware, stack: Stack) -> Layers:
        """The parts of a resolved configuration's network. Attention with dropout forms all scores, as here."""
        p, m, precision = config.parallel, config.model, config.train.precision
        stack = stack.model_copy(update={"attention": "unfused"}) if m.dropout else stack
        size = PRECISIONS[precision].facts["compute_bytes"]
        kernels = Kernels(hardware, stack, "bf16" if precision == "fp8" else precision, size)
        route = group_route(hardware, p.tp, 1, config.world, together=p.tp)
        hides = stack.hides.tp if config.overlap.tp else "none"
        whole = config.batch.micro * m.seq_length * m.hidden_size * size
        return cls(config, stack, kernels, Exchange(route, p.tp, p.sp, whole, hides, 1 - hardware.attained.hiding))

    @property
    def tokens(self) -> int:
        return self.config.batch.micro * self.config.model.seq_length

    @property
    def stream(self) -> int:
        """Elements of the residual stream on this rank."""
        p = self.config.parallel
        return (self.tokens // p.tp if p.sp else self.tokens) * self.config.model.hidden_size

    def block(self, parts: Block, fp8: bool, recompute: Recompute) -> Pair:
        """A block, its linear layers in FP8 or not, in a chunk that recomputes so."""
        pairs = [self.part(part, fp8) for part in parts]
        fixed = self.kernels.measured.layer_s if self.kernels.measured else 0.0
        total = sum(pairs, Pair(Seconds(elementwise=fixed), Seconds(elementwise=2 * fixed)))
        again = self._again(parts, pairs, recompute)
        if recompute.full:  # but for the block's result, which no gradient needs
            last = unread(parts) if self.stack.stops_early else None
            again = total.forward + (self._linears(last, fp8).forward * -1 if last else Seconds())
        backward = total.backward + Seconds(recompute=again.total - again.tp, tp=again.tp)
        hosts = [passes * self.stack.host_s for passes in (1, 3 if recompute.full else 2)]
        ways = zip((total.forward, backward), hosts, strict=True)
        waits = ((way, host if self.stack.launch_blocking else max(0.0, host - way.total)) for way, host in ways)
        return Pair(*(way + Seconds(host=wait) for way, wait in waits))

    def part(self, part: Part, fp8: bool) -> Pair:
        """A part of a block with what tensor parallelism exposes."""
        m, tp = self.config.model, self.config.parallel.tp
        match part:
            case Linears():
                return self._linears(part, fp8)
            case Attention():
                heads = self.config.batch.micro * part.heads // tp
                seconds = self.kernels.attention(heads, m.seq_length, part.window, part.width)
                moved = self._passes(2 * self.tokens * part.qkv // tp)  # q, k and v into attention's order
                return moved + Pair(*(Seconds(attention=way) for way in seconds))
            case Activation():
                return self._passes(self.tokens * (part.inputs + part.outputs) // tp)
            case Norm():
                return self._passes(2 * self.stream)
            case Residual():
                return self._passes((7 if m.dropout else 3) * self.stream)

    def embedding(self) -> Pair:
        """The token embedding."""
        moved = self.kernels.elementwise(2 * self.stream * self.kernels.bytes)
        return Pair(Seconds(elementwise=moved, tp=self.exchange.exposed(0.0, enters=False)), Seconds(elementwise=moved))

    def head(self) -> Pair:
        """The projection to the vocabulary and the loss."""
        m, tp = self.config.model, self.config.parallel.tp
        columns, shown = padded_vocab(m, tp) // tp, self.exchange.gather() if self.config.parallel.sp else 0.0
        logits = self.kernels.elementwise(LOSS_PASSES * self.tokens * columns * self.kernels.bytes)
        loss = Pair(Seconds(elementwise=logits, tp=shown), Seconds(elementwise=logits, tp=2 * shown))
        return self._gemms(columns, m.hidden_size, fp8=False) + loss

    def _passes(self, elements: float) -> Pair:
        """Element-wise operations that read and write so many elements in a forward."""
        seconds = self.kernels.elementwise(elements * self.kernels.bytes)
        return Pair(Seconds(elementwise=seconds), Seconds(elementwise=2 * seconds))

    def _linears(self, group: Linears, fp8: bool) -> Pair:
        """Linear layers side by side with the collectives that they share."""
        enters, tp = isinstance(group, Columns), self.config.parallel.tp
        cut = (tp, 1) if enters else (1, tp)
        gemms = sum((self._gemms(one.outputs // cut[0], one.inputs // cut[1], fp8) for one in group.layers), Pair())
        one = gemms.backward.gemm / 2  # dgrad, and wgrad
        forward = self.exchange.exposed(gemms.forward.gemm, enters=enters)
        backward = self.exchange.exposed(one, enters=not enters, backward=True)
        backward += self.exchange.regathered(one) if enters else 0.0
        return gemms + Pair(Seconds(tp=forward), Seconds(tp=backward))

    def _gemms(self, outputs: int, inputs: int, fp8: bool) -> Pair:
        """A linear layer of this rank: its GEMM, then dgrad and wgrad, and what is quantized for them."""
        facts, gemm, moved = RECIPES[self.config.fp8.recipe].facts, self.kernels.gemm, self.kernels.elementwise
        m, n, k, grain = self.tokens, outputs, inputs, facts["grain"] if fp8 else None
        cast = CASTS[facts["scale"] if grain == "tensor" else grain] if grain else 0
        backward = gemm(m, k, n, grain=grain) + gemm(n, k, m, grain=grain)
        summed = moved(cast * m * n) + self.kernels.stream(self._summed * n * k)
        return Pair(Seconds(gemm(m, n, k, grain=grain), 0.0, moved(cast * m * k)), Seconds(backward, 0.0, summed))

    @property
    def _summed(self) -> float:
        """Bytes that move for each element of a weight to sum its gradients over micro-batches. A GEMM adds in fp32;
        sums in 16 bits are passes of their own, which read two elements and write one, but for the first micro-batch.
        """
        count = max(1, self.config.micro_batches)
        return 3 * 2 * (count - 1) / count if self.stack.gradient_bytes == 2 else 0.0

    def _again(self, parts: Block, pairs: Sequence[Pair], recompute: Recompute) -> Seconds:
        """The forward of the operations that a backward forms again: norms are those before column-parallel layers."""
        found = Seconds()
        for part, then, pair in zip(parts, (*parts[1:], None), pairs, strict=True):
            norm = recompute.norm and isinstance(part, Norm) and isinstance(then, Columns)
            if norm or (recompute.activation and isinstance(part, Activation)):
                found += pair.forward
            elif recompute.attention and isinstance(part, Attention):
                found += Seconds(attention=pair.forward.attention)
        return found


def chunk_times(config: RunConfig, hardware: Hardware, stack: Stack) -> dict[Place, Pair]:
    """The times of every chunk of every pipeline rank of a resolved configuration."""
    layers, stages, fp8 = Layers.of(config, hardware, stack), stages_of(config), eight_bit_layers(config)
    distinct, numbers = kinds(config.model)
    alike = [(number, layer in fp8) for layer, number in enumerate(numbers)]
    blocks, chunks, found = dict[object, Pair](), dict[object, Pair](), dict[Place, Pair]()
    for rank, chunk in itertools.product(range(config.parallel.pp), range(config.parallel.vpp)):
        index, recompute = stages.index(rank, chunk), recompute_of(config.train, chunk)
        first, last, own = index == 0, index == stages.count - 1, stages.layers(index)
        key = tuple(alike[own.start : own.stop]), recompute, first, last
        if key not in chunks:
            total = (layers.embedding() if first else Pair()) + (layers.head() if last else Pair())
            for kind, count in Counter(alike[own.start : own.stop]).items():
                if (kind, recompute) not in blocks:
                    blocks[kind, recompute] = layers.block(distinct[kind[0]], kind[1], recompute)
                total += blocks[kind, recompute] * count
            chunks[key] = total
        found[rank, chunk] = chunks[key]
    return found
