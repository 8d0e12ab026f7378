"""Defaults of environment variables, in ranks and in the documents."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from megascale.operate.diagnose.hang import flight
from megascale.operate.node import environment
from megascale.operate.node.environment import (
    COMMON_DEFAULTS,
    MULTI_RANK_DEFAULTS,
    missing_defaults,
    warn_of_idle_hosts,
)

RUN = Path("/shared/runs/gpt")
PAGE = Path(__file__).parents[3] / "docs" / "launch.md"


def test_a_run_of_several_ranks_has_all_of_them() -> None:
    assert missing_defaults({}, RUN, (2, 13)) == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": flight.dump_prefix(RUN),
    }
    assert flight.dump_prefix(RUN) == f"/shared/runs/gpt/flight/{os.uname().nodename}_rank_"


def test_one_rank_has_nothing_to_dump() -> None:
    assert set(missing_defaults({}, None, (2, 13))) == {variable.name for variable in COMMON_DEFAULTS}


def test_earlier_names_for_an_earlier_torch() -> None:
    assert set(missing_defaults({}, RUN, (2, 8))) == {
        variable.old_name or variable.name for variable in (*COMMON_DEFAULTS, *MULTI_RANK_DEFAULTS)
    }


@pytest.mark.parametrize("torch", [(2, 8), (2, 13)])
def test_what_the_user_has_set_stays_under_any_of_its_names(torch: tuple[int, int]) -> None:
    for variable in (*COMMON_DEFAULTS, *MULTI_RANK_DEFAULTS):
        for name in filter(None, (variable.name, variable.old_name, *variable.aliases)):
            found = missing_defaults({name: ""}, RUN, torch)
            assert len(found) == len(COMMON_DEFAULTS) + len(MULTI_RANK_DEFAULTS) - 1
            assert variable.name not in found and variable.old_name not in found


def test_the_threads_of_a_host_s_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(96)))
    assert missing_defaults({"LOCAL_WORLD_SIZE": "8"})["OMP_NUM_THREADS"] == "12"
    assert missing_defaults({"LOCAL_WORLD_SIZE": "128"})["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in missing_defaults({"LOCAL_WORLD_SIZE": "8", "OMP_NUM_THREADS": "4"})
    assert "OMP_NUM_THREADS" not in missing_defaults({})


@pytest.mark.parametrize(
    ("env", "warning"),
    [
        ({}, ""),
        ({"SLURM_JOB_NUM_NODES": "1", "PET_NNODES": "1:4", "PBS_NUM_NODES": ""}, ""),
        ({"SLURM_JOB_NUM_NODES": "2"}, "srun or launch/slurm.sbatch starts them on all"),
        ({"PET_NNODES": "3"}, "all 8 ranks start on this host, one of 3 (PET_NNODES)"),
    ],
)
def test_a_shell_of_several_hosts_is_warned(env: dict[str, str], warning: str) -> None:
    found = warn_of_idle_hosts(8, env)
    assert warning in found and bool(warning) == bool(found)


def test_this_process_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"})
    environment.set_defaults(RUN)
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


def test_the_documents_say_which_and_why() -> None:
    table = dict(re.findall(r"^\| `(\w+)` \| `(\S+)` \| ", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert table == {variable.name: variable.value for variable in (*COMMON_DEFAULTS, *MULTI_RANK_DEFAULTS)}
    for variable in (*COMMON_DEFAULTS, *MULTI_RANK_DEFAULTS):
        assert variable.reason in PAGE.read_text(encoding="utf-8")
