"""Estimates of a step's kernels beside measurements, what FP8 gains by them, and what is not built."""

from __future__ import annotations

import pytest

from lab.commands.kernel_estimates import ASSUMED, PAGE, Step, measured, speed_ups, verdict
from lab.commands.operator_bytes import BF16, CONFIG, count, recipe_config
from lab.kernel_savings import savings


@pytest.fixture(scope="module")
def plain() -> Step:
    return Step(recipe_config(CONFIG, BF16))


def test_measured_shares_are_those_of_the_page() -> None:
    found = measured(PAGE.read_text(encoding="utf-8"))
    assert found["gemm"] == pytest.approx(0.731 * 877.9) and found["idle"] == pytest.approx(0.01 * 877.9)
    assert sum(found.values()) == pytest.approx(877.9, rel=0.005)


def test_kernels_that_move_bytes_take_the_planner_s_bandwidth(plain: Step) -> None:
    found, rate = plain.milliseconds, 0.75 * 4.8e12 / 0.992
    stream, passes = 2 * 8192 * 4096, 8 * 4
    norms = (2 + 3) + (4 + 4)  # alone and after an addition, forward and backward, without the gains
    assert found["norms"] == pytest.approx(1e3 * passes * norms * stream / rate, rel=0.001)
    assert found["loss"] == pytest.approx(1e3 * 4 * 3 * 2 * 8192 * 128256 / rate, rel=0.01)


def test_the_page_has_the_estimates(plain: Step) -> None:
    rows = [line.split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines()]
    rows = rows[rows.index(["<!-- estimates: begin -->"]) :]
    page = {row[0].strip("| "): row[2] for row in rows[: next(i for i, row in enumerate(rows) if row[0] == "| all")]
            if len(row) > 3}  # fmt: skip
    assert {name: page[name] for name in plain.milliseconds} == {
        name: f"{value:.1f}" for name, value in plain.milliseconds.items()
    }


def test_bf16_takes_what_was_measured_and_fp8_less_by_its_gemms(plain: Step) -> None:
    """With FP8 GEMMs of no time and nothing else changed, the step is the rest and the head."""
    pytest.importorskip("triton", reason="triton comes with torch's builds for GPUs")
    fp8, found = Step(recipe_config(CONFIG, "tensorwise")), measured(PAGE.read_text(encoding="utf-8"))
    factors = {name: found[name] / value for name, value in plain.milliseconds.items()}
    low, high = speed_ups(plain, fp8, factors, found["idle"])
    rest = sum(found.values()) - found["gemm"] + fp8.milliseconds["quantise"] + factors["gemm"] * fp8.head
    slow = fp8.tflop * (1e3 / ASSUMED["tensor"][0] + 2e3 / ASSUMED["tensor"][1])
    assert low == pytest.approx(sum(found.values()) / (rest + slow), rel=0.001) and low < high
    weights = 4096 * (6144 + 4096 + 3 * 14336)
    assert fp8.tflop == pytest.approx(2e-12 * weights * 8 * 4 * 8192)
    assert fp8.planned_rate == pytest.approx(3e3 * fp8.tflop / fp8.fp8_gemms[0])


def test_a_bar_is_met_by_the_lower_rate_or_missed() -> None:
    assert verdict([1.2, 1.3], 1.2) == ["1.20 to 1.30", "1.20", "met"]
    assert verdict([1.1, 1.2], 1.2)[2] == "**missed** at the lower rate"
    assert verdict([1.0, 1.1], 1.2)[2] == "**missed**"
    assert verdict([1.0, 1.1], None) == ["1.00 to 1.10", "", ""]


def test_the_addition_in_the_next_norm_saves_three_passes(plain: Step) -> None:
    """A read in forward, and a read and a write in backward, of the residual stream."""
    (saving,) = plain.savings.values()
    assert saving.nbytes == pytest.approx(3 * 2 * 8192 * 4096, rel=0.001)
    assert plain.saved(saving.what) == plain.stream(32 * saving.nbytes)


def test_kernels_that_cast_save_passes_over_their_operands() -> None:
    pytest.importorskip("triton", reason="triton comes with torch's builds for GPUs")
    norms, inner, unknown = (2 * 8192 * width for width in (2 * 4096, 3 * 14336, 3 * 4096 + 6144))
    expected = {
        "tensorwise": [unknown], "delayed": [norms, 2 * norms + inner],
        "rowwise": [norms + inner], "blockwise": [norms + inner],
    }  # fmt: skip
    for recipe, nbytes in expected.items():
        config = recipe_config(CONFIG, recipe)
        _, *found = savings(config, count(config))
        assert [saving.nbytes for saving in found] == pytest.approx(nbytes, rel=0.001), recipe
