"""The section `[launch]`: timeouts between ranks."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megascale.config.section import Section

Seconds = Annotated[float, Field(ge=1, le=10**6)]
"""At least 1 s: ranks that share a core may be slower than a shorter timeout."""


class LaunchConfig(Section):
    """`[launch]`: timeouts; a rank that waits longer for another rank ends the run."""

    timeout_s: Seconds = Field(
        600.0,
        description="timeout in training and evaluation from the second step on, in seconds; on GPUs, set several "
        "times the step time, because the host runs ahead",
    )
    start_timeout_s: Seconds = Field(
        1800.0,
        description="timeout until the end of the first step (rendezvous, indexing of data, loading of a checkpoint, "
        "compilation), and in waits for checkpoints, in seconds; at least timeout_s",
    )
