"""The section `[model]`: sizes and parts of a decoder-only transformer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from megascale.catalog.layers import ACTIVATIONS, BLOCKS, NORMS, ROPE_SCALINGS, ROUTER_SCORES
from megascale.config.attention_pattern import check_attention_pattern, kind_of_letter
from megascale.config.section import AUTO_AS_NONE, Count, Float32, Section, Size, TableChoice, choice, no_choice
from megascale.config.sparse_pattern import Reach, SparsePattern, check_sparse_pattern
from megascale.core.registry import Card, closest_name

DERIVED_FROM = {"num_kv_heads": "num_heads", "ffn_size": "hidden_size"}
"""Sizes with a default that is derived from another size."""

ROPE_KEYS = ("rope_theta", "rope_scaling", "rotary_fraction", "local_rope_theta")
"""Keys of rotary embeddings, which a preset sets for its own position embedding."""

Window = Annotated[int, Field(ge=0, le=2**40)]
Positive = Annotated[Float32, Field(gt=0)]


def _known_preset(name: str) -> str:
    from megascale.catalog.presets import PRESETS

    if name not in PRESETS:
        raise no_choice("preset", name, list(PRESETS), closest_name(name, PRESETS), "presets.md")
    return name


class ModelConfig(Section):
    """`[model]`: a preset, sizes, or a preset with changed sizes."""

    preset: Annotated[str, AfterValidator(_known_preset)] | None = Field(
        None, description="a named model, the source of all keys that are not given"
    )
    num_layers: Annotated[int, Field(gt=0, le=10_000)] = Field(description="transformer blocks")
    hidden_size: Size = Field(description="width of the residual stream")
    num_heads: Size = Field(description="attention heads")
    num_kv_heads: Size = Field(description="key and value heads, shared by groups of query heads; default num_heads")
    explicit_head_dim: Annotated[Size | None, AUTO_AS_NONE] = Field(
        None, alias="head_dim", description="elements of a head; default hidden_size / num_heads"
    )
    ffn_size: Size = Field(
        description="inner width of the MLP; default 4 x hidden_size, or for a gated activation 8/3 x hidden_size "
        "rounded up to a multiple of 64"
    )
    vocab_size: Annotated[int, Field(gt=0, le=2**31)] = Field(description="tokens in the vocabulary, before padding")
    seq_length: Annotated[int, Field(gt=0, le=2**30)] = Field(description="tokens in a sequence")
    norm: Annotated[str, choice(NORMS)] = Field("layernorm", description="normalization before attention and MLP")
    norm_eps: Float32 = Field(1e-5, gt=0, description="added to the variance in a norm")
    activation: Annotated[str, choice(ACTIVATIONS)] = Field("gelu", description="activation function of the MLP")
    position: Literal["learned", "rope"] = Field(
        "learned", description="learned position vectors, or rotary embeddings"
    )
    positions: Annotated[Size | None, AUTO_AS_NONE] = Field(
        None, description="learned position vectors, of which those up to seq_length are trained; default: seq_length"
    )
    rope_theta: Float32 = Field(10_000.0, gt=0, description="base of the rotary frequencies")
    rope_scaling: Annotated[
        Annotated[dict[str, Any], AfterValidator(TableChoice(ROPE_SCALINGS))] | None, AUTO_AS_NONE
    ] = Field(
        None,
        description="scaling of the rotary frequencies, a table with `type` and the keys of the type, such as "
        '{type = "linear", factor = 4.0}',
    )
    rotary_fraction: float = Field(1.0, gt=0, le=1, description="share of a head that is rotated, from its start")
    local_rope_theta: Annotated[Positive | None, AUTO_AS_NONE] = Field(
        None, description="base of the rotary frequencies in layers with a window, without rope_scaling"
    )
    softmax_scale: Annotated[Positive | None, AUTO_AS_NONE] = Field(
        None,
        description="factor of attention scores; default 1 / sqrt(head_dim), and with kv_lora_rank "
        "1 / sqrt(head_dim + rope_head_dim), with yarn times the square of 0.1 mscale_all_dim ln(factor) + 1",
    )
    kv_lora_rank: Annotated[int, Field(ge=0, le=2**20)] = Field(
        0,
        description="width of the latent vector from which keys and values of all heads are projected (multi-head "
        "latent attention, MLA); 0: none",
    )
    q_lora_rank: Annotated[int, Field(ge=0, le=2**20)] = Field(
        0, description="with kv_lora_rank, width of the latent vector of queries; 0: queries are projected at once"
    )
    rope_head_dim: Annotated[int, Field(ge=0, le=2**16)] = Field(
        0,
        description="with kv_lora_rank, rotated elements of a head of q and k, beside its head_dim others; those of k "
        "are the same in all heads",
    )
    explicit_value_head_dim: Annotated[Size | None, AUTO_AS_NONE] = Field(
        None, alias="value_head_dim", description="with kv_lora_rank, elements of a head of v; default head_dim"
    )
    explicit_latent_norm_eps: Annotated[Positive | None, AUTO_AS_NONE] = Field(
        None,
        alias="latent_norm_eps",
        description="with kv_lora_rank, norm_eps of the norms of latent vectors; default norm_eps",
    )
    attention_softcap: Annotated[Positive | None, AUTO_AS_NONE] = Field(
        None, description="soft cap of attention scores, cap * tanh(scores / cap), as in Gemma 2"
    )
    attention_sinks: bool = Field(
        False,
        description="a learned logit of each head beside the scores of a query's keys, which takes its share of the "
        "softmax and has no value (gpt-oss)",
    )
    qk_norm: Literal["none", "head", "full", "fixed", "tanh"] = Field(
        "none",
        description="norm of q and k, of the kind `norm`, before rope. head: over each head, with one gain for "
        "all heads; full: over all heads together; fixed: over each head, without a gain; tanh: in its place "
        "tanh(alpha x), with a learned alpha",
    )
    bias: bool = Field(True, description="biases in linear layers, those of experts too; the router's: router_bias")
    explicit_qkv_bias: Annotated[bool | None, AUTO_AS_NONE] = Field(
        None, alias="qkv_bias", description="biases in the q, k and v projections; default bias"
    )
    embedding_scale: Float32 = Field(
        1.0, gt=0, description="factor on the token embedding, rounded to the compute dtype; Gemma: sqrt(hidden_size)"
    )
    logit_softcap: Annotated[Positive | None, AUTO_AS_NONE] = Field(
        None, description="bound on the logits: cap x tanh(logits / cap), as in Gemma 2"
    )
    tie_embeddings: bool = Field(True, description="the output projection shares the weight of the token embedding")
    block: Annotated[str, choice(BLOCKS)] = Field(
        "serial", description="arrangement of attention, MLP and norms in a layer"
    )
    explicit_residual_tau: Annotated[Annotated[Float32, Field(ge=0, lt=1)] | None, AUTO_AS_NONE] = Field(
        None,
        alias="residual_tau",
        description="share of a branch in the variance of the residual stream, "
        "x = sqrt(1 - tau) x + sqrt(tau) branch(x), or 0: x + branch(x); default 0, and with unit_scaling "
        "0.4 (4 / num_layers)^0.43",
    )
    attention_pattern: Annotated[Annotated[str, AfterValidator(check_attention_pattern)] | None, AUTO_AS_NONE] = Field(
        None,
        description="[kinds of attention](long-context.md#linear-attention), a letter for each layer, repeated over "
        'the layers, such as "LLLLLLLS": L linear with decay, S softmax; default S',
    )
    window: Window | Annotated[list[Window], Field(min_length=1)] | None = Field(
        None,
        description="sliding-window attention: number of keys per query, counting the query's own position; a list "
        "repeats over the layers; 0: full causal attention",
    )
    sparse_attention: Annotated[
        Annotated[dict[str, Any], AfterValidator(check_sparse_pattern)] | None, AUTO_AS_NONE
    ] = Field(
        None,
        description="[sparse attention](long-context.md#sparse-attention): each head sees local blocks of keys and "
        "every stride-th block before them, a table such as {local_blocks = 4, stride = 8, block = 64}",
    )
    experts: Annotated[int, Field(ge=0, le=2**16)] = Field(
        0, description="routed experts of a layer, in place of its MLP (mixture of experts); 0: dense layers"
    )
    experts_per_token: Annotated[int, Field(gt=0, le=2**16)] = Field(
        2, description="experts that a token is routed to: those with the largest scores"
    )
    explicit_expert_ffn_size: Annotated[Size | None, AUTO_AS_NONE] = Field(
        None, alias="expert_ffn_size", description="inner width of an expert; default ffn_size"
    )
    dense_layers: Annotated[int, Field(ge=0, le=10_000)] = Field(
        0, description="first layers with a dense MLP of ffn_size in place of experts"
    )
    shared_ffn_size: Annotated[int, Field(ge=0, le=2**26)] = Field(
        0, description="inner width of the shared expert, an MLP for all tokens beside the routed ones; 0: none"
    )
    shared_gate: bool = Field(False, description="the shared expert's output times the sigmoid of a learned gate")
    router_score: Annotated[str, choice(ROUTER_SCORES)] = Field(
        "softmax", description="scores of experts, from the router's logits"
    )
    router_groups: Annotated[int, Field(gt=0, le=2**16)] = Field(
        1, description="groups of consecutive experts: tokens choose among the experts of router_top_groups of them"
    )
    router_top_groups: Annotated[int, Field(gt=0, le=2**16)] = Field(1, description="groups that a token chooses from")
    router_group_value: Literal["max", "top2"] = Field(
        "max", description="value of a group of experts: its largest score, or with top2 the sum of the largest two"
    )
    router_normalize: bool = Field(True, description="weights of the chosen experts add up to 1")
    router_scale: Float32 = Field(1.0, gt=0, description="factor on the weights of the chosen experts")
    router_bias: bool = Field(False, description="a learned bias of each expert's logit, in choice and weight")
    balance_bias: bool = Field(
        False,
        description="a bias of each expert, added to its score for the choice alone, that moves with its load after a "
        "step (balance without auxiliary loss)",
    )
    mtp_layers: Annotated[int, Field(ge=0, le=100)] = Field(
        0,
        description="depths of [multi-token prediction](experts.md#6-predict-several-tokens): a block each after the "
        "last layer, which predicts one token further ahead; 0: none",
    )
    exits: list[Count] = Field(
        [],
        description="early exits: the numbers of layers after which the residual stream has a norm and an output head "
        "of its own ([exits](experts.md#7-early-exits))",
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="dropout probability of embeddings, attention weights, and outputs of attention and MLP",
    )
    init_std: Annotated[Float32, Field(gt=0)] = Field(
        0.02,
        description="standard deviation of initial weights; for projections into the residual stream "
        "init_std / sqrt(2 x num_layers)",
    )
    unit_scaling: bool = Field(
        False,
        description="[µnit scaling](optimizers.md#unit-scaling): weights, and outputs of linear layers, start with "
        "variance 1",
    )
    mup_base_width: Annotated[int, Field(ge=0)] = Field(
        0,
        description="hidden_size of the model for which init_std and the learning rate were chosen: they are scaled to "
        "this model's width by [muP](optimizers.md#width); 0: no scaling",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, keys: Any) -> Any:
        return fill_defaults(keys) if isinstance(keys, dict) else keys

    def __hash__(self) -> int:
        return hash(
            (self.num_layers, self.hidden_size, self.seq_length)
        )  # `window` may be a list, and `sparse_attention` a table, which are not hashable

    @property
    def total_layers(self) -> int:
        """The number of blocks, with those of multi-token prediction, which come last."""
        return self.num_layers + self.mtp_layers

    @property
    def embeds_last(self) -> bool:
        """The last pipeline stage uses the token embedding: as its head, or for multi-token prediction."""
        return self.tie_embeddings or self.mtp_layers > 0

    @property
    def width_ratio(self) -> float:
        """The width relative to that of the model for which learning rate and initialization were chosen (muP)."""
        return self.hidden_size / self.mup_base_width if self.mup_base_width else 1.0

    @property
    def residual_tau(self) -> float:
        """The share of a branch in the residual stream; 0 for a plain sum. Its default with unit scaling is between the
        published values of 4 layers, 0.4, and of 100, 0.1 (Narayan et al. 2025, 3.1 and figure 5).
        """
        if self.explicit_residual_tau is not None:
            return self.explicit_residual_tau
        return float(0.4 * (4 / self.num_layers) ** 0.43) if self.unit_scaling else 0.0

    @property
    def head_dim(self) -> int:
        return self.explicit_head_dim or self.hidden_size // self.num_heads

    @property
    def value_head_dim(self) -> int:
        return self.explicit_value_head_dim or self.head_dim

    @property
    def qk_head_dim(self) -> int:
        """Elements of a head of q and k: with latent attention, those that are not rotated and those that are."""
        return self.head_dim + self.rope_head_dim

    @property
    def latent_norm_eps(self) -> float:
        return self.explicit_latent_norm_eps or self.norm_eps

    @property
    def position_rows(self) -> int:
        """Learned position vectors; 0 with rotary embeddings."""
        return (self.positions or self.seq_length) if self.position == "learned" else 0

    @property
    def rotary_dim(self) -> int:
        return self.rope_head_dim or int(self.head_dim * self.rotary_fraction)

    @property
    def qkv_bias(self) -> bool:
        return self.bias if self.explicit_qkv_bias is None else self.explicit_qkv_bias

    @property
    def expert_ffn_size(self) -> int:
        return self.explicit_expert_ffn_size or self.ffn_size

    def has_experts(self, layer: int) -> bool:
        """Return True for a layer with experts in place of a dense MLP."""
        return self.experts > 0 and layer >= self.dense_layers

    @property
    def attention_scale(self) -> float:
        scaling = (self.rope_scaling or {}) if self.kv_lora_rank else {}
        stretch = yarn_mscale(scaling.get("factor", 1.0), scaling.get("mscale_all_dim", 0.0))
        return float(self.qk_head_dim**-0.5 * stretch**2) if self.softmax_scale is None else self.softmax_scale

    def given_window(self, layer: int) -> int:
        """The window of a layer as configured, also if longer than the sequence; 0 for none."""
        pattern = self.window if isinstance(self.window, list) else [self.window or 0]
        return pattern[layer % len(pattern)]

    @property
    def sparse_pattern(self) -> SparsePattern | None:
        """The pattern of sparse attention."""
        return SparsePattern(**self.sparse_attention) if self.sparse_attention else None

    @property
    def windows(self) -> tuple[Reach | None, ...]:
        """The window or the sparse pattern of every layer; None: full causal attention."""
        if sparse := self.sparse_pattern:
            return (sparse,) * self.total_layers
        pattern = self.window if isinstance(self.window, list) else [self.window or 0]
        return _windows(tuple(pattern), self.seq_length, self.total_layers)

    def attention_kind(self, layer: int) -> Card:
        """The kind of attention of a layer (`catalog.layers.ATTENTIONS`)."""
        pattern = self.attention_pattern or "S"
        return kind_of_letter(pattern[layer % len(pattern)])

    @property
    def gated(self) -> bool:
        return bool(ACTIVATIONS[self.activation].facts["gated"])


def yarn_mscale(factor: float, weight: float) -> float:
    """The factor of yarn for scores of sequences that are `factor` times longer, 0.1 weight ln(factor) + 1."""
    return 0.1 * weight * math.log(max(factor, 1.0)) + 1.0


@lru_cache
def _windows(pattern: tuple[int, ...], seq_length: int, num_layers: int) -> tuple[int | None, ...]:
    windows = [window if 0 < window < seq_length else None for window in pattern]
    return tuple(itertools.islice(itertools.cycle(windows), num_layers))


def fill_defaults(keys: dict[str, Any]) -> dict[str, Any]:
    """Add the keys of the preset and the derived sizes; drop head_dim, qkv_bias and positions if equal to their
    defaults. A slice of a preset has the windows of the preset's first layers, and at least one layer with experts.
    """
    full = dict(keys)
    if isinstance(name := keys.get("preset"), str):
        from megascale.catalog.presets import PRESETS

        full = PRESETS.get(name, {}) | keys
        if keys.get("position", "rope") != "rope":
            full = {key: value for key, value in full.items() if key in keys or key not in ROPE_KEYS}
    hidden, heads, layers = full.get("hidden_size"), full.get("num_heads"), full.get("num_layers")
    if "window" not in keys and isinstance(full.get("window"), list) and isinstance(layers, int) and layers > 0:
        full["window"] = full["window"][:layers]
    if "dense_layers" not in keys and "dense_layers" in full and isinstance(layers, int) and layers > 0:
        full["dense_layers"] = min(full["dense_layers"], layers - 1)
    if "num_kv_heads" not in full and isinstance(heads, int):
        full["num_kv_heads"] = heads
    if "ffn_size" not in full and isinstance(hidden, int):
        activation = full.get("activation")
        card = ACTIVATIONS.cards.get(activation) if isinstance(activation, str) else None
        full["ffn_size"] = -(-hidden // 24) * 64 if card and card.facts["gated"] else 4 * hidden
    head = full.get("head_dim")
    if isinstance(head, int) and isinstance(heads, int) and head * heads == hidden:
        del full["head_dim"]
    if full.get("positions") == full.get("seq_length"):
        full.pop("positions", None)
    if full.get("qkv_bias") is full.get("bias", True):
        full.pop("qkv_bias", None)
    return full


SAME_MODEL_HINT = "[model] as there, or another name or checkpoint.resume for this run"

EXPERT_KEYS = (
    "experts", "experts_per_token", "expert_ffn_size", "dense_layers", "shared_ffn_size", "shared_gate",
    "router_score", "router_groups", "router_top_groups", "router_group_value", "router_normalize", "router_scale",
    "router_bias", "balance_bias",
)  # fmt: skip
"""The keys that describe experts."""

FREE_KEYS = (
    "preset", "seq_length", "norm_eps", "rope_theta", "rope_scaling", "rotary_fraction", "local_rope_theta",
    "softmax_scale", "latent_norm_eps", "attention_softcap", "embedding_scale", "logit_softcap", "window",
    "sparse_attention", "dropout", "init_std", "mup_base_width", "unit_scaling",
)  # fmt: skip
"""Keys of `[model]` that a run may change when it loads a checkpoint: they change no tensor."""


def model_differences(saved: Mapping[str, Any], model: ModelConfig) -> str:
    """List the keys but `FREE_KEYS` that differ between a saved `[model]` section and this run's; empty if none does.
    A key without a value has its default there.
    """
    there = ModelConfig.model_construct(**{key: value for key, value in saved.items() if value is not None})
    keys = (field.alias or name for name, field in ModelConfig.model_fields.items())
    rows = ((key, _effective(there, key), _effective(model, key)) for key in keys if key not in FREE_KEYS)
    return "; ".join(f"{key} {theirs} there, {ours} here" for key, theirs, ours in rows if theirs != ours)


def _effective(model: ModelConfig, key: str) -> Any:
    """The value of a key; None if the section, unchecked, lacks what it follows from."""
    try:
        return (model.position_rows or None) if key == "positions" else getattr(model, key)
    except (AttributeError, TypeError, ArithmeticError):
        return None
