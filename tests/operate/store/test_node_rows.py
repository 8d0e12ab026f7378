"""The rows of a node: times on rank 0's clock, sums of steps that have ended, lost events, tags."""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megascale.operate.store.node_rows import RankRows, RankTotals, Texts, row_type, step_parts, take_rows
from megascale.operate.store.schema import TABLES
from megascale.operate.store.table_files import arrow_table
from megascale.record.events import COMPUTE
from megascale.record.label import Label
from megascale.record.layout import TAGS
from megascale.record.log_reader import LogReader
from tests.operate.store.played_ranks import EPOCH_NS, PlayedRank


def drained(*ranks: PlayedRank) -> list[RankRows]:
    found = [RankRows(LogReader(rank.path)) for rank in ranks]
    for rows in found:
        rows.drain()
    return found


def take(texts: Texts, ranks: list[RankRows]) -> dict[str, list[dict[str, Any]]]:
    """The rows by table, as dictionaries; columns are those of the schema."""
    return {table: arrow_table(table, columns).to_pylist() for table, columns in take_rows(ranks, texts).items()}


def test_events_of_two_ranks_are_rows_on_rank_0_s_clock(tmp_path: Path) -> None:
    ranks = [PlayedRank(tmp_path, rank, tmp_path) for rank in range(2)]
    ranks[1].communicate(4, 7, 10.5, 12.0, 64)  # its strings have other indices than rank 0's
    ranks[0].compute(4, "F", 10.0, 11.0, exposed=0.25)
    events = {row["rank"]: row for row in take(Texts(), drained(*ranks))["events"]}
    assert events[0] | {"axis": "compute", "name": "F", "part": "", "layer": -1, "group_name": ""} == events[0]
    assert events[0] | {"step": 4, "chunk": 0, "microbatch": 1, "sequence": -1, "peer": -1} == events[0]
    assert events[0]["start_ns"] == EPOCH_NS + 10 * 10**9 and events[0]["exposed_ns"] == 250_000_000
    assert events[1] | {"axis": "tp", "name": "all_gather", "part": "qkv", "layer": 3, "group_name": "tp"} == events[1]
    assert events[1] | {"sequence": 7, "bytes": 64, "direction": "forward", "attempt": 0} == events[1]
    assert (events[1]["issue_ns"], events[1]["end_ns"]) == (EPOCH_NS + 10_500_000_000, EPOCH_NS + 12 * 10**9)


def test_a_step_is_summed_once_it_has_ended_on_its_rank(tmp_path: Path) -> None:
    """Its last communication may end during the next step."""
    rank = PlayedRank(tmp_path, 0, tmp_path)
    rank.compute(1, "F", 1.0, 2.0)
    rank.act("F", (1, 0, 2), (2.0, 2.0, 5.0, 0.5))
    rank.end_step(1, 1.0, 5.0)
    texts, [kept] = Texts(), drained(rank)
    first = take(texts, [kept])
    assert len(first["events"]) == 2
    assert [(part["axis"], part["step"], part["total_ns"]) for part in first["step_parts"]] == [
        ("step", 1, 3_750_000_000)
    ]
    rank.communicate(1, 0, 4.5, 5.5)
    rank.compute(2, "F", 6.0, 7.0)
    rank.end_step(2)
    kept.drain()
    second = {(p["step"], p["axis"], p["name"]): p for p in take(texts, [kept])["step_parts"]}
    assert second.keys() == {(1, "compute", "F"), (1, "tp", "all_gather"), (2, "step", "step")}
    part = second[1, "compute", "F"]
    assert (part["count"], part["total_ns"], part["max_ns"], part["exposed_ns"]) == (2, 4 * 10**9, 3 * 10**9, 5 * 10**8)
    assert part["last_issue_ns"] == EPOCH_NS + 2 * 10**9
    kept.ended = True
    assert [(p["step"], p["axis"]) for p in take(texts, [kept])["step_parts"]] == [(2, "compute")]
    assert take(texts, [kept])["step_parts"] == []


def test_steps_have_tags_and_count_lost_events(tmp_path: Path) -> None:
    rank = PlayedRank(tmp_path, 0, tmp_path)
    rank.end_step(1, tags=1 << TAGS.index("first step") | 1 << TAGS.index("gc"))
    texts, [kept] = Texts(), drained(rank)
    for sequence in range(5000):
        rank.communicate(2, sequence, 1.0, 2.0)
    kept.drain()
    rank.communicate(2, 5000, 1.0, 2.0)
    assert [row["tags"] for row in take(texts, [kept])["steps"]] == ["first step,gc"]
    rank.end_step(2, loss=float("nan"))
    rank.end_step(3)
    kept.drain()
    two, three = take(texts, [kept])["steps"]
    assert (two["events_lost"], three["events_lost"]) == (5000 - 4095, 0)
    assert two["tags"] == "" and np.isnan(two["loss"]) and two["peak_memory_bytes"] == 1 << 30


EVENTS = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 1), st.integers(0, 1), st.integers(1, 50)),
    max_size=30,
)


@given(EVENTS)
def test_sums_by_rank_step_and_part(given_events: list[tuple[int, int, int, int, int]]) -> None:
    """An action in segments, events of the same micro-batch in a row, counts once; communication counts every time."""
    events, texts = np.zeros(len(given_events), row_type("events")), Texts()
    axes = texts.indices([COMPUTE, "tp"])
    expected: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    microbatches: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, (row, (rank, step, name, chunk, duration)) in enumerate(zip(events, given_events, strict=True)):
        row["rank"], row["step"], row["name"], row["chunk"] = rank, step, name, chunk
        row["axis"], row["microbatch"], row["group_name"] = axes[name], number // 4 - 1, number % 2
        microbatches[rank, step, name, chunk, number % 2].append(number // 4 - 1)
        row["end_ns"], row["exposed_ns"], row["bytes"], row["issue_ns"] = duration, duration // 2, 3, duration
        expected[rank, step, name, chunk, number % 2].append(duration)
    found = step_parts(events, np.zeros(0, row_type("steps")), texts)
    assert len(found) == len(expected)
    for row in found:
        key = tuple(int(row[key]) for key in ("rank", "step", "name", "chunk", "group_name"))
        durations, of = expected[key], microbatches[key]
        actions = [i for i, group in groupby(of) for _ in (group if i < 0 else [0])]
        assert row["count"] == len(actions if row["axis"] == axes[0] else of)
        assert (row["total_ns"], row["max_ns"]) == (sum(durations), max(durations))
        assert row["exposed_ns"] == sum(duration // 2 for duration in durations)
        assert (row["bytes"], row["last_issue_ns"]) == (3 * len(durations), max(durations))


def test_all_columns_are_filled(tmp_path: Path) -> None:
    """Every column of the tables has a value that differs from zero in some row."""
    rank = PlayedRank(tmp_path, 1, tmp_path, ready=False)
    rank.begin(attempt=3)
    label = Label("qkv", 3, 2, "forward")
    _, _, number = rank.log.enter("pp.up", "send", label, 9, 7, (2, 1, 4), "send", stored=("pp", 5))
    rank.log.write_times(number, 1.0, 1.5, 2.0, 0.5)
    rank.end_step(2, tags=1)
    rank.end_step(3)
    rank.log.tables.set_expert_loads(2, 2, [0, 0, 0.5, 1.5])
    [kept] = drained(rank)
    tables = take(Texts(), [kept])
    assert [(row["layer"], row["expert"]) for row in tables["expert_loads"]] == [(1, 0), (1, 1)], "layer 0 has none"
    for table, rows in tables.items():
        empty = [column.name for column in TABLES[table] if not any(row[column.name] for row in rows)]
        assert empty == (["events_lost"] if table == "steps" else [])


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
    assert totals.seconds(reader.texts()) == (2 * 2.75, {"tp": 0.5, "dp": 1.0}, {"data": 4.0})
    assert (totals.train_s, totals.tokens, totals.flops, totals.lost) == (1.5, 8192, 2e15, 0)


def test_an_action_that_only_waits_takes_nothing_from_the_sum(tmp_path: Path) -> None:
    """Prometheus takes a counter that decreases for one that began anew, and its whole value for an increase."""
    rank, totals = PlayedRank(tmp_path, 0, tmp_path), RankTotals()
    reader = LogReader(rank.path)
    rank.compute(1, "F", 1.0, 2.0)
    totals.add(reader.drain())
    rank.compute(1, "F", 1000.1, 1000.3, exposed=0.2)  # 1000.3 - 1000.1 is a bit less
    totals.add(reader.drain())
    assert totals.seconds(reader.texts())[0] == 1.0


def test_lost_records_are_counted(tmp_path: Path) -> None:
    rank, totals = PlayedRank(tmp_path, 0, tmp_path), RankTotals()
    reader = LogReader(rank.path)
    for _ in range(5000):  # the log of a played rank has 4096 places
        rank.compute(1, "F", 1.0, 2.0)
    totals.add(reader.drain())
    assert totals.lost + totals.seconds(reader.texts())[0] == 5000
    assert totals.lost >= 5000 - 4096


def test_nothing_drained_is_nothing(tmp_path: Path) -> None:
    rank, totals = PlayedRank(tmp_path, 0, tmp_path), RankTotals()
    totals.add(LogReader(rank.path).drain())
    assert totals == RankTotals()
    assert totals.seconds([]) == (0, {}, {})
