"""The panels of the Grafana dashboards, as data: queries in PromQL with their legends, and units.

`$run` and `$node` are variables of the dashboards; `$__rate_interval` is Grafana's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RUN = 'run="$run"'
NODE = 'run="$run", node=~"$node"'


@dataclass(frozen=True)
class Panel:
    """A panel. `queries`: PromQL and legend. `unit`: Grafana's name of the unit. `kind`: curves, or the last value."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: Literal["curves", "value"] = "curves"
    help: str = ""
    log: bool = False


@dataclass(frozen=True)
class Board:
    """A dashboard: rows of panels by title. `nodes`: it has the variable `$node`."""

    uid: str
    title: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]
    nodes: bool = False


def rate(metric: str, labels: str = RUN) -> str:
    """Return the query of a counter's increase per second. `metric`: without prefix and suffix."""
    return f"rate(megascale_{metric}_total{{{labels}}}[$__rate_interval])"


def value(title: str, unit: str, query: str, help_text: str = "") -> Panel:
    """Return a panel of a single number."""
    return Panel(title, unit, ((query, ""),), "value", help_text)


def ten(title: str, unit: str, query: str, help_text: str = "", legend: str = "rank {{rank}} on {{node}}") -> Panel:
    """Return a panel of the ten series with the greatest values."""
    return Panel(title, unit, ((f"topk(10, {query})", legend),), help=help_text)
