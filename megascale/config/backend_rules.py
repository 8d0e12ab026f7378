"""Rules of `[fp8]` and `[backends]`: shapes of a recipe's GEMMs, and demands on backends."""

from __future__ import annotations

from collections.abc import Iterator

from megascale.catalog.backends import AUTO, BACKENDS, Requirement, unmet_requirement
from megascale.catalog.layers import BLOCKS
from megascale.catalog.precisions import PRECISIONS
from megascale.catalog.recipes import RECIPES
from megascale.config.backends import BackendsConfig, Fp8Config, bf16_layers
from megascale.config.data import DataConfig
from megascale.config.finding import Finding
from megascale.config.model import ModelConfig
from megascale.config.parallel import ParallelConfig
from megascale.config.train import BatchConfig, OptimizerConfig, TrainConfig


def fp8_shapes(
    model: ModelConfig, parallel: ParallelConfig, batch: BatchConfig, train: TrainConfig, fp8: Fp8Config
) -> Iterator[Finding]:
    """Check the sizes of FP8 GEMMs against the recipe's alignment, and that some layer runs in FP8."""
    if not train.quantizes:
        return
    (first, last), layers = bf16_layers(fp8, model.num_layers), model.num_layers
    if first + last >= layers:
        message = f"the first {first} and last {last} of {layers} layers leave none in fp8"
        message += (
            ", and these stay in bf16 by default" if fp8.first_layers_bf16 is fp8.last_layers_bf16 is None else ""
        )
        yield Finding(
            "fp8.first_layers_bf16",
            message,
            "first_layers_bf16 = 0 and last_layers_bf16 = 0, or train.precision = bf16",
        )
    facts, head, tp = fp8.facts, model.head_dim, parallel.tp
    for key, ranks in (("parallel.tp", tp), ("parallel.cp", parallel.cp)):
        if facts["whole"] and ranks > 1:
            yield Finding(key, f"{ranks} ranks shard matrices, and the fp8 recipe {fp8.recipe} needs whole ones", "1")
    fused_columns, columns = (model.num_heads + 2 * model.num_kv_heads) * head, "columns of q, k and v on a rank"
    expert_gemms = model.experts > 0 and facts["serves_experts"]
    tokens = "tokens of a sequence" if facts["token_run"] else "tokens in a micro-batch"
    if facts["weight"].block.spans_rows or facts["stochastic"] or model.kv_lora_rank:  # a block must not span k and v
        fused_columns, columns = model.num_kv_heads * head, "columns of k on a rank"
    latent = (
        ("model.kv_lora_rank", model.kv_lora_rank, 1, "kv_lora_rank"),
        ("model.q_lora_rank", model.q_lora_rank, 1, "q_lora_rank"),
        ("model.rope_head_dim", model.num_heads * model.rope_head_dim, tp, "rotated columns of q on a rank"),
    )
    for key, size, ranks, noun in (
        ("model.hidden_size", model.hidden_size, 1, "hidden_size"),
        *(latent if model.kv_lora_rank else ()),
        ("model.num_heads", model.num_heads * model.value_head_dim, tp, "columns of the heads on a rank"),
        ("model.num_kv_heads", fused_columns, tp, columns),
        (
            "model.ffn_size",
            0 if model.experts and not model.dense_layers else model.ffn_size,
            tp,
            "columns of the MLP on a rank",
        ),
        ("model.shared_ffn_size", model.shared_ffn_size, tp, "columns of the shared expert on a rank"),
        ("model.seq_length", model.seq_length * (1 if facts["token_run"] else batch.micro), 1, tokens),
        *([("model.expert_ffn_size", model.expert_ffn_size, 1, "columns of an expert")] if expert_gemms else []),
    ):
        if size // ranks % facts["alignment"]:
            needs = f"the fp8 recipe {fp8.recipe} needs multiples of {facts['alignment']}"
            to_change, hint = (key, "another size") if size % facts["alignment"] else ("parallel.tp", "fewer ranks")
            yield Finding(to_change, f"{size // ranks} {noun}: {needs}", f"{hint}, or another fp8.recipe")


def fp8_schedule(fp8: Fp8Config) -> Iterator[Finding]:
    """Check the order of the recipe's changes."""
    key, end, last = "fp8.schedule", -1.0, fp8.recipe
    for start, change in fp8.schedule:
        if start <= end:
            yield Finding(key, f"{change} at {start} does not come after {end}", "ascending shares of the run")
        if change == last:
            yield Finding(key, f"{change} at {start} follows itself", "another recipe, bf16 or bf16_forward")
        end, last = start, change


def fp8_scale(train: TrainConfig, fp8: Fp8Config) -> Iterator[Finding]:
    """Check that a format of scales is for amaxes of the operands themselves, and has an effect in a phase."""
    facts, key = RECIPES[fp8.recipe].facts, "fp8.scale"
    if not train.quantizes or fp8.scale == "fp32":
        return
    if facts["scaling"] != "current":
        message = f"{fp8.scale} is for scales by an operand's amax, and those of {fp8.recipe} are {facts['scaling']}"
        yield Finding(key, message, "fp8.recipe = tensorwise, rowwise or blockwise, or remove the key")
    elif all(phase.facts is RECIPES[phase.recipe].facts for _, phase in fp8.phases):
        message = f"has no effect: the fp8 recipe {fp8.recipe} has scales in {facts['input'].scale}"
        yield Finding(key, message, "remove the key")


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
    rows = (data.sequence_chunk_tokens or model.seq_length // parallel.cp) // (parallel.tp if parallel.sp else 1)
    if tiles == 1:
        return
    if tiles > rows:
        message = f"a rank has {rows} tokens of a sequence for {tiles} tiles"
        yield Finding("train.mlp_tiles", message, f"at most {rows}")
    elif train.quantizes:
        run, alignment = fp8.facts["token_run"], fp8.facts["alignment"]
        tokens, unit, of = (rows, run, " of a sequence") if run else (rows * batch.micro, alignment, "")
        if rows % tiles or tokens // tiles % unit:
            message = f"{tokens} tokens{of} on a rank in {tiles} tiles: the fp8 recipe {fp8.recipe} needs multiples"
            yield Finding("train.mlp_tiles", f"{message} of {unit} in a tile", "fewer tiles")


def tile_scales(model: ModelConfig, train: TrainConfig, fp8: Fp8Config) -> Iterator[Finding]:
    """Check that FP8 scales of a tile are those of all tokens."""
    facts = fp8.facts
    if train.mlp_tiles == 1 or not train.quantizes:
        return
    if facts["covers_tokens"]:
        message = f"with the fp8 recipe {fp8.recipe} a scale covers all tokens, and a tile would have its own"
        yield Finding("train.mlp_tiles", message, "1, or fp8.recipe = blockwise, mxfp8 or static")
    elif facts["stochastic"]:
        message = f"the fp8 recipe {fp8.recipe} has random bits by a token's place in all of the micro-batch"
        yield Finding("train.mlp_tiles", message, "1, or another fp8.recipe")
    elif BLOCKS[model.block].facts.get("shares_casts"):
        message = f"attention and MLP of a {model.block} block share an fp8 operand, and tiles have their own"
        yield Finding("train.mlp_tiles", message, "1, or train.precision = bf16")


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
    recipe = fp8.recipe if train.quantizes else None
    dtype = PRECISIONS[train.precision].facts["compute_dtype"]
    for operation, registry in BACKENDS.items():
        requested = getattr(backends, operation)
        requirement = Requirement.for_operation(
            operation,
            model,
            dtype,
            optimizer.name,
            parallel.tp,
            recipe,
            document_mask=data.attention_mask == "document",
            attends_in_parts=bool(parallel.cp_keys > 1 or parallel.hybrid_dp or data.sequence_chunk_tokens),
        )
        if requested != AUTO and (reason := unmet_requirement(registry[requested], requirement)):
            yield Finding(f"backends.{operation}", f"{requested} {reason}", "auto, or another backend")
