"""Blocks of linear attention are its recurrence over tokens, with gradients, states and documents."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megascale.layout.sequence_shard import TokenSpan
from megascale.ops import linear_attention
from megascale.ops.linear_attention import Decays, attend, attend_backward, decay_rates, state_after, state_gradient

S, B, HEADS, D = 23, 2, 3, 4
STARTS = ((0, 5, 6, 17), (0, 8))


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rates(layer: int = 1) -> Tensor:
    return decay_rates(range(HEADS), HEADS, layer, 4, torch.empty(0, dtype=torch.float64))


def documents(starts: tuple[tuple[int, ...], ...]) -> Tensor:
    return torch.tensor([[sum(at <= token for at in row) - 1 for token in range(S)] for row in starts])


def recurrence(qkv: Tensor, state: Tensor, starts: tuple[tuple[int, ...], ...] | None) -> tuple[Tensor, Tensor]:
    """Advance a state [b, heads, d, d] by one token after another: the result [s, b, heads, d], and the state."""
    q, k, v = F.silu(qkv).unbind(2)
    out = []
    for token in range(S):
        kept = torch.tensor([starts is None or token not in row for row in starts or [()] * B]).view(B, 1, 1, 1)
        state = state * torch.exp(-rates()).unsqueeze(2) * kept + k[token].unsqueeze(-1) * v[token].unsqueeze(-2)
        out.append((q[token].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(out), state


@pytest.mark.parametrize("starts", [None, STARTS], ids=["rows", "documents"])
@pytest.mark.parametrize("block", [4, 7, 64])
@pytest.mark.parametrize("after_others", [False, True])
def test_blocks_are_the_recurrence(
    starts: tuple[tuple[int, ...], ...] | None, block: int, after_others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_attention, "BLOCK", block)
    qkv, grad, grad_state = drawn(S, B, 3, HEADS, D), drawn(S, B, HEADS, D, seed=1), drawn(B, HEADS, D, D, seed=2)
    state = drawn(B, HEADS, D, D, seed=3) if after_others else torch.zeros(B, HEADS, D, D, dtype=torch.float64)
    leaves = qkv.requires_grad_(), state.requires_grad_()
    shifted = starts and tuple((-1, *row[1:]) for row in starts) if after_others else starts  # the first goes on
    expected = recurrence(*leaves, shifted)
    expected_grads = torch.autograd.grad(expected, leaves, (grad, grad_state))

    numbers = None if starts is None else documents(starts)
    span = TokenSpan(0, S)
    if after_others:  # tokens before, of the first document
        span = TokenSpan(S, 2 * S)
        numbers = None if numbers is None else torch.cat([torch.zeros_like(numbers), numbers], 1)
    decays, out, grad_qkv = Decays(rates(), numbers), torch.empty_like(grad), torch.empty_like(qkv)
    before = state.detach() if after_others else None
    with torch.no_grad():
        after = attend(span, qkv, out, decays, before)
        grad_before = attend_backward(span, qkv, grad, grad_qkv, decays, before, grad_state)
    for ours, theirs in zip((out, after, grad_qkv), (*expected, expected_grads[0]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    if after_others:
        torch.testing.assert_close(grad_before, expected_grads[1], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("starts", [None, STARTS], ids=["rows", "documents"])
def test_spans_in_turn_are_a_sequence(
    starts: tuple[tuple[int, ...], ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states of spans alone, advanced in order, are those of the sequence; gradients in the reverse order."""
    qkv, grad = drawn(S, B, 3, HEADS, D), drawn(S, B, HEADS, D, seed=1)
    decays = Decays(rates(), None if starts is None else documents(starts))
    whole = state_after(qkv, TokenSpan(0, S), decays)
    rest = state_gradient(qkv[9:], grad[9:], TokenSpan(9, S), decays)
    monkeypatch.setattr(linear_attention, "BLOCK", 4)
    spans = [TokenSpan(0, 9), TokenSpan(9, 10), TokenSpan(10, S)]
    state: Tensor | None = None
    for span in spans:
        state = decays.advance(state, span, state_after(qkv[slice(*span)], span, decays))
    torch.testing.assert_close(state, whole, rtol=1e-12, atol=1e-13)
    gradient: Tensor | None = None
    for span in spans[:0:-1]:
        gradient = decays.advance(gradient, span, state_gradient(qkv[slice(*span)], grad[slice(*span)], span, decays))
    torch.testing.assert_close(gradient, rest, rtol=1e-12, atol=1e-13)


def test_rates_of_a_rank_are_those_of_its_heads() -> None:
    """From 2^(-8 / n) of the first head to 2^-8 of the last, in the last layer next to none."""
    like = torch.empty(0, dtype=torch.float64)
    whole = decay_rates(range(8), 8, 0, 12, like)
    assert torch.equal(torch.cat([decay_rates(range(i, i + 4), 8, 0, 12, like) for i in (0, 4)]), whole)
    assert whole[0].item() == pytest.approx(0.5, rel=1e-4) and whole[-1].item() == pytest.approx(2**-8, rel=1e-4)
    assert 0 < decay_rates(range(8), 8, 11, 12, like).max().item() < 1e-4
    assert 0 < decay_rates(range(8), 8, 13, 12, like).max().item() < 1e-4  # of a layer of multi-token prediction


def test_the_state_of_bf16_is_in_fp32() -> None:
    """A state of many tokens whose bf16 sum would stop growing, as 256 + 1 is 256."""
    qkv = torch.ones(600, 1, 3, 1, 1, dtype=torch.bfloat16)
    one = F.silu(torch.ones(())).item() ** 2
    slow = torch.full((1, 1), 1e-9)
    after = state_after(qkv, TokenSpan(0, 600), Decays(slow, None))
    assert after.dtype == torch.float32 and math.isclose(after.item(), 600 * one, rel_tol=1e-5)
