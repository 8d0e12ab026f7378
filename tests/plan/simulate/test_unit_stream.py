"""Exposed communication of weights that stream: that of the executor's order, and none that compute hides."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.plan.simulate.unit_stream import UnitTimes, streamed
from megascale.schedule.ir import build_schedule
from megascale.schedule.one_f_one_b import one_f_one_b
from megascale.schedule.resharding import count_gathers

SECONDS = st.floats(0, 4)
UNITS = st.lists(st.builds(UnitTimes, SECONDS, SECONDS, SECONDS, SECONDS), min_size=1, max_size=6)


@pytest.mark.parametrize("units", [1, 2, 5])
@pytest.mark.parametrize("m", [1, 2, 4])
def test_units_are_gathered_as_often_as_in_training(m: int, units: int) -> None:
    """A unit where a forward meets a backward, once."""
    counts = count_gathers(build_schedule(one_f_one_b, 1, 1, m)[0], "forward", 0, units)
    for at in range(units):
        alone = [UnitTimes(0.0, 0.0, 1.0 if at == unit else 0.0, 0.0) for unit in range(units)]
        exposed = streamed(alone, turns=True, overlap=False, slowdown=0.0)
        assert m * (exposed.forward + exposed.backward) + exposed.ends == counts[at]


def test_without_overlap_all_is_exposed() -> None:
    exposed = streamed([UnitTimes(1, 2, 3, 4)] * 5, turns=False, overlap=False, slowdown=0.25)
    assert exposed == (5 * 3, 5 * (3 + 4), 0)


@pytest.mark.parametrize("slowdown", [0.0, 0.25])
def test_long_compute_hides_all_but_the_ends(slowdown: float) -> None:
    """The first two gathers, as there are two slots, and the last reduction but for a unit's backward."""
    exposed = streamed([UnitTimes(1, 2, 0.5, 0.75)] * 8, turns=False, overlap=True, slowdown=slowdown)
    assert exposed.forward + exposed.backward == pytest.approx(slowdown * 8 * (2 * 0.5 + 0.75))
    assert exposed.ends == pytest.approx(0.5 + 0.75)


def test_short_compute_leaves_the_rest() -> None:
    exposed = streamed([UnitTimes(1, 2, 3, 4)] * 8, turns=False, overlap=True, slowdown=0.25)
    assert exposed.forward + exposed.backward == pytest.approx(8 * (2 * 3 + 4) - 8 * 3)
    assert exposed.forward / exposed.backward == pytest.approx(3 / 7)


def test_a_unit_without_compute_hides_nothing() -> None:
    """An embedding at which a backward meets a forward: the first layer, released before, is gathered again."""
    layers = [UnitTimes(0, 0, 0.5, 0.25), *[UnitTimes(1, 2, 0.5, 0.25)] * 4]
    exposed = streamed(layers, turns=True, overlap=True, slowdown=0)
    assert exposed.forward + exposed.backward == pytest.approx(0.5)


@settings(deadline=None, max_examples=100)
@given(UNITS, st.booleans(), st.booleans())
def test_overlap_hides_at_most_what_compute_covers(units: list[UnitTimes], turns: bool, overlap: bool) -> None:
    work = sum(unit.forward + unit.backward for unit in units)
    shown = streamed(units, turns=turns, overlap=False, slowdown=0.0)
    exposed = streamed(units, turns=turns, overlap=overlap, slowdown=0.0)
    sent = shown.forward + shown.backward
    assert min(exposed) >= 0
    assert sent - work - 1e-9 <= exposed.forward + exposed.backward <= sent + 1e-9
