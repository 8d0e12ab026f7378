"""A rank's counters: sums over everything that was drained of its log."""

from __future__ import annotations

from pathlib import Path

from megascale.operate.store.rank_totals import RankTotals
from megascale.record.label import Label
from megascale.record.log_reader import LogReader
from tests.operate.store.played_ranks import PlayedRank


def test_time_by_kind_over_several_drains(tmp_path: Path) -> None:
    rank, totals = PlayedRank(tmp_path, 0, tmp_path), RankTotals()
    reader = LogReader(rank.path)

    def wait(sequence: int, axis: str, exposed: float) -> None:
        _, _, number = rank.log.enter(axis, "all_gather", Label("qkv"), 8, stored=(axis, sequence))
        rank.log.write_times(number, 1.0, 1.0, 2.0, exposed)

    for step in (1, 2):
        rank.compute(step, "F", 1.0, 2.0, exposed=0.25)
        rank.compute(step, "B", 2.0, 4.0)
        wait(2 * step, "tp", 0.25)
        wait(2 * step, "dp", 0.5)
        rank.log.write_activity("data", step, 0.0, 3.0, 2.0)
        rank.end_step(step)
        totals.add(reader.drain())
    texts = reader.texts()
    assert totals.compute_s(texts) == 2 * 2.75
    assert totals.exposed_s(texts) == {"tp": 0.5, "dp": 1.0}
    assert totals.host_s(texts) == {"data": 4.0}
    assert (totals.train_s, totals.tokens, totals.flops, totals.lost) == (1.5, 8192, 2e15, 0)


def test_an_action_that_only_waits_takes_nothing_from_the_sum(tmp_path: Path) -> None:
    """Prometheus takes a counter that decreases for one that began anew, and its whole value for an increase."""
    rank, totals = PlayedRank(tmp_path, 0, tmp_path), RankTotals()
    reader = LogReader(rank.path)
    rank.compute(1, "F", 1.0, 2.0)
    totals.add(reader.drain())
    rank.compute(1, "F", 1000.1, 1000.3, exposed=0.2)  # 1000.3 - 1000.1 is a bit less
    totals.add(reader.drain())
    assert totals.compute_s(reader.texts()) == 1.0


def test_lost_records_are_counted(tmp_path: Path) -> None:
    rank, totals = PlayedRank(tmp_path, 0, tmp_path), RankTotals()
    reader = LogReader(rank.path)
    for _ in range(5000):  # the log of a played rank has 4096 places
        rank.compute(1, "F", 1.0, 2.0)
    totals.add(reader.drain())
    assert totals.lost + totals.compute_s(reader.texts()) == 5000
    assert totals.lost >= 5000 - 4096


def test_nothing_drained_is_nothing(tmp_path: Path) -> None:
    rank, totals = PlayedRank(tmp_path, 0, tmp_path), RankTotals()
    totals.add(LogReader(rank.path).drain())
    assert totals == RankTotals()
    assert totals.compute_s([]) == 0
    assert totals.exposed_s([]) == {}
