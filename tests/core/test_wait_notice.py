"""Notices of long waits."""

from __future__ import annotations

import time

import pytest

from megascale.core import wait_notice
from megascale.core.wait_notice import WaitNotice, wait_notices


def test_a_short_wait_says_nothing_and_asks_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> str:
        raise AssertionError("nobody was to be named")

    WaitNotice("rank 0").print_if_due(fail)
    with wait_notices("rank 0", "rank 1"):
        pass
    assert capsys.readouterr().err == ""


def test_a_long_wait_says_so_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_notice, "FIRST_S", 0.05)
    monkeypatch.setattr(wait_notice, "NEXT_S", 60)
    notice = WaitNotice("rank 0 of 2 on h")
    for _ in range(4):
        notice.print_if_due(lambda: "rank 1")
        time.sleep(0.05)
    with wait_notices("rank 0", "rank 2"):  # as for a wait in C++
        time.sleep(0.3)
    assert capsys.readouterr().err.splitlines() == [
        "rank 0 of 2 on h: has waited 0 s for rank 1",
        "rank 0: has waited 0 s for rank 2",
    ]


def test_a_closed_terminal_does_not_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_notice, "FIRST_S", 0)

    class Closed:
        def write(self, text: str) -> None:
            raise BrokenPipeError

    monkeypatch.setattr("sys.stderr", Closed())
    WaitNotice("rank 0").print_if_due(lambda: "rank 1")
