"""How long ranks wait for each other."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megascale.config.section import Section

Seconds = Annotated[float, Field(ge=1, le=10**6)]
"""In less than one, ranks that share a processor may not answer, and the step would be called stuck."""


class LaunchConfig(Section):
    """`[launch]`: a rank that waits for another one longer than this ends the run."""

    timeout_s: Seconds = Field(
        600.0,
        description="in training and evaluation, from the second step on, in seconds; on GPUs several times a step, "
        "which the host issues ahead",
    )
    start_timeout_s: Seconds = Field(
        1800.0,
        description="until the first step is done (ranks meet, rank 0 indexes the data, a checkpoint is read, kernels "
        "are compiled), and wherever ranks wait for a checkpoint to be written; no less than timeout_s",
    )
