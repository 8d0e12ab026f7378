"""Bytes that the ends of the network need while they run, beyond what is there when they begin: the embedding's
backward, and the head's forward, which forms the loss and its gradient. Counted as in `plan.working`.
"""

from __future__ import annotations

from megascale.config.run import RunConfig
from megascale.layout.loss import BLOCK_BYTES, loss_chunks
from megascale.layout.tensors import padded_vocab
from megascale.plan.activations import Sizes
from megascale.plan.tape import Tape, into_gradient, is_cut, norm_forward

TOKEN_BYTES = 53
"""Of a token's label, weight, and sums over the vocabulary, in fp32."""


def embedding_backward(config: RunConfig) -> int:
    """Beyond the gradient of its result: that of all tokens without those of other ranks, in the format of
    accumulation; and that of positions, of one sequence.
    """
    sizes, m = Sizes(config), config.model
    narrow = sizes.compute < sizes.wide
    whole, one = (rows * m.hidden_size for rows in (sizes.tokens, sizes.seq))
    gathered, masked = (whole * sizes.compute if there else 0 for there in (is_cut(config), sizes.tp > 1))
    tokens = masked + max(gathered, whole * sizes.wide if narrow else 0)
    if m.position != "learned":
        return tokens
    summed = sizes.residual // sizes.micro if sizes.micro > 1 else 0
    return max(tokens, one * sizes.compute + summed)


def head_forward(config: RunConfig) -> int:
    """Of the last norm, the head's product, the loss and its gradient, chunk by chunk, beyond the input."""
    sizes, m = Sizes(config), config.model
    columns, rows = padded_vocab(m, sizes.tp) // sizes.tp, sizes.own // sizes.micro
    chunks = loss_chunks(rows, sizes.tokens, columns)
    tokens = -(-rows // chunks) * (sizes.tokens // rows)
    logits, grad = tokens * columns * sizes.compute, tokens * m.hidden_size * sizes.compute
    cut = is_cut(config)
    part = grad // sizes.tp if cut else 0
    tape = Tape()
    tape.need(norm_forward(sizes, m.norm))
    tape.hold(sizes.residual + sizes.statistics)
    if chunks > 1:  # gradients of the chunks before, which are joined at the end
        tape.hold(sizes.residual * (chunks - 1) // chunks)
        tape.need(sizes.residual + sizes.residual // chunks)
    tape.hold((grad if cut else 0) + logits)
    tape.need(_losses(sizes, tokens, columns))
    tape.hold(grad + part)
    tape.free(grad if cut and not config.overlap.tp else 0)  # else its sum over ranks is still formed
    tape.need(into_gradient(sizes, columns * m.hidden_size))
    return tape.most


def _losses(sizes: Sizes, tokens: int, columns: int) -> int:
    """Of the losses of a chunk's tokens: a few numbers each, and a block of their logits in the format of the loss."""
    rows = min(tokens, max(1, BLOCK_BYTES // (columns * sizes.wide)))
    return TOKEN_BYTES * tokens + (rows * columns * sizes.wide if sizes.compute < sizes.wide else 0)
