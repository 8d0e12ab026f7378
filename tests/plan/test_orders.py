"""Numbers say what the actions are."""

from __future__ import annotations

from megascale.catalog.schedules import SCHEDULES
from megascale.plan.orders import Done, Orders, done
from megascale.schedule.ir import Kind


def test_numbers_say_what_actions_are() -> None:
    orders = Orders(SCHEDULES["interleaved_1f1b"].load()(3, 2, 7))
    for rank, order in enumerate(orders.schedule):
        expected = [Done(action.chunk, action.kind is Kind.B, action.microbatch == 0) for action in order]
        assert [done(number) for number in orders[rank]] == expected
        assert orders[rank] is orders[rank]
