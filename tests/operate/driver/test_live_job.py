"""The live file of a job with a driver: every rank as the heartbeats tell it, old and lost ones told apart."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from lab.simulation import Simulation
from megascale.config.fault import FaultConfig
from megascale.core.errors import Exit
from megascale.operate.channel.messages import Heartbeat, RankEnd, RanksEnded
from megascale.operate.driver.job_state import JobPlan
from megascale.operate.driver.live_job import live_state, writing_live_file
from megascale.record.live_file import LIVE_FILE, read_live_file
from megascale.record.rank_state import RankStatus


def simulated_job(folder: Path = Path()) -> Simulation:
    sim = Simulation(JobPlan("run", 4, 16, ("train",), "/logs", folder=str(folder)), FaultConfig(), 0)
    sim.run(1000.0)
    assert sim.trains
    assert sim.job.attempt is not None
    for node, ranks in sim.job.attempt.placement.items():
        statuses = tuple(RankStatus(rank, 1, "step", 5, state="S") for rank in ranks)
        sim.job.receive(node, Heartbeat(sim.now, 0, statuses), sim.now)
    return sim


def test_all_ranks_of_a_job_that_trains() -> None:
    sim = simulated_job()
    state = live_state(sim.job, sim.now)
    assert (state.stage, state.status, state.attempt) == ("run", None, 0)
    assert [(rank.rank, rank.phase, rank.step) for rank in state.ranks] == [(rank, "step", 5) for rank in range(16)]


def test_the_age_of_a_heartbeat_counts_as_time_without_progress() -> None:
    sim = simulated_job()
    before = live_state(sim.job, sim.now).ranks[5]
    sim.job.roster.members["node1"].heard -= 100.0
    after = live_state(sim.job, sim.now).ranks[5]
    assert (after.idle_s - before.idle_s, after.silent_s - before.silent_s) == (100.0, 100.0)


def test_a_lost_node_s_ranks_have_failed() -> None:
    sim = simulated_job()
    sim.job.roster.lose("node2")
    state = live_state(sim.job, sim.now)
    assert [rank for rank, found in enumerate(state.ranks) if found.state == "X"] == [8, 9, 10, 11]


def test_ranks_of_a_node_may_be_any() -> None:
    """As with srun --distribution=cyclic."""
    sim = simulated_job()
    assert sim.job.attempt is not None
    nodes = list(sim.job.attempt.placement)
    sim.job.attempt.placement = {node: tuple(range(place, 16, 4)) for place, node in enumerate(nodes)}
    sim.job.roster.lose("node2")
    state = live_state(sim.job, sim.now)
    assert len(state.ranks) == 16
    assert [rank for rank, found in enumerate(state.ranks) if found.state == "X"] == [2, 6, 10, 14]


def test_ranks_of_the_next_larger_job_are_not_in_the_picture_of_this_one() -> None:
    sim = simulated_job()
    statuses = tuple(RankStatus(rank, 2, "import") for rank in range(12, 20))
    sim.job.receive("node3", Heartbeat(sim.now, 0, statuses), sim.now)
    assert [rank.phase for rank in live_state(sim.job, sim.now).ranks] == ["step"] * 12 + ["import"] * 4


def test_before_the_first_attempt_all_ranks_are_unknown() -> None:
    sim = Simulation(JobPlan("run", 4, 16, ("train",), "/logs"), FaultConfig(), 0)
    sim.job.attempt = None
    state = live_state(sim.job, 0.0)
    assert [rank.phase for rank in state.ranks] == [""] * 16


def test_the_last_state_has_the_job_s_status(tmp_path: Path) -> None:
    sim, path = simulated_job(tmp_path), tmp_path / LIVE_FILE

    async def end_while_it_is_written() -> None:
        async with writing_live_file(sim.job, lambda: sim.now):
            while not path.exists():
                await asyncio.sleep(0.01)
            assert read_live_file(path).status is None
            sim.job.request_stop(sim.now)
            for node, ranks in sim.job.attempt.placement.items():
                ends = tuple(RankEnd(rank, Exit.STOPPED, sim.now, in_order=True) for rank in ranks)
                sim.job.receive(node, RanksEnded(0, ends), sim.now)

    asyncio.run(end_while_it_is_written())
    last = read_live_file(path)
    assert last.status == Exit.STOPPED
    assert {rank.phase for rank in last.ranks} == {"done"}


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    sim = simulated_job(tmp_path / "absent")

    async def write_twice() -> None:
        async with writing_live_file(sim.job, lambda: sim.now):
            await asyncio.sleep(0.2)

    asyncio.run(write_twice())
    assert capsys.readouterr().err.count("the live file cannot be written") == 1
