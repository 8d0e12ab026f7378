"""torch's fused operators of symmetric memory on CPUs: torch's own schemas, checks and chunking, with gloo's messages
in place of the copies between GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

OPERATORS = (
    "fused_all_gather_matmul",
    "fused_all_gather_scaled_matmul",
    "fused_matmul_reduce_scatter",
    "fused_scaled_matmul_reduce_scatter",
)


def serve_on_cpus() -> list[str]:
    """Register the operators in this process, a rank of a test's world. Returns a list of the calls' names, which grows
    with every call.
    """
    module: Any = symmetric_memory
    module._pipelined_multi_all_gather_and_consume = _gather_and_consume
    module._pipelined_produce_and_all2all = _produce_and_exchange
    library = torch.library.Library("symm_mem", "IMPL")
    module.test_library = library  # keeps the library, and with it the operators, alive
    called = list[str]()
    for name in OPERATORS:
        library.impl(name, _noted(called, name, getattr(module, f"_{name}")), "CPU")
    return called


def _noted(called: list[str], name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **more: Any) -> Any:
        called.append(name)
        return operator(*arguments, **more)

    return call


def _gather_and_consume(
    shard: Sequence[Tensor],
    shard_consumer: Callable[[list[Tensor], int], None],
    ag_out: Sequence[Tensor],
    group_name: str,
    ag_out_needed: bool = True,
) -> None:
    group = dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[attr-defined]
    for part, out in zip(shard, ag_out, strict=True):
        dist.all_gather(list(_bytes(out).chunk(group.size())), _bytes(part), group)
    for rank, parts in enumerate(zip(*(out.chunk(group.size()) for out in ag_out), strict=True)):
        shard_consumer(list(parts), rank)


def _produce_and_exchange(
    chunk_producer: Callable[[int, Tensor], None], output: Tensor, group_name: str, out_chunk_dim: int = 0
) -> None:
    group = dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[attr-defined]
    formed = torch.empty_like(output)
    for rank, chunk in enumerate(formed.chunk(group.size())):
        chunk_producer(rank, chunk)
    dist.all_to_all_single(_bytes(output), _bytes(formed), group=group)


def _bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as bytes: gloo lacks a few dtypes."""
    return tensor.view(-1).view(torch.uint8)
