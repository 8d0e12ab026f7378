"""Rules of `[batch]`, `[train]` and `[optimizer]`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megascale.catalog.precisions import PRECISIONS
from megascale.catalog.schedules import SCHEDULES
from megascale.config.batch_rampup import schedule_steps
from megascale.config.data import DataConfig
from megascale.config.finding import Finding
from megascale.config.model import ModelConfig
from megascale.config.parallel import ParallelConfig
from megascale.config.train import BatchConfig, OptimizerConfig, TrainConfig, may_have

MAX_MICROBATCHES = 2**20  # micro-batches of a rank in a step: a schedule lists every action of each


def recomputed_operations(train: TrainConfig) -> Iterator[Finding]:
    """Check that recompute_ops has an effect and no duplicates."""
    key, operations = "train.recompute_ops", train.recompute_ops or ()
    if operations and not may_have(train, "selective"):
        message = f"selects operations for selective recomputation, but recompute = {train.recompute}"
        yield Finding(key, message, "train.recompute = selective, or remove the key")
    elif len(set(operations)) < len(operations):
        yield Finding(key, "names an operation twice", "remove the duplicate")


def batch_size(parallel: ParallelConfig, batch: BatchConfig) -> Iterator[Finding]:
    """Check that micro x dp divides the global batch."""
    dp = parallel.dp if isinstance(parallel.dp, int) else 1
    unit = batch.micro * dp
    if batch.total % unit:
        near = sorted({max(unit, batch.total // unit * unit), (batch.total // unit + 1) * unit})
        message = f"{batch.total} is not divisible by micro x dp = {batch.micro} x {dp}"
        yield Finding("batch.global", message, f"{' or '.join(map(str, near))}")


def batch_rampup(parallel: ParallelConfig, batch: BatchConfig) -> Iterator[Finding]:
    """Check that the batch grows to batch.global in whole increments, each of which micro x dp divides."""
    if batch.rampup is None:
        return
    start, increment, _ = batch.rampup
    unit, key = batch.micro * (parallel.dp if isinstance(parallel.dp, int) else 1), "batch.rampup"
    if start >= batch.total or (batch.total - start) % increment:
        message = f"the batch does not grow from {start} by {increment} to batch.global = {batch.total}"
        yield Finding(key, message, "[start, increment, samples] with a multiple of increment between start and global")
    for name, size in (("start", start), ("increment", increment)):
        if size % unit:
            yield Finding(key, f"{name} {size} is not divisible by micro x dp = {unit}", f"a multiple of {unit}")


def counts(model: ModelConfig, parallel: ParallelConfig, batch: BatchConfig, data: DataConfig) -> Iterator[Finding]:
    """Check that tokens of a micro-batch fit 31 bits, and micro-batches of a step in memory, before a run on `data`;
    plans of batches, without data, may exceed both.
    """
    if batch.micro * model.seq_length >= 2**31:
        message = f"{batch.micro} sequences of {model.seq_length} tokens are over 2^31 tokens in a micro-batch"
        yield Finding("batch.micro", message, "a smaller batch.micro or model.seq_length")
    micro_batches = batch.total // (batch.micro * (parallel.dp if isinstance(parallel.dp, int) else 1))
    if micro_batches > MAX_MICROBATCHES:
        message = f"{micro_batches} micro-batches in a step of a rank, over {MAX_MICROBATCHES}"
        yield Finding("batch.global", message, "a smaller batch.global, or a larger batch.micro or parallel.dp")


def noise_scale(parallel: ParallelConfig, batch: BatchConfig, train: TrainConfig) -> Iterator[Finding]:
    """Check that a step has the gradient of one micro-batch to compare with that of the whole batch."""
    key, name = "train.noise_scale_every", parallel.schedule
    if not train.noise_scale_every:
        return
    if batch.total <= batch.micro:
        message = f"a step of one micro-batch of {batch.micro} has no smaller batch to compare with"
        yield Finding(key, message, "a larger batch.global, a smaller batch.micro, or 0")
    ahead = "unbounded_in_flight", "split", "pairs"
    fit = [card.name for card in SCHEDULES.cards.values() if not any(map(card.facts.get, ahead))]
    if name and name not in fit:
        message = f"{name} computes the head's gradient of further micro-batches before all gradients of the first"
        yield Finding(key, message, f"parallel.schedule = {' or '.join(fit)}, or 0")


def tile_recomputation(train: TrainConfig) -> Iterator[Finding]:
    """Check that the activation function is not recomputed apart from its tile."""
    if train.mlp_tiles > 1 and "activation" in (train.recompute_ops or ()):
        message = f"activation has no effect with mlp_tiles = {train.mlp_tiles}: a tile is recomputed as a whole"
        yield Finding("train.recompute_ops", message, "without activation")


def learning_rate(batch: BatchConfig, train: TrainConfig, optimizer: OptimizerConfig) -> Iterator[Finding]:
    """Check that the learning rate decays, and that warm-up and decay fit into the run."""
    lr, min_lr, warmup, decay_steps = optimizer.lr, optimizer.min_lr, optimizer.warmup_steps, optimizer.decay_steps
    if min_lr > lr:
        yield Finding("optimizer.min_lr", f"{min_lr:g} is more than lr = {lr:g}", f"at most {lr:g}")
    steps = schedule_steps(batch, train, optimizer)
    if warmup >= steps:
        run = f"train.steps = {train.steps}"
        if optimizer.schedule_steps:
            run = f"schedule_steps = {steps}"
        elif steps != train.steps:
            run = f"{steps} steps of batch.global, as many samples as {run} with the ramp-up"
        yield Finding("optimizer.warmup_steps", f"{warmup} is not less than {run}", f"fewer than {steps}")
    elif optimizer.decay == "wsd" and (decay_steps or 0) > steps - warmup:
        message = f"{decay_steps} do not fit after the warm-up"
        yield Finding("optimizer.decay_steps", message, f"at most {steps - warmup}")


def optimizer_groups(model: ModelConfig, parallel: ParallelConfig, optimizer: OptimizerConfig) -> Iterable[Finding]:
    """Check options of the optimizer, and that every parameter is in one group, whose rule can update it."""
    widths = model.mup_base_width or model.unit_scaling
    if not (optimizer.groups or optimizer.options or widths or parallel.vocab_pp):
        return ()
    from megascale.layout.group_rules import group_findings  # a layer above: the parameters of a model

    return group_findings(model, optimizer, shared=parallel.vocab_pp > 0)


def frozen_parameters(model: ModelConfig, train: TrainConfig) -> Iterable[Finding]:
    """Check that `freeze` names parameters of the model, whole ones, and not all of them."""
    if not train.freeze:
        return ()
    from megascale.layout.group_rules import freeze_findings  # a layer above: the parameters of a model

    return freeze_findings(model, train.freeze)


def compensated_weights(train: TrainConfig, optimizer: OptimizerConfig) -> Iterator[Finding]:
    """Check that compensated weights are of bf16 training."""
    facts, precision = PRECISIONS[train.precision].facts, train.precision
    if optimizer.master_weights != "full" and not (facts["master_weights"] and facts["compute_dtype"] == "bfloat16"):
        message = f"there are no bf16 weights with precision = {precision}"
        yield Finding("optimizer.master_weights", message, "bf16, or remove the key")
