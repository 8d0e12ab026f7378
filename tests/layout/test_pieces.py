"""The pieces of a collective: slices of its rows."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.cli.check_run import host_warnings
from megascale.config.loading import load_config
from megascale.layout.pieces import split_rows, unfused_gemms
from megascale.plan.search.plan import Plan
from megascale.plan.simulate import profiles


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_slices_cover_all_rows_once_in_order_and_evenly(rows: int, pieces: int) -> None:
    slices = split_rows(rows, pieces)
    assert [row for piece in slices for row in range(rows)[piece]] == list(range(rows))
    assert len(slices) == min(rows, pieces)
    lengths = {piece.stop - piece.start for piece in slices}
    assert not lengths or (min(lengths) > 0 and max(lengths) - min(lengths) <= 1)


GPUS = Path(__file__).parents[2] / "configs/gpu"


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ((), None),
        (("batch.micro=1",), "batch.micro = 2"),
        (("batch.micro=1", "model.seq_length=1024"), "batch.micro = 4"),
        (("batch.micro=1", "parallel.sp=false"), None),
        (("batch.micro=1", "overlap.tp=false"), None),
        (("batch.micro=1", "parallel.tp=4"), None),
    ],
)
def test_gemms_of_too_few_rows_are_named(settings: tuple[str, ...], hint: str | None) -> None:
    config = load_config(str(GPUS / "gpt3-175b.toml"), settings, 1024)
    found = [each.hint for each in unfused_gemms(config)]
    assert found == ([f"{hint}, if memory allows"] if hint else [])
    assert any("rows on a rank of tp" in line for line in host_warnings(config)) == (hint is not None)


def test_a_plan_has_the_seconds_of_what_does_not_overlap() -> None:
    """The estimate with collectives that overlap with wgrad only is longer by them."""
    config = load_config(str(GPUS / "gpt3-175b.toml"), ["batch.micro=1"], 1024)
    hardware, stack = profiles.hardware("h100"), profiles.stack("megascale")
    exposed = stack.model_copy(update={"overlaps": stack.overlaps.model_copy(update={"tp": "backward"})})
    plans = [Plan(config, hardware, each) for each in (stack, exposed)]
    (note,) = (note for note in plans[0].notes if note.startswith("batch.micro"))
    seconds = plans[1].estimate.step_s - plans[0].estimate.step_s
    assert f": {seconds:.3g} s on top" in note and seconds > 0.5
    assert not any(note.startswith("batch.micro") for note in plans[1].notes), "they are in that estimate"
