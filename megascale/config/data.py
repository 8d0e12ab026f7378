"""The section `[data]`: datasets, how documents fill samples, and who reads them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megascale.catalog.data import DATA_POLICIES, SAMPLE_WEIGHTS, TOKENIZERS
from megascale.config.section import Count, FilePath, Float32, NonNegativeInt, Section, absolute_or_url, choice

SplitName = Literal["train", "valid"]

# not strict, because TOML has arrays and no tuples
WeightedPrefix = Annotated[tuple[Annotated[Float32, Field(gt=0)], FilePath], Field(strict=False)]
Blend = list[WeightedPrefix]

SampleRange = Annotated[list[NonNegativeInt], Field(min_length=2, max_length=2)]

WeightChange = Annotated[
    tuple[NonNegativeInt, Annotated[list[Annotated[Float32, Field(ge=0)]], Field(min_length=1)]], Field(strict=False)
]

Odds = Annotated[list[Annotated[Float32, Field(gt=0)]], Field(min_length=1)]


class DataConfig(Section):
    """`[data]`: token datasets in megatron-core's .bin/.idx format, named without the extension: paths, or URLs of an
    fsspec file system.
    """

    train: FilePath | Annotated[Blend, Field(min_length=1)] | None = Field(
        None, description="a dataset's prefix, or a blend: [[weight, prefix], ...]"
    )
    valid: FilePath | Annotated[Blend, Field(min_length=1)] | None = Field(
        None, description="validation data, as train; by default a part of train, see split"
    )
    split: Annotated[list[Annotated[Float32, Field(ge=0)]], Field(min_length=2, max_length=2)] = Field(
        [0.99, 0.01], description="shares of train's documents for training and validation, if valid is not given"
    )
    tokenizer: FilePath | None = Field(None, description="tokenizer file, compared with the dataset's tokenizer")
    cache: FilePath | None = Field(
        None,
        description="folder of the sample indices, and of blocks of remote datasets; default: beside the first dataset",
    )
    cache_bytes: int = Field(
        64 << 30, ge=64 << 20, le=2**60, description="bytes of blocks of remote datasets that are kept in data.cache"
    )
    retry_timeout_s: float = Field(
        60.0, ge=0, le=600, description="timeout for retries of a failing access to remote datasets, in seconds"
    )
    skip_samples: list[SampleRange] = Field(
        [],
        description="ranges [start, stop] of the order of training samples, without stop, which the run leaves out; in "
        "ascending order",
    )
    packing: Literal["concat", "best_fit", "decompose"] = Field(
        "concat",
        description="how documents fill samples: concat, end to end and cut at seq_length; best_fit, no document is "
        "cut that fits, and padding fills a sample; decompose, cut into powers of two, and all samples of a step have "
        "pieces of one length",
    )
    decompose_min_length: Count | None = Field(
        None,
        description="with packing = decompose, tokens of the shortest pieces, a power of two; shorter ones are not "
        "read; default: 256, or seq_length if it is less",
    )
    decompose_bucket_samples: Count | None = Field(
        None,
        description="with packing = decompose, successive samples in the order that have pieces of one length; "
        "default: batch.global, a step",
    )
    curriculum: Literal["mixed", "grow_linear", "grow_p2"] | Odds = Field(
        "mixed",
        description="with packing = decompose, the order of the lengths: mixed, evenly; otherwise odds that a step has "
        "pieces of a length, from the shortest on, as long as its cycle has such: grow_linear, n, ..., 2, 1; grow_p2, "
        "..., 4, 2, 1; or a list",
    )
    decompose_cycle: Count | None = Field(
        None,
        description="with a curriculum, samples after which it begins anew, in units of decompose_bucket_samples; "
        "default: 128",
    )
    document_order_file: FilePath | None = Field(
        None,
        description="file of the order in which documents are concatenated and read, the same in every epoch: a .npy "
        "of document numbers; default: shuffled",
    )
    max_tokens_per_rank: Count | None = Field(
        None, description="with parallel.hybrid_dp, most tokens of a rank in a micro-batch"
    )
    sequence_chunk_tokens: Count | None = Field(
        None,
        description="tokens of a chunk: every sample becomes dependent chunks, micro-batches that share a store of "
        "keys and values, so that activations do not grow with seq_length; default: whole samples",
    )
    sequence_chunks_saved: Count = Field(
        1,
        description="with sequence_chunk_tokens, last chunks of a sample that keep their activations; others are "
        "recomputed",
    )
    attention_mask: Literal["causal", "document"] = Field(
        "causal",
        description="what a token attends to: causal, all earlier tokens of its sample; document, those of its own "
        "document, where positions restart too",
    )
    eod_mask_loss: bool = Field(
        True,
        description="with attention_mask = document, leave the loss of a document's first token, which the end of the "
        "document before it predicts, out",
    )
    eod: NonNegativeInt | None = Field(
        None,
        description="with attention_mask = document, a token that ends a document also within the documents of the "
        "dataset's index",
    )
    document_length: Count | None = Field(
        None,
        description="with attention_mask = document, expected tokens of a document, for estimates before a run and for "
        "mock data; default: seq_length, which is the upper bound of the cost of attention",
    )
    blend_schedule: list[WeightChange] = Field(
        [],
        description="changes of the blend's weights: [[place, [weight, ...]], ...], from a place in the order of "
        "training samples on, for the datasets of train in their order; 0: none",
    )
    blend_policy: Annotated[str, choice(DATA_POLICIES)] | None = Field(
        None,
        description="[data policy](extending/data_policy.md) that changes the weights of train's datasets during "
        "training; default: none",
    )
    blend_policy_every: Count | None = Field(
        None, description="with a blend_policy: steps between its updates, at least prefetch + 2; default: 100"
    )
    sample_weight: Annotated[str, choice(SAMPLE_WEIGHTS)] | None = Field(
        None,
        description="[weights of training samples](extending/sample_weight.md), or of their labels, in the loss, which "
        "is divided by their sum; default: none",
    )
    reader: Literal["rank", "host"] = Field(
        "rank",
        description="rank: every rank reads its samples before each step; host: a process of each host reads them for "
        "all ranks there, ahead of the step",
    )
    prefetch: Annotated[int, Field(gt=0, le=1024)] = Field(
        2,
        description="with reader = host: steps whose samples are read ahead, in the host's memory; new weights of a "
        "policy begin prefetch + 2 steps after it",
    )
    reader_timeout_s: Annotated[float, Field(ge=1, le=86400)] = Field(
        120.0,
        description="with reader = host: seconds in which the reader must read a sample, beside data.retry_timeout_s "
        "for remote datasets; after that it hangs, and another one is started",
    )
    mock: bool = Field(False, description="random tokens in place of data, to measure throughput")

    @property
    def updates_every(self) -> int:
        """Steps between the updates of the weights by a policy."""
        return self.blend_policy_every or 100

    def absolute(self) -> DataConfig:
        """Return the section with absolute paths."""

        def absolute(source: str | Blend | None) -> str | Blend | None:
            if isinstance(source, list):
                return [(weight, absolute_or_url(prefix)) for weight, prefix in source]
            return source and absolute_or_url(source)

        paths = {
            key: absolute(getattr(self, key)) for key in ("train", "valid", "tokenizer", "cache", "document_order_file")
        }
        if self.tokenizer in TOKENIZERS.cards:
            paths["tokenizer"] = self.tokenizer
        return self.model_copy(update=paths)


def dataset_prefixes(source: str | Blend | None) -> list[str]:
    """Dataset prefixes of `data.train` or `data.valid`."""
    if source is None:
        return []
    return [source] if isinstance(source, str) else [prefix for _, prefix in source]
