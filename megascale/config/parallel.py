"""The sections `[parallel]` and `[overlap]`: axes of parallelism, pipeline schedule, overlap of communication."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megascale.catalog.schedules import SCHEDULES
from megascale.config.section import AUTO_AS_NONE, Count, Ranks, Section, choice, single_value


class ParallelConfig(Section):
    """`[parallel]`: the world is tp x cp x dp x pp processes, tp fastest and pp slowest."""

    tp: Ranks = Field(1, description="tensor parallelism: weight matrices are split over tp ranks")
    sp: bool = Field(
        False, description="sequence parallelism: activations of norms and dropout are split over tp along the sequence"
    )
    cp: Annotated[Literal[1], single_value(1)] = Field(1, description="context parallelism; not available yet")
    ep: Annotated[Literal[1], single_value(1)] = Field(1, description="expert parallelism; not available yet")
    dp: Ranks | Literal["auto"] = Field(
        "auto", description="data parallelism; auto: number of processes / (tp x cp x pp)"
    )
    pp: Ranks = Field(1, description="pipeline stages")
    vpp: Annotated[int, Field(gt=0, le=10_002)] = Field(1, description="model chunks on each pipeline stage")
    schedule: Annotated[str, choice(SCHEDULES)] | None = Field(
        None, description="pipeline schedule; default 1f1b, with vpp > 1 interleaved_1f1b"
    )
    layers_per_chunk: Annotated[list[Annotated[int, Field(ge=0)]] | None, AUTO_AS_NONE] = Field(
        None,
        description="layers of the pp x vpp model chunks, in network order; auto: even, with fewer or no layers in the "
        "first and last chunk, which have the embedding and the head",
    )
    zero: int = Field(
        1,
        ge=0,
        le=2,
        description="ZeRO stage, sharding over dp: 0 none, 1 optimizer state, 2 optimizer state and gradients",
    )


class OverlapConfig(Section):
    """`[overlap]`: overlap of communication and compute; without overlap the same operations run in sequence."""

    tp: bool = Field(
        True,
        description="all-gather and reduce-scatter of activations in pieces, overlapped with GEMMs on other pieces",
    )
    pp: bool = Field(True, description="post receives two actions ahead; false: when needed")
    dp: bool = Field(
        True, description="reduce a bucket's gradients and all-gather its parameters during other buckets' compute"
    )
    bucket_bytes: Count | Literal["auto"] = Field(
        "auto",
        description="gradient bytes above which a model chunk is split into buckets of whole layers; "
        "auto: 1/16 of the chunk, at most 32 MiB, but at least 512 KiB per dp rank",
    )
