"""The sections of the run itself: batch, train, optimizer, checkpoint and observe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from megascale.catalog.decays import DECAYS
from megascale.catalog.objectives import OBJECTIVES
from megascale.catalog.optimizers import ALL_KINDS, OPTIMIZERS
from megascale.catalog.precisions import PRECISIONS
from megascale.config.section import (
    AUTO,
    AUTO_AS_NONE,
    Count,
    FilePath,
    Float32,
    NonNegativeInt,
    Section,
    TableChoice,
    choice,
)
from megascale.core.registry import closest_name

HF_PREFIX = "hf:"  # prefix of a `checkpoint.resume` that names a folder of Hugging Face weights
MOCK_TEACHER = "mock"  # value of `train.distill_teacher` for random soft labels

PositiveFloat = Annotated[Float32, Field(gt=0)]
Operations = Annotated[list[Literal["attention", "norm", "activation"]], Field(min_length=1)]
Share = Annotated[float, Field(gt=0, le=1)]
StoredShare = Annotated[dict[Literal["host", "nvme"], Share], Field(min_length=1, max_length=1)]
LayerPolicy = Literal["keep", "selective", "full", "full_host", "host", "nvme"] | StoredShare
"""A policy for a layer's saved tensors, between its forward and backward."""


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
    memory: Literal["auto"] | Annotated[list[LayerPolicy], Field(min_length=1)] | None = Field(
        None,
        description="policies for the layers' saved tensors, repeated over the layers: keep; selective or full, "
        "recompute; full_host, recompute from inputs in host memory; host or nvme, move to host memory or to "
        "memory_dir; {host = 0.5} or {nvme = 0.5}, move a share of mlp_tiles; auto: the planner's choice "
        "([policies](long-context.md#a-policy-for-each-layer))",
    )
    memory_limit: Count | None = Field(
        None, description="bytes of a device that memory = auto may fill; default: what the hardware's profile leaves"
    )
    memory_dir: FilePath | None = Field(
        None, description="folder on a local disk for the saved tensors of all ranks of a host, for nvme in memory"
    )
    mlp_tiles: Count = Field(
        1,
        description="tiles of tokens in which a block's MLP runs; with several only its input is saved, and backward "
        "recomputes one tile after another ([tiles](long-context.md#tiles-of-the-mlp))",
    )
    mtp_loss_weight: Annotated[Float32, Field(gt=0)] = Field(
        0.1, description="weight of the losses of model.mtp_layers together, relative to the loss of the next token"
    )
    exit_loss_weight: PositiveFloat | Annotated[list[PositiveFloat], Field(min_length=1)] = Field(
        1.0, description="weight of the loss of each of model.exits, or a list, relative to the loss of the last layer"
    )
    exit_warmup_steps: NonNegativeInt = Field(
        0, description="steps over which exit_loss_weight rises linearly from 0; 0: none"
    )
    distill_teacher: FilePath | None = Field(
        None,
        description="file of a teacher's soft labels by `megascale data teacher`, to distill from "
        "([distillation](recipes.md#distillation)); mock: random ones, to measure throughput",
    )
    distill_alpha: Annotated[Float32, Field(ge=0, le=1)] = Field(
        0.5, description="share of the KL to the teacher in the loss; 1 - distill_alpha is that of the cross-entropy"
    )
    distill_top_k: Annotated[int, Field(gt=0, le=4096)] = Field(
        32, description="likeliest tokens of the teacher that count for a label; at most those of the file"
    )
    distill_until_step: NonNegativeInt = Field(
        0, description="last step with the teacher; the steps after it train on the next token alone; 0: all steps"
    )
    objectives: list[Annotated[dict[str, Any], AfterValidator(TableChoice(OBJECTIVES, weighted=True))]] = Field(
        [],
        description="[auxiliary objectives](extending/objective.md) over the last hidden states: tables "
        "`[[train.objectives]]` with `type`, `weight` (relative to the loss of the next token) and the type's options",
    )
    z_loss: Annotated[Float32, Field(ge=0, le=1)] = Field(
        0.0,
        description="coefficient of the squared log of the softmax's denominator in the gradient, 1e-4 in PaLM; the "
        "reported loss stays the cross-entropy",
    )
    freeze: list[Annotated[str, Field(min_length=1)]] = Field(
        [],
        description='patterns of the names of parameters that are not trained, such as "layers.*.mlp.*" '
        "([frozen parameters](recipes.md#freeze-parameters))",
    )
    compile: bool = Field(False, description="torch.compile of the operations between linear layers")
    log_every: Count = Field(10, description="steps between records of metrics")
    eval_every: NonNegativeInt = Field(
        0, description="steps between evaluations on validation data, with one at the end; 0: never"
    )
    eval_steps: Count = Field(10, description="global batches per evaluation")
    logit_sharpness_every: NonNegativeInt = Field(
        0,
        description="steps between measurements of the [sharpness of logits](low-precision.md#watch-the-casts), on the "
        "first batch of validation data; 0: never",
    )
    weight_average: Literal["none", "ema", "lawa"] = Field(
        "none",
        description="averages of the weights, evaluated beside them and kept in checkpoints: ema, a moving average; "
        "lawa, the mean of the last weight_average_count snapshots ([averages](optimizers.md#averages-of-weights))",
    )
    weight_average_decay: float = Field(
        0.999, ge=0, lt=1, description="decay of weight_average = ema at every weight_average_every steps"
    )
    weight_average_every: Count = Field(
        1, description="steps between updates of weight_average = ema, or snapshots of lawa"
    )
    weight_average_count: Annotated[int, Field(gt=0, le=64)] = Field(
        5, description="snapshots of weight_average = lawa, each with the memory of master weights"
    )
    noise_scale_every: NonNegativeInt = Field(
        0,
        description="steps between measurements of the [gradient noise scale](planning.md#batch-size); 0: never",
    )
    noise_scale_decay: float = Field(
        0.9, ge=0, lt=1, description="decay of the moving averages of the noise scale, at every measurement"
    )
    check_replicas_every: NonNegativeInt = Field(
        0, description="steps between checks that replicas of a weight are equal bit for bit, over dp and tp; 0: never"
    )

    @property
    def element_bytes(self) -> tuple[int, int]:
        """Bytes of an element in the compute and the accumulation dtype."""
        facts = PRECISIONS[self.precision].facts
        return int(facts["compute_bytes"]), int(facts["accumulate_bytes"])

    @property
    def soft_tokens(self) -> int:
        """Tokens of a teacher for a label, 0 without a teacher."""
        return self.distill_top_k if self.distill_teacher else 0

    @property
    def teacher_file(self) -> str | None:
        """The file of a teacher's soft labels; None without a teacher, and for random ones."""
        return None if self.distill_teacher == MOCK_TEACHER else self.distill_teacher

    @property
    def quantizes(self) -> bool:
        """True if linear layers run the GEMMs of a recipe, which `[fp8]` configures."""
        return bool(PRECISIONS[self.precision].facts.get("quantizes"))


def may_have(train: TrainConfig, *policies: str) -> bool:
    """Return True if a layer has one of these policies, of shares too, or the planner has the choice."""
    own: Sequence[LayerPolicy | str] = train.memory or [train.recompute]
    return own == AUTO or any(name in policies for each in own for name in ([each] if isinstance(each, str) else each))


GROUP_KEYS = {
    "params": 'a list of patterns such as "layers.*.attention.q.weight"',
    "kinds": "a list of matrix, embedding, head, norm or bias",
    "name": "an optimizer's name",
    "lr_mult": "a number, 0 or more",
    "weight_decay": "a number, 0 or more",
    "options": "a table",
}
"""Keys of a group of `[[optimizer.groups]]`, and their values in words."""


def _check_group(group: Any) -> Any:
    """Check the keys of a group and their types."""
    meant = {key: closest_name(key, GROUP_KEYS) for key in group if key not in GROUP_KEYS}
    mistakes = [f"a group has no {key}" for key in meant]
    mistakes += [f"{key} should be {text}" for key, text in GROUP_KEYS.items() if not _is_valid(key, group.get(key))]
    if not group.get("params") and not group.get("kinds"):
        mistakes.append("a group needs params or kinds")
    rule = group.get("name")
    if isinstance(rule, str) and rule not in OPTIMIZERS.names():
        meant["name"] = OPTIMIZERS.nearest(rule)
        mistakes = [f"name is not one of {', '.join(OPTIMIZERS.names())}", *(m for m in mistakes if m[:5] != "name ")]
    if mistakes:
        close = " and ".join(f"'{name}'" for name in meant.values() if name)
        hint = f"did you mean {close}?" if close else f"keys of a group: {', '.join(GROUP_KEYS)}"
        raise PydanticCustomError("table", "{message}", {"message": "; ".join(mistakes), "hint": hint})
    return group


def _is_valid(key: str, value: Any) -> bool:
    if value is None:
        return True
    if key in ("params", "kinds"):
        texts = isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)
        return texts and (key == "params" or set(value) <= set(ALL_KINDS))
    if key in ("lr_mult", "weight_decay"):
        return type(value) in (int, float) and 0 <= value < 2**128
    return value in OPTIMIZERS.names() if key == "name" else isinstance(value, dict)


class OptimizerConfig(Section):
    """`[optimizer]`"""

    name: Annotated[str, choice(OPTIMIZERS)] = Field("adamw", description="update rule")
    options: dict[str, Any] = Field(
        {}, description="the rule's own options, a table; [docs/optimizers.md](optimizers.md) lists them"
    )
    groups: list[Annotated[dict[str, Any], AfterValidator(_check_group)]] = Field(
        [],
        description="parameters with another rule, rate or decay: tables `[[optimizer.groups]]` with `params` "
        "(patterns of names) or `kinds`, and `name`, `lr_mult`, `weight_decay`, `options` "
        "([groups](optimizers.md#groups))",
    )
    master_weights: Literal["full", "bf16_compensated"] = Field(
        "full",
        description="master weights of bf16 weights: full, in fp32; bf16_compensated, as the bf16 weights and what "
        "rounding leaves over, 2 bytes less ([compensated weights](optimizers.md#compensated-weights))",
    )
    offload: Literal["none", "host"] = Field(
        "none",
        description="host: master weights and the state of element-wise rules are in host memory, and updated there "
        "([offload](optimizers.md#state-in-host-memory))",
    )
    offload_stride: Annotated[NonNegativeInt | None, AUTO_AS_NONE] = Field(
        None,
        description="with offload, every how many sub-groups one is updated on the device; 1: all, 0: none; auto: by "
        "the rates of the hardware's profile",
    )
    lr: Float32 = Field(gt=0, description="learning rate after the warm-up")
    min_lr: Float32 = Field(0.0, ge=0, description="learning rate at the end")
    warmup_steps: NonNegativeInt = Field(0, description="steps of linear warm-up from 0 to lr")
    decay: Annotated[str, choice(DECAYS)] = Field("cosine", description="decay of the learning rate after the warm-up")
    decay_steps: Count | None = Field(
        None, description="for wsd: steps of the final decay; default a tenth of train.steps"
    )
    schedule_steps: Count | None = Field(
        None,
        description="steps of the learning rate's schedule, warm-up and decay, after which it is min_lr; default: "
        "those of the run",
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
    zclip: bool = Field(
        False,
        description="also clip to a bound that follows the mean and deviation of recent gradient norms "
        "([ZClip](optimizers.md#spikes))",
    )
    zclip_threshold: float = Field(2.5, gt=0, le=1e6, description="deviations above the mean that zclip lets pass")
    zclip_alpha: float = Field(0.97, gt=0, lt=1, description="decay of zclip's mean and variance")
    zclip_warmup: int = Field(25, ge=2, description="first steps of zclip, which give the mean and variance")
    skip_sigma: Annotated[float, Field(ge=0, le=1e6)] = Field(
        0.0,
        description="skip a step whose loss or gradient norm is as many standard deviations above the mean of recent "
        "steps; 0: never",
    )
    skip_window: Annotated[int, Field(ge=2, le=1_000_000)] = Field(
        128, description="recent steps for skip_sigma; none is skipped before"
    )


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
    in_memory_every: NonNegativeInt = Field(
        0,
        description="steps between copies in host memory, to resume after a failure of processes but not of hosts; "
        "needs host memory for twice the state; 0: none",
    )
    in_memory_dir: FilePath = Field("/dev/shm", description="folder of the copies in memory, on a memory file system")
    replicate: bool = Field(False, description="also send every copy to another host, to survive the loss of a host")
    dir: FilePath | None = Field(
        None,
        description="parent of the folder of checkpoints, which has the run's name: a path, or a URL of an fsspec file "
        "system, such as s3://bucket/runs; default: the run's folder",
    )
    max_file_bytes: Annotated[int, Field(ge=64 << 10, le=2**40)] = Field(
        2 << 30,
        description="maximum size of a checkpoint file (a larger tensor row is one file); at least 65536",
    )
    retry_timeout_s: float = Field(
        60.0, ge=0, le=600, description="timeout for retries of a failing storage access, in seconds"
    )


class ObserveConfig(Section):
    """`[observe]`"""

    tensorboard: bool = Field(True, description="write TensorBoard events")
    record_events: bool = Field(
        True, description="record every action and communication with exposed time, for events and metrics"
    )
    store_events: bool = Field(True, description="keep single events in the event store (`megascale trace`)")
    event_store: bool = Field(
        True, description="keep every rank's events and steps in an event store (`megascale events`)"
    )
    store_dir: FilePath | None = Field(
        None,
        description="parent of the event store, a folder with the run's name: a path, or a URL of an fsspec file "
        "system; default: the run's folder, which then has it in `events`",
    )
    store_interval_s: float = Field(
        10.0, ge=1, le=3600, description="seconds between the files that a node writes into the event store"
    )
    store_bytes: Annotated[int, Field(ge=1 << 20, le=2**50)] = Field(
        2 << 30,
        description="maximum bytes that a node keeps in the event store, at least 1048576: single events go first, the "
        "oldest before the others, then sums by step",
    )
    store_events_h: float = Field(
        24.0, ge=0, le=87600, description="hours for which single events are kept; 0: only their sums by step"
    )
    profile_step: NonNegativeInt = Field(
        0,
        description="step that the first rank of each pipeline stage runs under torch's profiler, so that `megascale "
        "diagnose --mfu` tells GEMMs from attention; 0: none",
    )
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = Field(
        0,
        description="first port for [Prometheus' metrics](metrics.md#prometheus): the launcher, or the "
        "driver and each agent, serve them at the first free one of 32; 0: none",
    )
    metrics_address: str = Field(
        "127.0.0.1",
        description="address of the host at which metrics are served, to anyone who reaches it; 0.0.0.0: on all",
    )
