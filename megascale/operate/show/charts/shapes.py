"""The shapes of a chart as SVG text, and round numbers for its axes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape

BLUE, ORANGE, GREY, GREEN, RED = "#0072b2", "#e69f00", "#8c8c8c", "#009e73", "#b2182b"

FILE_START = b"<svg xmlns='http://www.w3.org/2000/svg'"  # the first bytes of a chart's file
REPORT_START = b"<!doctype html><!-- megascale "  # the first bytes of a report's file

STYLE = """
svg text { font: 11px sans-serif; fill: #333 }
svg .title { font-weight: bold }
svg .right { text-anchor: end }
svg .middle { text-anchor: middle }
"""
"""The rules that a page with charts must have."""


def document(width: float, height: float, title: str, body: Iterable[str]) -> str:
    """Return a chart with a title."""
    box = f"viewBox='0 0 {width:.0f} {height:.0f}' width='{width:.0f}'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' {box} role='img'>"
    return "\n".join([head, text(8, 15, title, "title"), *body, "</svg>"])


def text(x: float, y: float, words: str, look: str = "") -> str:
    """Return a text; `look`: a class of STYLE."""
    kind = f" class='{look}'" if look else ""
    return f"<text{kind} x='{x:.1f}' y='{y:.1f}'>{escape(words)}</text>"


def rect(x: float, y: float, width: float, height: float, colour: str = "", note: str = "") -> str:
    """Return a rectangle. `note`: the text beside the pointer."""
    fill = f" fill='{colour}'" if colour else ""
    end = f"><title>{escape(note)}</title></rect>" if note else "/>"
    return f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height:.1f}'{fill}{end}"


def line(x: float, y: float, path: str, colour: str, more: str = "", note: str = "") -> str:
    """Return a stroke from a point along a path, such as 'h14'."""
    end = f"><title>{escape(note)}</title></path>" if note else "/>"
    return f"<path d='M{x:.1f} {y:.1f}{path}' fill='none' stroke='{colour}'{more}{end}"


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round values from `low` to `high`."""
    power = 10.0 ** math.floor(math.log10((high - low) / count))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power * count >= (high - low) * (1 - 1e-9))
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
