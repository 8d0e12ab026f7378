"""Bytes that a block needs only while it runs, beyond what it keeps and what is there when it begins: the gradients
between its operations, whole activations that are gathered, products on their way into a gradient, copies in other
formats.

Operations are followed in their order, as torch's operators carry them out on a CPU, not compiled; each needs what it
forms, its predecessors' results are held until they are used, and what was kept for it is released. Of biases, scales
and a loss's numbers nothing is counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from megascale.catalog.layers import BLOCKS
from megascale.config.model import ModelConfig
from megascale.config.run import RunConfig
from megascale.layout.chunks import eight_bit_layers
from megascale.layout.recompute import NOTHING, Recompute
from megascale.plan.activations import BOOL, INDEX, BlockBytes, Sizes
from megascale.plan.flops import block_weights, scores
from megascale.plan.tape import Tape, into_gradient, is_cut, norm_backward, norm_forward

CASTING = 8
"""Bytes that a cast to eight bits needs for a number: in fp32 before and after it is scaled."""


def block_backward(config: RunConfig, layer: int, recompute: Recompute = NOTHING) -> int:
    """The most beyond what the block has kept and the gradient of its result, with what is computed again."""
    return _Backward(config, layer, recompute).run()


def block_forward(config: RunConfig, layer: int, recompute: Recompute = NOTHING, value: bool = True) -> int:
    """The most beyond the input of the block, where even what is not kept for the backward is there until the product
    that needs it is done. Without `value` the last product is left out.
    """
    sizes, m = Sizes(config), config.model
    recompute = NOTHING if recompute.full else recompute
    kept, side_by_side = sizes.block(layer), BLOCKS[m.block].facts["norms"] == 1
    product, branch = _reduced(config), 0 if side_by_side else sizes.residual
    normed = sizes.residual if kept.cast or not (side_by_side and recompute.norm) else 0
    before = kept.statistics + normed + (kept.inner if side_by_side else 0)
    copied = m.position == "rope" or (m.dropout and sizes.micro > 1)  # what the copy is made of is there as well
    core = kept.core + (kept.qkv if copied else 0)
    attended = (kept.qkv if recompute.attention else core) + kept.attended + (0 if side_by_side else product)
    last = (max(product, 2 * sizes.residual) if side_by_side else product) if value else 0
    end = kept.kept(recompute) - kept.input + branch
    if kept.cast:  # what was cast
        activated = sizes.tokens * m.ffn_size // sizes.tp
        end += (0 if side_by_side else sizes.residual) + activated * sizes.compute
        last = max(last, (CASTING - 1) * activated)
    else:
        end += kept.normed if recompute.norm and not side_by_side else 0
        end += kept.activated if recompute.activation else 0
        last = max(last, CASTING * kept.activated // sizes.compute) if layer in eight_bit_layers(config) else last
    turned = 2 * kept.qkv + turning(sizes, m) if m.position == "rope" else 0
    middle = 0 if side_by_side else end - kept.inner - kept.activated - kept.normed + norm_forward(sizes, m.norm)
    return max(before + max(turned, core + forming_weights(config, layer), attended), middle, end + last)


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


def forming_weights(config: RunConfig, layer: int) -> int:
    """Beyond what attention keeps, while its weights are formed in full, for dropout: as many again, or before there
    are any, who sees whom by the distance of two tokens.
    """
    m, sizes = config.model, Sizes(config)
    distances = (INDEX + 2 * BOOL) * sizes.seq**2
    return max(2 * weights_bytes(config, layer), distances - weights_bytes(config, layer)) if m.dropout else 0


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
        self.weights = {name: count // config.parallel.tp for name, count in block_weights(self.model).items()}
        self.weights_formed = weights_bytes(config, layer)
        self.forming = forming_weights(config, layer)
        self.forward = block_forward(config, layer, recompute, value=False)
        self.full = self.sizes.tokens * self.model.hidden_size * self.sizes.compute
        heads = self.sizes.tokens * self.model.num_heads * self.model.head_dim // self.sizes.tp
        self.attended = heads * self.sizes.compute
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
        self.tape.need(2 * self.sizes.residual)  # with the sum of it and the gradient beside it
        self.tape.free(self.kept.statistics + self.sizes.residual + kept)

    def _core(self) -> None:
        """From the gradient of what the heads attend to, to those of q, k and v side by side."""
        tape, qkv, core, late = self.tape, self.kept.qkv, self.kept.core, 0
        turned = turning(self.sizes, self.model) if self.model.position == "rope" else 0
        if self.recompute.attention:  # what it starts from, gives and is given stays until its end
            core = self.kept.core_again - self.attended
            tape.need(self.kept.core_again + self.forming)
            tape.hold(self.kept.core_again)
            late = self.attended + self.attended + qkv
        tape.need(self.weights_formed)
        tape.hold(qkv)
        tape.free(self.kept.attended + core + (0 if late else self.attended))
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

    def _weight_gradient(self, name: str, first: int, second: int) -> int:
        """From both factors, in eight bits turned along the tokens one after the other."""
        numbers, compute = self.weights[name], self.sizes.compute
        if not self.eight_bits:
            return into_gradient(self.sizes, numbers)
        first, second = first // compute, second // compute
        each = 1 if self.kept.cast else CASTING + compute
        return max(each * first, first + each * second, first + second + numbers * self.sizes.wide)
