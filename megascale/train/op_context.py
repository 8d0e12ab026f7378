"""The context in which the operations of a run select their backends."""

from __future__ import annotations

import torch

from megascale.catalog.precisions import PRECISIONS
from megascale.config.run import RunConfig
from megascale.device import Device
from megascale.ops.select import OpContext


def op_context(config: RunConfig, device: Device) -> OpContext:
    """Return the context of a run's operations on a device."""
    return OpContext(
        config.model,
        config.backends,
        getattr(torch, PRECISIONS[config.train.precision].facts["compute_dtype"]),
        device,
        tp=config.parallel.tp,
        optimizer=config.optimizer.name,
        compiled=config.train.compile,
        recipe=config.fp8.recipe if config.train.quantizes else None,
        document_mask=config.data.attention_mask == "document",
        attends_in_parts=config.attends_in_parts,
        z_loss=config.train.z_loss,
    )
