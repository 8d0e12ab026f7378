"""Symmetric memory: ranks map peers only if all ranks of the group can and are on the same host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megascale.comm import symmetric_memory
from megascale.comm.group import Group
from megascale.core.rank import Rank
from tests.fused import serve_on_cpus
from tests.worlds import run_world

torch_symmetric_memory = pytest.importorskip("torch.distributed._symmetric_memory")

A_GPU: Any = SimpleNamespace(is_cpu=False, torch_device=torch.device("cpu"))


def _ask(rank: Rank, cannot_allocate: int, cannot_map: int, hosts: tuple[str, str] = ("a", "a")) -> tuple[bool, bool]:
    """Return (can_map_peers, this rank tried to map) if rank `cannot_allocate` or `cannot_map` fails (-1: no rank)."""
    tried = []

    def empty(*size: int, **_: Any) -> torch.Tensor:
        if rank.rank == cannot_allocate:
            raise RuntimeError("no symmetric memory")
        return torch.empty(*size)

    def rendezvous(probe: torch.Tensor, group: dist.ProcessGroup) -> object:
        tried.append(probe)
        if rank.rank == cannot_map:
            raise RuntimeError("no peer access")
        return object()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric_memory, "host_key", lambda: hosts[rank.rank])
        patch.setattr(torch_symmetric_memory, "empty", empty)
        patch.setattr(torch_symmetric_memory, "rendezvous", rendezvous)
        group = Group("tp", (0, 1), rank.rank, dist.new_group([0, 1]))
        return symmetric_memory.can_map_peers(group, A_GPU), bool(tried)


def test_nobody_maps_unless_all_could_allocate() -> None:
    assert run_world(2, _ask, 1, -1) == [(False, False)] * 2


def test_nobody_maps_over_hosts() -> None:
    assert run_world(2, _ask, -1, -1, ("a", "b")) == [(False, False)] * 2


def test_all_agree_that_one_cannot_map() -> None:
    assert run_world(2, _ask, -1, 0) == [(False, True)] * 2


def test_it_is_usable_where_all_can() -> None:
    assert run_world(2, _ask, -1, -1) == [(True, True)] * 2


def _multiply(rank: Rank) -> None:
    """Check both operators without FP8 against their definitions. tests/parallel checks the FP8 operators."""
    called = serve_on_cpus()
    group = Group("tp", (0, 1), rank.rank, dist.new_group([0, 1]))
    draw = torch.Generator().manual_seed(0)
    parts, inputs = torch.randn(2, 3, 2, 4, generator=draw), torch.randn(2, 6, 2, 4, generator=draw)
    matrices = torch.randn(2, 4, 5, generator=draw)
    full, outputs = symmetric_memory.SymmetricMemory(group).all_gather_matmul(
        parts[rank.rank], list(matrices), label="gather"
    )
    torch.testing.assert_close(full, parts.flatten(0, 1))
    torch.testing.assert_close(outputs, [full @ matrix for matrix in matrices])
    rows = symmetric_memory.SymmetricMemory(group).matmul_reduce_scatter(
        inputs[rank.rank], matrices[rank.rank], label="scatter"
    )
    torch.testing.assert_close(rows, (inputs @ matrices.unsqueeze(1)).sum(0).chunk(2)[rank.rank])
    assert called == ["fused_all_gather_matmul", "fused_matmul_reduce_scatter"]


def test_fused_operators_are_a_collective_and_a_matmul() -> None:
    run_world(2, _multiply)


def _workspaces(rank: Rank) -> tuple[int, list[int]]:
    """The bytes that are reserved for operators on parts [3, 2, 4], and those that they ask for."""
    asked = list[int]()

    def no_workspace(of_group: str, min_size: int) -> None:
        assert of_group == name
        asked.append(min_size)
        raise RuntimeError("no symmetric memory")

    group: Any = Group("tp", (0, 1), rank.rank, dist.new_group([0, 1]))
    name, part, matrix = group.process_group.group_name, torch.zeros(3, 2, 4), torch.zeros(4, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_symmetric_memory, "get_symm_mem_workspace", no_workspace)
        for use in (
            lambda: symmetric_memory.SymmetricMemory(group).reserve(part.nbytes),
            lambda: torch_symmetric_memory._fused_all_gather_matmul(part, [matrix], 0, name),
            lambda: torch_symmetric_memory._fused_matmul_reduce_scatter(part.repeat(2, 1, 1), matrix, "sum", 0, name),
        ):
            with pytest.raises(RuntimeError, match="no symmetric memory"):
                use()
    return asked[0], asked[1:]


def test_the_workspace_that_is_reserved_does_not_grow() -> None:
    for reserved, asked in run_world(2, _workspaces):
        assert len(asked) == 2 and reserved == max(asked)


def test_older_fp8_operators_are_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.8 the reduce-scatter operator had no output shape."""
    assert symmetric_memory._has_scaled_matmul.__wrapped__()
    older = torch.library.Library("symm_mem_older", "DEF")
    older.define("fused_all_gather_scaled_matmul(Tensor A) -> Tensor")
    monkeypatch.setattr(torch.ops, "symm_mem", torch.ops.symm_mem_older)
    assert not symmetric_memory._has_scaled_matmul.__wrapped__()
    older.define(
        "fused_scaled_matmul_reduce_scatter(Tensor A, Tensor B, Tensor A_scale, Tensor B_scale, str reduce_op, "
        "int scatter_dim, str group_name, Tensor? bias = None, Tensor? result_scale = None, "
        "ScalarType? out_dtype = None, bool use_fast_accum = False) -> Tensor"
    )
    assert not symmetric_memory._has_scaled_matmul.__wrapped__()
