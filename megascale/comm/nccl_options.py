"""NCCL's settings: the options of a process group, and the environment variables that conflict with this program."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megascale.config.launch import NcclConfig
from megascale.core.errors import Problem


def nccl_options(backend: str, axis: str, nccl: NcclConfig, timeout: timedelta) -> Any:
    """Return the `pg_options` of a group of parallelism `axis`; None without a setting, and for other backends.
    `timeout`: the one that the group is opened with, since torch warns of options with another one.

    NCCL_MIN_CTAS and NCCL_MAX_CTAS in the environment override these options in all groups.
    """
    ctas = nccl.ctas(axis)
    if backend != "nccl" or ctas is None:
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas, options.config.max_ctas = ctas
    options._timeout = timeout
    return options


def set_network_patience(backend: str, nccl: NcclConfig, environ: MutableMapping[str, str]) -> None:
    """Set timeout and retries of InfiniBand adapters before NCCL reads them, at the first communicator: a link that
    flaps for seconds must not end a job (MegaScale, 3.6 and 6.3). Variables of the environment take precedence.
    """
    if backend == "nccl":
        environ.setdefault("NCCL_IB_TIMEOUT", str(nccl.ib_timeout))
        environ.setdefault("NCCL_IB_RETRY_CNT", str(nccl.ib_retry_count))


@dataclass(frozen=True)
class ConflictingVariable:
    """An environment variable that breaks a run if its value `conflicts`. `names`: aliases, by precedence."""

    names: tuple[str, ...]
    conflicts: Callable[[str], bool]
    reason: str


def _torch_bool(value: str) -> bool:
    """Parse a switch as torch does (`getCvarBool`)."""
    return value.lower() in ("y", "yes", "1", "t", "true")


def _is_nonzero(value: str) -> bool:
    """Parse a switch as CUDA and torch's configuration modules do: on, except for 0."""
    return value not in ("", "0")


def _number(value: str) -> int | None:
    """Parse an integer as C++ does (`std::stoi`): text after the digits is ignored."""
    digits = re.match(r"\s*([+-]?[0-9]+)", value)
    return int(digits[1]) if digits else None


CONFLICTING_VARIABLES = (
    ConflictingVariable(
        ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"),
        _torch_bool,
        "the host would wait instead of the device, and nothing overlaps",
    ),
    ConflictingVariable(
        ("TORCH_DISTRIBUTED_USE_TORCHCOMMS",),
        _is_nonzero,
        "torchcomms cannot open a group without the ranks outside the group",
    ),
    ConflictingVariable(
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"),
        lambda value: _number(value) in (0, 2),
        "a failed or timed-out communication would not end the run: 0 waits on, 2 continues with incomplete data",
    ),
)


def environment_problems(backend: str, environ: Mapping[str, str]) -> Iterator[Problem]:
    """Yield the variables of `environ` that would make a run on `backend` hang, fail or overlap nothing."""
    if backend != "nccl":
        return
    for variable in CONFLICTING_VARIABLES:
        name = next((name for name in variable.names if name in environ), "")  # the first name takes precedence
        if name and variable.conflicts(environ[name]):
            yield Problem("environment", name, f"{environ[name]!r}: {variable.reason}", f"unset {name}")
