"""Link benchmark: every operation is timed through training's transports."""

from __future__ import annotations

import json

import pytest

from megascale.bench import links, timed_group
from megascale.bench.links import COLLECTIVES, OPERATIONS, LinkTiming, fit_link
from megascale.bench.quartiles import Quartiles
from megascale.cli.main import main
from megascale.core.rank import Rank
from megascale.plan.simulate.link_time import Route
from tests.worlds import run_world

SIZES = [64, 4096]


def measured(rank: Rank) -> list[LinkTiming]:
    from megascale.device import detect_device

    timed_group.TIMING_S = 0.0
    return links.measure_links(detect_device(allow_gpu=False), rank.rank, rank.world_size, SIZES, repeats=2)


@pytest.mark.parametrize("world", [2, 3])
def test_every_operation_has_its_times(world: int) -> None:
    for timings in run_world(world, measured):
        assert [each.operation for each in timings] == [name for name in OPERATIONS for _ in SIZES]
        assert all(each.ranks == world and each.bytes % world == 0 for each in timings)
        assert all(each.seconds.count == 2 and each.seconds.low >= 0 for each in timings)
        assert all(each.seconds.low > 0 for each in timings if each.operation != "message")


def of(operation: str, ranks: int, size: int, route: Route) -> LinkTiming:
    seconds = route.message(size) if operation == "message" else route.collective(operation, size, ranks)  # type: ignore[arg-type]
    return LinkTiming(operation, ranks, size, Quartiles.from_values([seconds]))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_fitted_link_predicts_the_timings(ranks: int) -> None:
    """Timings predicted by the planner for a link fit the link."""
    route = Route(bandwidth=3e9, latency=2e-5, network=False)
    timings = [of(operation, ranks, size, route) for operation in OPERATIONS for size in links.SIZES]
    for operations in (COLLECTIVES, ["message"]):
        assert fit_link(timings, operations).bandwidth == pytest.approx(3e9)
        assert fit_link(timings, operations).latency == pytest.approx(2e-5)


def test_timings_independent_of_size_are_latency() -> None:
    timings = [LinkTiming("message", 2, size, Quartiles.from_values([1e-4])) for size in SIZES]
    assert fit_link(timings, ["message"]).latency == pytest.approx(1e-4)
    assert fit_link(timings, ["message"]).bandwidth > 1e12


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
