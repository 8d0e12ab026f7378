"""Bytes that a block needs only while it runs, beyond what it keeps and what is there when it begins: the gradients
between its operations, whole activations that are gathered, products on their way into a gradient, copies in other
formats.

Operations are followed in their order, as torch's operators carry them out on a CPU, not compiled; each needs what it
forms, its predecessors' results are held until they are used, and what was kept for it is released. Of biases, scales
and a loss's numbers nothing is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from megascale.catalog.layers import BLOCKS
from megascale.catalog.precisions import PRECISIONS
from megascale.catalog.recipes import RECIPES
from megascale.config.model import ModelConfig
from megascale.config.run import RunConfig
from megascale.layout.chunks import eight_bit_layers
from megascale.layout.recompute import NOTHING, Recompute
from megascale.plan.activations import BOOL, INDEX, BlockBytes, Sizes
from megascale.plan.flops import block_weights, scores
from megascale.plan.tape import Tape, into_gradient, is_cut, norm_backward, norm_forward
from megascale.plan.tensor_traffic import SCALE_BLOCK

CASTING = 8
"""Bytes that a cast to eight bits needs for a number: in fp32 before and after it is scaled."""

CASTS = PRECISIONS["fp8"].facts["cast_bytes"]
"""Bytes of a weight's number in eight bits, as it is and transposed."""


def block_backward(config: RunConfig, layer: int, recompute: Recompute = NOTHING) -> int:
    """The most beyond what the block has kept and the gradient of its result, with what is computed again."""
    return _Backward(config, layer, recompute).run()


def block_forward(config: RunConfig, layer: int, recompute: Recompute = NOTHING) -> int:
    """The most beyond the input of the block, where even what is not kept for the backward is there until the product
    that needs it is done.
    """
    return _Forward(config, layer, recompute).most


def first_forward(config: RunConfig, layer: int, recompute: Recompute = NOTHING) -> int:
    """Likewise in a step's first micro-batch, in which weights are cast to eight bits: beyond what the casts of all the
    block's weights take, and less than `block_forward` where there are not all of them yet.
    """
    return _Forward(config, layer, recompute).first


class _Forward:
    """The forward of one block, at the moments that may hold most. `value`: whether its last product is formed."""

    def __init__(self, config: RunConfig, layer: int, recompute: Recompute, value: bool = True) -> None:
        self.config, self.layer, self.value = config, layer, value
        self.sizes, self.model = Sizes(config), config.model
        self.graph = not (recompute.full and value)  # else nothing is kept but the input
        self.recompute = NOTHING if recompute.full else recompute
        self.kept = self.sizes.block(layer)
        self.side_by_side = BLOCKS[self.model.block].facts["norms"] == 1
        gathers = self.model.dropout and self.sizes.gathers_heads
        self.copied = self.model.position == "rope" or gathers  # what the copy is made of is there as well
        self.core = self.kept.core + (self.kept.qkv if self.copied else 0)
        self.weights = {name: count // config.parallel.tp for name, count in block_weights(self.model).items()}

    @property
    def most(self) -> int:
        return max(self._attending(), self._attended(), 0 if self.side_by_side else self._middle(), self._end())

    @property
    def first(self) -> int:
        """Of the first micro-batch: products wait until their weights are cast, one after the other."""
        normed = self.sizes.residual // self.sizes.compute  # as it is cast
        end, qkv = self._end() - self._last(), self._normed() + normed
        activating, product = end + self._casting_activated(), end + self._product()
        if self.side_by_side:  # by weight what is there before it is cast, and until the next is
            moments = [("qkv", qkv, 0), ("up", qkv, self._attending()), ("out", activating, 0), ("down", end, product)]
        else:
            out, up = self._normed() + self.core, self._added() + self.sizes.residual + normed
            moments = [("qkv", qkv, self._attending()), ("out", out, max(self._attended(), self._middle()))]
            moments += [("up", up, 0), ("down", activating, product)]
        lacking, most = CASTS * sum(self.weights.values()), 0
        for name, before, after in moments:
            casting = min(before, end) + self._casting(name)  # what was activated is cast by then
            most = max(most, before - lacking, casting - lacking)
            lacking -= CASTS * self.weights[name]
            most = max(most, after - lacking)
        return most

    def _casting(self, name: str) -> int:
        """Of a weight to eight bits, and where rows have scales of its columns too."""
        by_rows = RECIPES[self.config.fp8.recipe].facts["grain"] == "row"
        return self.weights[name] * (CASTING + (1 + self.sizes.compute if by_rows else 0))

    def _normed(self) -> int:
        kept, recompute = self.kept, self.recompute
        there = kept.cast or not (self.side_by_side and recompute.norm)
        return kept.statistics + (self.sizes.residual if there else 0)

    def _before(self) -> int:
        """Attention: the first norm, and what is formed beside its q, k and v."""
        if not self.side_by_side:
            return self._normed()
        return self.kept.inner + (self._normed() if self.graph else 0)

    def _attending(self) -> int:
        m, sizes = self.model, self.sizes
        turned = 2 * self.kept.qkv + turning(sizes, m) if m.position == "rope" else 0
        graph = self.graph and not self.recompute.attention
        core = forming_weights(self.config, self.layer, graph) if m.dropout else self.core
        return self._before() + max(turned, core)

    def _attended(self) -> int:
        attended, _ = self._entering_rows()
        core = self.core + self.kept.attended
        if not self.graph:
            core = self.kept.qkv + attended
        elif self.recompute.attention:
            core = self.kept.qkv + self.kept.attended
        return self._before() + core + (0 if self.side_by_side else _reduced(self.config))

    def _middle(self) -> int:
        """While the second norm is formed."""
        return self._added() + norm_forward(self.sizes, self.model.norm)

    def _added(self) -> int:
        """Beside the second norm: the residual stream, the branch that was added to it, and what is kept of that."""
        if not self.graph:
            return 2 * self.sizes.residual
        kept, (_, activated) = self.kept, self._entering_rows()
        found = self._end() - self._last() - kept.inner - kept.activated - kept.normed
        return found - (self.sizes.residual + activated if kept.cast else 0)

    def _end(self) -> int:
        """With the last product."""
        kept, sizes, recompute = self.kept, self.sizes, self.recompute
        if not self.graph:
            attended, activated = self._entering_rows()
            beside = kept.qkv + attended if self.side_by_side else 3 * sizes.residual
            return beside + kept.inner + activated + self._last()
        found = kept.kept(recompute) - kept.input + (0 if self.side_by_side else sizes.residual)
        if self.side_by_side and self.copied and not recompute.attention:
            found += kept.qkv
        if kept.cast:  # what was cast
            attended, activated = self._entering_rows()
            apart = self.model.dropout or self.model.windows[self.layer] is not None  # from what attention keeps
            found += ((attended if apart else 0) if self.side_by_side else sizes.residual) + activated
        else:
            found += kept.normed if recompute.norm and not self.side_by_side else 0
            found += kept.activated if recompute.activation else 0
        return found + self._last()

    def _entering_rows(self) -> tuple[int, int]:
        """Bytes of what enters the attention's and the MLP's last products, before it is cast."""
        m, sizes = self.model, self.sizes
        widths = m.num_heads * m.head_dim, m.ffn_size
        attended, activated = (sizes.tokens * width // sizes.tp * sizes.compute for width in widths)
        return attended, activated

    def _last(self) -> int:
        return max(self._product(), self._casting_activated())

    def _product(self) -> int:
        """The last product, before its mask is drawn, and what is made of it: it is scaled, dropped and added to the
        stream, when there is no more of a serial block's MLP than is kept.
        """
        if not self.value:
            return 0
        kept, dropout, freed = self.kept, self.model.dropout, 0
        if not self.side_by_side and (not self.graph or (self.recompute.activation and not kept.cast)):
            freed = kept.activated + (0 if self.graph else kept.inner)
        after = (3 if dropout else 2) if self.side_by_side else (2 if dropout else 0)
        return max(_reduced(self.config) - self.sizes.mask, after * self.sizes.residual - freed)

    def _casting_activated(self) -> int:
        if self.layer not in eight_bit_layers(self.config):
            return 0
        _, activated = self._entering_rows()
        return (CASTING - (1 if self.kept.cast else 0)) * activated // self.sizes.compute


def summing(config: RunConfig, terms: int, numbers: int, factors: int) -> int:
    """Of a product of `numbers` numbers whose factors have scales for blocks of its terms: on a CPU the blocks are
    multiplied one after the other, two are there beside their sum, with the `factors` (bytes) of one of them.
    """
    if RECIPES[config.fp8.recipe].facts["grain"] != "block":
        return 0
    blocks = terms // SCALE_BLOCK
    return min(blocks, 3) * numbers * Sizes(config).wide + factors // blocks


def turning(sizes: Sizes, model: ModelConfig) -> int:
    """Of queries and keys before and after they turn, in fp32 where that is wider."""
    heads = (model.num_heads + model.num_kv_heads) // sizes.tp
    return 2 * sizes.tokens * heads * model.head_dim * sizes.wide if sizes.compute < sizes.wide else 0


def _reduced(config: RunConfig) -> int:
    """Of a product that is summed over ranks: as it leaves in pieces, the others' parts that arrive, and their sum."""
    sizes = Sizes(config)
    full = sizes.tokens * config.model.hidden_size * sizes.compute
    if not is_cut(config):
        return full
    return full + sizes.residual + (full if config.overlap.tp else 0)


def forming_weights(config: RunConfig, layer: int, graph: bool) -> int:
    """While attention's weights are formed in full, for dropout: q, k and v as they come and turned, k and v for each
    head; who sees whom, by the distance of two tokens; and the weights four times. `graph`: with what a backward needs.
    """
    m, sizes = config.model, Sizes(config)
    kept, weights, square = sizes.block(layer), weights_bytes(config, layer), sizes.seq**2
    copies = 1 if graph and sizes.gathers_heads else 0  # of q
    heads = (2 + copies) * sizes.tokens * m.num_heads * m.head_dim // sizes.tp * sizes.compute
    begun = kept.qkv * (2 if m.position == "rope" else 1) + heads
    begun += BOOL * (weights // sizes.compute + square) + INDEX * sizes.seq
    return begun + max(4 * weights + (BOOL * square if graph else 0), weights + (INDEX + 2 * BOOL) * square)


def weights_bytes(config: RunConfig, layer: int) -> int:
    """Of attention's weights where they are formed in full."""
    m, sizes = config.model, Sizes(config)
    return sizes.micro * m.num_heads // sizes.tp * scores(m, layer) * sizes.compute if m.dropout else 0


class _Backward:
    """The backward of one block."""

    def __init__(self, config: RunConfig, layer: int, recompute: Recompute) -> None:
        self.sizes, self.model, self.recompute = Sizes(config), config.model, recompute
        self.kept: BlockBytes = self.sizes.block(layer)
        self.cut, self.overlap = is_cut(config), config.overlap.tp
        self.eight_bits = layer in eight_bit_layers(config)
        self.summing = partial(summing, config)
        self.weights = {name: count // config.parallel.tp for name, count in block_weights(self.model).items()}
        self.weights_formed = weights_bytes(config, layer)
        again = self.kept.core_again
        self.attending = forming_weights(config, layer, graph=True) - self.kept.qkv if self.model.dropout else again
        self.forward = _Forward(config, layer, recompute, value=False).most
        self.full = self.sizes.tokens * self.model.hidden_size * self.sizes.compute
        heads = self.sizes.tokens * self.model.num_heads * self.model.head_dim // self.sizes.tp
        self.attended = heads * self.sizes.compute
        self.shared = self.kept.shared and not recompute.attention
        self.inner = self.kept.inner
        self.activated = self.inner // 2 if self.model.gated else self.inner
        self.tape = Tape()

    def run(self) -> int:
        again = self.recompute.full
        if again:  # first what its forward would have kept
            self.tape.need(self.forward)
            self.tape.hold(self.kept.kept(NOTHING) - self.kept.input + self.sizes.residual)  # and its value
            self.recompute = NOTHING
        if BLOCKS[self.model.block].facts["norms"] == 1:
            self._drop()
            self._row(["out", "down"])
            self._activation()
            self._core()
            self._column(["qkv", "up"])
            self._norm(0)
        else:
            self._drop()
            self._row(["down"])
            self._activation()
            self._column(["up"])
            self._norm(self.kept.middle)
            self.tape.hold(self.sizes.residual if again else 0)  # who began it keeps the gradient that it was given
            self._drop()
            self._row(["out"])
            self._core()
            self._column(["qkv"])
            self._norm(0)
        return self.tape.most

    def _size(self, name: str) -> int:
        """Of what enters `out` and `down`, and of what `qkv` and `up` give."""
        return {"out": self.attended, "down": self.activated, "qkv": self.kept.qkv, "up": self.inner}[name]

    def _drop(self) -> None:
        """A gradient of a branch for that of the sum."""
        if self.model.dropout:
            self.tape.need(2 * self.sizes.residual)
            self.tape.hold(self.sizes.residual)
            self.tape.free(self.sizes.mask)

    def _row(self, names: Sequence[str]) -> None:
        """The gradient is gathered; it gives those of the inputs and, one after the other, those of the weights."""
        tape, again = self.tape, 0
        if self.recompute.activation and "down" in names and not self.kept.cast:
            again = self.activated
        held = self._cast(self.sizes.residual) if self.kept.cast else 0
        gathered = self._travelling(self.full)
        tape.hold(gathered + sum(self._size(name) for name in names) + again)
        for name in names:
            tape.need(self._weight_gradient(name, self.full, self._size(name)))
        tape.free(held + gathered + again + (self.sizes.residual if self.model.dropout else 0))
        if "out" in names and not self.shared:
            tape.free(self.kept.attended)
        if not self.recompute.activation or self.kept.cast:
            tape.free(self.kept.activated if "down" in names else 0)

    def _activation(self) -> None:
        self.tape.need(self.inner + (2 * self.activated if self.model.gated else 0))
        self.tape.hold(self.inner - self.activated)
        self.tape.free(self.inner)  # what it was formed from

    def _column(self, names: Sequence[str]) -> None:
        """The input is there, or formed or gathered again, for the weights' gradients; its own is summed over ranks."""
        tape = self.tape
        grads = sum(self._size(name) for name in names)
        again = self.recompute.norm and not self.kept.cast
        if again:
            tape.need(norm_forward(self.sizes, self.model.norm))
            tape.hold(self.sizes.residual)
        held = sum(self._cast(self._size(name)) for name in names) if self.eight_bits else 0
        gathered, part = self._travelling(self.full), self.sizes.residual if self.cut else 0
        if self.eight_bits:  # one product after the other, which are added up
            for done, name in enumerate(names):
                product = self._input_gradient(name)
                tape.need(gathered + min(1, done) * self.full + product)
        tape.hold(gathered + self.full + part)
        summed = self.full if self.cut and not self.overlap else 0  # else that goes on under the products that follow
        tape.free(summed)
        for name in names:
            tape.need(self._weight_gradient(name, self.full, self._size(name)))
        tape.free(held + gathered + (self.full if self.cut else 0) - summed + grads)
        tape.free(self.sizes.residual if again else self.kept.normed)

    def _norm(self, kept: int) -> None:
        """`kept`: what it was formed from, if nobody else needs that."""
        self.tape.need(norm_backward(self.sizes, self.model.norm))
        self.tape.free(self.sizes.residual)
        self.tape.need(2 * self.sizes.residual)  # with the sum of it and the gradient beside it
        self.tape.free(self.kept.statistics + kept)

    def _core(self) -> None:
        """From the gradient of what the heads attend to, to those of q, k and v side by side."""
        tape, qkv, core, late = self.tape, self.kept.qkv, self.kept.core, 0
        turned = turning(self.sizes, self.model) if self.model.position == "rope" else 0
        if self.recompute.attention:  # what it starts from, gives and is given stays until its end
            core = self.kept.core_again - self.attended
            tape.need(self.attending)
            tape.hold(self.kept.core_again)
            late = self.attended + self.attended + qkv
        tape.need(self.weights_formed)
        tape.hold(qkv)
        tape.free(core + (0 if late else self.attended) + (self.kept.attended if self.shared else 0))
        tape.need(qkv + turned)
        tape.free(late)

    def _travelling(self, nbytes: int) -> int:
        """Room for what is gathered: in eight bits if it travels so."""
        if not self.cut:
            return 0
        return nbytes // self.sizes.compute if self.kept.cast else nbytes

    def _cast(self, nbytes: int) -> int:
        """The cast of a tensor, which is held."""
        numbers = nbytes // self.sizes.compute
        self.tape.need(CASTING * numbers)
        self.tape.hold(numbers)
        return numbers

    def _input_gradient(self, name: str) -> int:
        """From the gradient of a product's result, in eight bits, and its weight."""
        terms = self._size(name) // self.sizes.compute // self.sizes.tokens
        numbers = self.full // self.sizes.compute
        factors = terms * (self.sizes.tokens + self.model.hidden_size)
        return max(self.full, self.summing(terms, numbers, factors))

    def _weight_gradient(self, name: str, first: int, second: int) -> int:
        """From both factors, in eight bits turned along the tokens one after the other."""
        numbers, compute = self.weights[name], self.sizes.compute
        if not self.eight_bits:
            return into_gradient(self.sizes, numbers)
        first, second = first // compute, second // compute
        each = 1 if self.kept.cast else CASTING + compute
        summed = self.summing(self.sizes.tokens, numbers, first + second) or numbers * self.sizes.wide
        return max(each * first, first + each * second, first + second + summed)
