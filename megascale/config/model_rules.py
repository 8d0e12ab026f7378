"""Rules of `[model]`."""

from __future__ import annotations

from collections.abc import Iterator

from megascale.catalog.layers import NORMS
from megascale.config.attention_pattern import has_no_scores, has_states
from megascale.config.exclusions import ONE_EXPERT, REMOVE, Exclusions, only, unsupported
from megascale.config.finding import Finding, divisors, join_values
from megascale.config.model import ModelConfig
from megascale.config.moe import MoeConfig
from megascale.config.train import CheckpointConfig, TrainConfig


def attention_heads(model: ModelConfig) -> Iterator[Finding]:
    """Check that heads without a head_dim of their own divide hidden_size, and that key-value heads divide heads."""
    if model.explicit_head_dim is None and model.hidden_size % model.num_heads:
        message = f"hidden_size {model.hidden_size} is not divisible by {model.num_heads} heads"
        hint = f"one of {join_values(divisors(model.hidden_size, 512))}, or a head_dim"
        yield Finding("model.num_heads", message, hint)
    if model.num_heads % model.num_kv_heads and not model.kv_lora_rank:  # else latent_attention says which
        message = f"{model.num_heads} heads cannot share {model.num_kv_heads} key-value heads"
        yield Finding("model.num_kv_heads", message, f"one of {join_values(divisors(model.num_heads))}")


def positions(model: ModelConfig) -> Iterator[Finding]:
    """Check that learned positions reach to the end of a sequence."""
    if model.position == "learned" and model.positions is not None and model.positions < model.seq_length:
        message = f"{model.positions} learned positions are fewer than the {model.seq_length} of a sequence"
        yield Finding("model.positions", message, f"seq_length of at most {model.positions}, or remove the key")


def rope(model: ModelConfig) -> Iterator[Finding]:
    """Check that rope rotates pairs of elements, and that a base for layers with a window has such layers."""
    if model.position != "rope" or (model.explicit_head_dim is None and model.hidden_size % model.num_heads):
        return  # `attention_heads` reports the latter
    scaling = model.rope_scaling or {}
    least = 4 if scaling.get("type") == "dynamic" else 2  # the exponent of dynamic scaling is d / (d - 2)
    if model.rotary_dim % 2 or model.rotary_dim < least:
        key = "num_heads" if model.rotary_fraction == 1 else "rotary_fraction"
        key, other = ("rope_head_dim", "number") if model.rope_head_dim else (key, "head_dim or rotary_fraction")
        of = f"{model.rotary_dim} of {model.qk_head_dim}"
        message = f"rope rotates an even number of elements of a head, at least {least}, not {of}"
        yield Finding(f"model.{key}", message, f"another {other}")
    if model.local_rope_theta is not None and not any(map(model.given_window, range(model.num_layers))):
        yield Finding("model.local_rope_theta", "is for layers with a window, and there is none", "remove the key")


def rope_scaling(model: ModelConfig) -> Iterator[Finding]:
    """Check that the ends of a scaling's ramp are in order."""
    scaling = model.rope_scaling or {}
    ends = {"llama3": ("high_freq_factor", 4.0, "low_freq_factor", 1.0), "yarn": ("beta_fast", 32.0, "beta_slow", 1.0)}
    if scaling.get("type") in ends:
        upper, default_upper, lower, default_lower = ends[scaling["type"]]
        high, low = scaling.get(upper, default_upper), scaling.get(lower, default_lower)
        if high < low or (high == low and scaling["type"] == "llama3"):  # yarn's ramp may be a step, as Kimi-K2's
            hint = f"for example {default_upper:g} and {default_lower:g}"
            yield Finding("model.rope_scaling", f"{upper} is not above {lower}", hint)
    if scaling.get("type") == "yarn" and model.rope_theta <= 1:
        message = f"yarn divides by its logarithm, and {model.rope_theta} is not above 1"
        yield Finding("model.rope_theta", message, "for example 10000")


def qk_norm(model: ModelConfig) -> Iterator[Finding]:
    """Check that queries and keys have an RMS norm: their norms have a gain alone."""
    if model.qk_norm not in ("none", "tanh") and NORMS[model.norm].facts["mean"]:
        names = [card.name for card in NORMS.cards.values() if not card.facts["mean"]]
        message = f"{model.norm} subtracts a mean, and q and k need an RMS norm"
        yield Finding("model.qk_norm", message, f"norm = {' or '.join(names)}")


RESIDUAL_TAU = Exclusions("model.residual_tau", bool, (
    ("model.block", only("post_norm", "fog"), "branches of a weighted residual stream end in a norm", "post_norm"),
))  # fmt: skip

UNIT_SCALING = Exclusions("model.unit_scaling", only(True), (
    ("model.block", only("post_norm"), "unit scaling has a norm after each branch and none before", "post_norm"),
    ("model.position", only("rope"), "learned positions would add to the embedding's variance", "rope"),
    ("model.tie_embeddings", only(False), "the head's weight is 1 / hidden_size of an embedding's", "false"),
    ("model.embedding_scale", only(1.0), "the embedding already has variance 1", "remove the key"),
    ("model.init_std", only(0.02), "has no effect with unit scaling", "remove the key"),
))  # fmt: skip


def latent_attention(model: ModelConfig) -> Iterator[Finding]:
    """Check that latent attention has keys of every head, a rotated part, and values no wider than keys, to whose width
    they are padded.
    """
    if not model.kv_lora_rank:
        return
    if model.num_kv_heads != model.num_heads:
        message = f"latent attention has keys of all {model.num_heads} heads, not of {model.num_kv_heads}"
        yield Finding("model.num_kv_heads", message, f"{model.num_heads}")
    if model.rope_head_dim == 0:
        yield Finding("model.rope_head_dim", "latent attention rotates a part of q and k", "for example 64")
    if model.value_head_dim > model.qk_head_dim:
        message = f"values of {model.value_head_dim} are wider than keys of {model.qk_head_dim}"
        yield Finding("model.value_head_dim", message, f"at most {model.qk_head_dim}")


def multi_token_prediction(model: ModelConfig) -> Iterator[Finding]:
    """Check that the last depth of multi-token prediction has a target in a sequence."""
    if model.mtp_layers and model.mtp_layers >= model.seq_length:
        message = f"a sequence of {model.seq_length} has no target of depth {model.mtp_layers}"
        yield Finding("model.mtp_layers", message, f"at most {model.seq_length - 1}")


def early_exits(model: ModelConfig, train: TrainConfig) -> Iterator[Finding]:
    """Check that exits ascend and are before the end, and that a list of their weights has as many."""
    exits, weights = model.exits, train.exit_loss_weight
    if exits != sorted(set(exits)) or any(after >= model.num_layers for after in exits):
        message = f"{exits} are not ascending numbers of layers before the last, {model.num_layers}"
        yield Finding("model.exits", message, f"numbers from 1 to {model.num_layers - 1}")
    if exits and isinstance(weights, list) and len(weights) != len(exits):
        message = f"{len(weights)} weights for {len(exits)} exits"
        yield Finding("train.exit_loss_weight", message, "a weight for each of model.exits, or one for all")


def attention_by_layer(model: ModelConfig) -> Iterator[Finding]:
    """Check that a list of windows and a pattern of attention are no longer than the layers."""
    windows = model.window if isinstance(model.window, list) else []
    for key, given, unit in ("window", windows, "numbers"), ("attention_pattern", model.attention_pattern, "letters"):
        if given and len(given) > model.num_layers:
            message = f"{len(given)} {unit} for {model.num_layers} layers"
            yield Finding(f"model.{key}", message, f"at most {model.num_layers}: fewer repeat over the layers")


def sparse_attention(model: ModelConfig) -> Iterator[Finding]:
    """Check that the heads share the offsets of a sparse pattern evenly, so that together they see all keys, and that
    the pattern hides some.
    """
    if (sparse := model.sparse_pattern) is None:
        return
    if model.num_heads % sparse.stride:
        message = f"{model.num_heads} heads cannot share {sparse.stride} offsets evenly, to see all keys together"
        strides = [stride for stride in divisors(model.num_heads) if stride > 1]
        hint = f"stride = one of {join_values(strides)}" if strides else "more heads, or remove the key"
        yield Finding("model.sparse_attention", message, hint)
    if sparse.local_blocks * sparse.block >= model.seq_length:
        message = f"{sparse.local_blocks} local blocks of {sparse.block} tokens reach over all {model.seq_length}"
        hint = f"blocks of fewer than {model.seq_length} tokens together, or remove the key"
        yield Finding("model.sparse_attention", message, hint)


NO_SCORES = Exclusions("model.attention_pattern", has_no_scores, tuple(
    (f"model.{key}", unset, "has no effect: no layer of {given} has softmax attention", "remove the key")
    for key, unset in {
        "window": only(None, 0), "qk_norm": only("none"), "softmax_scale": only(None),
        "attention_softcap": only(None), "attention_sinks": only(False), "sparse_attention": only(None),
    }.items()
))  # fmt: skip

LINEAR_ATTENTION = unsupported(
    "model.attention_pattern",
    ("model.block", only("serial", "sandwich", "post_norm", "fog"), "linear attention is a branch of its own",
     "serial, sandwich, post_norm or fog"),
    ("model.unit_scaling", only(False), "unit scaling has no rule for linear attention", "false"),
    ("parallel.hybrid_dp", only(False), "rings of any ranks exchange keys and values, and no states", "false"),
    when=has_states, off="layers of softmax attention alone",
)  # fmt: skip


def experts(model: ModelConfig) -> Iterator[Finding]:
    """Check that tokens can choose as many experts, from as many groups."""
    experts, chosen, groups, top = (
        model.experts, model.experts_per_token, model.router_groups, model.router_top_groups
    )  # fmt: skip
    if not experts:
        return
    if model.dense_layers >= model.num_layers:
        message = f"{model.dense_layers} dense layers of {model.num_layers} leave none with experts"
        yield Finding("model.dense_layers", message, f"at most {model.num_layers - 1}, or experts = 0")
    if experts % groups:
        message = f"{experts} experts cannot be split into {groups} groups"
        yield Finding("model.router_groups", message, f"one of {join_values(divisors(experts))}")
    elif top > groups:
        message = f"a token cannot choose {top} of {groups} group{'s' if groups > 1 else ''} of experts"
        yield Finding("model.router_top_groups", message, f"at most {groups}, or more router_groups")
    elif chosen > (available := experts // groups * top):
        message = f"{chosen} experts a token, of {available} to choose from"
        yield Finding("model.experts_per_token", message, f"at most {available}")
    if model.router_group_value == "top2" and groups in (1, experts):
        message = f"top2 is for several groups of two experts or more, and router_groups = {groups}"
        yield Finding("model.router_group_value", message, "max, or groups of two experts or more")
    if model.shared_gate and not model.shared_ffn_size:
        yield Finding(
            "model.shared_gate", "has no effect without a shared expert", "shared_ffn_size, or remove the key"
        )


def new_router(model: ModelConfig, checkpoint: CheckpointConfig) -> Iterator[Finding]:
    """Check that a router learns from the loss, where no given weights fix the model."""
    if model.experts and checkpoint.resume in ("auto", "never"):
        yield from ONE_EXPERT(model=model)


def unbalanced_experts(model: ModelConfig, moe: MoeConfig) -> Iterator[Finding]:
    """Warn of experts without a balance, and of a capacity that is none."""
    factor = moe.capacity_factor
    if model.experts and moe.balance == "none" and not model.balance_bias:
        yield Finding("moe.balance", "= none: nothing balances experts", "sequence, or model.balance_bias = true")
    if factor is not None and factor * model.experts_per_token >= model.experts:
        yield Finding("moe.capacity_factor", "has no effect: an expert has room for a whole sequence", REMOVE)
    elif factor is not None and factor < 1:
        message = f"= {factor:g} drops {1 - factor:.0%} of the choices or more, which FLOPs and MFU count"
        yield Finding("moe.capacity_factor", message, "1 or more")
