"""Faulty hosts of a synthetic fleet, and healthy ones that must not be told."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from megascale.core.storage import Location
from megascale.operate.diagnose.slow.host_outliers import (
    HostOutlier,
    OutlierSettings,
    find_host_outliers,
    recent_host_outliers,
)
from megascale.operate.diagnose.slow.host_series import HostTable, read_host_table
from megascale.operate.store.query import open_store
from megascale.operate.store.table_files import TableFile, write_rows
from tests.operate.store.tables import rows

sys.path.insert(0, str(Path(__file__).parents[4] / "tools" / "bench"))

from host_fleet import CHANGES, KINDS, SHAPES, Fleet, fleets, make_fleet
from host_outliers import one_distance

Finder = Callable[[HostTable], list[HostOutlier]]


def precision_and_recall(cases: Iterable[Fleet], find: Finder = find_host_outliers) -> tuple[float, float]:
    """Return shares of right hosts among those that were told, and of faulty hosts that were told."""
    told = right = faulty = 0
    for fleet in cases:
        nodes = {outlier.node for outlier in find(fleet.table)}
        told, right, faulty = told + len(nodes), right + (fleet.culprit in nodes), faulty + bool(fleet.culprit)
    return right / max(1, told), right / max(1, faulty)


def f1(precision: float, recall: float) -> float:
    return 2 * precision * recall / max(1e-9, precision + recall)


def without_continuity(table: HostTable) -> list[HostOutlier]:
    return find_host_outliers(table, OutlierSettings(continuity_s=0))


def small(seed: int) -> list[Fleet]:
    """Return fleets of each kind of fault with a quarter of the shapes, and as many healthy fleets."""
    return [fleet for index, fleet in enumerate(fleets(seed, sizes=(8, 16))) if index % 8 < 2]


def test_faulty_hosts_are_found_and_the_continuity_window_keeps_healthy_ones_out() -> None:
    cases = small(11)
    precision, recall = precision_and_recall(cases)
    assert precision >= 0.9
    assert f1(precision, recall) >= 0.89
    assert precision_and_recall(cases[:10], without_continuity)[0] < 0.9 * precision


@pytest.mark.slow
def test_figures_of_the_paper_and_its_ablations() -> None:
    cases = [fleet for seed in (101, 102, 103) for fleet in fleets(seed)]
    precision, recall = precision_and_recall(cases)
    print(f"precision {precision:.3f}, recall {recall:.3f}, F1 {f1(precision, recall):.3f} of {len(cases)} fleets")
    assert precision >= 0.9
    assert f1(precision, recall) >= 0.89
    some = cases[: len(cases) // 3]
    figures = precision_and_recall(some, without_continuity)
    print("without continuity: precision {:.3f}, recall {:.3f}".format(*figures))
    assert figures[0] < 0.9 * precision
    joint = [precision_and_recall(some, functools.partial(one_distance, margin=t)) for t in (-1.0, 0.0, 1.0, 2.0, 4.0)]
    best = max(joint, key=lambda pair: f1(*pair))
    print("one distance for all metrics: precision {:.3f}, recall {:.3f}".format(*best))
    assert f1(*best) < 0.95 * f1(precision, recall)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_whole_job_is_no_alarm(change: str) -> None:
    for seed in (0, 1):
        assert find_host_outliers(make_fleet(np.random.default_rng(seed), 16, change=change).table) == []


def test_what_is_told_of_a_faulty_host() -> None:
    fleet = make_fleet(np.random.default_rng(3), 16, "gpu power")
    found = find_host_outliers(fleet.table)
    assert {outlier.node for outlier in found} == {fleet.culprit}
    assert {outlier.metric for outlier in found} <= {"gpu.power_w", "gpu.clock_mhz"}
    assert {outlier.device for outlier in found} == {"gpu0", "gpu1", "gpu2", "gpu3"}
    assert all(outlier.value < outlier.usual and outlier.distance > 5 for outlier in found)
    assert all(outlier.until_ns - outlier.since_ns >= 235e9 for outlier in found)
    assert [outlier.distance for outlier in found] == sorted((o.distance for o in found), reverse=True)
    assert str(found[0]).startswith(f"{fleet.culprit}: gpu.") and "other hosts" in str(found[0])


def test_a_host_without_metrics_is_not_faulty() -> None:
    table = make_fleet(np.random.default_rng(5), 12).table
    silent = (table.node == 3) | ((table.node == 7) & (table.time_ns > np.median(table.time_ns)))
    kept = [column[~silent] for column in (table.node, table.metric, table.time_ns, table.value)]
    assert find_host_outliers(HostTable(table.nodes, table.metrics, *kept)) == []


def test_hosts_of_one_role_are_compared_with_each_other() -> None:
    """Two hosts of the last stage differ in memory: without roles one could be the faulty one of a few."""
    fleet = make_fleet(np.random.default_rng(8), 12, "memory", "step")
    roles = dict.fromkeys(fleet.table.nodes, "first")
    assert {outlier.node for outlier in find_host_outliers(fleet.table, roles=roles)} == {fleet.culprit}
    assert fleet.culprit is not None
    roles[fleet.culprit] = "alone"
    assert find_host_outliers(fleet.table, roles=roles) == []


def test_the_newest_samples_of_an_event_store(tmp_path: Path) -> None:
    fleet = make_fleet(np.random.default_rng(3), 12, "gpu power")
    table = fleet.table
    columns = {
        "node": [table.nodes[index] for index in table.node],
        "metric": [table.metrics[index] for index in table.metric],
        "time_ns": table.time_ns.tolist(),
        "value": table.value.tolist(),
    }
    events = Location(f"{tmp_path}/events")
    write_rows(events, TableFile("host_metrics", "n", 0, 1, 2), rows("host_metrics", len(table.value), **columns))
    for attempt, stages in enumerate(([*range(12)], [0] * 12)):  # the newest attempt counts
        ranks = rows("ranks", 12, attempt=attempt, rank=list(range(12)), node=list(table.nodes), pp=stages)
        write_rows(events, TableFile("ranks", "n", attempt, 1, 2), ranks)
    store = open_store(tmp_path)
    found = recent_host_outliers(store)
    assert {outlier.node for outlier in found.outliers} == {fleet.culprit}
    assert [str(one) for one in found.outliers] == [str(one) for one in find_host_outliers(table)]
    assert (found.hosts, found.compared, round(found.minutes)) == (12, 12, 15)
    assert len(read_host_table(store, minutes=3).value) < len(table.value) / 4


def test_fewer_than_four_hosts_are_not_compared() -> None:
    table = make_fleet(np.random.default_rng(2), 3, "gpu down").table
    assert find_host_outliers(table) == []


def test_the_continuity_window_is_a_parameter() -> None:
    fleet = make_fleet(np.random.default_rng(6), 16, "gpu down")
    since = {outlier.metric: outlier.since_ns for outlier in find_host_outliers(fleet.table)}
    assert since
    end = min(since.values()) + 100 * 10**9
    early = [column[fleet.table.time_ns < end] for column in (fleet.table.node, fleet.table.metric)]
    early += [column[fleet.table.time_ns < end] for column in (fleet.table.time_ns, fleet.table.value)]
    table = HostTable(fleet.table.nodes, fleet.table.metrics, *early)
    assert find_host_outliers(table) == []
    found = find_host_outliers(table, OutlierSettings(continuity_s=60))
    assert {outlier.node for outlier in found} == {fleet.culprit}


def test_every_kind_and_shape_of_fault_is_in_the_fleets() -> None:
    assert len(KINDS) == 8
    assert len(SHAPES) == 10
