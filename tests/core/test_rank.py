"""This process's rank, from the environment variables of torchrun and Slurm."""

from __future__ import annotations

import socket

import pytest

from megascale.core.errors import ConfigError
from megascale.core.rank import Rank, rank_from_environment, rendezvous_endpoint

HOST = socket.gethostname()
STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "1"}


def test_torchrun() -> None:
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    assert rank_from_environment(env) == Rank(5, 8, 1, HOST)


def test_without_a_local_rank_all_ranks_are_local() -> None:
    assert rank_from_environment({"RANK": "3", "WORLD_SIZE": "8"}) == Rank(3, 8, 3, HOST)


def test_srun() -> None:
    assert rank_from_environment(STEP) == Rank(9, 16, 1, HOST)


def test_torchrun_inside_srun_wins() -> None:
    assert rank_from_environment({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"} | STEP) == Rank(0, 2, 0, HOST)


def test_a_batch_script_is_no_rank() -> None:
    assert rank_from_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "16"}) is None


def test_without_a_launcher_there_is_no_rank() -> None:
    assert rank_from_environment({}) is None
    assert rank_from_environment({"RANK": "3"}) is None


def test_a_rank_names_itself() -> None:
    assert str(Rank(3, 8, 1, "node7")) == "rank 3 of 8 on node7"


@pytest.mark.parametrize("value", ["three", "", "-1", "1.0"])
def test_an_invalid_number_is_refused_with_the_variable(value: str) -> None:
    with pytest.raises(ConfigError, match=rf"environment  RANK: '{value}' is not a whole number"):
        rank_from_environment({"RANK": value, "WORLD_SIZE": "8"})
    with pytest.raises(ConfigError, match="SLURM_STEP_NUM_TASKS"):
        rank_from_environment(STEP | {"SLURM_STEP_NUM_TASKS": value})
    if value:
        with pytest.raises(ConfigError, match="MASTER_PORT"):
            rendezvous_endpoint({"MASTER_ADDR": "host", "MASTER_PORT": value})
