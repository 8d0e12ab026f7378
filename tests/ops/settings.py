"""Settings of operations for tests."""

from __future__ import annotations

from typing import Any

import torch

from megascale.config.backends import BackendsConfig
from megascale.config.model import ModelConfig
from megascale.device import Device, detect
from megascale.ops.select import Setting
from tests.runs import LLAMA

CPU = detect(allow_gpu=False)
GPU = Device(torch.device("cuda", 0), "nccl")
"""For asking: nothing runs on it."""


def setting(dtype: torch.dtype = torch.float32, device: Device = CPU, tp: int = 1, **model: Any) -> Setting:
    """A small Llama, with other keys of `[model]` where given."""
    return Setting(ModelConfig.model_validate(LLAMA | model), BackendsConfig(), dtype, device, tp)
