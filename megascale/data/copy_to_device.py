"""Copies of a batch's arrays to the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def copy_to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to the device; on a CPU the result shares its memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)  # pageable memory would block the host
