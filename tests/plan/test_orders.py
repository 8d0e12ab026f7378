"""Orders as arrays say what the lists say."""

from __future__ import annotations

from megascale.catalog.schedules import SCHEDULES
from megascale.plan.orders import Orders
from megascale.schedule.ir import Kind


def test_arrays_say_what_lists_say() -> None:
    orders = Orders(SCHEDULES["interleaved_1f1b"].load()(3, 2, 7))
    for rank, order in enumerate(orders.schedule):
        done = orders[rank]
        assert list(zip(done.chunk.tolist(), done.micro_batch.tolist(), strict=True)) == [
            action[1:] for action in order
        ]
        assert done.backward.tolist() == [action.kind is Kind.B for action in order]
        assert orders[rank] is done
