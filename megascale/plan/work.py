"""Seconds of a chunk's forward and backward for one micro-batch on one rank, by cause.

A block is matrix products, the attention's core, and passes over memory; between them tensor parallelism gathers and
scatters activations (Korthikanti et al. 2022, 4.2), of which a stack hides what `profiles.Hides` says. A backward has
two products for each of a forward's, and 2.5 times the attention of a kernel that forms the scores again (Dao 2023).
Without such a kernel scores are there as a whole, and pass through memory between their products.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial

from megascale.catalog.layers import BLOCKS
from megascale.catalog.precisions import PRECISIONS
from megascale.config.run import RunConfig
from megascale.layout.chunks import eight_bit_layers, stages_of
from megascale.layout.pieces import PIECES
from megascale.layout.recompute import Recompute, recompute_of
from megascale.layout.tensors import padded_vocab
from megascale.plan.flops import forward_attention
from megascale.plan.kernels import Kernels
from megascale.plan.links import group_route
from megascale.plan.profiles import Hardware, Stack

FLASH_BACKWARD = 2.5
"""Products in the backward of attention over those in its forward, where scores are formed again."""


@dataclass(frozen=True)
class Seconds:
    """Of one rank. `gemm`, `attention`, `elementwise`: of kernels; `again`: of all that a backward forms a second time;
    `host`: in which the device waits for the host to launch its work; `stragglers`: until the slowest rank has done the
    same; `tp`, `dp`: of communication, exposed, of dp only where weights are gathered layer by layer.
    """

    gemm: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    again: float = 0.0
    host: float = 0.0
    stragglers: float = 0.0
    tp: float = 0.0
    dp: float = 0.0

    @property
    def compute(self) -> float:
        return self.gemm + self.attention + self.elementwise + self.again

    @property
    def total(self) -> float:
        return self.compute + self.host + self.stragglers + self.tp + self.dp

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(*(own + others for own, others in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __mul__(self, factor: float) -> Seconds:
        return Seconds(*(own * factor for own in vars(self).values()))


@dataclass(frozen=True)
class Pair:
    """A forward and its backward."""

    forward: Seconds
    backward: Seconds

    def __add__(self, other: Pair) -> Pair:
        return Pair(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, factor: float) -> Pair:
        return Pair(self.forward * factor, self.backward * factor)


NOTHING = Pair(Seconds(), Seconds())


Kinds = tuple[tuple[int | None, bool], ...]
"""Of blocks what tells their times apart: their window, and whether they are in 8 bits."""


@dataclass(frozen=True)
class Product:
    """A matrix product of `rows` x `columns` over `terms` in a forward. `enters`: its input is gathered over tp, else
    its result is scattered.
    """

    columns: int
    terms: int
    enters: bool


def added_bytes(config: RunConfig, stack: Stack) -> float:
    """Bytes that move for each number of a weight's gradient, in a micro-batch, to add it to those of the others."""
    facts, count = PRECISIONS[config.train.precision].facts, max(1, config.micro_batches)
    own, wide = facts["compute_bytes"], stack.gradient_bytes or facts["accumulate_bytes"]
    if not stack.adds_apart:
        return 0.0
    return own + 2 * wide if wide > own else 3 * own * (count - 1) / count  # the first of as many numbers is the sum


class Work:
    """The times of a configuration's parts."""

    def __init__(self, config: RunConfig, hardware: Hardware, stack: Stack, kernels: Kernels) -> None:
        p, m = config.parallel, config.model
        self.config, self.stack, self.kernels = config, stack, kernels
        self.tokens = config.batch.micro * m.seq_length
        self.own = self.tokens // p.tp if p.sp else self.tokens
        self.tp, self.axis = p.tp, group_route(hardware, p.tp, 1, config.world, together=p.tp * p.cp)
        self.hides = stack.hides.tp if config.overlap.tp else "none"
        self.hiding = hardware.attained.hiding
        self.windows = m.windows
        self.layout, cast = stages_of(config), eight_bit_layers(config)
        self.kinds: Kinds = tuple((window, layer in cast) for layer, window in enumerate(self.windows))
        self.recompute = [recompute_of(config.train, chunk) for chunk in range(p.vpp)]
        self._blocks: dict[tuple[int | None, bool, Recompute], Pair] = {}
        self._chunks: dict[tuple[Kinds, Recompute, bool, bool], Pair] = {}
        self.whole = self.tokens * m.hidden_size * kernels.bytes  # bytes of an activation
        self.added = added_bytes(config, stack)

    def chunk(self, pp_rank: int, chunk: int) -> Pair:
        """All that a pipeline rank does in its chunk."""
        index = self.layout.index(pp_rank, chunk)
        layers, recompute = self.layout.layers(index), self.recompute[chunk]
        alike = self.kinds[layers.start : layers.stop], recompute, index == 0, index == self.layout.count - 1
        if alike not in self._chunks:
            self._chunks[alike] = self._chunk(*alike)
        return self._chunks[alike]

    def _chunk(self, kinds: Kinds, recompute: Recompute, first: bool, last: bool) -> Pair:
        total = NOTHING
        for (window, cast), count in Counter(kinds).items():
            total += self.block(window, cast, recompute) * count
        if first:
            total += self.embedding()
        return total + self.head() if last else total

    def block(self, window: int | None, cast: bool, recompute: Recompute) -> Pair:
        """A block whose queries see `window` keys, and whose products are in 8 bits if `cast`."""
        kind = window, cast, recompute
        if kind not in self._blocks:
            self._blocks[kind] = self._block(*kind)
        return self._blocks[kind]

    def _block(self, window: int | None, cast: bool, recompute: Recompute) -> Pair:
        forward = backward = Seconds()
        for product in self.products():
            pair = self.linear(product, eight_bit=cast)
            forward, backward = forward + pair.forward, backward + pair.backward
        exchanges = self.exchanges(cast)
        forward += Seconds(elementwise=self.kernels.between(self.element_bytes()))
        backward += Seconds(elementwise=2 * self.kernels.between(self.element_bytes()))
        core = self.core(window)
        forward, backward = forward + core.forward, backward + core.backward
        forward, backward = forward + exchanges.forward, backward + exchanges.backward
        again = self.again(forward, core.forward, cast, recompute)
        backward += Seconds(again=again.compute, tp=again.tp)
        return Pair(self.launched(forward, 1), self.launched(backward, 3 if recompute.full else 2))

    def launched(self, work: Seconds, passes: int) -> Seconds:
        """A block's work, which the host launches in `passes` times what it takes for a forward."""
        host = passes * self.stack.host_s
        return work + Seconds(host=host if self.stack.launch_blocking else max(0.0, host - work.total))

    def again(self, forward: Seconds, core: Seconds, cast: bool, recompute: Recompute) -> Seconds:
        """Of a block's forward, and its attention's core, what the backward forms again."""
        if recompute.full:
            return forward + self.end(cast) * -1 if self.stack.stops_early else forward
        moved = self.norm_bytes() * recompute.norm + self.activation_bytes() * recompute.activation
        found = Seconds(elementwise=self.kernels.memory(moved))
        return found + core if recompute.attention else found

    def end(self, cast: bool) -> Seconds:
        """Of a block's forward the products whose value is its result, and the way of that, which no backward needs."""
        pair, _ = self.joined(cast)[-1]
        shown = self.travel(pair.forward.gemm, enters=False) if self.tp > 1 else 0.0
        return pair.forward + Seconds(tp=shown)

    def products(self) -> list[Product]:
        m, tp = self.config.model, self.tp
        qkv = (m.num_heads + 2 * m.num_kv_heads) * m.head_dim
        return [
            Product(qkv // tp, m.hidden_size, enters=True),
            Product(m.hidden_size, m.num_heads * m.head_dim // tp, enters=False),
            Product((2 if m.gated else 1) * m.ffn_size // tp, m.hidden_size, enters=True),
            Product(m.hidden_size, m.ffn_size // tp, enters=False),
        ]

    def linear(self, product: Product, *, eight_bit: bool = False) -> Pair:
        """A linear layer's products, and what adds its gradients up, without what travels."""
        m, n, k = self.tokens, product.columns, product.terms
        gemm = partial(self.kernels.gemm, eight_bit=eight_bit)
        backward = gemm(m, k, n) + gemm(n, k, m)
        casts = [self.kernels.memory(CAST * m * width) if eight_bit else 0.0 for width in (k, n)]
        return Pair(
            Seconds(gemm=gemm(m, n, k), elementwise=casts[0]),
            Seconds(gemm=backward, elementwise=casts[1] + self.kernels.stream(n * k * self.added)),
        )

    def joined(self, cast: bool = False) -> list[tuple[Pair, bool]]:
        """A block's products, those together that one gather is before, or one scatter after; and whether it is one."""
        products = [(self.linear(each, eight_bit=cast), each.enters) for each in self.products()]
        if BLOCKS[self.config.model.block].facts["norms"] == 1:  # one gather before both branches, one scatter of a sum
            (qkv, _), (out, _), (up, _), (down, _) = products
            products = [(qkv + up, True), (out + down, False)]
        return products

    def exchanges(self, cast: bool) -> Pair:
        """What tensor parallelism shows of a block's communication, beside products in 8 bits if `cast`."""
        if self.tp == 1:
            return NOTHING
        forward = backward = 0.0
        for pair, enters in self.joined(cast):
            one = pair.backward.gemm / 2  # of the products for the input's and for the weight's gradient
            forward += self.travel(pair.forward.gemm, enters)
            backward += self.travel(one, not enters, backward=True)
            if enters and self.config.parallel.sp:  # the input was not kept: it is gathered again
                backward += self.hidden(self.gather(), one, self.hides != "none")
        return Pair(Seconds(tp=forward), Seconds(tp=backward))

    def travel(self, product: float, enters: bool, backward: bool = False) -> float:
        """Exposed seconds of one activation's way, beside a product of so many seconds."""
        if self.config.parallel.sp:
            behind = self.hides == "all" or (self.hides == "backward" and backward and not enters)
            return self.hidden(self.gather(), product, behind, pieces=self.hides == "all")
        if enters:  # each rank has the whole
            return 0.0
        whole = self.axis.collective("all_reduce", self.whole, self.tp)
        return self.hidden(whole, product, self.hides == "all" or (self.hides == "backward" and backward))

    def gather(self) -> float:
        return self.axis.collective("all_gather", self.whole, self.tp)

    def hidden(self, travel: float, product: float, behind: bool, pieces: bool = False) -> float:
        """What shows of `travel` behind a product."""
        if not behind:
            return travel
        least = max(1 / PIECES if pieces else 0.0, 1 - self.hiding)
        return max(least * travel, travel - product)

    def core(self, window: int | None) -> Pair:
        """Attention from q, k and v to what the heads attend to."""
        if self.stack.attention == "unfused":
            return self.whole_scores()
        m = self.config.model
        flops = forward_attention(m, self.windows.index(window)).causal_attention
        whole = flops * self.tokens / self.tp
        seen = flops / (2 * 2 * m.num_heads * m.head_dim)
        kernel = partial(self.kernels.attention, seen=seen, width=m.head_dim)
        return Pair(
            Seconds(attention=kernel(whole, backward=False)),
            Seconds(attention=kernel(FLASH_BACKWARD * whole, backward=True)),
        )

    def whole_scores(self) -> Pair:
        """Attention whose scores are all formed: two products, their softmax and dropout between them; of a backward
        four products.
        """
        m, kernels = self.config.model, self.kernels
        heads = self.config.batch.micro * m.num_heads // self.tp
        scores, size = heads * m.seq_length**2, kernels.bytes
        formed = kernels.gemm(m.seq_length, m.seq_length, m.head_dim, count=heads)
        used = kernels.gemm(m.seq_length, m.head_dim, m.seq_length, count=heads)
        return Pair(
            Seconds(attention=formed + used + kernels.stream(scores * (4 * size + MASK))),
            Seconds(attention=formed + 3 * used + kernels.stream(scores * (5 * size + MASK))),
        )

    def element_bytes(self) -> float:
        """Bytes that the fused element-wise operations of a block's forward move: both norms and residuals, of this
        rank's tokens; of all tokens the non-linearity, and q, k and v into attention's order.
        """
        m, size = self.config.model, self.kernels.bytes
        residuals = self.own * m.hidden_size * BLOCKS[m.block].facts["norms"] * (3 + (2 * 2 if m.dropout else 0))
        heads = self.tokens * 2 * (m.num_heads + 2 * m.num_kv_heads) * m.head_dim // self.tp
        return self.norm_bytes() + self.activation_bytes() + size * (residuals + heads)

    def norm_bytes(self) -> float:
        """Of them those of the norms."""
        m = self.config.model
        return self.kernels.bytes * self.own * m.hidden_size * 2 * BLOCKS[m.block].facts["norms"]

    def activation_bytes(self) -> float:
        """Of them those of the non-linearity."""
        m = self.config.model
        return self.kernels.bytes * (self.tokens * (3 if m.gated else 2) * m.ffn_size // self.tp)

    def embedding(self) -> Pair:
        m = self.config.model
        moved = self.kernels.memory(2 * self.own * m.hidden_size * self.kernels.bytes)
        added = self.kernels.stream(padded_vocab(m, self.tp) // self.tp * m.hidden_size * self.added)
        shown = self.travel(0.0, enters=False) if self.tp > 1 else 0.0
        return Pair(Seconds(elementwise=moved, tp=shown), Seconds(elementwise=moved + added, tp=0.0))

    def head(self) -> Pair:
        """The last norm, the projection to the vocabulary and the loss."""
        m = self.config.model
        columns = padded_vocab(m, self.tp) // self.tp
        pair = self.linear(Product(columns, m.hidden_size, enters=True))
        logits = self.kernels.memory(LOSS_PASSES * self.tokens * columns * self.kernels.bytes)
        shown = self.gather() if self.config.parallel.sp and self.tp > 1 else 0.0
        return pair + Pair(Seconds(elementwise=logits, tp=shown), Seconds(elementwise=logits, tp=2 * shown))


CAST = 4
"""Bytes that a cast of a number from 16 to 8 bits moves: it is read, and written as it is and transposed."""

MASK = 1
"""Bytes that say whether a score is dropped, as is the default of Megatron-LM. In a forward the softmax reads and
writes it, and so does the dropout; in a backward the dropout reads and writes its gradient, and the softmax reads that
and the score, and writes its gradient.
"""

LOSS_PASSES = 4
"""Times that logits pass through memory in a forward, and again in a backward, of a loss in 32 bits."""
