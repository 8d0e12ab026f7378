"""What ranks send each other, timed: every operation through the transports of training."""

from __future__ import annotations

import json

import pytest

from megascale.bench import links
from megascale.bench.links import COLLECTIVES, OPERATIONS, Timed, way
from megascale.bench.spread import Spread
from megascale.cli.main import main
from megascale.core.rank import Rank
from megascale.simulate.link_time import Route
from tests.worlds import run_world

SIZES = [64, 4096]


def measured(rank: Rank) -> list[Timed]:
    from megascale.device import detect

    links.TIMING_S = 0.0
    return links.measure(detect(allow_gpu=False), rank.rank, rank.world, SIZES, repeats=2)


@pytest.mark.parametrize("world", [2, 3])
def test_every_operation_has_its_times(world: int) -> None:
    for found in run_world(world, measured):
        assert [each.operation for each in found] == [name for name in OPERATIONS for _ in SIZES]
        assert all(each.ranks == world and each.bytes % world == 0 for each in found)
        assert all(each.seconds.count == 2 and each.seconds.low >= 0 for each in found)
        assert all(each.seconds.low > 0 for each in found if each.operation != "message")


def of(operation: str, ranks: int, size: int, route: Route) -> Timed:
    seconds = route.message(size) if operation == "message" else route.collective(operation, size, ranks)  # type: ignore[arg-type]
    return Timed(operation, ranks, size, Spread.of([seconds]))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_way_is_what_the_planner_would_say(ranks: int) -> None:
    """Times that the planner says of a link give that link."""
    route = Route(bandwidth=3e9, latency=2e-5, network=False)
    found = [of(operation, ranks, size, route) for operation in OPERATIONS for size in links.SIZES]
    for operations in (COLLECTIVES, ["message"]):
        assert way(found, operations).bandwidth == pytest.approx(3e9)
        assert way(found, operations).latency == pytest.approx(2e-5)


def test_where_size_does_not_matter_only_messages_cost() -> None:
    found = [Timed("message", 2, size, Spread.of([1e-4])) for size in SIZES]
    assert way(found, ["message"]).latency == pytest.approx(1e-4)
    assert way(found, ["message"]).bandwidth > 1e12


def test_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "links", "--processes", "2", "--sizes", "4096"]
    assert main([*words, "--json"]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert shown["ranks"] == 2
    assert [each["operation"] for each in shown["results"]] == list(OPERATIONS)
    assert set(shown["collectives"]) == set(shown["messages"]) == {"bandwidth", "latency"}


@pytest.mark.parametrize("words", [["--processes", "1"], ["--sizes", "0"]])
def test_mistakes(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "links", *words])
    assert caught.value.code == 2
    assert f"argument {words[0]}: '{words[1]}' is" in capsys.readouterr().err
