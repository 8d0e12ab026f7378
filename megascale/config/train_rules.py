"""Rules of `[batch]`, `[train]` and `[optimizer]`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megascale.catalog.optimizers import OPTIMIZERS, with_defaults
from megascale.catalog.precisions import PRECISIONS
from megascale.catalog.schedules import SCHEDULES
from megascale.config.batch_rampup import schedule_steps
from megascale.config.data import DataConfig
from megascale.config.exclusions import is_full_precision, only, unless, unsupported
from megascale.config.finding import Finding
from megascale.config.model import ModelConfig
from megascale.config.parallel import ParallelConfig
from megascale.config.train import BatchConfig, OptimizerConfig, TrainConfig, may_have

MAX_MICROBATCHES = 2**20  # micro-batches of a rank in a step: a schedule lists every action of each

OFFLOAD = unsupported(
    "optimizer.offload",
    ("optimizer.master_weights", only("full"), "compensated weights are the device's weights", "full"),
    ("train.weight_average", only("none"), "averages are of master weights on the device", "none"),
    ("sites.count", only(1), "outer steps are of master weights on the device", "1"),
    ("fault.rebuild_stage", only(0), "stages are rebuilt from state on the device", "0"),
    when=unless("none"), off="optimizer.offload = none",
)  # fmt: skip

PROJECTED_INPUTS = unsupported(
    "optimizer.name",
    ("optimizer.groups", only([]), "layers save what one rule needs", "no groups"),
    ("train.precision", is_full_precision, "wgrad is of projected inputs", "bf16"),
    ("train.recompute", unless("full"), "blocks save their own inputs, not those of layers", "none"),
    ("train.memory", lambda memory: not isinstance(memory, list) or not {"full", "full_host"} & {*map(str, memory)},
     "blocks save their own inputs, not those of layers", "keep, selective, host or nvme"),
    ("train.recompute_ops", only(None, ["attention"]), "recomputed inputs are not saved", '["attention"]'),
    ("train.mlp_tiles", only(1), "tiles save no inputs of layers", "1"),
    ("train.noise_scale_every", only(0), "gradients have the noise of the projection", "0"),
    ("model.experts", only(0), "experts keep whole inputs", "0"),
    ("model.kv_lora_rank", only(0), "latent projections keep whole inputs", "0"),
    ("model.mtp_layers", only(0), "MTP layers keep whole inputs", "0"),
    ("overlap.tp", unless("domino"), "halves of a micro-batch share no projection", "true"),
    when=lambda name: bool(OPTIMIZERS[str(name)].facts.get("input_projection")), off="another rule",
)  # fmt: skip


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


def offloaded_state(optimizer: OptimizerConfig) -> Iterator[Finding]:
    """Check that state in host memory is of rules of elements, any run of which can be updated alone."""
    fit = [name for name in OPTIMIZERS.names() if OPTIMIZERS[name].facts["unit_of_work"] == "elements"]
    for rule in dict.fromkeys((optimizer.name, *(group.get("name", optimizer.name) for group in optimizer.groups))):
        if optimizer.offload != "none" and rule not in fit:
            message = f"{rule} sees whole matrices or parameters, and a sub-group in host memory is any run of elements"
            yield Finding("optimizer.offload", message, f"none, or the rule {' or '.join(fit)}")


def projected_inputs(model: ModelConfig, optimizer: OptimizerConfig) -> Iterator[Finding]:
    """Check that projections of inputs have fewer elements than the inputs of any layer."""
    facts = with_defaults(OPTIMIZERS[optimizer.name].facts)
    rank = optimizer.options.get("rank", facts["options"].get("rank"))
    width = min(model.hidden_size, model.ffn_size, model.num_heads * model.head_dim)
    if facts["input_projection"] and isinstance(rank, int) and rank >= width:
        message = f"{optimizer.name}: rank is {rank}, and a layer has {width} inputs: it would save no fewer elements"
        yield Finding("optimizer.options", message, f"a rank below {width}")
