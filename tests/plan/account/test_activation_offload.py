"""Selective offload: its share by time and bytes, and the ranks that remain, against ByteScale's formula."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.plan.account.activation_offload import offload_share, ranks_with_offload


def test_what_leaves_in_a_layer_s_time() -> None:
    assert offload_share(2.0, 100.0, 25.0) == 0.5
    assert offload_share(9.0, 100.0, 25.0) == 1.0


@given(tokens=st.integers(1, 10**6), layers=st.integers(3, 100), share=st.floats(0, 1))
def test_ranks_are_those_of_the_formula(tokens: int, layers: int, share: float) -> None:
    activation, held = tokens * 7.0, 8192 * 7.0
    expected = (2 * activation + (1 - share) * (layers - 2) * activation) / (layers * held)
    assert ranks_with_offload(tokens, 8192, layers, share) == pytest.approx(math.ceil(expected - 1e-9), abs=0)


def test_without_offload_a_sequence_takes_its_tokens_over_the_limit() -> None:
    assert ranks_with_offload(786432, 8192, 32, 0.0) == 96
    assert ranks_with_offload(786432, 8192, 32, 1.0) == 6
    assert ranks_with_offload(786432, 8192, 2, 1.0) == 96
