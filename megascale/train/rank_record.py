"""The record of a rank, equal on all hosts of a job: configuration, code, versions, environment, datasets, device."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import torch

import megascale
from megascale.config.run import RunConfig
from megascale.config.toml_reader import dotted
from megascale.core.rank import Rank
from megascale.core.readable import is_url
from megascale.data.read.identity import dataset_identity, order_file_identity, run_prefixes
from megascale.device import Device, gpu_stack_versions
from megascale.ops.library import LIBRARIES

COMPARED_VARIABLES = re.compile(
    r"(NCCL|TORCH|TORCHINDUCTOR|PYTORCH|NVTE|CUBLAS|CUDNN)_\w+"
    r"|CUDA_DEVICE_MAX_CONNECTIONS|CUDA_LAUNCH_BLOCKING|CUDA_MODULE_LOADING|NVIDIA_TF32_OVERRIDE|DNNL_MAX_CPU_ISA"
)
"""Environment variables that change what ranks compute or send."""

HOST_VARIABLES = re.compile(
    r"\w+_(IFNAME|HCA|HOSTID|GID_INDEX|SOCKET_FAMILY|NETDEVS_POLICY|FILE|FILENAME|DIR|PATH|HOME|LOGS?|LOGS_FORMAT"
    r"|LOG_LEVEL|DEBUG|DEBUG_SUBSYS)|TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
)
"""Compared variables but for these, which may differ between hosts: interfaces, adapters, paths, logging."""


def rank_record(config: RunConfig, rank: Rank, device: Device, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what must be equal on all ranks, by key. `config`: resolved. Reads the package's sources and a few pieces
    of each dataset and of `data.document_order_file`.

    The threads of a process (OMP_NUM_THREADS) are not compared: hosts may have different cores.
    """
    variables = {
        name: value
        for name, value in env.items()
        if COMPARED_VARIABLES.fullmatch(name) and not HOST_VARIABLES.fullmatch(name)
    }
    keys = config.model_dump(mode="json", by_alias=True)
    sections: dict[str, Mapping[str, str]] = {
        "configuration": {key: json.dumps(value) for key, value in dotted(keys).items()},
        "code": code_digests(),
        "version": {
            "megascale": megascale.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            **gpu_stack_versions(),
            "numpy": version("numpy"),
            **{library.package: found for library in LIBRARIES if (found := library.version)},
        },
        "environment": variables,
        "data": {
            name: value
            for prefix in run_prefixes(config.data)
            if not is_url(prefix)
            for name, value in ((prefix, dataset_identity(prefix)), (f"{prefix}.json", _description_digest(prefix)))
        }
        | order_file_identity(config.data),
        "job": {"world size": str(rank.world_size), "backend": device.backend},
        "device": {} if device.is_cpu else {"name": device.name},
    }
    return {f"{section} {key}": value for section, values in sections.items() for key, value in values.items()}


def _description_digest(prefix: str) -> str:
    """Return the digest of PREFIX.json, which has the tokenizer and the end of a document; "no file" without one."""
    try:
        return hashlib.sha256(Path(f"{prefix}.json").read_bytes()).hexdigest()[:16]
    except OSError as error:
        return "no file" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"


def code_digests(folder: Path = Path(megascale.__file__).parent) -> dict[str, str]:
    """Return the digest of every Python file of the package, by its path."""
    return {
        str(path.relative_to(folder.parent)): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in sorted(folder.rglob("*.py"))
    }
