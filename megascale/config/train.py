"""The sections of the run itself: batch, train, optimizer, data, checkpoint and observe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megascale.catalog.decays import DECAYS
from megascale.catalog.optimizers import OPTIMIZERS
from megascale.catalog.precisions import PRECISIONS
from megascale.config.section import AUTO_AS_NONE, Count, FilePath, Float32, Section, choice

NonNegativeInt = Annotated[int, Field(ge=0, lt=2**63)]
Chunks = Annotated[list[NonNegativeInt], Field(min_length=1)]
Operations = Annotated[list[Literal["attention", "norm", "activation"]], Field(min_length=1)]


class BatchConfig(Section):
    """`[batch]`: sequences per micro-batch and per optimizer step."""

    micro: Annotated[int, Field(gt=0, le=2**24)] = Field(1, description="sequences in a micro-batch")
    total: Annotated[int, Field(gt=0, le=2**30)] = Field(
        alias="global", description="sequences in a step, over all ranks"
    )

    rampup: Annotated[list[Count], Field(min_length=3, max_length=3)] | None = Field(
        None,
        description="[start, increment, samples]: the batch of the first step, which grows by increment to global, at "
        "equal distances over the first samples of the run",
    )


class TrainConfig(Section):
    """`[train]`"""

    steps: Count = Field(description="optimizer steps of the whole run")
    seed: NonNegativeInt = Field(1234, description="seed of initial weights, dropout and the order of samples")
    precision: Annotated[str, choice(PRECISIONS)] = Field("fp32", description="dtype of compute")
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="activation recomputation: selective recomputes recompute_ops, full recomputes whole blocks"
    )
    recompute_ops: Annotated[Operations | None, AUTO_AS_NONE] = Field(
        None, description="operations for selective recomputation; auto: attention"
    )
    recompute_chunks: Annotated[Chunks | None, AUTO_AS_NONE] = Field(
        None, description="model chunks with recomputation, numbered from 0 on every rank; auto: all"
    )
    compile: bool = Field(False, description="torch.compile of the operations between linear layers")
    log_every: Count = Field(10, description="steps between records of metrics")
    eval_every: NonNegativeInt = Field(
        0, description="steps between evaluations on validation data, with one at the end; 0: never"
    )
    eval_steps: Count = Field(10, description="global batches per evaluation")
    check_replicas: NonNegativeInt = Field(
        0, description="steps between checks that replicas of a weight are equal bit for bit, over dp and tp; 0: never"
    )


class OptimizerConfig(Section):
    """`[optimizer]`"""

    name: Annotated[str, choice(OPTIMIZERS)] = Field("adamw", description="update rule")
    lr: Float32 = Field(gt=0, description="learning rate after the warm-up")
    min_lr: Float32 = Field(0.0, ge=0, description="learning rate at the end")
    warmup_steps: NonNegativeInt = Field(0, description="steps of linear warm-up from 0 to lr")
    decay: Annotated[str, choice(DECAYS)] = Field("cosine", description="decay of the learning rate after the warm-up")
    decay_steps: Count | None = Field(
        None, description="for wsd: steps of the final decay; default a tenth of train.steps"
    )
    weight_decay: Float32 = Field(0.1, ge=0, description="decoupled weight decay of matrices, not of norms and biases")
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = Field(
        [0.9, 0.95], description="decay of the first and second moment"
    )
    bias_correction: bool = Field(
        True, description="divide the moments by 1 - beta^step, because moments start at zero"
    )
    eps: Float32 = Field(1e-8, gt=0, description="added to the root of the second moment")
    clip_norm: Float32 = Field(1.0, ge=0, description="gradient norm above which gradients are clipped; 0: no clipping")


# not strict, because TOML has arrays and no tuples
WeightedPrefix = Annotated[tuple[Annotated[Float32, Field(gt=0)], FilePath], Field(strict=False)]
Blend = list[WeightedPrefix]


SampleRange = Annotated[list[NonNegativeInt], Field(min_length=2, max_length=2)]


WeightChange = Annotated[
    tuple[NonNegativeInt, Annotated[list[Annotated[Float32, Field(ge=0)]], Field(min_length=1)]], Field(strict=False)
]


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
    skip: list[SampleRange] = Field(
        [],
        description="ranges [start, stop] of the order of training samples, without stop, which the run leaves out; in "
        "ascending order",
    )
    packing: Literal["concat", "best_fit"] = Field(
        "concat",
        description="how documents fill samples: concat, end to end and cut at seq_length; best_fit, no document is "
        "cut that fits, and padding fills a sample",
    )
    order: FilePath | None = Field(
        None,
        description="file of the order in which documents are concatenated and read, the same in every epoch: a .npy "
        "of document numbers; default: shuffled",
    )
    mask: Literal["causal", "document"] = Field(
        "causal",
        description="what a token attends to: causal, all earlier tokens of its sample; document, those of its own "
        "document, where positions restart too",
    )
    boundary_loss: bool = Field(
        False,
        description="with mask = document, count the loss of a document's first token, which the end of the document "
        "before it predicts",
    )
    eod: NonNegativeInt | None = Field(
        None,
        description="with mask = document, a token that ends a document also within the documents of the dataset's "
        "index",
    )
    document_length: Count | None = Field(
        None,
        description="with mask = document, expected tokens of a document, for estimates before a run and for mock "
        "data; default: seq_length, which is the upper bound of the cost of attention",
    )
    weights: list[WeightChange] = Field(
        [],
        description="changes of the blend's weights: [[place, [weight, ...]], ...], from a place in the order of "
        "training samples on, for the datasets of train in their order; 0: none",
    )
    reader: Literal["rank", "host"] = Field(
        "rank",
        description="rank: every rank reads its samples before each step; host: a process of each host reads them for "
        "all ranks there, ahead of the step",
    )
    prefetch: Annotated[int, Field(gt=0, le=1024)] = Field(
        2, description="with reader = host: steps whose samples are read ahead, in the host's memory"
    )
    mock: bool = Field(False, description="random tokens in place of data, to measure throughput")


class CheckpointConfig(Section):
    """`[checkpoint]`"""

    every: NonNegativeInt = Field(1000, description="steps between checkpoints, with one at the end; 0: no checkpoints")
    keep: NonNegativeInt = Field(0, description="number of newest checkpoints to keep; 0: all")
    keep_every: NonNegativeInt = Field(
        0, description="with keep above 0, also keep checkpoints of every multiple of this step; 0: none"
    )
    resume: FilePath = Field(
        "auto",
        description="auto: the run's newest complete checkpoint; the folder of a checkpoint or run, or hf:FOLDER with "
        "Hugging Face weights: the start of a run without checkpoints of its own; never: do not resume",
    )
    background: bool = Field(
        True,
        alias="async",
        description="write checkpoints in a background process while training continues; false: wait",
    )
    memory_every: NonNegativeInt = Field(
        0,
        description="steps between copies in host memory, to resume after a failure of processes but not of hosts; "
        "needs host memory for twice the state; 0: none",
    )
    memory_dir: FilePath = Field("/dev/shm", description="folder of the copies in memory, on a memory file system")
    replicate: bool = Field(False, description="also send every copy to another host, to survive the loss of a host")
    dir: FilePath | None = Field(
        None,
        description="parent of the folder of checkpoints, which has the run's name: a path, or a URL of an fsspec file "
        "system, such as s3://bucket/runs; default: the run's folder",
    )
    file_bytes: int = Field(
        2 << 30,
        ge=64 << 10,
        le=2**40,
        description="maximum size of a checkpoint file (a larger tensor row is one file); at least 65536",
    )
    retry_timeout_s: float = Field(
        60.0, ge=0, le=600, description="timeout for retries of a failing storage access, in seconds"
    )


class ObserveConfig(Section):
    """`[observe]`"""

    dir: FilePath = Field("runs", description="parent of the run's folder")
    tensorboard: bool = Field(True, description="write TensorBoard events")
    record: bool = Field(
        True, description="record every action and communication with exposed time, for events and metrics"
    )
    events: bool = Field(True, description="write every rank's event file at the end of the run (`megascale trace`)")
    store: bool = Field(True, description="keep every rank's events and steps in an event store (`megascale events`)")
    store_dir: FilePath | None = Field(
        None,
        description="parent of the event store, a folder with the run's name: a path, or a URL of an fsspec file "
        "system; default: the run's folder, which then has it in `events`",
    )
    store_interval_s: float = Field(
        10.0, ge=1, le=3600, description="seconds between the files that a node writes into the event store"
    )
    store_bytes: int = Field(
        2 << 30,
        ge=1 << 20,
        le=2**50,
        description="maximum bytes that a node keeps in the event store, at least 1048576: single events go first, the "
        "oldest before the others, then sums by step",
    )
    store_events_h: float = Field(
        24.0, ge=0, le=87600, description="hours for which single events are kept; 0: only their sums by step"
    )
    metrics_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="first port for [Prometheus' metrics](observability.md#metrics-and-alerts): the launcher, or the "
        "driver and each agent, serve them at the first free one of 32; 0: none",
    )
    metrics_address: str = Field(
        "127.0.0.1",
        description="address of the host at which metrics are served, to anyone who reaches it; 0.0.0.0: on all",
    )
