"""The section `[sites]`: training across sites, each a job of its own, which meet in outer steps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megascale.config.section import AUTO_AS_NONE, Count, Float32, NonNegativeInt, Section
from megascale.core.network import split_port

CHUNK = 4096
"""Elements of which the largest are chosen together: an index of 12 bits, as in SparseLoCo (Sarfi et al. 2025)."""

INDEX_BITS = 12  # bits of an element's place in its chunk

LEVEL_BYTES = {2: 8, 8: 4, 32: 0}
"""Bytes of a chunk's magnitudes by bits of a value: two levels of 2 bits, the scale of 8 bits."""


class SitesConfig(Section):
    """`[sites]`: training across sites, each a job of its own, which meet in outer steps ([sites](sites.md))."""

    count: Annotated[int, Field(ge=1, le=256)] = Field(
        1, description="sites; each trains on batch.global samples of a step, so that a step consumes count times those"
    )
    index: NonNegativeInt = Field(0, description="this job among the sites, from 0")
    address: str = Field("", description="host:port of the meeting point, which `megascale sites` serves")
    every: Count = Field(100, description="steps between the outer steps of the same weights")
    lr: Annotated[Annotated[Float32, Field(gt=0)] | None, AUTO_AS_NONE] = Field(
        None, description="learning rate of outer steps; auto: 0.7, or 1 with top_k below 1"
    )
    momentum: Annotated[Annotated[Float32, Field(ge=0, lt=1)] | None, AUTO_AS_NONE] = Field(
        None, description="Nesterov momentum of outer steps; auto: 0.9, or 0 with top_k below 1"
    )
    top_k: Annotated[Float32, Field(ge=1 / CHUNK, le=1)] = Field(
        1.0, description=f"share of the elements of {CHUNK} that a site sends, the largest ones; 1: all"
    )
    bits: Literal[2, 8, 32] = Field(32, description="bits of a value that is sent; 32: as it is")
    error_decay: Annotated[Float32, Field(ge=0, le=1)] = Field(
        0.95, description="what remains in an outer step of what was not sent before, with top_k below 1 or fewer bits"
    )
    fragments: Count = Field(
        1, description="parts of the layers, each with outer steps of its own, at equal distances within `every`"
    )
    overlap: NonNegativeInt = Field(0, description="steps in whose background a fragment is sent; 0: training waits")
    grace_s: Annotated[float, Field(ge=0.1, le=10**6)] = Field(
        60.0, description="seconds that the sites at the meeting point wait for one that is late"
    )

    @property
    def outer_lr(self) -> float:
        return self.lr if self.lr is not None else 1.0 if self.top_k < 1 else 0.7

    @property
    def outer_momentum(self) -> float:
        return self.momentum if self.momentum is not None else 0.0 if self.top_k < 1 else 0.9

    @property
    def is_lossy(self) -> bool:
        """True if a site sends a part of its pseudo-gradient, and keeps the rest for the next outer step."""
        return self.top_k < 1 or self.bits < 32

    @property
    def state_tensors(self) -> int:
        """Tensors of outer state, each of the size of master weights: outer weights, momentum, residual."""
        return 0 if self.count == 1 else 1 + (self.outer_momentum > 0) + self.is_lossy

    @property
    def place(self) -> tuple[str, int]:
        """Host and port of the meeting point. Raises: ValueError"""
        return split_port(self.address)

    def due(self, step: int, last: int) -> list[int]:
        """The fragments whose outer step follows `step`; all after the `last`, so that the sites end as one model."""
        if step == last:
            return [*range(self.fragments)]
        phases = (index * self.every // self.fragments for index in range(self.fragments))
        return [index for index, phase in enumerate(phases) if step % self.every == phase and step]

    def sent_bytes(self, elements: int, value_bytes: int) -> int:
        """The bytes to another site in an outer step of `elements` weights, of `value_bytes` each, without those of
        shorter chunks.
        """
        if not self.is_lossy:
            return elements * value_bytes
        chunks, sent = elements / CHUNK, elements * self.top_k
        value_bits = 8 * value_bytes if self.bits == 32 else self.bits
        index_bits = INDEX_BITS if self.top_k < 1 else 0
        return round(sent * (value_bits + index_bits) / 8 + chunks * LEVEL_BYTES[self.bits])
