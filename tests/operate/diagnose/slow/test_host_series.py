"""Samples of hosts on one grid of times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from megascale.operate.diagnose.slow.host_series import HostTable, read_series
from megascale.operate.diagnose.slow.step_cube import dictionary

S = 10**9


def table(samples: Mapping[tuple[str, str], Sequence[tuple[float, float]]]) -> HostTable:
    """Return the table of (seconds, value) by (node, metric)."""
    rows = [(node, metric, seconds, value) for (node, metric), pairs in samples.items() for seconds, value in pairs]
    node, metric, seconds, value = zip(*rows, strict=True) if rows else ((),) * 4
    (nodes, of_node), (metrics, of_metric) = (dictionary(np.array(column, object)) for column in (node, metric))
    time_ns = (np.array(seconds) * S).astype(np.int64)
    return HostTable(nodes, metrics, of_node, of_metric, time_ns, np.array(value, float))


def test_hosts_that_sample_at_different_times_are_aligned() -> None:
    samples = {
        ("a", "cpu.percent"): [(0, 1), (5, 2), (10, 3), (15, 4)],
        ("b", "cpu.percent"): [(2, 10), (7.1, 20), (12, 30), (16.9, 40)],
    }
    (series,) = read_series(table(samples), sample_s=5, gap_s=10)
    assert series.values.tolist() == [[1, 10], [2, 20], [3, 30], [4, 40]]
    assert (series.times_ns / S).tolist() == [0, 5, 10, 15]


def test_gaps_have_the_nearest_sample_and_long_gaps_none() -> None:
    (series,) = read_series(table({("a", "cpu.percent"): [(0, 1), (15, 2), (55, 3)]}), sample_s=5, gap_s=10)
    first, second, third = [1.0] * 2, [2.0] * 4, [3.0] * 3
    expected = [*first, *second, np.nan, np.nan, np.nan, *third]
    np.testing.assert_equal(series.values[:, 0], expected)


def test_counters_are_rates_also_over_lost_samples_and_new_beginnings() -> None:
    times = (0, 5, 15, 20, 25, 30)
    totals = (0, 50, 250, 275, 5, 30)  # the host started again before the fifth sample
    (series,) = read_series(table({("a", "disk.read"): list(zip(times, totals, strict=True))}), sample_s=5, gap_s=10)
    np.testing.assert_allclose(series.values[:, 0], [10, 10, 10, 20, 5, 5, 5])  # the fifth bin has its neighbour's


def test_a_rate_is_that_of_the_samples_own_times() -> None:
    times = np.arange(12) * 5 + np.array([0, 1.5] * 6)
    samples = {("a", "network.sent"): [(when, 7 * when) for when in times]}
    (series,) = read_series(table(samples), sample_s=5, gap_s=10)
    np.testing.assert_allclose(series.values, 7)


def test_devices_of_a_host_are_series_of_one_metric_and_other_metrics_are_left_out() -> None:
    samples = {("a", "gpu0.percent"): [(0, 1)], ("b", "gpu1.percent"): [(0, 2)], ("a", "clock.error_s"): [(0, 3)]}
    (series,) = read_series(table(samples), sample_s=5, gap_s=10)
    assert (series.metric, list(series.devices), series.nodes.tolist()) == ("gpu.percent", ["gpu0", "gpu1"], [0, 1])


def test_an_empty_table_has_no_series() -> None:
    assert read_series(table({}), sample_s=5, gap_s=10) == []
