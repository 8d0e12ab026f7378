"""What NCCL is told of a group, and which of the environment's settings it cannot work with."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megascale.config.nccl import NcclConfig
from megascale.core.errors import Problem


def options(backend: str, axis: str, nccl: NcclConfig) -> Any:
    """The `pg_options` of a group that serves `axis`; None for what has none, which is any backend but NCCL.

    NCCL_MIN_CTAS and NCCL_MAX_CTAS of the environment outrank these, in all groups.
    """
    ctas = nccl.ctas(axis)
    if backend != "nccl" or ctas is None:
        return None
    found = dist.ProcessGroupNCCL.Options()
    found.config.min_ctas, found.config.max_ctas = ctas
    return found


@dataclass(frozen=True)
class Variable:
    """An environment variable that does not go together with this program where `hurts` says so of its value; that is
    with more than one pipeline stage, if `pipeline`. `mend`: what helps besides unsetting it.
    """

    names: tuple[str, ...]
    hurts: Callable[[str], bool]
    why: str
    pipeline: bool = False
    mend: str = ""


def _on(value: str) -> bool:
    """As torch reads its switches (`getCvarBool`)."""
    return value.lower() in ("y", "yes", "1", "t", "true")


def _set(value: str) -> bool:
    """As torch's configuration modules and CUDA read theirs: anything but 0."""
    return value not in ("", "0")


def _number(value: str) -> int | None:
    """As C++ reads one (`std::stoi`): whatever follows the digits is passed over."""
    found = re.match(r"\s*([+-]?[0-9]+)", value)
    return int(found[1]) if found else None


def _few_queues(value: str) -> bool:
    return (queues := _number(value)) is not None and queues < STREAMS


STREAMS = 8
"""Streams of a pipeline rank that have work while receives wait: compute, a send and a receive for each of two
neighbours, tp, dp, and the gradient of a tied embedding.
"""

VARIABLES = (
    Variable(
        ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"),
        _on,
        "the host would wait where the device should: a receive that is posted ahead never ends, and nothing overlaps",
    ),
    Variable(
        ("CUDA_LAUNCH_BLOCKING",),
        _set,
        "the host would wait for each receive that is posted ahead, before it sends what the other rank waits for",
        pipeline=True,
    ),
    Variable(
        ("CUDA_DEVICE_MAX_CONNECTIONS",),
        _few_queues,
        f"so few hardware queues do not give each of a pipeline rank's {STREAMS} streams its own: its GEMMs and sends "
        "would stand in one behind a receive that is posted ahead, and ranks would wait for each other for ever",
        pipeline=True,
        mend="or set it to 32",
    ),
    Variable(
        ("TORCH_DISTRIBUTED_USE_TORCHCOMMS",),
        _set,
        "torchcomms cannot open a group by its members alone",
    ),
    Variable(
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"),
        lambda value: _number(value) in (0, 2),
        "a communication that fails or waits too long would not end the run: 0 lets it wait for ever, 2 goes on with "
        "what has arrived",
    ),
)


def refused(backend: str, pp: int, environ: Mapping[str, str]) -> Iterator[Problem]:
    """The variables of an environment with which a run over `backend` with `pp` stages would hang or go wrong."""
    if backend != "nccl":
        return
    for variable in VARIABLES:
        name = next((name for name in variable.names if name in environ), "")  # the first outranks the others
        if name and variable.hurts(environ[name]) and (pp > 1 or not variable.pipeline):
            mend = ", ".join(filter(None, (f"unset {name}", variable.mend)))
            yield Problem("environment", name, f"{environ[name]!r}: {variable.why}", mend)
