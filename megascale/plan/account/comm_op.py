"""A collective or message of a step, as the formulas of `account` list it."""

from __future__ import annotations

from typing import NamedTuple

from megascale.catalog.precisions import PRECISIONS
from megascale.config.run import RunConfig

FP32 = 4
"""Bytes of an FP8 scale or amax."""


class CommOp(NamedTuple):
    """A collective or message in `group`. `bytes`: of the full tensor, sent in `calls` pieces. `label`: name in the
    event log without the layer. `times`: repetitions in a step or a micro-batch.
    """

    group: str
    operation: str
    bytes: int
    label: str
    calls: int = 1
    times: int = 1


def element_bytes(config: RunConfig) -> tuple[int, int]:
    """Element sizes in bytes of the compute and the accumulation dtype."""
    facts = PRECISIONS[config.train.precision].facts
    return facts["compute_bytes"], facts["accumulate_bytes"]
