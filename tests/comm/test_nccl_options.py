"""What NCCL is told, and what it is kept from, without a GPU: the rest is in the libraries' signatures."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megascale.comm import init
from megascale.comm.nccl_options import CONFLICTING_VARIABLES, environment_problems, nccl_options, set_network_patience
from megascale.config.launch import NcclConfig
from megascale.core.errors import ConfigError, Exit
from megascale.core.rank import Rank
from megascale.device import Device
from megascale.operate.node import environment


def names(environ: Mapping[str, str], backend: str = "nccl") -> list[str]:
    return [problem.key for problem in environment_problems(backend, environ)]


@pytest.mark.parametrize("value", ["1", "y", "Yes", "TRUE", "t"])
@pytest.mark.parametrize("name", ["TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"])
def test_blocking_waits_are_refused(name: str, value: str) -> None:
    assert names({name: value}) == [name]
    assert names({name: value}, "gloo") == []


@pytest.mark.parametrize("value", ["0", "n", "False"])
def test_what_torch_takes_for_off_is_let_through(value: str) -> None:
    assert names({"TORCH_NCCL_BLOCKING_WAIT": value}) == []
    assert names({"TORCH_NCCL_BLOCKING_WAIT": value, "NCCL_BLOCKING_WAIT": "1"}) == []  # the older name yields


def test_adapters_retry_for_longer_than_a_link_flaps() -> None:
    environ: dict[str, str] = {}
    set_network_patience("nccl", NcclConfig(), environ)
    assert environ == {"NCCL_IB_TIMEOUT": "22", "NCCL_IB_RETRY_CNT": "7"}
    assert 137 < NcclConfig().ib_patience_s < 138
    assert NcclConfig(ib_timeout=14, ib_retry_count=0).ib_patience_s == pytest.approx(0.0671, abs=1e-4)
    own = {"NCCL_IB_TIMEOUT": "18"}
    set_network_patience("nccl", NcclConfig(ib_retry_count=3), own)
    assert own == {"NCCL_IB_TIMEOUT": "18", "NCCL_IB_RETRY_CNT": "3"}
    nothing: dict[str, str] = {}
    set_network_patience("gloo", NcclConfig(), nothing)
    assert nothing == {}


def test_what_ranks_give_themselves_is_let_through() -> None:
    assert names(environment.missing_defaults({})) == []


def test_no_waits_of_a_pipeline_are_refused() -> None:
    """They are slow, and end: receives are placed by their senders."""
    assert names({"CUDA_LAUNCH_BLOCKING": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}) == []


@pytest.mark.parametrize("value", ["0", "2", "02", " 2", "+0", "2 # clean up"])
def test_errors_that_end_nothing_are_refused(value: str) -> None:
    """torch reads the number with `std::stoi`."""
    assert names({"TORCH_NCCL_ASYNC_ERROR_HANDLING": value}) == ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]


@pytest.mark.parametrize("value", ["1", "3", "20", "off"])
def test_errors_that_end_the_run_are_let_through(value: str) -> None:
    assert names({"TORCH_NCCL_ASYNC_ERROR_HANDLING": value}) == []


def test_a_run_is_refused_before_any_group_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_USE_TORCHCOMMS", "1")
    monkeypatch.setenv("NCCL_BLOCKING_WAIT", "1")
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("a group was opened"))
    with pytest.raises(ConfigError) as raised:
        init.init_distributed(Rank(0, 2, 0, "localhost"), Device(torch.device("cpu"), "nccl"))
    assert raised.value.exit_status == Exit.CONFIG
    text = str(raised.value)
    assert "NCCL_BLOCKING_WAIT: '1': the host would wait" in text and "-> unset NCCL_BLOCKING_WAIT" in text
    assert "TORCH_DISTRIBUTED_USE_TORCHCOMMS: '1'" in text


def test_torch_reads_the_variables_that_are_refused() -> None:
    """Those of its NCCL backend stand in its headers, that of torchcomms in its configuration."""
    root = Path(torch.__file__).parent
    files = ("include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp", "distributed/config.py")
    text = "".join((root / file).read_text() for file in files)
    for variable in CONFLICTING_VARIABLES:
        for name in variable.names:
            assert f'"{name}"' in text or name.startswith("CUDA_"), name


class Config:
    min_ctas = max_ctas = -1


class Options:
    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.config = Config()
        self._timeout = timedelta(minutes=10)


def test_a_group_gets_the_thread_blocks_of_its_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    nccl = NcclConfig(tp_ctas=[2, 8], dp_ctas="auto", pp_ctas=[1, 2], world_ctas=[1, 1])
    limit = timedelta(seconds=70)
    found = {axis: nccl_options("nccl", axis, nccl, limit) for axis in ("tp", "dp", "tied", "pp", "world", "none")}
    ctas = {axis: [each.config.min_ctas, each.config.max_ctas] for axis, each in found.items() if each is not None}
    assert ctas == {"tp": [2, 8], "pp": [1, 2], "world": [1, 1], "none": [1, 1]}
    assert {each._timeout for each in found.values() if each is not None} == {limit}, "torch warns of another one"
    assert nccl_options("gloo", "tp", nccl, limit) is None


def test_what_a_group_gets_where_nothing_is_chosen() -> None:
    chosen = {axis: NcclConfig().ctas(axis) for axis in ("tp", "ep", "dp", "edp", "tied", "pp", "world")}
    dp = dict.fromkeys(("dp", "edp", "tied"), (1, 16))
    assert chosen == {"tp": None, "ep": None, "pp": (1, 2), "world": (1, 1)} | dp


def test_torch_has_what_is_set() -> None:
    """The stand-in above is torch's own signature, from the stubs of its C++ part."""
    tree = ast.parse((Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi").read_text())
    nccl = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "ProcessGroupNCCL")
    config, given = (
        {n.target.id: ast.unparse(n.annotation) for n in ast.walk(c) if isinstance(n, ast.AnnAssign)}
        for c in nccl.body[:2]
        if isinstance(c, ast.ClassDef)
    )
    assert config["min_ctas"] == config["max_ctas"] == "int"
    assert given["config"] == "ProcessGroupNCCL.NCCLConfig"
    python = (Path(torch.__file__).parent / "distributed" / "distributed_c10d.py").read_text()
    assert "if backend_options._timeout != timeout:" in python
