"""Rules of `[batch]`, `[train]`, `[fp8]`, `[optimizer]` and `[backends]`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megascale.catalog.backends import AUTO, BACKENDS, Requirement, unmet_requirement
from megascale.catalog.layers import BLOCKS
from megascale.catalog.precisions import PRECISIONS
from megascale.catalog.recipes import RECIPES
from megascale.catalog.schedules import SCHEDULES
from megascale.config.backends import BackendsConfig, Fp8Config
from megascale.config.batch_rampup import full_batch_steps
from megascale.config.data import DataConfig
from megascale.config.divisors import join_values
from megascale.config.finding import Finding
from megascale.config.model import ModelConfig
from megascale.config.parallel import ParallelConfig
from megascale.config.train import BatchConfig, OptimizerConfig, TrainConfig

MAX_MICROBATCHES = 2**20
"""Micro-batches of a rank in a step: a schedule lists every action of each."""


def fp8_shapes(
    model: ModelConfig, parallel: ParallelConfig, batch: BatchConfig, train: TrainConfig, fp8: Fp8Config
) -> Iterator[Finding]:
    """Check that FP8 GEMM sizes are multiples of the recipe's alignment, and that some layer runs in FP8."""
    if train.precision != "fp8":
        return
    first, last, layers = fp8.bf16_first, fp8.bf16_last, model.num_layers
    if first + last >= layers:
        message = f"the first {first} and last {last} of {layers} layers leave none in fp8"
        yield Finding("fp8.bf16_first", message, "bf16_first = 0 and bf16_last = 0, or train.precision = bf16")
    facts, head, tp = RECIPES[fp8.recipe].facts, model.head_dim, parallel.tp
    fused_columns, columns = (model.num_heads + 2 * model.num_kv_heads) * head, "columns of q, k and v on a rank"
    if facts["granularity"] == "block":  # a block must not span k and v
        fused_columns, columns = model.num_kv_heads * head, "columns of k on a rank"
    for key, size, ranks, noun in (
        ("model.hidden_size", model.hidden_size, 1, "hidden_size"),
        ("model.num_heads", model.num_heads * head, tp, "columns of the heads on a rank"),
        ("model.num_kv_heads", fused_columns, tp, columns),
        ("model.ffn_size", model.ffn_size, tp, "columns of the MLP on a rank"),
        ("model.seq_length", model.seq_length * batch.micro, 1, "tokens in a micro-batch"),
    ):
        if size // ranks % facts["alignment"]:
            needs = f"the fp8 recipe {fp8.recipe} needs multiples of {facts['alignment']}"
            to_change, hint = (key, "another size") if size % facts["alignment"] else ("parallel.tp", "fewer ranks")
            yield Finding(to_change, f"{size // ranks} {noun}: {needs}", f"{hint}, or another fp8.recipe")


def recomputed_operations(train: TrainConfig) -> Iterator[Finding]:
    """Check that recompute_ops has no duplicates."""
    if train.recompute == "selective" and len(set(train.recompute_ops or ())) < len(train.recompute_ops or ()):
        yield Finding("train.recompute_ops", "names an operation twice", "remove the duplicate")


def recompute_chunks(parallel: ParallelConfig, train: TrainConfig) -> Iterator[Finding]:
    """Check that recompute_chunks exist and are unique."""
    key, chunks, last = "train.recompute_chunks", train.recompute_chunks or (), parallel.vpp - 1
    if missing := sorted(set(chunks) - set(range(parallel.vpp))):
        message = f"with vpp = {parallel.vpp} there is no chunk {join_values(missing)}"
        yield Finding(key, message, f"chunks 0 to {last}" if last else "chunk 0, or remove the key")
    elif len(set(chunks)) < len(chunks):
        yield Finding(key, "names a chunk twice", "remove the duplicate")


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


def counts(model: ModelConfig, parallel: ParallelConfig, batch: BatchConfig) -> Iterator[Finding]:
    """Check that tokens of a micro-batch fit 31 bits, and micro-batches of a step in memory."""
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
    if name and SCHEDULES[name].facts["unbounded_in_flight"]:
        bounded = [card.name for card in SCHEDULES.cards.values() if not card.facts["unbounded_in_flight"]]
        message = f"{name} computes the head's gradient of all micro-batches before it ends the first backward"
        yield Finding(key, message, f"parallel.schedule = {' or '.join(bounded)}, or 0")


def tile_tokens(
    model: ModelConfig,
    parallel: ParallelConfig,
    batch: BatchConfig,
    train: TrainConfig,
    data: DataConfig,
    fp8: Fp8Config,
) -> Iterator[Finding]:
    """Check that a rank's sequences have tokens for every tile, and with FP8 whole blocks of tokens."""
    tiles = train.mlp_tiles
    rows = (data.chunk_tokens or model.seq_length // parallel.cp) // (parallel.tp if parallel.sp else 1)
    if tiles == 1:
        return
    if tiles > rows:
        message = f"a rank has {rows} tokens of a sequence for {tiles} tiles"
        yield Finding("train.mlp_tiles", message, f"at most {rows}")
    elif train.precision == "fp8":
        alignment, tokens = RECIPES[fp8.recipe].facts["alignment"], rows * batch.micro
        if rows % tiles or tokens // tiles % alignment:
            message = f"{tokens} tokens on a rank in {tiles} tiles: the fp8 recipe {fp8.recipe} needs multiples"
            yield Finding("train.mlp_tiles", f"{message} of {alignment} in a tile", "fewer tiles")


def tile_scales(model: ModelConfig, train: TrainConfig, fp8: Fp8Config) -> Iterator[Finding]:
    """Check that FP8 scales of a tile are those of all tokens."""
    facts = RECIPES[fp8.recipe].facts
    if train.mlp_tiles == 1 or train.precision != "fp8":
        return
    if facts["scaling"] != "static" and facts["granularity"] != "block":
        message = f"with the fp8 recipe {fp8.recipe} a scale covers all tokens, and a tile would have its own"
        yield Finding("train.mlp_tiles", message, "1, or fp8.recipe = blockwise or mu_unit")
    elif BLOCKS[model.block].facts.get("shares_casts"):
        message = f"attention and MLP of a {model.block} block share an fp8 operand, and tiles have their own"
        yield Finding("train.mlp_tiles", message, "1, or train.precision = bf16")


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
    steps = full_batch_steps(batch, train)
    if warmup >= steps:
        run = f"train.steps = {train.steps}"
        if steps != train.steps:
            run = f"{steps} steps of batch.global, as many samples as {run} with the ramp-up"
        yield Finding("optimizer.warmup_steps", f"{warmup} is not less than {run}", f"fewer than {steps}")
    elif optimizer.decay == "wsd" and (decay_steps or 0) > steps - warmup:
        message = f"{decay_steps} do not fit after the warm-up"
        yield Finding("optimizer.decay_steps", message, f"at most {steps - warmup}")


def optimizer_groups(model: ModelConfig, optimizer: OptimizerConfig) -> Iterable[Finding]:
    """Check options of the optimizer, and that every parameter is in one group."""
    if not (optimizer.groups or optimizer.options or model.mup_base_width):
        return ()
    from megascale.layout.param_groups import group_findings  # a layer above: the parameters of a model

    return group_findings(model, optimizer)


def compensated_weights(train: TrainConfig, optimizer: OptimizerConfig) -> Iterator[Finding]:
    """Check that compensated weights are those of bf16 training."""
    facts, precision = PRECISIONS[train.precision].facts, train.precision
    if optimizer.master != "full" and not (facts["master_weights"] and facts["compute_dtype"] == "bfloat16"):
        message = f"there are no bf16 weights with precision = {precision}"
        yield Finding("optimizer.master", message, "bf16, or remove the key")


def supported_backends(
    model: ModelConfig,
    parallel: ParallelConfig,
    train: TrainConfig,
    fp8: Fp8Config,
    optimizer: OptimizerConfig,
    backends: BackendsConfig,
    data: DataConfig,
) -> Iterator[Finding]:
    """Check that a selected backend supports the model, dtype, layout and FP8 recipe."""
    recipe = fp8.recipe if train.precision == "fp8" else None
    dtype = PRECISIONS[train.precision].facts["compute_dtype"]
    for operation, registry in BACKENDS.items():
        requested = getattr(backends, operation)
        requirement = Requirement.for_operation(operation, model, dtype, optimizer.name, parallel.tp, recipe)
        requirement = requirement.with_documents() if data.mask == "document" else requirement
        if parallel.cp_keys > 1 or parallel.cp_mode == "hybrid" or data.chunk_tokens:
            requirement = requirement.with_partial_attention(operation)
        if requested != AUTO and (reason := unmet_requirement(registry[requested], requirement)):
            yield Finding(f"backends.{operation}", f"{requested} {reason}", "auto, or another backend")
