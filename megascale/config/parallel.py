"""The sections `[parallel]` and `[overlap]`: axes of parallelism, pipeline schedule, overlap of communication."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megascale.catalog.schedules import SCHEDULES
from megascale.config.section import AUTO_AS_NONE, Count, Ranks, Section, choice


class ParallelConfig(Section):
    """`[parallel]`: the world is tp x cp x dp x pp processes, tp fastest and pp slowest."""

    tp: Ranks = Field(1, description="tensor parallelism: weight matrices are split over tp ranks")
    sp: bool = Field(
        False, description="sequence parallelism: activations of norms and dropout are split over tp along the sequence"
    )
    cp: Ranks = Field(1, description="context parallelism: sequences are split over cp ranks, attention included")
    cp_mode: Literal["allgather", "ulysses", "ring", "usp"] = Field(
        "ring",
        description="what cp ranks exchange in attention: ring: keys and values, from neighbour to neighbour under "
        "compute; allgather: keys and values, at once; ulysses: heads, all to all; usp: ulysses among cp_a2a_size "
        "neighbours, and ring across",
    )
    cp_a2a_size: Ranks = Field(
        1, description="with cp_mode usp: neighbouring cp ranks that exchange heads, a divisor of cp"
    )
    hybrid_dp: bool = Field(
        False,
        description="hybrid data parallelism: dp x cp ranks are a pool, where rings of any size share long documents, "
        "and others stay on a rank",
    )
    cp_sharding: Literal["auto", "sequence", "document"] = Field(
        "auto",
        description="with data.attention_mask document, where cp ranks exchange keys: ranks hold chunks of the whole "
        "sequence or of each document; auto: for each micro-batch those that balance attention better",
    )
    ep: Ranks = Field(
        1,
        description="expert parallelism: experts are split over ep neighbouring ranks of a pipeline stage; it divides "
        "tp x cp x dp",
    )
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
    vocab_pp: Annotated[int, Field(ge=0, le=2)] = Field(
        0,
        description="vocabulary parallelism: embedding and head are split by rows over all pp x tp ranks, which meet "
        "once or twice between the forward and the backward of a micro-batch; 0: on the first and the last stage",
    )
    skip_ratio: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="experimental, changes the model that is trained: share of the stages between first and last "
        "that a micro-batch skips in training; all are skipped equally often",
    )
    far_axis: Literal["pp", "dp"] = Field(
        "pp",
        description="axis across the slow links between islands, for launch --topology and plans: pp: an island holds "
        "whole stages; dp: an island holds a part of each stage's dp ranks",
    )
    zero: Annotated[int, Field(ge=0, le=3)] = Field(
        1,
        description="ZeRO stage, sharding over dp x cp, of experts over tp x cp x dp / ep: 0 none, 1 optimizer state, "
        "2 optimizer state and gradients, 3 also weights",
    )
    grad_reduce: Literal["full", "fp8"] = Field(
        "full",
        description="how gradients travel to the ranks that shard: full, in the dtype of accumulation; fp8, as e4m3 "
        "codes with one power-of-two scale for a bucket, added in fp32 ([FP8-LM](https://arxiv.org/abs/2310.18313)); "
        "rounding then depends on the layout",
    )
    dp_shard: Annotated[Ranks | None, AUTO_AS_NONE] = Field(
        None,
        description="hybrid sharding: neighbouring dp ranks that shard what zero says, a divisor of dp; the groups of "
        "them have copies, and sum gradients at the end of a step; auto: all of dp",
    )
    state_shard: Literal["inner", "all"] = Field(
        "inner",
        description="with zero = 3 and dp_shard, who shards optimizer state: inner: the ranks that shard weights; all: "
        "the copies as well, which gather updated weights from each other",
    )
    reshard: Annotated[Literal["keep", "microbatch", "forward"] | None, AUTO_AS_NONE] = Field(
        None,
        description="with zero = 3, when gathered weights are released: keep: after a step's last backward; "
        "microbatch: when a stage turns to another model chunk; forward: behind each layer, in forward and in "
        "backward; auto: forward, with pp > 1 keep",
    )

    @property
    def resharding(self) -> Literal["keep", "microbatch", "forward"] | None:
        """When gathered weights are released, with the default; None unless weights are sharded."""
        default: Literal["keep", "forward"] = "keep" if self.pp > 1 else "forward"
        return (self.reshard or default) if self.zero == 3 else None

    @property
    def replicas(self) -> int:
        """Number of data-parallel ranks of a resolved configuration."""
        if not isinstance(self.dp, int):
            raise ValueError("parallel.dp is 'auto': resolve the configuration for a number of processes first")
        return self.dp

    @property
    def replica_size(self) -> int:
        """Number of processes in one model replica."""
        return self.tp * self.cp * self.pp

    @property
    def cp_heads(self) -> int:
        """Number of neighbouring cp ranks that exchange heads."""
        return {"ulysses": self.cp, "usp": self.cp_a2a_size}.get(self.cp_mode, 1)

    @property
    def cp_keys(self) -> int:
        """Number of cp ranks that exchange keys and values in every micro-batch."""
        return 1 if self.hybrid_dp else self.cp // self.cp_heads


class OverlapConfig(Section):
    """`[overlap]`: overlap of communication and compute; without overlap the same operations run in sequence."""

    tp: bool | Literal["domino"] = Field(
        True,
        description="all-gather and reduce-scatter of activations in pieces, overlapped with GEMMs on other pieces; "
        "domino: whole, overlapped with the other half of a micro-batch's sequences",
    )
    pp: bool = Field(
        True, description="messages between stages overlap with compute; false: the sender's compute waits for them"
    )
    dp: bool = Field(
        True, description="reduce a bucket's gradients and all-gather its parameters during other buckets' compute"
    )
    cp: bool = Field(True, description="send a ring's keys and values on during attention to them; false: before it")
    bucket_bytes: Count | Literal["auto"] = Field(
        "auto",
        description="gradient bytes above which a model chunk is split into buckets of whole layers; "
        "auto: 1/16 of the chunk, at most 32 MiB, but at least 512 KiB per dp rank",
    )
