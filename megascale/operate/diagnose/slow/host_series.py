"""Metrics of hosts as series on one grid of times: the table `host_metrics` of an event store, aligned for comparison.

Counters become rates per second. A bin without a sample gets the nearest one, if that is near enough, and otherwise
NaN: a host without samples has no value, and is not compared.

- `HostTable`: columns of the table; `read_host_table`: from an event store
- `HostSeries`: a metric of all hosts; `read_series`: those of a table
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megascale.operate.store.host_families import HOST_METRICS, split_device
from megascale.operate.store.query import fetch

if TYPE_CHECKING:
    import duckdb


WATCHED = {name: metric for name, metric in HOST_METRICS.items() if metric.floor}
"""Metrics in which hosts of a job are alike while all are healthy."""


@dataclass(frozen=True)
class HostTable:
    """Columns of `host_metrics`, text as indices into `nodes` and `metrics`."""

    nodes: Sequence[str]
    metrics: Sequence[str]
    node: NDArray[np.integer]
    metric: NDArray[np.integer]
    time_ns: NDArray[np.int64]
    value: NDArray[np.float64]


def read_host_table(store: duckdb.DuckDBPyConnection, minutes: float = 15.0) -> HostTable:
    """Read the newest samples of the watched metrics from an event store."""
    nodes = fetch(store, "SELECT DISTINCT node FROM host_metrics ORDER BY node")["node"].tolist()
    names = fetch(store, "SELECT DISTINCT metric FROM host_metrics ORDER BY metric")["metric"].tolist()
    metrics = [name for name in names if split_device(name)[0] in WATCHED]
    numbered = "(SELECT unnest(?::VARCHAR[]) AS {0}, unnest(range({1})) AS {0}_index)"
    rows = fetch(
        store,
        "SELECT node_index, metric_index, time_ns, value FROM host_metrics "
        f"JOIN {numbered.format('node', len(nodes))} USING (node) "
        f"JOIN {numbered.format('metric', len(metrics))} USING (metric) "
        "WHERE time_ns > (SELECT max(time_ns) FROM host_metrics) - ?::BIGINT",
        [nodes, metrics, round(minutes * 60e9)],
    )
    return HostTable(nodes, metrics, rows["node_index"], rows["metric_index"], rows["time_ns"], rows["value"])


@dataclass(frozen=True)
class HostSeries:
    """A metric of all hosts and devices. `values`: [times, series], NaN where there is none; `times_ns`: of the grid.
    `nodes`, `devices`: of each series, `nodes` as indices into the table's.
    """

    metric: str
    nodes: NDArray[np.integer]
    devices: Sequence[str]
    times_ns: NDArray[np.int64]
    values: NDArray[np.float32]

    def only(self, chosen: NDArray[np.intp]) -> HostSeries:
        """Return the chosen series."""
        devices = [self.devices[index] for index in chosen]
        return replace(self, nodes=self.nodes[chosen], devices=devices, values=self.values[:, chosen])


def read_series(table: HostTable, sample_s: float, gap_s: float) -> list[HostSeries]:
    """Return the series of each watched metric, on a grid of `sample_s` seconds. A sample fills bins up to `gap_s`
    seconds away.
    """
    if not len(table.time_ns):
        return []
    period = round(sample_s * 1e9)
    start = int(table.time_ns.min())
    bins = (table.time_ns - start + period // 2) // period
    times = start + np.arange(int(bins.max()) + 1) * period
    reach = round(gap_s / sample_s)
    order = np.argsort(table.metric.astype(np.int16), kind="stable")  # a radix sort
    ends = np.searchsorted(table.metric[order], np.arange(len(table.metrics) + 1))
    parts: dict[str, list[tuple[str, NDArray[np.integer]]]] = {name: [] for name in WATCHED}
    for index, metric in enumerate(table.metrics):
        name, device = split_device(metric)
        if name in WATCHED:
            parts[name].append((device, order[ends[index] : ends[index + 1]]))
    found = []
    for name, devices in parts.items():
        nodes, names, columns = [], [], []
        for device, rows in devices:
            node = table.node[rows]
            known = np.flatnonzero(np.bincount(node))
            place = np.searchsorted(known, np.arange(len(table.nodes)))[node]
            samples = np.full((len(times), len(known)), np.nan)
            samples[bins[rows], place] = table.value[rows]
            if WATCHED[name].counter:
                when = np.zeros(samples.shape)
                when[bins[rows], place] = (table.time_ns[rows] - times[0]) / 1e9
                samples = _rates(samples, when, reach)
            columns.append(_fill(samples, reach))
            nodes.append(known)
            names += [device] * len(known)
        if devices:
            found.append(HostSeries(name, np.concatenate(nodes), names, times, np.concatenate(columns, axis=1)))
    return found


def _rates(totals: NDArray[np.float64], seconds: NDArray[np.float64], reach: int) -> NDArray[np.float64]:
    """Return increases per second since the sample before, up to `reach` bins ago; NaN where a total has begun anew."""
    rates = np.full(totals.shape, np.nan)
    with np.errstate(invalid="ignore"):
        rates[1:] = np.diff(totals, axis=0) / np.diff(seconds, axis=0)  # most have one in the bin before
        for distance in range(2, reach + 1):
            later, earlier = slice(distance, None), slice(None, -distance)
            row, column = np.nonzero(np.isnan(rates[later]) & ~np.isnan(totals[later]) & ~np.isnan(totals[earlier]))
            increase = totals[row + distance, column] - totals[row, column]
            rates[row + distance, column] = increase / (seconds[row + distance, column] - seconds[row, column])
    return np.where(rates < 0, np.nan, rates)


def _fill(samples: NDArray[np.float64], reach: int) -> NDArray[np.float32]:
    """Return samples with gaps filled by the nearest sample, up to `reach` bins away. Half the bytes are enough now."""
    filled, given = samples.astype(np.float32), ~np.isnan(samples)
    row, column = np.nonzero(~given)
    for offset in (sign * distance for distance in range(1, reach + 1) for sign in (-1, 1)):
        source = row + offset
        within = (source >= 0) & (source < len(samples))
        found = within & given[np.where(within, source, 0), column]
        filled[row[found], column[found]] = samples[source[found], column[found]]
        row, column = row[~found], column[~found]
    return filled
