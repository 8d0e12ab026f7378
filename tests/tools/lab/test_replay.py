"""Published failures replayed in simulated time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.failure_mixes import LLAMA3, MIXES, FailureMix
from lab.replay import REQUEUE_S, Replay, ReplayPlan, most_within, seconds_for, spare_nodes
from megascale.config.fault import FaultConfig


def test_the_causes_of_llama_3_add_up() -> None:
    assert sum(cause.count for cause in LLAMA3.causes) == 419
    assert LLAMA3.device_hours == pytest.approx(50_676, rel=1e-3)


def test_spares_are_the_99th_percentile_of_a_binomial() -> None:
    assert [spare_nodes(nodes, 0.0012) for nodes in (128, 256, 512, 1024)] == [2, 2, 3, 4], "ByteRobust, table 5"
    assert spare_nodes(100, 0.0) == 0


def test_times_between_published_sizes_are_interpolated() -> None:
    assert [seconds_for(gpus, REQUEUE_S) for gpus in (1024, 2048, 16_384, 65_536)] == [454.0, 454.0, 768.0, 768.0]
    assert 454 < seconds_for(3000, REQUEUE_S) < 545


def test_the_most_of_times_within_a_window() -> None:
    assert most_within([], 10) == 0
    assert most_within([0, 5, 10, 11, 12, 40], 10) == 4, "at 12 a spare has followed the first"
    assert most_within([0, 5], 100) == 2


def test_longer_restarts_and_more_failures_cost_training_time() -> None:
    plan = ReplayPlan(512, days=108)

    def share(mix: FailureMix = LLAMA3, **changes: float) -> float:
        return Replay(mix, replace(plan, **changes), FaultConfig()).run().effective_share

    assert share(restart=20.0) < share() < share(replace(LLAMA3, device_hours=20 * LLAMA3.device_hours))


@pytest.mark.parametrize("mix", MIXES.values(), ids=list(MIXES))
def test_a_replay_is_better_than_requeue_and_loses_few_healthy_nodes(mix: FailureMix) -> None:
    result = Replay(mix, ReplayPlan(512, days=108), FaultConfig()).run()
    assert result.failures > 15
    assert result.effective_share > max(0.99, result.requeue_share)
    assert result.healthy <= result.replaced // 4
    assert result.incidents >= result.failures - 2
