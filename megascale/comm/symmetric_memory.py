"""Collectives fused with GEMMs by torch's symmetric memory (`torch.ops.symm_mem`).

On NVIDIA GPUs that map each other's memory, copy engines move pieces while tensor cores compute. `can_map_peers`:
support by a group; `SymmetricMemory`: its fused operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import TypeVar

import torch
from torch import Tensor

from megascale.comm.group import Group
from megascale.comm.host_ranks import host_key
from megascale.device import Device
from megascale.record.label import Label, LabelLike

T = TypeVar("T")


ScaledMatrix = tuple[Tensor, Tensor, bool]
"""The second FP8 operand of a GEMM: data [k, n], column-major, its scale [] or [1, n], and True to allow accumulation
with less precision than fp32.
"""


@dataclass(frozen=True)
class SymmetricMemory:
    """GEMMs fused with the collectives of a group whose ranks map each other's memory: in the operands' dtype, and of
    FP8 operands with scales.
    """

    group: Group

    def reserve(self, part_bytes: int) -> None:
        """Allocate torch's workspace for operators on parts of activations of up to `part_bytes`: one part for an
        all-gather, two for a reduce-scatter. A collective of the group. An operator that needs a larger workspace would
        allocate it in a step, and freeing the smaller one waits for the device.
        """
        import torch.distributed._symmetric_memory as symmetric_memory

        assert self.group.process_group is not None
        symmetric_memory.get_symm_mem_workspace(self.group.process_group.group_name, 2 * part_bytes)

    def all_gather_matmul(
        self, part: Tensor, matrices: Sequence[Tensor], *, label: LabelLike
    ) -> tuple[Tensor, list[Tensor]]:
        """Return X = all-gather of `part` [s / size, b, k] along dimension 0, and X @ matrix for each matrix [k, n]."""
        with self._record("all_gather", label, part.nbytes * self.group.size):
            full, outputs = torch.ops.symm_mem.fused_all_gather_matmul(part, list(matrices), 0, self._name)
        return full, list(outputs)

    def all_gather_scaled_matmul(
        self, part: Tensor, scale: Tensor, matrices: Sequence[ScaledMatrix], dtype: torch.dtype, *, label: LabelLike
    ) -> tuple[Tensor, list[Tensor]]:
        """Return X = all-gather of the FP8 `part` [s / size, b, k], and X @ matrix for each matrix, in `dtype`. `scale`
        of X: [] or [s, b, 1].
        """
        operands, scales, fast_accum = (list(column) for column in zip(*matrices, strict=True))
        none, dtypes = [None] * len(operands), [dtype] * len(operands)
        with self._record("all_gather", label, part.nbytes * self.group.size):
            full, outputs = torch.ops.symm_mem.fused_all_gather_scaled_matmul(
                part, operands, scale, scales, 0, self._name, none, none, dtypes, fast_accum
            )
        return full, list(outputs)

    def matmul_reduce_scatter(self, x: Tensor, matrix: Tensor, *, label: LabelLike) -> Tensor:
        """Return this rank's rows [s / size, b, n] of the sum over ranks of x [s, b, k] @ matrix [k, n]."""
        with self._record("reduce_scatter", label, x.shape[:-1].numel() * matrix.shape[1] * x.element_size()):
            return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, matrix, "sum", 0, self._name)

    def scaled_matmul_reduce_scatter(
        self, x: Tensor, scale: Tensor, matrix: ScaledMatrix, dtype: torch.dtype, *, label: LabelLike
    ) -> Tensor:
        """Return this rank's rows [s / size, b, n], in `dtype`, of the sum over ranks of the FP8 x [s, b, k] @ matrix.
        `scale` of x: [] or [s, b, 1].
        """
        data, matrix_scale, fast_accum = matrix
        shape = [*x.shape[:-1], data.shape[1]]
        with self._record("reduce_scatter", label, math.prod(shape) * dtype.itemsize):
            return torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
                x, data, scale, matrix_scale, "sum", 0, 0, self._name, shape,
                out_dtype=dtype, use_fast_accum=fast_accum,
            )  # fmt: skip

    def has_scaled_matmul(self) -> bool:
        """Return True if torch has the FP8 operators with the arguments of torch 2.8: the earlier reduce-scatter takes
        2-D inputs only.
        """
        return _has_scaled_matmul()

    @contextmanager
    def _record(self, operation: str, label: LabelLike, nbytes: int) -> Iterator[None]:
        """Record a fused operation in the log, with its end at the issue: no event can show the exposed part."""
        group, recorder = self.group, self.group.recorder
        fused = Label.from_part(label).with_suffix("fused")
        record = recorder.record_communication(group.axis, group.name, operation, fused, nbytes)
        yield
        recorder.log.issued(record.handle)
        recorder.close(record, recorder.mark(), known=False)

    @property
    def _name(self) -> str:
        assert self.group.process_group is not None
        return self.group.process_group.group_name


def can_map_peers(group: Group, device: Device) -> bool:
    """Return True if all ranks of a group can map each other's memory. A collective of the group.

    False for groups over several hosts: without a fabric between the hosts torch's rendezvous never returns.
    """
    if group.size == 1 or device.is_cpu:
        return False
    import torch.distributed._symmetric_memory as symmetric_memory

    probe = _none_if_unsupported(partial(symmetric_memory.empty, 1024, dtype=torch.uint8, device=device.torch_device))
    ready = group.control.all_gather(host_key() if probe is not None else None, "symmetric memory")
    if None in ready or len(set(ready)) > 1:
        return False
    assert probe is not None and group.process_group is not None
    mapped = _none_if_unsupported(partial(symmetric_memory.rendezvous, probe, group.process_group))
    return all(group.control.all_gather(mapped is not None, "symmetric memory"))


def _none_if_unsupported(function: Callable[[], T]) -> T | None:
    try:
        return function()
    except (RuntimeError, NotImplementedError):  # no peer access, or no support in the driver
        return None


@cache
def _has_scaled_matmul() -> bool:
    operators = torch.ops.symm_mem
    names = ("fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter")
    if not all(hasattr(operators, name) for name in names):
        return False
    arguments = operators.fused_scaled_matmul_reduce_scatter.default._schema.arguments
    return any(argument.name == "output_shape" for argument in arguments)
