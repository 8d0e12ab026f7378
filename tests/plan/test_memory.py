"""Of many micro-batches few show what a rank holds; what it holds of state is compared in tests/parallel."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.catalog.schedules import SCHEDULES
from megascale.plan.memory import representative
from megascale.schedule.ir import Kind, Order


@pytest.mark.parametrize("name", [name for name in SCHEDULES.names() if not SCHEDULES[name].facts["piles"]])
@given(p=st.integers(1, 8), v=st.integers(1, 4), m=st.integers(1, 150))
def test_what_is_alive_does_not_grow_with_the_micro_batches(name: str, p: int, v: int, m: int) -> None:
    v = v if SCHEDULES[name].facts["chunks"] else 1
    few, all = (SCHEDULES[name].load()(p, v, count) for count in (representative(p, m), m))
    assert [alive(order, v) for order in few] == [alive(order, v) for order in all]


def alive(order: Order, v: int) -> set[tuple[int, ...]]:
    """Every number of micro-batches of each chunk that are alive at once."""
    now, found = [0] * v, set()
    for action in order:
        now[action.chunk] += 1 if action.kind is Kind.F else -1
        found.add(tuple(now))
    return found
