"""Families of Prometheus' metrics, and their text. All names begin with `megascale_`.

Names have their unit, counters end with `_total` in the text, and labels have few values: never a step or a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

PREFIX = "megascale_"

Labels = dict[str, str]


@dataclass
class MetricFamily:
    """A metric with the values of its series. `name`: without prefix, and without the `_total` of a counter."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    samples: list[tuple[Labels, float]] = field(default_factory=list)

    def add(self, value: float, labels: Mapping[str, str]) -> None:
        """Add a series."""
        self.samples.append((dict(labels), value))


class Families:
    """Families that grow series by series, each described where its values are known. `labels`: of all series."""

    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        self._by_name: dict[str, MetricFamily] = {}

    def gauge(self, name: str, help_text: str, value: float, labels: Labels | None = None) -> None:
        """Add a series to a gauge."""
        self._by_name.setdefault(name, MetricFamily(name, "gauge", help_text)).add(value, self._labels | (labels or {}))

    def counter(self, name: str, help_text: str, value: float, labels: Labels | None = None) -> None:
        """Add a series to a counter."""
        self._by_name.setdefault(name, MetricFamily(name, "counter", help_text)).add(
            value, self._labels | (labels or {})
        )

    def __iter__(self) -> Iterator[MetricFamily]:
        return iter(self._by_name.values())


def exposition(families: Iterable[MetricFamily]) -> bytes:
    """Return the text of families, with the prefix before their names."""
    from prometheus_client.exposition import generate_latest
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

    class Collected:
        """A collector of prometheus_client."""

        def collect(self) -> Iterable[Metric]:
            for family in families:
                kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
                metric = kind(PREFIX + family.name, family.help)
                suffix = "_total" if family.kind == "counter" else ""
                for labels, value in family.samples:
                    metric.add_sample(PREFIX + family.name + suffix, labels, value)
                yield metric

    return bytes(generate_latest(Collected()))
