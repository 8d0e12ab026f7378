"""Formatting of counts, bytes, FLOP/s and durations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.core.units import format_bytes, format_count, format_duration, format_flops

COUNTS = {"": 1, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
BYTES = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}
FLOPS = {"FLOP/s": 1, "MFLOP/s": 1e6, "GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15}
SECONDS = {"d": 86_400, "h": 3600, "m": 60, "s": 1}


@pytest.mark.parametrize(
    ("shown", "value"),
    {
        "0": 0, "999": 999, "1.00k": 1000, "1.23M": 1_234_567, "7.00B": 7e9, "15.60T": 15.6e12, "-1.50k": -1500,
    }.items(),
)  # fmt: skip
def test_counts(shown: str, value: float) -> None:
    assert format_count(value) == shown


@pytest.mark.parametrize(
    ("shown", "value"), {"0 B": 0, "1023 B": 1023, "1.00 KiB": 1024, "2.00 GiB": 2**31, "1.50 TiB": 1.5 * 2**40}.items()
)
def test_bytes(shown: str, value: float) -> None:
    assert format_bytes(value) == shown


def test_flops() -> None:
    assert [format_flops(f) for f in (9.89e14, 1e9, 1.5e15)] == ["989.0 TFLOP/s", "1.0 GFLOP/s", "1.5 PFLOP/s"]
    assert format_flops(485514925) == "485.5 MFLOP/s"


@pytest.mark.parametrize(
    ("shown", "value"),
    {"42s": 42.9, "2m 05s": 125, "1h 02m": 3725, "2d 03h": 2 * 86_400 + 3 * 3600 + 59, "unknown": float("inf")}.items(),
)
def test_durations(shown: str, value: float) -> None:
    assert format_duration(value) == shown


@given(st.floats(0, 1e18))
def test_the_shown_value_is_rounded_to_its_last_digit(value: float) -> None:
    shown = format_count(value)
    suffix = shown.lstrip("0123456789.")
    step = 0.01 * COUNTS[suffix] if suffix else 1
    assert abs(float(shown.removesuffix(suffix)) * COUNTS[suffix] - value) <= 0.51 * step
    for show, sizes, digits in ((format_bytes, BYTES, 2), (format_flops, FLOPS, 1)):
        number, unit = show(value).split()
        assert abs(float(number) * sizes[unit] - value) <= 0.51 * max(10**-digits * sizes[unit], sizes[unit] == 1)


@given(st.floats(0, 1e9))
def test_a_duration_is_cut_to_its_second_unit(value: float) -> None:
    parts = [(int(part[:-1]), SECONDS[part[-1]]) for part in format_duration(value).split()]
    total = sum(number * size for number, size in parts)
    assert total <= value < total + parts[-1][1]
