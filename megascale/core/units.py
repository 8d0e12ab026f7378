"""Formatting of counts, bytes, FLOP/s, durations, times. Bytes use powers of 1024, all other units powers of 1000."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

GIB = 1024**3
MIB = 1024**2


def format_count(value: float) -> str:
    """1234567 -> '1.23M'. For parameters, tokens and other counts."""
    return _scaled(value, ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")), "", 2)


def format_bytes(value: float) -> str:
    """2147483648 -> '2.00 GiB'."""
    return _scaled(value, ((1024**4, " TiB"), (GIB, " GiB"), (MIB, " MiB"), (1024, " KiB")), " B", 2)


def format_flops(value: float) -> str:
    """9.89e14 -> '989.0 TFLOP/s'. `value` in FLOP/s."""
    units = ((1e15, " PFLOP/s"), (1e12, " TFLOP/s"), (1e9, " GFLOP/s"), (1e6, " MFLOP/s"))
    return _scaled(value, units, " FLOP/s", 1)


def _scaled(value: float, units: Sequence[tuple[float, str]], one: str, digits: int) -> str:
    for size, suffix in units:
        if abs(value) >= size:
            return f"{value / size:.{digits}f}{suffix}"
    return f"{value:.0f}{one}"


def format_duration(seconds: float) -> str:
    """3725 -> '1h 02m'; 42 -> '42s'."""
    if not math.isfinite(seconds):
        return "unknown"
    minutes, secs = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02d}h"
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {secs:02d}s" if minutes else f"{secs}s"


def format_time(seconds: float) -> str:
    """Seconds since 1970 -> '2026-11-28 04:14:48 +0000', on this host's clock and in its time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(seconds))
