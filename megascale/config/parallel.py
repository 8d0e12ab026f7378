"""How the work is spread: the axes of parallelism, the pipeline schedule, and what communication is hidden."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megascale.catalog.schedules import SCHEDULES
from megascale.config.section import Auto, Count, Section, choice, only


class ParallelConfig(Section):
    """`[parallel]`: the world is tp x cp x dp x pp processes, tp fastest and pp slowest."""

    tp: Count = Field(1, description="tensor parallelism: each matrix is cut in tp")
    sp: bool = Field(False, description="sequence parallelism: norms and dropout are cut over tp along the sequence")
    cp: Annotated[Literal[1], only(1)] = Field(1, description="context parallelism; not available yet")
    ep: Annotated[Literal[1], only(1)] = Field(1, description="expert parallelism; not available yet")
    dp: Count | Literal["auto"] = Field(
        "auto", description="data parallelism; auto: what the number of processes leaves"
    )
    pp: Count = Field(1, description="pipeline stages")
    vpp: Count = Field(1, description="model chunks on each pipeline stage")
    schedule: Annotated[str, choice(SCHEDULES)] | None = Field(
        None, description="order of forwards and backwards; default 1f1b, with vpp > 1 interleaved_1f1b"
    )
    layers_per_chunk: Annotated[list[Annotated[int, Field(ge=0)]] | None, Auto] = Field(
        None,
        description="layers of each of the pp x vpp chunks, in the order of the network; auto: as even as can be, "
        "where the ends, with the embedding and the head, have fewer or none",
    )
    zero: int = Field(
        1, ge=0, le=2, description="sharded over dp: 0 nothing, 1 optimizer state, 2 optimizer state and gradients"
    )


class OverlapConfig(Section):
    """`[overlap]`: communication hidden behind compute. Off, the same operations run one after the other."""

    tp: bool = Field(True, description="activations travel piece by piece while matrix products work on other pieces")
    pp: bool = Field(True, description="receives are posted two actions ahead; off: when they are needed")
    dp: bool = Field(
        True, description="a bucket's gradients are reduced, and its weights gathered, behind other buckets' work"
    )
    bucket_bytes: Count | Literal["auto"] = Field(
        "auto",
        description="a model chunk whose gradients take more is cut into buckets of whole layers; "
        "auto: a sixteenth of the chunk, at most 32 MiB, but 512 KiB or more for each dp rank",
    )
