"""The section `[nccl]`: thread blocks of NCCL's communicators, by axis of parallelism."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megascale.config.section import Section

Ctas = Annotated[list[Annotated[int, Field(ge=1, le=64)]], Field(min_length=2, max_length=2)] | Literal["auto"]
"""Minimum and maximum of thread blocks per operation; NCCL has at most 64 channels of one block."""


class NcclConfig(Section):
    """`[nccl]`: minimum and maximum of thread blocks (CTAs) per communicator; a block takes an SM from GEMMs."""

    tp_ctas: Ctas = Field("auto", description="tensor parallelism; auto: NCCL's choice")
    dp_ctas: Ctas = Field([1, 16], description="data parallelism, and the gradients of a tied embedding")
    pp_ctas: Ctas = Field(
        [1, 2],
        description="point-to-point messages between pipeline stages; a posted receive occupies its SMs while waiting",
    )
    world_ctas: Ctas = Field([1, 1], description="all-reduces of a few values over all ranks")

    def ctas(self, axis: str) -> tuple[int, int] | None:
        """Minimum and maximum for an axis (`core.events.Event.axis`); None for NCCL's choice."""
        ctas_of_axis = {"tp": self.tp_ctas, "dp": self.dp_ctas, "tied": self.dp_ctas, "pp": self.pp_ctas}
        axis_ctas = ctas_of_axis.get(axis, self.world_ctas)
        return (axis_ctas[0], axis_ctas[1]) if isinstance(axis_ctas, list) else None
