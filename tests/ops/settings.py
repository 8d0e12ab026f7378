"""Contexts of operations for tests."""

from __future__ import annotations

from typing import Any

import torch

from megascale.config.backends import BackendsConfig
from megascale.config.model import ModelConfig
from megascale.device import Device, detect_device
from megascale.ops.select import OpContext
from tests.runs import LLAMA

CPU = detect_device(allow_gpu=False)
GPU = Device(torch.device("cuda", 0), "nccl")
"""A device for queries; nothing runs there."""


def setting(dtype: torch.dtype = torch.float32, device: Device = CPU, tp: int = 1, **model: Any) -> OpContext:
    """Return the context of a small Llama with changed keys of `[model]`."""
    return OpContext(ModelConfig.model_validate(LLAMA | model), BackendsConfig(), dtype, device, tp)
