"""Who this process is, from what torchrun and Slurm put into the environment."""

from __future__ import annotations

import socket

import pytest

from megascale.core.errors import ConfigError
from megascale.core.rank import Rank, from_environment, meeting_place

HOST = socket.gethostname()
STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "1"}


def test_torchrun() -> None:
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    assert from_environment(env) == Rank(5, 8, 1, HOST)


def test_without_a_local_rank_all_ranks_are_local() -> None:
    assert from_environment({"RANK": "3", "WORLD_SIZE": "8"}) == Rank(3, 8, 3, HOST)


def test_srun() -> None:
    assert from_environment(STEP) == Rank(9, 16, 1, HOST)


def test_torchrun_inside_srun_wins() -> None:
    assert from_environment({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"} | STEP) == Rank(0, 2, 0, HOST)


def test_a_batch_script_is_no_rank() -> None:
    assert from_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "16"}) is None


def test_alone() -> None:
    assert from_environment({}) is None
    assert from_environment({"RANK": "3"}) is None


def test_a_rank_names_itself() -> None:
    assert str(Rank(3, 8, 1, "node7")) == "rank 3 of 8 on node7"


@pytest.mark.parametrize("value", ["three", "", "-1", "1.0"])
def test_a_variable_that_is_no_number_is_named(value: str) -> None:
    with pytest.raises(ConfigError, match=rf"environment  RANK: '{value}' is not a whole number"):
        from_environment({"RANK": value, "WORLD_SIZE": "8"})
    with pytest.raises(ConfigError, match="SLURM_STEP_NUM_TASKS"):
        from_environment(STEP | {"SLURM_STEP_NUM_TASKS": value})
    if value:
        with pytest.raises(ConfigError, match="MASTER_PORT"):
            meeting_place({"MASTER_ADDR": "host", "MASTER_PORT": value})
