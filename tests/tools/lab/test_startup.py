"""The benchmark of a start: its parts are measured by real processes, and extrapolated from what was measured."""

from __future__ import annotations

import json
import os
import time

import pytest

from lab import forked, startup
from lab.__main__ import main
from lab.forked import run_forked
from lab.startup import PAPER, SIZES, GroupOpening, StartUp, layout_of, table
from lab.store_rate import StoreRate, installed_stores
from megascale.core.errors import MegascaleError

MEASURED = StartUp(
    {"a process of Python": 0.02},
    [
        StoreRate("ours", 1, 5_000.0, 20_000.0),
        StoreRate("ours", 16, 20_000.0, 30_000.0),
        StoreRate("torch's TCPStore", 16, 40_000.0, 50_000.0),
    ],
    [GroupOpening(8, 1.0, 2.0, 0.5, 100, 50, 7), GroupOpening(32, 4.0, 8.0, 0.5, 148, 52, 9)],
)


def test_processes_run_at_once_and_are_numbered() -> None:
    begun = time.time()
    results = run_forked(3, lambda number: [number, os.getpid(), time.time() - begun])
    assert [result[0] for result in results] == [0, 1, 2]
    assert len({result[1] for result in results} | {os.getpid()}) == 4
    for _, process, _ in results:  # they were waited for
        with pytest.raises(ChildProcessError):
            os.waitpid(process, os.WNOHANG)


def test_a_process_that_fails_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MegascaleError, match="process 1 of 2 has failed"):
        run_forked(2, lambda number: 1 // (1 - number))
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_processes_without_an_answer_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "SECONDS", 0.2)
    with pytest.raises(MegascaleError, match="2 of 2 processes did not answer"):
        run_forked(2, lambda number: time.sleep(600))


def test_requests_of_rank_0_grow_on_a_line_and_those_of_others_with_their_number() -> None:
    assert MEASURED.requests(32) == 148 + 31 * 52
    assert MEASURED.requests(2048) == 148 + 2 * (2048 - 32) + 2047 * 52
    assert MEASURED.store_s(2048) == MEASURED.requests(2048) / 30_000


def test_the_paper_stands_beside_what_follows() -> None:
    text = table(MEASURED)
    for size in SIZES:
        assert f"| {size:,} | {MEASURED.requests(size):,} | {MEASURED.store_s(size):.1f} | {PAPER[size]} |" in text
    assert "not measured: " in text


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 128])
def test_layouts_have_all_ranks(ranks: int) -> None:
    assert layout_of(ranks).world_size == ranks


@pytest.mark.slow
def test_the_command_measures(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "PROCESSES", {"a process of Python": "pass"})  # an import of torch takes seconds
    words = ["--clients", "1", "3", "--ranks", "2", "4", "--seconds", "0.2", "--json"]
    assert main(["startup", *words]) == 0
    found = json.loads(capfd.readouterr().out)
    assert {(rate["store"], rate["clients"]) for rate in found["rates"]} == {
        (store, clients) for store in installed_stores() for clients in (1, 3)
    }
    assert all(rate["requests_per_s"] > 0 and rate["requests_per_cpu_s"] > 0 for rate in found["rates"])
    assert len(found["rates"]) >= 4
    two, four = found["openings"]
    assert (two["ranks"], four["ranks"]) == (2, 4) and 5 < four["requests"] < 200
    assert [job["ranks"] for job in found["extrapolated"]] == list(SIZES)
