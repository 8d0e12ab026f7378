"""Bytes of context parallelism by mode against the papers' formulas, and counted message by message."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.plan.account.context_bytes import CONTEXT_MODES, ContextMode, Heads, context_bytes

N, P, SIZE, WIDE = 4096, 8, 2, 4
MHA, GQA = Heads(32, 32, 128, SIZE, WIDE), Heads(32, 8, 128, SIZE, WIDE)


def test_ulysses_sends_4_n_h_over_p() -> None:
    forward, backward = context_bytes("ulysses", N, P, MHA)
    assert forward == 4 * N * (32 * 128) / P * SIZE * (P - 1) / P
    assert backward == forward
    assert context_bytes("ulysses", N, P, GQA)[0] == forward * (2 * 32 + 2 * 8) / (4 * 32)


def test_ulysses_replicates_key_value_heads_beyond_their_number() -> None:
    forward, _ = context_bytes("ulysses", N, 32, GQA)
    assert forward == (2 * 32 + 2 * 32) * 128 * N / 32 * SIZE * 31 / 32


def test_a_ring_sends_p_minus_1_blocks() -> None:
    block, gradient = (2 * 8 * 128 * (N / P) * size for size in (SIZE, WIDE))
    assert context_bytes("ring", N, P, GQA) == ((P - 1) * block, (P - 1) * block + P * gradient)
    assert context_bytes("allgather", N, P, GQA) == ((P - 1) * block, (P - 1) * (block + gradient))


@given(mode=st.sampled_from(CONTEXT_MODES), tokens=st.integers(1, 10**6))
def test_one_rank_sends_nothing(mode: ContextMode, tokens: int) -> None:
    assert context_bytes(mode, tokens, 1, GQA) == (0, 0)


@pytest.mark.parametrize("heads", [MHA, GQA])
def test_ulysses_bytes_fall_with_the_ranks_and_a_ring_s_do_not(heads: Heads) -> None:
    for ranks in (2, 4):
        few, many = (sum(context_bytes("ulysses", N, count, heads)) for count in (ranks, 2 * ranks))
        assert many < few
        few, many = (sum(context_bytes("ring", N, count, heads)) for count in (ranks, 2 * ranks))
        assert many > few
