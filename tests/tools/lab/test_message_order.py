"""The simulation of an order of receives, computed by hand, and its costs."""

from __future__ import annotations

import argparse

import pytest

from lab.commands.message_order import GOALS, compare, costs, orders_of, pipelines, run
from lab.message_times import Times, times_of
from lab.receive_orders import deadlocks, posted_ahead
from megascale.layout.stages import looped, placement_of
from megascale.schedule.ir import Kind, Schedule, build_schedule
from megascale.schedule.lower import lower
from megascale.schedule.one_f_one_b import one_f_one_b
from tests.schedule.hosts import check_messages


def lowered(p: int, m: int) -> Schedule:
    return lower(build_schedule(one_f_one_b, p, 1, m), looped(p, 1))


def times(lists: Schedule, message: float) -> Times:
    seconds = {(r, action): 2.0 if action.kind is Kind.B else 1.0 for r, order in enumerate(lists) for action in order}
    return times_of(lists, looped(len(lists), 1), seconds, message)


def test_a_message_goes_there_and_back() -> None:
    """F 0..1, there 1..1.5, F 1.5..2.5, B 2.5..4.5, back 4.5..5, B 5..7; rank 0 posts its receive at 1, so that no
    compute is beside it.
    """
    assert times(lowered(2, 1), 0.5) == Times(7.0, 0.0, 1)


def test_a_receive_before_its_message_is_beside_compute() -> None:
    """F0 SEND F1 SEND B0 B1: rank 0 computes F1 while its first receive and its sends run."""
    lists = [posted_ahead(order) for order in lowered(2, 2)]
    assert str(lists[0][1].kind) == "RECV_B" and lists[0][1].microbatch == 0
    assert times(lists, 0.5).beside > times(lowered(2, 2), 0.5).beside


def test_messages_of_a_channel_are_in_order_and_take_turns() -> None:
    """With messages of 3 the second forward's message starts after the first's, and arrives at 1 + 3 + 3."""
    forwards = [[a for a in order if a.kind in (Kind.F, Kind.SEND_F, Kind.RECV_F)] for order in lowered(2, 2)]
    assert times(forwards, 3.0).last == 8.0


def test_a_list_that_waits_for_itself_does_not_end() -> None:
    lists = lowered(2, 1)
    lists[0].remove(next(action for action in lists[0] if action.kind is Kind.RECV_B))
    with pytest.raises(AssertionError, match="does not end"):
        times(lists, 0.5)


@pytest.mark.parametrize(("name", "most"), [("1f1b", 0.01), ("interleaved_1f1b", 0.003)])
def test_the_order_of_the_senders_costs_little(name: str, most: float) -> None:
    assert max(costs(shape, 0)[0] for shape in pipelines(name, 4)) <= GOALS[name] == most


def test_only_receives_posted_ahead_deadlock() -> None:
    shape, placement = ("interleaved_1f1b", 3, 2, 6), placement_of("interleaved_1f1b", 3, 2)
    ahead, senders, *others = orders_of(shape, True)
    assert deadlocks(ahead, placement)
    for lists in (senders, *others):
        check_messages(lists, placement)
        assert not deadlocks(lists, placement)
    assert all(lists != senders for lists in others)


def test_less_compute_is_beside_messages() -> None:
    ahead, sender, _ = compare(("1f1b", 8, 1, 32), 0.1)
    assert sender.beside < 0.5 * ahead.beside


def test_the_tables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.commands.message_order.SHAPES", [("1f1b", 2, 1, 4)])
    assert run(argparse.Namespace(most=2, draws=1)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| 1f1b | 2, 1, 4 | 0.00% |" in lines[6] and any(
        line.startswith("| interleaved_1f1b | 20 | 0.3% | 0.00% |") for line in lines
    )
