"""Hugging Face's architectures that compute what a `[model]` says: their configurations, and where they keep each of
our tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megascale.config.model import ModelConfig
from megascale.core.errors import CheckpointError

Keys = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where one of our tensors is in theirs: part `index` of `count` equal ones along the last dimension of `name`,
    transposed if `turned`.
    """

    name: str
    turned: bool = False
    index: int = 0
    count: int = 1


@dataclass(frozen=True)
class Family:
    """One architecture. `keys`: those of `[model]` that are the same in all its models. `read` gives the others for a
    config.json, `write` a config.json without what all have. `place` finds a tensor by our name. `sizes`: keys of a
    config.json that are above 0 where they are there. `ignored`: endings of tensors in old files that are no weights.
    """

    name: str
    architecture: str
    keys: Mapping[str, Any]
    read: Callable[[Keys], Keys]
    write: Callable[[ModelConfig], Keys]
    place: Callable[[str], Place]
    sizes: tuple[str, ...]
    ignored: tuple[str, ...] = ()


def model_keys(config: Keys, where: str) -> Keys:
    """The keys of `[model]` for a config.json.

    Raises: CheckpointError for a model that we would compute otherwise, or whose sizes are not above 0
    """
    family = family_of(config, where)
    for key in family.sizes:
        size = config.get(key)
        if isinstance(size, int | float) and size <= 0:
            mend = "the config.json that belongs to the weights"
            raise CheckpointError(f"{where}: {key} is {size!r}, not above 0", mend=mend)
    try:
        return dict(family.keys) | family.read(config)
    except (KeyError, TypeError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else f"a value of another kind: {error}"
        raise CheckpointError(f"{where}: {what}", mend="the config.json that belongs to the weights") from None
    except ValueError as error:
        mend = "a model without it: we would compute this one otherwise"
        raise CheckpointError(f"{where}: {error}", mend=mend) from None


def family_of(config: Keys, where: str) -> Family:
    """The family of a config.json.

    Raises: CheckpointError if it is none that we know
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(f"{where}: model_type is {kind!r}", mend=f"a model of {', '.join(FAMILIES)}")
    return FAMILIES[kind]


def family_for(model: ModelConfig) -> Family:
    """The family that computes what a `[model]` says.

    Raises: CheckpointError if there is none
    """
    lacking = {}
    for family in FAMILIES.values():
        other = {key: value for key, value in family.keys.items() if getattr(model, key) != value}
        try:
            if not other:
                family.write(model)
                return family
            lacking[family.name] = ", ".join(f"{key} = {value!r}" for key, value in other.items())
        except ValueError as error:
            lacking[family.name] = str(error)
    reasons = "; ".join(f"{name} has {reason}" for name, reason in lacking.items())
    raise CheckpointError(f"no architecture of Hugging Face's that we know computes this model: {reasons}")


def write_config(model: ModelConfig) -> Keys:
    """A config.json for a model.

    Raises: CheckpointError if there is no architecture for it
    """
    family = family_for(model)
    common = {
        "architectures": [family.architecture],
        "model_type": family.name,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
    }
    return common | family.write(model)


def _must(config: Keys, key: str, *allowed: Any) -> None:
    if config.get(key, allowed[0]) not in allowed:
        raise ValueError(f"{key} is {config[key]!r}, not {' or '.join(map(repr, allowed))}")


def _must_divide(config: Keys, key: str, of: str) -> None:
    if config[of] % config[key]:
        raise ValueError(f"{of} is {config[of]!r}, no multiple of {key}, which is {config[key]!r}")


# ---- GPT-2

_GELUS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}


def _read_gpt2(config: Keys) -> Keys:
    _must(config, "scale_attn_weights", True)
    _must(config, "scale_attn_by_inverse_layer_idx", False)
    _must(config, "add_cross_attention", False)
    _must(config, "activation_function", *_GELUS)
    _must_divide(config, "n_head", "n_embd")
    return {
        "num_layers": config["n_layer"],
        "hidden_size": config["n_embd"],
        "num_heads": config["n_head"],
        "num_kv_heads": config["n_head"],
        "ffn_size": config.get("n_inner") or 4 * config["n_embd"],
        "vocab_size": config["vocab_size"],
        "seq_length": config["n_positions"],
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "activation": _GELUS[config.get("activation_function", "gelu_new")],
        "tie_embeddings": config.get("tie_word_embeddings", True),
        "init_std": config.get("initializer_range", 0.02),
    }


def _write_gpt2(model: ModelConfig) -> Keys:
    if model.num_kv_heads != model.num_heads:
        raise ValueError("num_kv_heads = num_heads")
    if any(model.windows):
        raise ValueError("no window")
    names = {ours: theirs for theirs, ours in reversed(_GELUS.items())}
    if model.activation not in names:
        raise ValueError(f"activation = {' or '.join(map(repr, names))}")
    return {
        "n_layer": model.num_layers,
        "n_embd": model.hidden_size,
        "n_head": model.num_heads,
        "n_inner": None if model.ffn_size == 4 * model.hidden_size else model.ffn_size,
        "n_positions": model.seq_length,
        "n_ctx": model.seq_length,
        "layer_norm_epsilon": model.norm_eps,
        "activation_function": names[model.activation],
    }


_GPT2_SIZES = ("n_layer", "n_embd", "n_head", "n_inner", "n_positions", "vocab_size")
_GPT2_ENDS = {
    "embedding.token.weight": "transformer.wte.weight",
    "embedding.position.weight": "transformer.wpe.weight",
    "final_norm.weight": "transformer.ln_f.weight",
    "final_norm.bias": "transformer.ln_f.bias",
    "head.weight": "lm_head.weight",
}
_GPT2_PARTS = {
    "attention_norm": Place("ln_1"),
    "attention.q": Place("attn.c_attn", True, 0, 3),
    "attention.k": Place("attn.c_attn", True, 1, 3),
    "attention.v": Place("attn.c_attn", True, 2, 3),
    "attention.out": Place("attn.c_proj", True),
    "mlp_norm": Place("ln_2"),
    "mlp.up": Place("mlp.c_fc", True),
    "mlp.down": Place("mlp.c_proj", True),
}


def _place_gpt2(name: str) -> Place:
    if name in _GPT2_ENDS:
        return Place(_GPT2_ENDS[name])
    index, part, kind = _parts(name)
    place = _GPT2_PARTS[part]
    turned = place.turned and kind == "weight"
    return Place(f"transformer.h.{index}.{place.name}.{kind}", turned, place.index, place.count)


# ---- Llama, and Mistral, which is Llama with a sliding window


def _read_llama(config: Keys) -> Keys:
    _must(config, "hidden_act", "silu")
    ropes = [config.get(key) or {} for key in ("rope_scaling", "rope_parameters")]  # where both are, the first counts
    for keys in ropes:
        _must(keys, "rope_type", "default")
        _must(keys, "type", "default")
    for keys in (*ropes, config):
        _must(keys, "partial_rotary_factor", 1.0, None)
    rope: Keys = next(filter(None, ropes), {})
    bias = config.get("attention_bias", False)
    _must(config, "mlp_bias", bias)
    _must_divide(config, "num_attention_heads", "hidden_size")
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    _must(config, "head_dim", hidden // heads, None)
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "ffn_size": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "seq_length": config.get("max_position_embeddings", 2048),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_theta": float(rope.get("rope_theta") or config.get("rope_theta", 10_000.0)),
        "bias": bias,
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "init_std": config.get("initializer_range", 0.02),
    }


def _write_llama(model: ModelConfig) -> Keys:
    if any(model.windows):
        raise ValueError("no window")
    return _llama_keys(model) | {"attention_bias": model.bias, "mlp_bias": model.bias}


def _read_mistral(config: Keys) -> Keys:
    for key in ("attention_bias", "mlp_bias"):
        _must(config, key, False)
    window = config.get("sliding_window", 4096)
    return _read_llama(config) | ({"window": window} if window else {})


def _write_mistral(model: ModelConfig) -> Keys:
    windows = set(model.windows)
    if len(windows) > 1 or None in windows:
        raise ValueError("one window for all layers")
    if model.bias:
        raise ValueError("no bias")
    return _llama_keys(model) | {"sliding_window": windows.pop()}


def _llama_keys(model: ModelConfig) -> Keys:
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.ffn_size,
        "max_position_embeddings": model.seq_length,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "hidden_act": "silu",
    }


_LLAMA_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
                "intermediate_size", "vocab_size", "max_position_embeddings")  # fmt: skip
_LLAMA_ENDS = {
    "embedding.token.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_LLAMA_PARTS = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def _place_llama(name: str) -> Place:
    if name in _LLAMA_ENDS:
        return Place(_LLAMA_ENDS[name])
    index, part, kind = _parts(name)
    return Place(f"model.layers.{index}.{_LLAMA_PARTS[part]}.{kind}")


def _parts(name: str) -> tuple[str, str, str]:
    """Index, part and kind of layers.INDEX.PART.KIND."""
    _, index, rest = name.split(".", 2)
    part, _, kind = rest.rpartition(".")
    return index, part, kind


_LLAMA = {"block": "serial", "norm": "rmsnorm", "position": "rope", "activation": "swiglu"}

FAMILIES = {
    family.name: family
    for family in (
        Family(
            "gpt2",
            "GPT2LMHeadModel",
            {"block": "serial", "norm": "layernorm", "position": "learned", "bias": True},
            _read_gpt2,
            _write_gpt2,
            _place_gpt2,
            _GPT2_SIZES,
            (".attn.bias", ".attn.masked_bias"),
        ),
        Family(
            "llama",
            "LlamaForCausalLM",
            _LLAMA,
            _read_llama,
            _write_llama,
            _place_llama,
            _LLAMA_SIZES,
            (".rotary_emb.inv_freq",),
        ),
        Family(
            "mistral",
            "MistralForCausalLM",
            _LLAMA,
            _read_mistral,
            _write_mistral,
            _place_llama,
            (*_LLAMA_SIZES, "sliding_window"),
        ),
    )
}
"""By model_type."""
