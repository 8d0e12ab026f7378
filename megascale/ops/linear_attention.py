"""Linear attention with decay, in blocks of tokens (Lightning Attention, Qin et al. 2024; MiniMax-01, Li et al. 2025).

A head has a state S [d, d], which decays by lambda at every token and is zero at the start of a document:

    S_t = lambda S_t-1 + k_t^T v_t    o_t = q_t S_t    q, k, v: silu of what is projected

A block of n tokens, after the state S and before a state with the gradient dS, i and j from 0:

    O  = (Q K^T * D) V + (from_start * Q) S    D_ij = lambda^(i - j) for j <= i    from_start_i = lambda^(i + 1)
    S' = across S + (to_end * K)^T V           to_end_j = lambda^(n - 1 - j)       across = lambda^n

Each factor is 0 where a document begins in between. Backward repeats the states from the first one, then takes the
blocks in reverse order. All of it is in fp32 or wider. Tensors of rows are [n, b, 3, heads, d], of q, k and v as they
are projected, or [n, b, heads, d]; a state is [b, heads, d, d].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

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


class BlockDecays(NamedTuple):
    """The factors of a block of n tokens without documents: D [heads, n, n], the others [heads, n, 1]."""

    within: Tensor
    from_start: Tensor
    to_end: Tensor


class Decays:
    """The factors of blocks by their places in a sequence. `rates` [heads, 1]: -ln(lambda), in the dtype of states;
    `documents` [b, s]: the number of each token's document, or None.
    """

    def __init__(self, rates: Tensor, documents: Tensor | None) -> None:
        self.dtype = rates.dtype
        self._rates = rates
        self._documents = documents
        self._by_length: dict[int, BlockDecays] = {}

    def within(self, block: TokenSpan) -> Tensor:
        """D of a block."""
        factors = self._of_length(block.size).within
        numbers = self._numbers(block)
        return factors if numbers is None else factors * (numbers.mT == numbers).unsqueeze(1)

    def from_start(self, block: TokenSpan) -> Tensor:
        """The factors of the state before a block, by token."""
        factors, numbers = self._of_length(block.size).from_start, self._numbers(block)
        if numbers is None or block.start == 0:
            return factors
        return factors * (numbers.mT == self._before(block)).unsqueeze(1)

    def to_end(self, block: TokenSpan) -> Tensor:
        """The factors of a block's tokens in the state after it."""
        factors, numbers = self._of_length(block.size).to_end, self._numbers(block)
        return factors if numbers is None else factors * (numbers.mT == numbers[..., -1:]).unsqueeze(1)

    def advance(self, state: Tensor | None, block: TokenSpan, added: Tensor) -> Tensor:
        """Add the `state` before a block or span, None for zeros, to what the block has `added`: the state after it; or
        a gradient after it to that before it.
        """
        if state is None:
            return added
        across, numbers = torch.exp(self._rates * -block.size).unsqueeze(2), self._numbers(block)
        if numbers is not None and block.start:
            across = across * (numbers[..., -1:] == self._before(block)).unsqueeze(1)
        return added + across * state

    def _of_length(self, n: int) -> BlockDecays:
        if n not in self._by_length:
            places = torch.arange(n + 1, device=self._rates.device)
            powers = torch.exp(-self._rates * places)
            past = places[:n].unsqueeze(1) - places[:n]
            within = powers[:, past.clamp(min=0)].mul_(past >= 0)
            ends = powers[:, 1:], powers[:, :n].flip(1)
            self._by_length[n] = BlockDecays(within, *(factors.unsqueeze(2) for factors in ends))
        return self._by_length[n]

    def _numbers(self, block: TokenSpan) -> Tensor | None:
        """The documents of a block [b, 1, n]."""
        return None if self._documents is None else self._documents[:, None, slice(*block)]

    def _before(self, block: TokenSpan) -> Tensor:
        """The document of the token before a block [b, 1, 1]."""
        assert self._documents is not None, "asked with documents"
        return self._documents[:, None, block.start - 1 : block.start]


def attend(
    qkv: Tensor, out: Tensor, span: TokenSpan, decays: Decays, state: Tensor | None, block: int = BLOCK
) -> Tensor:
    """Attend within a span, after `state`, None for zeros; write the result to `out`. Return the state after it."""
    for rows, part in blocks(span, block):
        q, k, v = _features(qkv[rows], decays)
        result = (q @ k.mT).mul_(decays.within(part)) @ v
        if state is not None:
            result += (q * decays.from_start(part)) @ state
        out[rows] = result.permute(2, 0, 1, 3)
        state = decays.advance(state, part, (k * decays.to_end(part)).mT @ v)
    assert state is not None, "a span has tokens"
    return state


def state_after(qkv: Tensor, span: TokenSpan, decays: Decays, block: int = BLOCK) -> Tensor:
    """Return the state after a span, of the span alone."""
    state: Tensor | None = None
    for rows, part in blocks(span, block):
        state = decays.advance(state, part, _added(qkv[rows], part, decays))
    assert state is not None, "a span has tokens"
    return state


def state_gradient(qkv: Tensor, grad_out: Tensor, span: TokenSpan, decays: Decays, block: int = BLOCK) -> Tensor:
    """Return the gradient of the state before a span from the result of the span alone."""
    grad: Tensor | None = None
    for rows, part in reversed([*blocks(span, block)]):
        q, grad_rows = _features(qkv[rows], decays)[0], _by_head(grad_out[rows], decays)
        grad = decays.advance(grad, part, (q * decays.from_start(part)).mT @ grad_rows)
    assert grad is not None, "a span has tokens"
    return grad


def attend_backward(
    qkv: Tensor, grad_out: Tensor, grad_qkv: Tensor, span: TokenSpan, decays: Decays, state: Tensor | None,
    grad_state: Tensor | None, block: int = BLOCK,
) -> Tensor:  # fmt: skip
    """Write the gradient of `attend` to `grad_qkv`; return that of the state before. `grad_state`: of the state after,
    None for zeros.
    """
    states = _states(qkv, span, decays, state, block)
    for (rows, part), before in reversed([*zip(blocks(span, block), states, strict=False)]):  # no state after the last
        q, k, v = _features(qkv[rows], decays)
        grad, within = _by_head(grad_out[rows], decays), decays.within(part)
        scores, grad_scores = (q @ k.mT).mul_(within), (grad @ v.mT).mul_(within)
        grads = torch.stack((grad_scores @ k, grad_scores.mT @ q, scores.mT @ grad))
        if before is not None:
            grads[0] += (grad @ before.mT) * decays.from_start(part)
        if grad_state is not None:
            to_end = decays.to_end(part)
            grads[1] += (v @ grad_state.mT) * to_end
            grads[2] += (k * to_end) @ grad_state
        grad_state = decays.advance(grad_state, part, (q * decays.from_start(part)).mT @ grad)
        grads = torch.ops.aten.silu_backward(grads, _by_head(qkv[rows], decays))
        grad_qkv[rows] = grads.permute(3, 1, 0, 2, 4)
    assert grad_state is not None, "a span has tokens"
    return grad_state


def blocks(span: TokenSpan, block: int) -> Iterator[tuple[slice, TokenSpan]]:
    """Yield the blocks of a span: their rows in it, and their places in the sequence."""
    for start in range(0, span.size, block):
        stop = min(start + block, span.size)
        yield slice(start, stop), TokenSpan(span.start + start, span.start + stop)


def _states(qkv: Tensor, span: TokenSpan, decays: Decays, state: Tensor | None, block: int) -> Iterator[Tensor | None]:
    """Yield the states before the blocks of a span."""
    for rows, part in blocks(span, block):
        yield state
        state = decays.advance(state, part, _added(qkv[rows], part, decays))


def _added(qkv: Tensor, block: TokenSpan, decays: Decays) -> Tensor:
    """Return the state of a block alone, of its rows."""
    _, k, v = _features(qkv, decays)
    return (k * decays.to_end(block)).mT @ v


def _features(qkv: Tensor, decays: Decays) -> tuple[Tensor, ...]:
    """Return q, k and v [b, heads, n, d] of rows."""
    return F.silu(_by_head(qkv, decays)).unbind()


def _by_head(rows: Tensor, decays: Decays) -> Tensor:
    """Map rows [n, b, .., heads, d] to [.., b, heads, n, d] in the dtype of states."""
    return rows.movedim(0, -2).movedim(0, -4).to(decays.dtype)
