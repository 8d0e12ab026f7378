"""Estimates of a step's kernels beside measurements."""

from __future__ import annotations

from argparse import Namespace

import pytest

from lab.commands.kernel_estimates import PAGE, estimate, measured
from lab.commands.operator_bytes import BF16, CONFIG

OPTIONS = Namespace(config=CONFIG, hardware="h200", attention="flash3")


def test_measured_shares_are_those_of_the_page() -> None:
    found = measured(PAGE.read_text(encoding="utf-8"))
    assert found["gemm"] == pytest.approx(0.731 * 877.9) and found["idle"] == pytest.approx(0.01 * 877.9)
    assert sum(found.values()) == pytest.approx(877.9, rel=0.005)


def test_kernels_that_move_bytes_take_the_planner_s_bandwidth() -> None:
    found, rate = estimate(OPTIONS, BF16), 0.75 * 4.8e12 / 0.992
    stream, passes = 2 * 8192 * 4096, 8 * 4
    norms = (2 + 3) + (4 + 4)  # alone and after an addition, forward and backward, without the gains
    assert found["norms"] == pytest.approx(1e3 * passes * norms * stream / rate, rel=0.001)
    assert found["loss"] == pytest.approx(1e3 * 4 * 3 * 2 * 8192 * 128256 / rate, rel=0.01)


def test_the_page_has_the_estimates() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines()]
    page = {row[0].strip("| "): row[2] for row in rows[rows.index(["<!-- estimates: begin -->"]) :] if len(row) > 3}
    assert {name: page[name] for name in estimate(OPTIONS, BF16)} == {
        name: f"{value:.1f}" for name, value in estimate(OPTIONS, BF16).items()
    }
