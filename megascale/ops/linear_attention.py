"""Linear attention with decay, in blocks of tokens (Lightning Attention, Qin et al. 2024; MiniMax-01, Li et al. 2025).

A head has a state S [d, d], which decays by lambda at every token and is zero at the start of a document:

    S_t = lambda S_t-1 + k_t^T v_t    o_t = q_t S_t    q, k, v: silu of what is projected

A block of n tokens, i and j from 0, after the state S of the token before:

    O  = (Q K^T * D) V + (from_start * Q) S    D_ij = lambda^(i - j) for j <= i    from_start_i = lambda^(i + 1)
    S' = across S + (to_end * K)^T V           to_end_j = lambda^(n - 1 - j)       across = lambda^n

Each factor is that of two tokens (`Decays.between`), 0 where a document begins in between. Backward repeats the states
from the first one, then takes the blocks in reverse order. All of it is in fp32 or wider. Tensors of rows are
[n, b, 3, heads, d], of q, k and v as they are projected, or [n, b, heads, d]; a state is [b, heads, d, d].
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from megascale.layout.parts.linear_attention import BLOCK
from megascale.layout.sequence_shard import TokenSpan


def decay_rates(heads: range, num_heads: int, layer: int, num_layers: int, like: Tensor) -> Tensor:
    """Return -ln(lambda) of `heads` of a layer [heads, 1], in the dtype and on the device of `like`: from
    2^(-8 / num_heads) of the first head to 2^-8 of the last, less in later layers and next to 0 in the last.
    """
    numbers = torch.arange(heads.start + 1, heads.stop + 1, dtype=like.dtype, device=like.device)
    share = 1 - min(layer, num_layers - 1) / (num_layers - 1 + 1e-5) + 1e-5
    return torch.exp2(numbers * (-8 / num_heads)).mul_(share).unsqueeze(1)


class Decays:
    """The factors of blocks by their places in a sequence. `rates` [heads, 1]: -ln(lambda), in the dtype of states;
    `documents` [b, s]: the number of each token's document, or None.
    """

    def __init__(self, rates: Tensor, documents: Tensor | None) -> None:
        self.dtype = rates.dtype
        self._rates = rates
        self._documents = documents
        self._kept: dict[tuple[int, int, int], Tensor] = {}

    def from_start(self, block: TokenSpan) -> Tensor:
        """The factors of the state before a block, by token."""
        return self.between(block, TokenSpan(block.start - 1, block.start))

    def to_end(self, block: TokenSpan) -> Tensor:
        """The factors of a block's tokens in the state after it."""
        return self.between(TokenSpan(block.stop - 1, block.stop), block).mT

    def advance(self, state: Tensor | None, block: TokenSpan, added: Tensor) -> Tensor:
        """Add the `state` before a block or span, None for zeros, to what the block has `added`: the state after it; or
        a gradient after it to that before it.
        """
        ends = TokenSpan(block.stop - 1, block.stop), TokenSpan(block.start - 1, block.start)
        return added if state is None else added + self.between(*ends) * state

    def between(self, tokens: TokenSpan, others: TokenSpan) -> Tensor:
        """The factors of `others` in what `tokens` see [.., heads, tokens, others], 0 for others after a token. The
        token before a sequence is of its first document.
        """
        key = tokens.start - others.start, tokens.size, others.size
        if key not in self._kept:
            past, columns = (torch.arange(n, device=self._rates.device) for n in key[1:])
            past = past[:, None] + key[0] - columns
            self._kept[key] = torch.exp(-self._rates[..., None] * past.clamp(min=0)).mul_(past >= 0)
        if self._documents is None:
            return self._kept[key]
        rows, columns = (self._documents[:, None, max(0, it.start) : max(1, it.stop)] for it in (tokens, others))
        return self._kept[key] * (rows.unsqueeze(3) == columns.unsqueeze(2))


def attend(span: TokenSpan, qkv: Tensor, out: Tensor, decays: Decays, state: Tensor | None) -> Tensor:
    """Attend within a span, after `state`, None for zeros; write the result to `out`. Return the state after it."""
    for rows, part in blocks(span):
        q, k, v = _features(qkv[rows], decays)
        result = (q @ k.mT).mul_(decays.between(part, part)) @ v
        if state is not None:
            result += (q * decays.from_start(part)) @ state
        out[rows] = result.permute(2, 0, 1, 3)
        state = decays.advance(state, part, (k * decays.to_end(part)).mT @ v)
    assert state is not None, "a span has tokens"
    return state


def state_after(qkv: Tensor, span: TokenSpan, decays: Decays) -> Tensor:
    """Return the state after a span, of the span alone."""
    (state,) = deque(_states(qkv, span, decays, None), maxlen=1)
    assert state is not None, "a span has tokens"
    return state


def state_gradient(qkv: Tensor, grad_out: Tensor, span: TokenSpan, decays: Decays) -> Tensor:
    """Return the gradient of the state before a span from the result of the span alone."""
    grad: Tensor | None = None
    for rows, part in reversed([*blocks(span)]):
        q, grad_rows = _features(qkv[rows], decays)[0], _by_head(grad_out[rows], decays)
        grad = decays.advance(grad, part, (q * decays.from_start(part)).mT @ grad_rows)
    assert grad is not None, "a span has tokens"
    return grad


def attend_backward(
    span: TokenSpan, qkv: Tensor, grad_out: Tensor, grad_qkv: Tensor, decays: Decays, state: Tensor | None,
    grad_state: Tensor | None,
) -> Tensor:  # fmt: skip
    """Write the gradient of `attend` to `grad_qkv`; return that of the state before. `grad_state`: of the state after,
    None for zeros.
    """
    states = _states(qkv, span, decays, state)
    for (rows, part), before in reversed([*zip(blocks(span), states, strict=False)]):  # without the state after all
        q, k, v = _features(qkv[rows], decays)
        grad, within = _by_head(grad_out[rows], decays), decays.between(part, part)
        scores, grad_scores = (q @ k.mT).mul_(within), (grad @ v.mT).mul_(within)
        grads = torch.stack((grad_scores @ k, grad_scores.mT @ q, scores.mT @ grad))
        from_start = decays.from_start(part)
        if before is not None:
            grads[0] += (grad @ before.mT) * from_start
        if grad_state is not None:
            to_end = decays.to_end(part)
            grads[1] += (v @ grad_state.mT) * to_end
            grads[2] += (k * to_end) @ grad_state
        grad_state = decays.advance(grad_state, part, (q * from_start).mT @ grad)
        grad_qkv[rows] = torch.ops.aten.silu_backward(grads, _by_head(qkv[rows], decays)).permute(3, 1, 0, 2, 4)
    assert grad_state is not None, "a span has tokens"
    return grad_state


def blocks(span: TokenSpan) -> Iterator[tuple[slice, TokenSpan]]:
    """Yield the blocks of a span: their rows in it, and their places in the sequence."""
    for start in range(0, span.size, BLOCK):
        rows = slice(start, min(start + BLOCK, span.size))
        yield rows, TokenSpan(span.start + rows.start, span.start + rows.stop)


def _states(qkv: Tensor, span: TokenSpan, decays: Decays, state: Tensor | None) -> Iterator[Tensor | None]:
    """Yield the state before a span, and that after each of its blocks."""
    yield state
    for rows, part in blocks(span):
        _, k, v = _features(qkv[rows], decays)
        state = decays.advance(state, part, (k * decays.to_end(part)).mT @ v)
        yield state


def _features(qkv: Tensor, decays: Decays) -> tuple[Tensor, ...]:
    """Return q, k and v [b, heads, n, d] of rows."""
    return F.silu(_by_head(qkv, decays)).unbind()


def _by_head(rows: Tensor, decays: Decays) -> Tensor:
    """Map rows [n, b, .., heads, d] to [.., b, heads, n, d] in the dtype of states."""
    return rows.movedim(0, -2).movedim(0, -4).to(decays.dtype)
