"""This process's rank, from the environment variables of torchrun and Slurm."""

from __future__ import annotations

import socket

import pytest

from megascale.core.errors import ConfigError
from megascale.core.rank import Rank, local_world_size, rank_from_environment, rendezvous_endpoint

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


@pytest.mark.parametrize(
    "env",
    [
        {"RANK": "8", "WORLD_SIZE": "8"},
        {"RANK": "0", "WORLD_SIZE": "0"},
        {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "-1"},
        STEP | {"SLURM_PROCID": "16"},
        {"RANK": "9" * 5000, "WORLD_SIZE": "8"},
    ],
    ids=str,
)
def test_a_rank_beyond_the_world_is_refused(env: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"environment  [A-Z_]+: .*number"):
        rank_from_environment(env)


@pytest.mark.parametrize("port", ["0", "65536", "99999999999"])
def test_a_port_beyond_16_bits_is_refused(port: str) -> None:
    with pytest.raises(ConfigError, match=r"environment  MASTER_PORT: .*from 1 to 65535"):
        rendezvous_endpoint({"MASTER_ADDR": "host", "MASTER_PORT": port})


def test_ranks_of_this_host() -> None:
    assert local_world_size(4, {}) == 4
    assert local_world_size(4, {"LOCAL_WORLD_SIZE": "2"}) == 2
    for text in ("", "0", "two"):
        with pytest.raises(ConfigError, match="environment  LOCAL_WORLD_SIZE: "):
            local_world_size(4, {"LOCAL_WORLD_SIZE": text})
