"""Hosts whose metrics stay far from those of the others: a faulty machine, found without knowing its fault.

Hosts of a training job do the same at the same time, so their metrics are alike. For each metric, windows of recent
values are compared over hosts by robust distances: the difference to the median host, in multiples of the usual
difference (median absolute deviation). A host is told only if it stays an outlier for the continuity window, because
healthy hosts have short disturbances. A change of the whole job moves the median and is no outlier, and a host without
samples is not compared.

The method is Minder's (NSDI 2025, arXiv:2411.01791) with these distances in the place of its autoencoders.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megascale.operate.diagnose.slow.host_series import WATCHED, HostSeries, HostTable, read_host_table, read_series
from megascale.operate.diagnose.slow.peers import MAD_TO_DEVIATION
from megascale.operate.store.query import fetch

if TYPE_CHECKING:
    import duckdb

LEAST_HOSTS = 4  # fewer hosts have no majority to compare with
COMPANY = 2  # other hosts at the same distance that make a host no outlier: those of a stage differ together


@dataclass(frozen=True)
class OutlierSettings:
    """Parameters of the comparison, times in seconds.

    `sample_s`: distance of samples; `window_s`: length of the sliding windows; `continuity_s`: for how long a host must
    stay an outlier; `gap_s`: longest gap that the nearest sample fills. `margin`: by how many standard deviations an
    outlier is farther than the farthest of as many healthy hosts. `share`: of the usual value, a difference that means
    nothing.
    """

    sample_s: float = 5.0
    window_s: float = 60.0
    continuity_s: float = 240.0
    gap_s: float = 30.0
    margin: float = 2.0
    share: float = 0.01


@dataclass(frozen=True)
class HostOutlier:
    """A host that stayed an outlier in a metric. `device`: such as gpu3, or empty. `distance`: the median of its
    distances, in standard deviations of the others. `value`, `usual`: medians of the host and of the others over that
    time. `since_ns`, `until_ns`: ends of the first and the last such window.
    """

    node: str
    metric: str
    device: str
    since_ns: int
    until_ns: int
    distance: float
    value: float
    usual: float

    def __str__(self) -> str:
        where = f" of {self.device}" if self.device else ""
        unit = "/s" if WATCHED[self.metric].counter else ""
        minutes = (self.until_ns - self.since_ns) / 60e9
        values = f"{self.value:.4g}{unit}, other hosts {self.usual:.4g}{unit}"
        return f"{self.node}: {self.metric}{where} {values}, for {minutes:.0f} min"


@dataclass(frozen=True)
class HostComparison:
    """The `outliers` of a run's newest samples, the farthest host first. `hosts`: with samples; `compared`: those with
    LEAST_HOSTS hosts of their role, themselves included; `minutes`: from the first sample to the last.
    """

    outliers: tuple[HostOutlier, ...]
    hosts: int
    compared: int
    minutes: float

    def __str__(self) -> str:
        """Return the extent of the comparison, and a line for each outlier or for the reason why there is none."""
        least, alone = OutlierSettings.continuity_s / 60, self.hosts - self.compared
        what = f"in stages of fewer than {LEAST_HOSTS} hosts, which have no majority"
        rest = f"; {alone} {'more ' if self.compared else ''}{what}" if alone else ""
        extent = f"compared {self.compared} hosts by their metrics over {self.minutes:.0f} min{rest}"
        none = "no host stays far from the others"
        if not self.compared:
            none = "nothing can be said about these hosts"
        elif self.minutes < least:
            none = f"nothing can be said yet: a host is named once it has stayed apart for {least:.0f} min"
        return "\n".join([extent, *(map(str, self.outliers) if self.outliers else [none])])

    def to_json(self) -> dict[str, Any]:
        """Return all fields, and the summary of each outlier."""
        return asdict(self) | {"outliers": [asdict(one) | {"summary": str(one)} for one in self.outliers]}


def find_host_outliers(
    table: HostTable, settings: OutlierSettings = OutlierSettings(), roles: Mapping[str, str] | None = None
) -> list[HostOutlier]:
    """Return the outliers of a table of some minutes, the farthest host first, a host's metrics together.

    `roles`: of hosts by name, such as their pipeline stages; a host is compared with those of its role.
    """
    known = roles or {}
    role_of_node = np.array([known.get(node, "") for node in table.nodes])
    found: list[HostOutlier] = []
    for series in read_series(table, settings.sample_s, settings.gap_s):
        role_of_series = role_of_node[series.nodes]
        for role in sorted(set(role_of_series.tolist())):
            alike = series.only(np.flatnonzero(role_of_series == role)) if known else series
            found += outliers_in_series(table.nodes, alike, WATCHED[series.metric].floor, settings)
    farthest: dict[str, float] = {}
    for outlier in found:
        farthest[outlier.node] = max(outlier.distance, farthest.get(outlier.node, 0.0))
    return sorted(found, key=lambda outlier: (-farthest[outlier.node], outlier.node, -outlier.distance))


def recent_host_outliers(store: duckdb.DuckDBPyConnection) -> HostComparison:
    """Compare the hosts by the newest samples of an event store, each with those of the same pipeline stages in the
    newest attempt.
    """
    newest = "FROM ranks WHERE attempt = (SELECT max(attempt) FROM ranks) GROUP BY node"
    stages = fetch(store, f"SELECT node, list_sort(list(DISTINCT pp))::VARCHAR AS stages {newest}")
    roles = dict(zip(stages["node"].tolist(), stages["stages"].tolist(), strict=True))
    table = read_host_table(store)
    hosts = Counter(roles.get(node, "") for node in table.nodes)
    compared = sum(count for count in hosts.values() if count >= LEAST_HOSTS)
    minutes = float(np.ptp(table.time_ns)) / 60e9 if len(table.time_ns) else 0.0
    return HostComparison(tuple(find_host_outliers(table, roles=roles)), len(table.nodes), compared, minutes)


def outliers_in_series(
    nodes: Sequence[str], series: HostSeries, floor: float, settings: OutlierSettings
) -> list[HostOutlier]:
    """Return the outliers of one metric. `nodes`: all names; `floor`: a difference that means nothing."""
    if len(np.unique(series.nodes)) < LEAST_HOSTS:
        return []
    means = window_means(series.values, max(1, round(settings.window_s / settings.sample_s)))
    distance = distances(means, floor, settings)
    farthest_by_chance = math.sqrt(2 * math.log(means.shape[1]))  # of healthy series, if distances are normal
    outlying = distance > farthest_by_chance + settings.margin
    found = []
    for index, (first, last) in persistent(outlying, settings).items():
        stay = slice(first, last + 1)
        apart = np.abs(means[stay, index] - _medians(means[stay]))
        beside = np.abs(means[stay] - means[stay, index : index + 1]) < apart[:, None] / 2
        near = series.nodes[2 * beside.sum(axis=0) > len(apart)]
        if len({*near.tolist()} - {int(series.nodes[index])}) >= COMPANY:
            continue
        one = HostOutlier(
            nodes[series.nodes[index]], series.metric, series.devices[index], int(series.times_ns[first]),
            int(series.times_ns[last]), distance=float(np.median(distance[stay, index])),
            value=float(np.median(means[stay, index])), usual=float(np.nanmedian(means[stay])),
        )  # fmt: skip
        found.append(one)
    return found


def window_means(values: NDArray[np.float32], window: int) -> NDArray[np.float32]:
    """Return the mean of the `window` values up to each time, NaN where more than half of them are missing."""
    missing = np.isnan(values)
    gaps = bool(missing.any())
    total = np.cumsum(np.where(missing, 0.0, values) if gaps else values, axis=0, dtype=np.float64)
    counts = np.cumsum(~missing, axis=0, dtype=np.int32) if gaps else np.arange(1, len(values) + 1)[:, None]
    for sums in (total, counts):
        sums[window:] -= sums[:-window].copy()
    with np.errstate(invalid="ignore", divide="ignore"):
        means = (total / counts).astype(np.float32)
    means[np.broadcast_to(2 * counts < window, means.shape)] = np.nan
    return means


def distances(means: NDArray[np.float32], floor: float, settings: OutlierSettings) -> NDArray[np.float32]:
    """Return the distance of each series from the median series, in standard deviations. `floor`: least deviation.

    The standard deviation is that of the moment, or that of all moments where it is greater: few hosts are alike by
    chance. It is wider for few series, which estimate it badly.
    """
    centre = _medians(means)
    apart = np.abs(means - centre[:, None])
    spread = MAD_TO_DEVIATION * _medians(apart)
    spread = np.fmax(spread, np.nanmedian(spread)) * (1 + 1 / means.shape[1])
    least = np.fmax(floor, settings.share * np.abs(centre))
    apart /= np.fmax(spread, least)[:, None]
    return apart


def _medians(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the median of each row without its NaN; NaN for a row of them. np.nanmedian is many times slower."""
    ordered, counts = np.sort(rows, axis=1), rows.shape[1] - np.isnan(rows).sum(axis=1)  # NaN come last
    middle = np.stack([np.maximum(counts - 1, 0) // 2, counts // 2], axis=1)
    return np.take_along_axis(ordered, np.minimum(middle, rows.shape[1] - 1), 1).mean(axis=1)


def persistent(outlying: NDArray[np.bool_], settings: OutlierSettings) -> dict[int, tuple[int, int]]:
    """Return the series that are outlying in all windows of a continuity window, with the first and the last of the
    longest such run.
    """
    least = max(1, round(settings.continuity_s / settings.sample_s))
    run = np.zeros(outlying.shape[1], int)
    longest, end = run.copy(), run.copy()
    for time, row in enumerate(outlying):
        run = np.where(row, run + 1, 0)
        longer = run > longest
        longest[longer], end[longer] = run[longer], time
    return {index: (end[index] - longest[index] + 1, end[index]) for index in np.flatnonzero(longest >= least).tolist()}
