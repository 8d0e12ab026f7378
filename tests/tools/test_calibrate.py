"""Calibration: rows are valid jobs, the fit reduces the error, and left-out sources are not used."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megascale.plan.account.flops import mfu
from megascale.plan.account.memory import JobMemory
from megascale.plan.simulate import profiles

ROOT = Path(__file__).parents[2]
SOURCES = ("fms-fsdp", "torchtitan", "nemo-2024")


@pytest.fixture(scope="module")
def calibration() -> Any:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import calibration.ablation
        import calibration.assumptions
        import calibration.fit
        import calibration.rows

        yield calibration
    finally:
        sys.path.remove(str(ROOT / "tools"))


@pytest.fixture(scope="module")
def rows(calibration: Any) -> Sequence[Any]:
    return list(calibration.rows.read())


def test_every_row_is_a_job_of_its_source(rows: Sequence[Any]) -> None:
    assert len(rows) > 600
    text = (ROOT / "tools/calibration/README.md").read_text()
    for source, count in Counter(row.source for row in rows).items():
        assert source in text, (source, count)
    for row in rows:
        assert row.config.world_size == int(row.text["gpus"])
        assert row.config.num_microbatches >= 1
        assert 1e-3 < row.step_s < 1e3


def test_steps_in_mxfp8_and_nvfp4_are_planned(calibration: Any, rows: Sequence[Any]) -> None:
    """The rate of NVFP4 is one number for two accelerators: no step is further off than 12%, and no fit has them."""
    scaled = list(calibration.rows.read_block_scaled())
    assert Counter(row.recipe for row in scaled) == {"mxfp8": 12, "nvfp4": 9}
    assert not any(row.recipe == "nvfp4" for row in rows)
    known = calibration.fit.Profiles(scaled)
    errors = {row.line: known.predicted(row, {}) / row.step_s - 1 for row in scaled}
    for recipe, most in (("mxfp8", 0.06), ("nvfp4", 0.12)):
        assert max(abs(errors[row.line]) for row in scaled if row.recipe == recipe) < most


LARGER = {
    "megatron-bridge": 13,  # FSDP runs offload activations; MXFP8 with activations in 8 bits
    "nemo-2024": 1,  # squared ReLU, whose recomputation is assumed
    "narayanan-2021": 1,  # ZeRO 3, by 19 GiB: DeepSpeed gathers and reduces single matrices, not layers
    "bigscience-2022": 1,  # by 2 GiB
}
"""Published runs that exceed their device's memory by megascale's formulas."""


@pytest.mark.slow
def test_published_runs_fit_in_memory(rows: Sequence[Any]) -> None:
    """Published runs of other trainers fit in memory, with weights cast like the stack's."""
    room = {name: profiles.hardware(name) for name in {row.hardware for row in rows}}
    larger = Counter(
        row.source
        for row in rows
        if JobMemory(row.config, profiles.stack(row.stacks[0]).storage).fullest().total
        > room[row.hardware].memory_limit(row.config.world_size)
    )
    assert larger == LARGER


def test_no_measurement_is_there_twice(rows: Sequence[Any]) -> None:
    seen = Counter(tuple(row.text.values()) for row in rows)
    assert max(seen.values()) == 1


def test_a_fit_reduces_the_error(calibration: Any, rows: Sequence[Any]) -> None:
    few = [row for row in rows if row.source in SOURCES and row.config.world_size >= 64 and row.config.parallel.pp == 1]
    result = calibration.fit.Fit(few)
    usual = {key: e.usual for key, e in result.known.keys}
    errors = [
        calibration.fit.mean_error(few, {row.line: result.known.predicted(row, values) for row in few})
        for values in (usual, result.values)
    ]
    assert errors[1] < errors[0]
    for key, e in result.known.keys:
        assert e.low <= result.values[key] <= e.high


def test_errors_are_taken_for_what_they_are(calibration: Any) -> None:
    """The weights invert the covariance: a variance per row, and a variance shared by all rows."""
    fit = calibration.fit
    errors = np.array([0.10, 0.02, 0.05, -0.03, 0.04])
    scatter = np.mean((errors - 0.04) ** 2) ** 0.5  # from their middle
    own = scatter**2 * np.maximum(1, np.abs(errors - 0.04) / (2 * scatter)) * len(errors) ** 0.5
    white = fit.whitening(errors)
    assert white @ (np.diag(own) + fit.SHARED**2) @ white.T == pytest.approx(np.eye(5), abs=1e-9)
    assert fit.whitening(np.array([0.3])) == pytest.approx((fit.LEAST**2 + fit.SHARED**2) ** -0.5)


@pytest.mark.slow
def test_a_left_out_source_is_not_used(calibration: Any, rows: Sequence[Any]) -> None:
    """A stack used only by the left-out source keeps its default values."""
    few = [row for row in rows if row.source in SOURCES and row.config.world_size >= 64 and row.config.parallel.pp == 1]
    result = calibration.fit.Fit(few)
    left_out = result.left_out()
    stretched = [
        calibration.rows.Row(**{**vars(row), "step_s": row.step_s * (2 if row.source == "nemo-2024" else 1)})
        for row in few
    ]
    other = calibration.fit.Fit(stretched).left_out()
    for row in few:
        if row.source == "nemo-2024":
            assert other[row.line] == pytest.approx(left_out[row.line], rel=0.1)
    assert max(abs(other[row.line] / left_out[row.line] - 1) for row in few if row.source != "nemo-2024") > 0.1


def test_the_ablation_ends_where_megascale_is(calibration: Any) -> None:
    from megascale.plan.simulate import profiles

    baseline, megascale = profiles.stack("megatron-2023"), profiles.stack("megascale-2024")
    last = calibration.ablation.stack(9, baseline, megascale)
    assert last.overlaps == megascale.overlaps
    assert last.attention == megascale.attention
    for name in ("slowdown", "passes", "step_s"):
        assert getattr(last.attained, name) == getattr(megascale.attained, name)
    assert calibration.ablation.stack(1, baseline, megascale) == baseline


def test_the_tables_of_megascale_come_out(calibration: Any, rows: Sequence[Any]) -> None:
    """With the shipped profiles, Table 2's step times are within 4%, Table 3's MFU within 2.5 points and in order."""
    tables = [row for row in rows if row.source == "megascale-2024"]
    known = calibration.fit.Profiles(tables)
    result = {row.line: known.predicted(row, {}) for row in tables}
    assert max(abs(result[row.line] / row.step_s - 1) for row in tables if row.step is None) < 0.04
    steps = [row for row in tables if row.step]
    assert [row.step for row in steps] == list(range(1, 10))
    printed = [float(re.search(r"MFU ([\d.]+)%", row.text["note"])[1]) for row in steps]
    reached = [share * row.step_s / result[row.line] for share, row in zip(printed, steps, strict=True)]
    assert reached == pytest.approx(printed, abs=2.5)
    assert reached == sorted(reached), "each technique adds something"
    seconds = [result[row.line] for row in steps[:8]]
    assert seconds == sorted(seconds, reverse=True)
    for row, share in zip(steps, printed, strict=True):  # so is the table's count what the steps were taken from
        tokens = row.config.batch.total * row.config.model.seq_length / row.step_s
        assert 100 * mfu(row.flops, tokens, 256 * 312e12) == pytest.approx(share, abs=0.05)


def test_an_assumption_is_worth_what_planning_without_it_changes(calibration: Any, rows: Sequence[Any]) -> None:
    few = [row for row in rows if row.source in ("fms-fsdp", "nemo-2024") and row.config.world_size >= 64]
    cells = dict(calibration.assumptions.worth(few))
    assert cells["none"][:2] == ["0.0%", "0%"]
    assert float(cells["overlaps"][0].rstrip("%")) > float(cells["latency"][0].rstrip("%")) > 0
    assert cells["host_s"] == cells["none"], "no stack of these has slow hosts"
    assert len(cells["none"]) == 2 + len(calibration.rows.goals(few))


def test_the_page_has_a_row_for_each_assumption(calibration: Any) -> None:
    assumptions = calibration.assumptions
    page = (ROOT / "docs/results/planner.md").read_text()
    filled = assumptions.fill(page, [(name, ["1.0%", "2%", "3.0%", "4.0%"]) for name in assumptions.WITHOUT])
    assert filled.count("| 1.0% | 2% | 3.0% | 4.0% |\n") == len(assumptions.WITHOUT)
    assert len(filled.splitlines()) == len(page.splitlines())
    with pytest.raises(AssertionError, match="one row for missing"):
        assumptions.fill(page, [("missing", [])])


def test_tables_of_the_page_have_a_column_for_each_published_step(
    calibration: Any, rows: Sequence[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    import calibrate

    tables = [row for row in rows if row.source == "megascale-2024"]
    exact = {"exact": {row.line: row.step_s for row in tables}, "slow": {row.line: 2 * row.step_s for row in tables}}
    heading, _, measured, same, double = calibrate.iteration_times(tables, exact)
    assert (heading.count("|"), measured.split(" | ")[1]) == (8 + 2, "40.00")
    assert same.count("+0.0%") == double.count("+100.0%") == 8
    heading, _, measured, same, double = calibrate.ablation_mfu(tables, exact)
    assert heading.count("|") == 9 + 2
    assert measured.partition("| measured")[2] == same.partition("| exact")[2]
    assert float(measured.split(" | ")[1].rstrip("%")) == pytest.approx(
        2 * float(double.split(" | ")[1].rstrip("%")), abs=0.15
    )


@pytest.fixture
def few_rows(tmp_path: Path) -> Path:
    """A file of one source's rows of 16 GPUs."""
    with open(ROOT / "tools/calibration/rows.csv", newline="") as file:
        text = list(csv.DictReader(file))
    path = tmp_path / "rows.csv"
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, text[0])
        writer.writeheader()
        writer.writerows(row for row in text if row["source"] == "llm-foundry" and row["gpus"] == "16")
    return path


def test_check_prints_errors_of_the_rows_it_is_given(
    few_rows: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import calibrate

    monkeypatch.setattr(calibrate, "experts", lambda: ["errors of experts"])  # a fit of all their rows
    monkeypatch.setattr("gc.disable", lambda: None)
    monkeypatch.setattr("sys.argv", ["calibrate.py", "--check", "--rows", str(few_rows)])
    calibrate.main()
    out = capsys.readouterr().out
    assert "| llm-foundry, h100 |" in out and out.endswith("\n\nerrors of experts\n")


@pytest.mark.slow
def test_check_writes_nothing(few_rows: Path) -> None:
    command = [sys.executable, "tools/calibrate.py", "--check", "--rows", str(few_rows)]
    before = (ROOT / "docs/results/planner.md").read_text()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "| llm-foundry, h100 |" in done.stdout
    assert (ROOT / "docs/results/planner.md").read_text() == before
