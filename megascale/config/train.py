"""The run itself: batch, steps, optimizer, data, checkpoints, and where results go."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megascale.catalog.decays import DECAYS
from megascale.catalog.optimizers import OPTIMIZERS
from megascale.catalog.precisions import PRECISIONS
from megascale.config.section import Auto, Count, FilePath, Section, choice

Whole = Annotated[int, Field(ge=0, lt=2**63)]
Chunks = Annotated[list[Whole], Field(min_length=1)]
Operations = Annotated[list[Literal["attention", "norm", "activation"]], Field(min_length=1)]


class BatchConfig(Section):
    """`[batch]`: sequences in one forward of one rank, and in one optimizer step of the whole job."""

    micro: Count = Field(1, description="sequences in a micro-batch")
    total: Count = Field(alias="global", description="sequences in a step, over all ranks")


class TrainConfig(Section):
    """`[train]`"""

    steps: Count = Field(description="optimizer steps of the whole run")
    seed: Whole = Field(1234, description="initial weights, dropout and the order of samples follow from it")
    precision: Annotated[str, choice(PRECISIONS)] = Field("fp32", description="number format of compute")
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="what the backward computes again instead of keeping it: recompute_ops, or whole blocks"
    )
    recompute_ops: Annotated[Operations | None, Auto] = Field(
        None, description="what selective recomputation computes again; auto: attention"
    )
    recompute_chunks: Annotated[Chunks | None, Auto] = Field(
        None, description="the model chunks of each rank, from 0, that recompute; auto: all"
    )
    compile: bool = Field(False, description="torch.compile of each block, between its linear layers")
    log_every: Count = Field(10, description="steps between lines of metrics")
    eval_every: Whole = Field(
        0, description="steps between evaluations on validation data, and one at the end; 0: never"
    )
    eval_steps: Count = Field(10, description="global batches in an evaluation")


class OptimizerConfig(Section):
    """`[optimizer]`"""

    name: Annotated[str, choice(OPTIMIZERS)] = Field("adamw", description="update rule")
    lr: float = Field(gt=0, description="learning rate after the warm-up")
    min_lr: float = Field(0.0, ge=0, description="learning rate at the end")
    warmup_steps: Whole = Field(0, description="steps of linear rise from 0 to lr")
    decay: Annotated[str, choice(DECAYS)] = Field("cosine", description="course of the learning rate after the warm-up")
    decay_steps: Count | None = Field(
        None, description="for wsd: steps of the final fall; default a tenth of train.steps"
    )
    weight_decay: float = Field(0.1, ge=0, description="decoupled decay of matrices; norms and biases have none")
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = Field(
        [0.9, 0.95], description="decay of the first and second moment"
    )
    bias_correction: bool = Field(True, description="divide the moments by 1 - beta^step, for they start at zero")
    eps: float = Field(1e-8, gt=0, description="added to the root of the second moment")
    clip_norm: float = Field(1.0, ge=0, description="largest norm of the whole gradient; 0: no clipping")


# not strict, for TOML has no tuples, but arrays
Weighted = Annotated[tuple[Annotated[float, Field(gt=0)], FilePath], Field(strict=False)]
Blend = list[Weighted]


class DataConfig(Section):
    """`[data]`: token datasets in megatron-core's .bin/.idx format, named without their ending."""

    train: FilePath | Annotated[Blend, Field(min_length=1)] | None = Field(
        None, description="a dataset's prefix, or a blend: [[weight, prefix], ...]"
    )
    valid: FilePath | Annotated[Blend, Field(min_length=1)] | None = Field(
        None, description="validation data, likewise; without it, a part of train, see split"
    )
    split: Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=2, max_length=2)] = Field(
        [0.99, 0.01], description="shares of train's documents that train and validate, when valid is not given"
    )
    tokenizer: FilePath | None = Field(
        None, description="tokenizer file; checked against the one the data was made with"
    )
    cache: FilePath | None = Field(None, description="folder of the sample indices; default: beside the first dataset")
    mock: bool = Field(False, description="random tokens instead of data, for measuring speed")


class CheckpointConfig(Section):
    """`[checkpoint]`"""

    every: Whole = Field(1000, description="steps between checkpoints, and one at the end; 0: no checkpoints at all")
    keep: Whole = Field(0, description="newest checkpoints kept; 0: all")
    keep_every: Whole = Field(
        0, description="where keep is not 0, those of each step that this divides are kept for good as well; 0: none"
    )
    resume: FilePath = Field(
        "auto",
        description="auto: from the run's newest complete checkpoint; a checkpoint's folder, or a run's: from it, "
        "until the run has one of its own; hf:FOLDER: likewise, from weights as Hugging Face lays them out; never",
    )
    background: bool = Field(
        True, alias="async", description="train on while another process writes what was copied; false: wait for it"
    )
    memory_every: Whole = Field(
        0,
        description="steps between copies that stay in the hosts' memory, from which a run goes on whose processes "
        "died but not its hosts; they take twice the state; 0: none",
    )
    memory_dir: FilePath = Field("/dev/shm", description="where those are, a file system that is memory")
    replicate: bool = Field(
        False, description="send each of them to the next host of data parallelism too, for when a host is lost"
    )
    dir: FilePath | None = Field(
        None,
        description="parent of a folder of this run's name, for its checkpoints: a path, or the URL of any file system "
        "of fsspec, such as s3://bucket/runs; default: the run's folder",
    )
    file_bytes: int = Field(
        2 << 30,
        ge=64 << 10,
        le=2**40,
        description="size of a file, at most, but for one row of a tensor that is larger; at least 65536",
    )
    patience_s: float = Field(
        60.0, ge=0, le=600, description="for how long storage that fails is tried again, in seconds, at each access"
    )


class ObserveConfig(Section):
    """`[observe]`"""

    dir: FilePath = Field("runs", description="parent of the run's folder")
    tensorboard: bool = Field(True, description="write TensorBoard events")
    ledger: bool = Field(
        True, description="each rank keeps a ledger: every communication and what waited for it, for the metrics too"
    )
    events: bool = Field(
        True, description="each rank writes what its ledger has kept when the run ends (`megascale trace`)"
    )
