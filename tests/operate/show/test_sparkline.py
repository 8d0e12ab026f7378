"""Curves as text."""

from __future__ import annotations

import numpy as np

from megascale.operate.show.sparkline import ASCII_LEVELS, BLOCKS, bars


def test_the_lowest_and_the_highest_part_have_the_ends_of_the_levels() -> None:
    assert bars(np.arange(8.0), 8, 1) == [BLOCKS]
    assert bars(np.repeat(np.arange(5.0), 7), 5, 1, ASCII_LEVELS) == [ASCII_LEVELS]


def test_what_is_not_finite_is_left_out() -> None:
    assert bars(np.array([np.nan, 1.0, np.inf, 2.0]), 2, 1) == [BLOCKS[0] + BLOCKS[-1]]
    assert bars(np.array([np.nan]), 10, 1) == bars(np.array([]), 10, 1) == [""]


def test_a_constant_curve_is_flat() -> None:
    assert bars(np.ones(30), 10, 1) == [BLOCKS[0] * 10]


def test_bars_of_several_lines() -> None:
    assert bars(np.arange(16.0), 16, 2) == [" " * 8 + BLOCKS, BLOCKS + "█" * 8]
    assert bars(np.array([0.0, 9.0]), 4, 2, ASCII_LEVELS) == ["  ^^", "__||"]
    assert bars(np.array([]), 4, 3) == ["", "", ""]
