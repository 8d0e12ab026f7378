"""This process's rank, from the environment variables of launchers, operators and shells."""

from __future__ import annotations

import socket

import pytest

from megascale.core.errors import ConfigError
from megascale.core.rank import (
    Rank,
    format_ranks,
    launcher_store,
    local_world_size,
    on_one_host,
    rank_from_environment,
    rendezvous_endpoint,
)

HOST = socket.gethostname()
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "1"}
FIRST_TASK = STEP | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}


@pytest.mark.parametrize(
    ("env", "rank", "says"),
    [
        (TORCHRUN, Rank(5, 8, 1, HOST), "RANK=5 and WORLD_SIZE=8"),
        ({"RANK": "3", "WORLD_SIZE": "8"}, Rank(3, 8, 3, HOST), "RANK=3 and WORLD_SIZE=8"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Rank(0, 1, 0, HOST), "RANK=0 and WORLD_SIZE=1"),  # a pod of an operator
        (STEP, Rank(9, 16, 1, HOST), "SLURM_PROCID=9 and SLURM_STEP_NUM_TASKS=16"),
        (TORCHRUN | STEP, Rank(5, 8, 1, HOST), "RANK=5 and WORLD_SIZE=8"),  # torchrun inside srun
        (OPEN_MPI, Rank(2, 4, 0, HOST), "OMPI_COMM_WORLD_RANK=2 and OMPI_COMM_WORLD_SIZE=4"),
        (HYDRA, Rank(3, 4, 1, HOST), "PMI_RANK=3 and PMI_SIZE=4"),
        (HYDRA | STEP, Rank(9, 16, 1, HOST), "SLURM_PROCID=9 and SLURM_STEP_NUM_TASKS=16"),  # srun --mpi=pmi2
    ],
)
def test_a_rank_and_the_variables_that_say_so(env: dict[str, str], rank: Rank, says: str) -> None:
    found = rank_from_environment(env)
    assert found == rank and found.variables == says


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_JOB_NUM_NODES": "2"},  # a batch script
        FIRST_TASK | {"SLURM_STEP_NUM_TASKS": "1"},  # salloc's shell on a node
        FIRST_TASK | {"SLURM_PTY_PORT": "40001"},  # the shell of srun --pty with several tasks
        FIRST_TASK | {"SLURM_PTY_PORT": "40001"} | HYDRA,
        OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},  # mpirun -n 1 bash
        {"PBS_JOBID": "7", "PBS_NUM_NODES": "2"},
        {"LSB_JOBID": "7", "LSB_DJOB_NUMPROC": "4"},
        {"NODE_RANK": "0", "LOCAL_RANK": "0", "PET_NNODES": "2"},
    ],
)
def test_shells_and_scripts_are_no_ranks(env: dict[str, str]) -> None:
    assert rank_from_environment(env) is None


def test_a_rank_names_itself() -> None:
    assert str(Rank(3, 8, 1, "node7")) == "rank 3 of 8 on node7"
    assert format_ranks([3]) == "rank 3" and format_ranks([1, 2, 7], 2) == "ranks 1, 2 and 1 more"


@pytest.mark.parametrize("value", ["three", "", "-1", "1.0", "٣", "9" * 5000])
def test_an_invalid_number_is_refused_with_the_variable(value: str) -> None:
    for env, name in (
        (TORCHRUN, "RANK"),
        (TORCHRUN, "WORLD_SIZE"),
        (TORCHRUN, "LOCAL_RANK"),
        (TORCHRUN, "LOCAL_WORLD_SIZE"),
        (STEP, "SLURM_STEP_NUM_TASKS"),
        (STEP, "SLURM_PROCID"),
        (STEP, "SLURM_LOCALID"),
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE"),
    ):
        with pytest.raises(ConfigError, match=f"environment  {name}: ") as raised:
            rank_from_environment(env | {name: value})
        assert len(str(raised.value).splitlines()) == 2
    with pytest.raises(ConfigError, match="MASTER_PORT"):
        rendezvous_endpoint({"MASTER_ADDR": "host", "MASTER_PORT": value})
    with pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE"):
        local_world_size(4, {"LOCAL_WORLD_SIZE": value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "8"}, "RANK: 8 is not a number from 0 to 7"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE: 0 is not a number of 1 or more"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK: 4 is not a number from 0 to 3"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE: 9 is not a number from 1 to 8"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE: 0 is not a number from 1 to 8"),
    ],
)
def test_variables_that_contradict_each_other(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"environment  {message}"):
        rank_from_environment(TORCHRUN | changes)


@pytest.mark.parametrize(("name", "other"), [("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")])
def test_half_of_the_variables_is_not_guessed(name: str, other: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: '3', but {other} is not set  -> set both, or unset {name}"):
        rank_from_environment({name: "3"})


def test_a_second_task_of_a_terminal_is_refused() -> None:
    with pytest.raises(ConfigError, match="SLURM_PTY_PORT: srun --pty gives its terminal to task 0"):
        rank_from_environment(STEP | {"SLURM_PTY_PORT": "40001"})


@pytest.mark.parametrize("port", ["0", "65536", "70000"])
def test_a_port_that_is_none(port: str) -> None:
    with pytest.raises(ConfigError, match=f"MASTER_PORT: {port} is not a number from 1 to 65535"):
        rendezvous_endpoint({"MASTER_ADDR": "host", "MASTER_PORT": port})


def test_ranks_of_this_host() -> None:
    assert local_world_size(4, {}) == 4
    assert local_world_size(4, {"LOCAL_WORLD_SIZE": "2"}) == 2
    assert on_one_host(2, {"LOCAL_WORLD_SIZE": "2"}) and not on_one_host(4, {"LOCAL_WORLD_SIZE": "2"})


def test_the_endpoint() -> None:
    assert rendezvous_endpoint({}) is None and rendezvous_endpoint({"MASTER_ADDR": ""}) is None
    assert rendezvous_endpoint({"MASTER_ADDR": "host"}) == ("host", 29500)
    step = {"SLURM_STEP_NODELIST": "rack[03-04,7]node[1-2],login", "SLURM_JOB_ID": "71", "SLURM_STEP_ID": "2"}
    assert rendezvous_endpoint(step) == ("rack03node1", 20712)


def test_the_store_of_our_launcher() -> None:
    assert launcher_store({}) is None
    assert launcher_store({"MEGASCALE_STORE": "127.0.0.1:4000"}) == ("127.0.0.1", 4000, None)
    assert launcher_store({"MEGASCALE_STORE": "127.0.0.1:4000:5"}) == ("127.0.0.1", 4000, 5)
    for text in ("", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:4000:-1"):
        with pytest.raises(ConfigError, match="MEGASCALE_STORE"):
            launcher_store({"MEGASCALE_STORE": text})
