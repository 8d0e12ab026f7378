"""The table of exclusions: for values of a key, the values that other keys may have beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from megascale.catalog.backends import AUTO
from megascale.catalog.decays import uses_decay_steps
from megascale.catalog.precisions import PRECISIONS
from megascale.catalog.recipes import RECIPES
from megascale.catalog.schedules import SCHEDULES
from megascale.config.backends import Fp8Config
from megascale.config.data import DataConfig
from megascale.config.fault import FaultConfig
from megascale.config.finding import Finding
from megascale.config.model import EXPERT_KEYS, ModelConfig
from megascale.config.moe import MoeConfig
from megascale.config.parallel import ParallelConfig
from megascale.config.section import Section
from megascale.config.train import CheckpointConfig, ObserveConfig, OptimizerConfig, TrainConfig

Test = Callable[[object], bool]


def only(*values: object) -> Test:
    """Return a test for one of `values`."""
    return lambda value: value in values


def unless(*values: object) -> Test:
    """Return a test for none of `values`."""
    return lambda value: value not in values


def is_full_precision(precision: object) -> bool:
    """Return True for a value of `train.precision` without GEMMs of a recipe."""
    return not PRECISIONS[str(precision)].facts.get("quantizes")


def can_wait(schedule: object) -> bool:
    """Return True for a schedule whose backwards can come some forwards later."""
    facts = SCHEDULES["1f1b" if schedule is None else str(schedule)].facts
    return facts["periodic"] and not facts["pairs"]


@cache
def _field_of(section: type, name: str) -> str:
    """Return the field of a key: the value that was given, where the section derives one under the key's name."""
    explicit = f"explicit_{name}"
    return explicit if explicit in getattr(section, "model_fields", (explicit,)) else name


@dataclass(frozen=True, eq=False)  # hashed by identity, not with all rows
class Exclusions:
    """The limits of other keys while the value of `key` passes the test `when`. `rows`: key, test of its value, message
    and hint of the finding after a failure. A message may name the `{value}` of its key, the `{given}` value of `key`,
    and the last part of `key`, its `{name}`.
    """

    key: str
    when: Test
    rows: tuple[tuple[str, Test, str, str], ...]

    @property
    def sections(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(key.partition(".")[0] for key in (self.key, *(row[0] for row in self.rows))))

    def __call__(self, **sections: Any) -> list[Finding]:

        def read(key: str) -> object:
            table, _, name = key.partition(".")
            return getattr(section := sections[table], _field_of(section.__class__, name))

        if not self.when(given := read(self.key)):
            return []
        name, values = self.key.rpartition(".")[2], [read(key) for key, _, _, _ in self.rows]
        return [
            Finding(key, message.format(value=_as_toml(value), given=_as_toml(given), name=name), hint)
            for value, (key, passes, message, hint) in zip(values, self.rows, strict=True)
            if not passes(value)
        ]


def _as_toml(value: object) -> object:
    return str(value).lower() if isinstance(value, bool) else value


NO_EFFECT, REMOVE = "has no effect with {name} = {given}", "remove the key"


def _without_effect(key: str, when: Test, keys: dict[str, Test], on: str = "", hint: str = "") -> Exclusions:
    """Return the exclusions of `keys` without an effect, each with the test of its default. `on`: what `key` is for an
    effect, such as "above 0", if that is the hint.
    """
    hint = hint or (f"{key} {on}, or {REMOVE}" if on else REMOVE)
    return Exclusions(key, when, tuple((other, unset, NO_EFFECT, hint) for other, unset in keys.items()))


def _off(switch: str, when: Test, section: type[Section], *names: str, on: str = "", hint: str = "") -> Exclusions:
    """Return the exclusions of keys of the switch's table without an effect, but with their defaults."""
    table, fields = switch.partition(".")[0], section.model_fields
    defaults = {field.alias or name: field.default for name, field in fields.items()}
    return _without_effect(switch, when, {f"{table}.{name}": only(defaults[name]) for name in names}, on, hint)


def unsupported(switch: str, *rows: tuple[str, Test, str, str], when: Test = bool, off: str = "") -> Exclusions:
    """Return the exclusions of keys without an implementation for a switch that is on: true, above 0, not empty. `off`:
    the switch with another value, for the hint.
    """
    end, off = f" ({switch} = {{given}})", f", or {off or 'no ' + switch.rpartition('.')[2]}"
    return Exclusions(switch, when, tuple((key, passes, what + end, hint + off) for key, passes, what, hint in rows))


NO_LEARNED_POSITIONS = _without_effect("model.position", unless("learned"), {"model.positions": only(None)})

NO_ROPE = _without_effect("model.position", unless("rope"), {
    "model.rope_theta": only(10_000.0), "model.rope_scaling": only(None), "model.local_rope_theta": only(None),
    "model.rotary_fraction": only(1),
})  # fmt: skip

NO_EXPERTS = _off("model.experts", only(0), ModelConfig, *EXPERT_KEYS[1:], on="above 0")

NO_BALANCED_EXPERTS = _without_effect("model.experts", only(0), {
    "moe.balance": only("none"), "moe.z_loss_weight": only(0.0), "moe.capacity_factor": only(None),
    "moe.dispatcher": only("all_to_all"), "moe.token_blocks": only(1),
}, "above 0")  # fmt: skip

NO_BALANCE_LOSS = _off("moe.balance", only("none"), MoeConfig, "balance_weight", hint="moe.balance, or remove the key")

NO_BALANCE_GROUP = _off("moe.balance", unless("group"), MoeConfig, "balance_group", on="= group")

NO_BALANCE_BIAS = _without_effect("model.balance_bias", only(False), {"moe.bias_rate": only(1e-3)}, "= true")

EXPERTS = unsupported(
    "model.experts",
    ("model.block", only("serial", "sandwich", "post_norm", "fog"),
     "experts follow attention, in a branch of their own", "serial, sandwich, post_norm or fog"),
    ("parallel.hybrid_dp", only(False), "ranks that exchange tokens run the same micro-batches", "false"),
    ("train.mlp_tiles", only(1), "experts have no tiles", "1"),
)  # fmt: skip

ONE_EXPERT = Exclusions("model.experts_per_token", only(1), (
    ("model.router_normalize", only(False), "makes the weight of a token's only expert 1, and no gradient reaches "
     "the router", "false, or experts_per_token above 1"),
))  # fmt: skip

NO_LATENT = _off(
    "model.kv_lora_rank", only(0), ModelConfig, "q_lora_rank", "rope_head_dim", "value_head_dim", "latent_norm_eps",
    on="above 0",
)  # fmt: skip

LATENT = unsupported(
    "model.kv_lora_rank",
    ("model.norm", only("rmsnorm"), "latent vectors are normalized by rmsnorm", "rmsnorm"),
    ("model.position", only("rope"), "latent attention needs rotary embeddings", "rope"),
    ("model.rotary_fraction", only(1), "rope_head_dim says what is rotated", REMOVE),
    ("model.bias", only(False), "biases are not supported with latent attention", "bias = false"),
    ("model.qkv_bias", only(None, False), "biases are not supported with latent attention", REMOVE),
    ("model.block", only("serial"), "latent attention is in serial blocks", "serial"),
    ("model.qk_norm", only("none"), "norms of q and k are not supported with latent attention", "none"),
    ("model.window", only(None, 0), "windows are not supported with latent attention", REMOVE),
    ("model.attention_softcap", only(None), "a soft cap is not supported with latent attention", REMOVE),
    ("model.attention_sinks", only(False), "sinks are not supported with latent attention", "false"),
)  # fmt: skip

NO_MTP = _without_effect("model.mtp_layers", only(0), {"train.mtp_loss_weight": only(0.1)})

MTP = unsupported(
    "model.mtp_layers",
    ("model.position", unless("learned"), "MTP layers have no learned positions", "rope"),
    ("data.sequence_chunk_tokens", only(None), "chunks of sequences are not supported with MTP layers", REMOVE),
    ("parallel.hybrid_dp", only(False), "planned micro-batches have no targets of MTP layers", "false"),
    ("train.noise_scale_every", only(0), "the noise scale of several losses is not supported", "0"),
)  # fmt: skip

NO_EXITS = _without_effect("model.exits", only([]), {
    "train.exit_loss_weight": only(1.0), "train.exit_warmup_steps": only(0)})  # fmt: skip

EXITS = unsupported(
    "model.exits",
    ("parallel.hybrid_dp", only(False), "planned micro-batches are not supported with exits", "false"),
    ("train.noise_scale_every", only(0), "the noise scale of several losses is not supported", "0"),
)  # fmt: skip

ATTENTION_SINKS = Exclusions("model.attention_sinks", only(True), (
    ("model.dropout", only(0), "attention with sinks has no dropout", "0"),
    ("model.attention_softcap", only(None), "attention with sinks has no soft cap", "no soft cap"),
    ("backends.attention", only(AUTO), "attention with sinks runs by backends.partial_attention", "auto"),
))  # fmt: skip

SPARSE_ATTENTION = Exclusions("model.sparse_attention", bool, (
    ("model.window", only(None, 0), "the local blocks of sparse attention are its window", REMOVE),
    ("model.kv_lora_rank", only(0), "sparse attention is not supported with latent attention", "0"),
    ("model.dropout", only(0), "sparse attention has no dropout", "0"),
    ("model.attention_softcap", only(None), "sparse attention has no soft cap", "no soft cap"),
))  # fmt: skip

TIED_HEAD = Exclusions("model.tie_embeddings", only(True), (
    ("model.mup_base_width", only(0), "the head's scale and learning rate are not the token embedding's under muP",
     "tie_embeddings = false, or remove the key"),
))  # fmt: skip

MOCK_DATA = _off("data.mock", only(True), DataConfig, "packing", "sample_weight", hint="data.train, or remove the key")

NO_DOCUMENTS = _without_effect("data.attention_mask", unless("document"), {
    "data.eod_mask_loss": only(True), "data.eod": only(None), "data.document_length": only(None),
}, "= document")  # fmt: skip

NOT_DECOMPOSED = _without_effect("data.packing", unless("decompose"), {
    "data.decompose_min_length": only(None), "data.decompose_bucket_samples": only(None),
    "data.curriculum": only(None, "mixed"), "data.decompose_cycle": only(None),
}, "= decompose")  # fmt: skip

NO_POLICY = Exclusions("data.blend_policy", only(None), (
    ("data.blend_policy_every", only(None), "has no effect without a policy", "data.blend_policy, or remove the key"),
))  # fmt: skip

SAMPLE_WEIGHTS = unsupported(
    "data.sample_weight",
    ("train.noise_scale_every", only(0), "the noise scale is in tokens, which have unequal weights", "0"),
)  # fmt: skip

EXPERT_PARALLEL = Exclusions("parallel.ep", unless(1), (
    ("train.noise_scale_every", only(0),
     "an expert's first gradient is of tokens of several ranks, and no micro-batch's (parallel.ep = {given})",
     "0, or ep = 1"),
))  # fmt: skip

WHOLE_SEQUENCES = Exclusions("data.sequence_chunk_tokens", only(None), (
    ("data.sequence_chunks_saved", only(1), "has no effect without data.sequence_chunk_tokens", REMOVE),
))  # fmt: skip

CHUNKS = unsupported(
    "data.sequence_chunk_tokens",
    ("parallel.cp", only(1), "a rank has all chunks of a sequence, and cp = {value} splits it", "1"),
    ("parallel.hybrid_dp", only(False), "hybrid_dp deals whole documents to ranks", "false"),
    ("model.dropout", only(0), "chunks have no dropout", "0"),
    ("model.attention_softcap", only(None), "needs all keys at once", "whole sequences"),
    ("moe.balance", only("none", "step"), "a chunk is not all of a sequence, whose loads are balanced", "step"),
    ("moe.capacity_factor", only(None), "a chunk is not all of a sequence, which has the capacity", "none"),
    ("train.precision", is_full_precision, "chunks have no scales of fp8 that recomputation repeats", "bf16"),
    ("train.noise_scale_every", only(0), "the gradient of a sequence is a sum over chunks", "0"),
    ("data.blend_policy", only(None), "the loss of a sequence is a sum over chunks", "no policy"),
)  # fmt: skip

VOCABULARY = unsupported(
    "parallel.vocab_pp",
    ("parallel.pp", unless(1), "there are no stages to share the vocabulary", "above 1"),
    ("model.mtp_layers", only(0), "MTP layers use whole embeddings and heads", "0"),
    ("model.exits", only([]), "exits use whole heads", "[]"),
    ("data.sequence_chunk_tokens", only(None), "chunks of sequences are not supported", REMOVE),
    ("parallel.hybrid_dp", only(False), "planned micro-batches are not supported", "false"),
    ("train.noise_scale_every", only(0), "the gradients of a micro-batch end at different times", "0"),
    ("parallel.schedule", can_wait, "no room for passes between forwards and backwards", "interleaved_zb or zb_v"),
    ("data.blend_policy", only(None), "the loss of a micro-batch is not the last stage's", "no policy"),
    ("optimizer.name", unless("lamb"), "lamb needs norms of whole parameters", "adamw"),
)  # fmt: skip

SKIPS = unsupported(
    "parallel.skip_ratio",
    ("parallel.schedule", only(None, "1f1b"), "ranks would be idle where others skip", "1f1b"),
    ("parallel.pp", unless(1, 2), "no stage lies between the first and the last", "above 2"),
    ("parallel.vpp", only(1), "ranks would be idle where others skip", "1"),
    ("parallel.vocab_pp", only(0), "its passes wait for all stages", "0"),
    ("model.experts", only(0), "experts balance the tokens of all micro-batches", "0"),
    ("model.exits", only([]), "a skipped chunk has no exit", "[]"),
    ("data.sequence_chunk_tokens", only(None), "chunks of a sequence need the same layers", "whole sequences"),
    ("parallel.hybrid_dp", only(False), "rings need the same micro-batches on all stages", "false"),
    ("batch.rampup", only(None), "FLOPs are counted for one number of micro-batches", "no ramp-up"),
    ("train.noise_scale_every", only(0), "the first micro-batch has no gradient of what it skips", "0"),
)  # fmt: skip

NO_PIPELINE = _without_effect("parallel.pp", only(1), {"nccl.pp_carveout": only(0), "parallel.far_axis": only("pp")})

NOT_HYBRID = _without_effect("parallel.hybrid_dp", only(False), {"data.max_tokens_per_rank": only(None)}, "= true")

HYBRID = unsupported(
    "parallel.hybrid_dp",
    ("parallel.cp_mode", only("ring"), "has no effect", REMOVE),
    ("parallel.vpp", only(1), "pipelines have any number of micro-batches", "1"),
    ("parallel.schedule", only(None, "1f1b"), "rings meet on all stages in 1F1B", "1f1b"),
    ("parallel.sp", only(False), "tokens of a rank need not divide over tp", "false"),
    ("parallel.zero", only(0, 1), "ranks have different numbers of reductions of gradients", "0 or 1"),
    ("batch.micro", only(1), "the planner packs documents", "1"),
    ("batch.rampup", only(None), "steps have no fixed number of micro-batches", "no ramp-up"),
    ("model.dropout", only(0), "has no dropout", "0"),
    ("model.attention_softcap", only(None), "needs all keys at once", "no soft cap"),
    ("train.compile", only(False), "micro-batches have any number of tokens", "false"),
    ("train.noise_scale_every", only(0), "micro-batches are no samples", "0"),
    ("data.blend_policy", only(None), "micro-batches have documents of many datasets", "no policy"),
    ("data.attention_mask", only("document"), "ranks get documents, each with its own attention", "document"),
    ("data.reader", unless("host"), "every rank reads the boundaries of all samples of a step", "rank"),
)  # fmt: skip

FROZEN = unsupported(
    "train.freeze",
    ("optimizer.name", unless("lamb"), "lamb needs norms of all parameters of a bucket", "adamw"),
    ("sites.count", only(1), "sites exchange all weights", "1"),
    ("fault.rebuild_stage", only(0), "a lost stage is rebuilt by its neighbours' optimizer state", "0"),
)  # fmt: skip

LAMB = Exclusions("optimizer.name", only("lamb"), (
    ("optimizer.master_weights", only("full"), "lamb needs master weights in fp32", "full, or another optimizer"),
))  # fmt: skip

COMPENSATED = Exclusions("optimizer.master_weights", unless("full"), (
    ("backends.optimizer", only(AUTO), "is for master weights in fp32", "auto, or optimizer.master_weights = full"),
))  # fmt: skip

ZCLIP = _off("optimizer.zclip", only(False), OptimizerConfig, "zclip_threshold", "zclip_alpha", "zclip_warmup",
             on="= true")  # fmt: skip

SKIPPED_STEPS = _off("optimizer.skip_sigma", only(0), OptimizerConfig, "skip_window", on="above 0")

NO_OFFLOAD = _off("optimizer.offload", only("none"), OptimizerConfig, "offload_stride", on="= host")

NO_CHECKPOINTS = _off("checkpoint.every", only(0), CheckpointConfig, "in_memory_every", on="above 0")
NO_COPIES = _off("checkpoint.in_memory_every", only(0), CheckpointConfig, "replicate", on="above 0")
NO_PRUNING = _off("checkpoint.keep", only(0), CheckpointConfig, "keep_every", on="above 0")

# Modes: the keys of another mode are mistakes.

NO_TAIL = _without_effect(
    "optimizer.decay", lambda decay: not uses_decay_steps(str(decay)), {"optimizer.decay_steps": only(None)},
    hint="remove the key: the decay ends with train.steps; or optimizer.decay = wsd",
)  # fmt: skip

CONSTANT_RATE = _without_effect(
    "optimizer.decay", only("constant"), {"optimizer.min_lr": only(0.0), "optimizer.schedule_steps": only(None)}
)

NO_AVERAGE = _off("train.weight_average", only("none"), TrainConfig, "weight_average_every", on="= ema or lawa")
NO_EMA = _off("train.weight_average", unless("ema"), TrainConfig, "weight_average_decay", on="= ema")
NO_LAWA = _off("train.weight_average", unless("lawa"), TrainConfig, "weight_average_count", on="= lawa")

NO_HISTORY = _off(
    "fp8.recipe", lambda recipe: recipe in RECIPES.cards and RECIPES[str(recipe)].facts.get("scaling") != "delayed",
    Fp8Config, "history", on="= delayed",
)  # fmt: skip

BLOCK_SCALES = _off(
    "fp8.recipe", lambda recipe: recipe in RECIPES.cards and RECIPES[str(recipe)].facts["token_run"] > 0,
    Fp8Config, "fast_dgrad", hint="another fp8.recipe, or remove the key",
)  # fmt: skip

NO_HOST_READER = _off("data.reader", unless("host"), DataConfig, "reader_timeout_s", on="= host")

MODES = (NO_ROPE, NO_TAIL, CONSTANT_RATE, NO_AVERAGE, NO_EMA, NO_LAWA, NO_HISTORY, NO_HOST_READER)


def without_other_modes(tree: dict[str, Any]) -> dict[str, Any]:
    """Drop keys of another mode from a stored configuration: earlier versions let users set them."""
    for exclusion in MODES:
        table, _, switch = exclusion.key.partition(".")
        given = tree.get(table, {}).get(switch)
        for key, passes, _, _ in exclusion.rows if given is not None and exclusion.when(given) else ():
            section, _, name = key.partition(".")
            if not passes(tree.get(section, {}).get(name)):
                tree[section].pop(name, None)
    return tree


# Switches that are off, as by an override of the command line: other keys wait for them, which is worth a warning.

OWN_VALIDATION = Exclusions("data.valid", unless(None), (
    ("data.split", only(DataConfig.model_fields["split"].default, [1.0, 0.0]),
     "has no effect beside data.valid: all documents of data.train are for training", "remove one of them"),
))  # fmt: skip

SWITCHED_OFF = (
    OWN_VALIDATION,
    _without_effect("train.precision", is_full_precision, {
        "fp8.recipe": only("tensorwise"), "fp8.scale": only("fp32"), "fp8.schedule": only([]),
        "fp8.fast_dgrad": only(False),
    }, hint=f"train.precision = fp8, or {REMOVE}"),
    _off("parallel.tp", only(1), ParallelConfig, "sp", on="above 1"),
    _off("parallel.cp", only(1), ParallelConfig, "cp_mode", on="above 1"),
    _without_effect("parallel.ep", only(1), {"moe.dispatcher": only("all_to_all"), "moe.token_blocks": only(1)}),
    _without_effect("parallel.pp", only(1), {"parallel.schedule": only("1f1b", "interleaved_1f1b")}, "above 1"),
    _without_effect("parallel.vpp", only(1), {"parallel.schedule": unless("interleaved_1f1b")}, "above 1"),
    _off("train.eval_every", only(0), TrainConfig, "eval_steps"),
    _off("train.eval_every", only(0), TrainConfig, "logit_sharpness_every", on="above 0"),
    _off("train.noise_scale_every", only(0), TrainConfig, "noise_scale_decay"),
    _off("checkpoint.every", only(0), CheckpointConfig, "keep", "keep_every", "max_file_bytes"),
    _off("checkpoint.in_memory_every", only(0), CheckpointConfig, "in_memory_dir"),
    _off("observe.event_store", only(False), ObserveConfig, "store_events", "store_dir", "store_interval_s",
         "store_bytes", "store_events_h"),
    _off("observe.metrics_port", only(0), ObserveConfig, "metrics_address"),
    _off("fault.check_nodes", only(False), FaultConfig, "check_timeout_s", "check_tolerance"),
)  # fmt: skip
