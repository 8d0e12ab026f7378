"""How much of a GPU NCCL takes for the communication of each axis of parallelism."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megascale.config.section import Section

Ctas = Annotated[list[Annotated[int, Field(ge=1, le=64)]], Field(min_length=2, max_length=2)] | Literal["auto"]
"""Fewest and most thread blocks of an operation; NCCL has 64 channels at most, each of one block."""


class NcclConfig(Section):
    """`[nccl]`: fewest and most thread blocks (CTAs) of a communicator; each takes an SM from matrix products."""

    tp_ctas: Ctas = Field("auto", description="of tensor parallelism; auto: NCCL chooses")
    dp_ctas: Ctas = Field([1, 16], description="of data parallelism, and of the gradients of a tied embedding")
    pp_ctas: Ctas = Field(
        [1, 2], description="of messages between pipeline stages: a receive holds its SMs from when it is posted"
    )
    world_ctas: Ctas = Field([1, 1], description="of all ranks, which sum a few numbers")

    def ctas(self, axis: str) -> tuple[int, int] | None:
        """The numbers of the group that serves an axis, as the ledger calls it; None for NCCL's choice."""
        chosen = {"tp": self.tp_ctas, "dp": self.dp_ctas, "tied": self.dp_ctas, "pp": self.pp_ctas}
        found = chosen.get(axis, self.world_ctas)
        return (found[0], found[1]) if isinstance(found, list) else None
