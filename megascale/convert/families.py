"""Model families: Hugging Face architectures that megascale can train, with their configurations and tensor names.

Family, FAMILIES: the descriptions. family_of_config, family_of_model: lookups. model_keys, make_config: config.json to
`[model]` and back. TensorLocation: the place of a megascale tensor in Hugging Face's files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megascale.config.model import ModelConfig
from megascale.core.errors import CheckpointError

ConfigKeys = dict[str, Any]


@dataclass(frozen=True)
class TensorLocation:
    """The place of a megascale tensor in Hugging Face's tensor `name`: part `index` of `count` equal parts along the
    last dimension, stored [in, out] instead of [out, in] if `transposed`.
    """

    name: str
    transposed: bool = False
    index: int = 0
    count: int = 1


@dataclass(frozen=True)
class Family:
    """A Hugging Face architecture.

    `fixed_keys`: `[model]` keys with the same value in all models of the family. `from_hf` computes the remaining
    `[model]` keys of a config.json; `to_hf` the family's own keys of a config.json. `locate`: the place of a megascale
    tensor. `size_keys`: config.json keys that must be above 0 if present. `ignored_suffixes`: of tensors in old files
    that are no weights.
    """

    name: str
    architecture: str
    fixed_keys: Mapping[str, Any]
    from_hf: Callable[[ConfigKeys], ConfigKeys]
    to_hf: Callable[[ModelConfig], ConfigKeys]
    locate: Callable[[str], TensorLocation]
    size_keys: tuple[str, ...]
    ignored_suffixes: tuple[str, ...] = ()


def model_keys(config: ConfigKeys, where: str) -> ConfigKeys:
    """The keys of `[model]` for a config.json.

    Raises: CheckpointError for a model whose results megascale would not reproduce, or with sizes that are not above 0
    """
    family = family_of_config(config, where)
    for key in family.size_keys:
        size = config.get(key)
        if isinstance(size, int | float) and size <= 0:
            hint = "the config.json that belongs to the weights"
            raise CheckpointError(f"{where}: {key} is {size!r}, not above 0", hint=hint)
    try:
        return dict(family.fixed_keys) | family.from_hf(config)
    except (KeyError, TypeError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else f"a value of the wrong type: {error}"
        raise CheckpointError(f"{where}: {what}", hint="the config.json that belongs to the weights") from None
    except ValueError as error:
        hint = "a model without this setting, which megascale does not support"
        raise CheckpointError(f"{where}: {error}", hint=hint) from None


def family_of_config(config: ConfigKeys, where: str) -> Family:
    """The family of a config.json.

    Raises: CheckpointError for an unknown `model_type`
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(f"{where}: model_type is {kind!r}", hint=f"a model of {', '.join(FAMILIES)}")
    return FAMILIES[kind]


def family_of_model(model: ModelConfig) -> Family:
    """The family whose architecture computes a `[model]`.

    Raises: CheckpointError if there is none
    """
    mismatches = {}
    for family in FAMILIES.values():
        differing = {key: value for key, value in family.fixed_keys.items() if getattr(model, key) != value}
        try:
            if not differing:
                family.to_hf(model)
                return family
            mismatches[family.name] = ", ".join(f"{key} = {value!r}" for key, value in differing.items())
        except ValueError as error:
            mismatches[family.name] = str(error)
    reasons = "; ".join(f"{name} has {reason}" for name, reason in mismatches.items())
    raise CheckpointError(f"no supported Hugging Face architecture computes this model: {reasons}")


def make_config(model: ModelConfig) -> ConfigKeys:
    """A config.json for a model.

    Raises: CheckpointError if no architecture computes the model
    """
    family = family_of_model(model)
    common = {
        "architectures": [family.architecture],
        "model_type": family.name,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
    }
    return common | family.to_hf(model)


def _require(config: ConfigKeys, key: str, *allowed: Any) -> None:
    if config.get(key, allowed[0]) not in allowed:
        raise ValueError(f"{key} is {config[key]!r}, not {' or '.join(map(repr, allowed))}")


def _require_divides(config: ConfigKeys, key: str, of: str) -> None:
    if config[of] % config[key]:
        raise ValueError(f"{of} is {config[of]!r}, not a multiple of {key} = {config[key]!r}")


# ---- GPT-2

_GELUS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}


def _read_gpt2(config: ConfigKeys) -> ConfigKeys:
    _require(config, "scale_attn_weights", True)
    _require(config, "scale_attn_by_inverse_layer_idx", False)
    _require(config, "add_cross_attention", False)
    _require(config, "activation_function", *_GELUS)
    _require_divides(config, "n_head", "n_embd")
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


def _write_gpt2(model: ModelConfig) -> ConfigKeys:
    if model.num_kv_heads != model.num_heads:
        raise ValueError("num_kv_heads = num_heads")
    if any(model.windows):
        raise ValueError("no window")
    hf_names = {ours: theirs for theirs, ours in reversed(_GELUS.items())}
    if model.activation not in hf_names:
        raise ValueError(f"activation = {' or '.join(map(repr, hf_names))}")
    return {
        "n_layer": model.num_layers,
        "n_embd": model.hidden_size,
        "n_head": model.num_heads,
        "n_inner": None if model.ffn_size == 4 * model.hidden_size else model.ffn_size,
        "n_positions": model.seq_length,
        "n_ctx": model.seq_length,
        "layer_norm_epsilon": model.norm_eps,
        "activation_function": hf_names[model.activation],
    }


_GPT2_SIZES = ("n_layer", "n_embd", "n_head", "n_inner", "n_positions", "vocab_size")
_GPT2_OUTER = {
    "embedding.token.weight": "transformer.wte.weight",
    "embedding.position.weight": "transformer.wpe.weight",
    "final_norm.weight": "transformer.ln_f.weight",
    "final_norm.bias": "transformer.ln_f.bias",
    "head.weight": "lm_head.weight",
}
_GPT2_LAYER = {
    "attention_norm": TensorLocation("ln_1"),
    "attention.q": TensorLocation("attn.c_attn", True, 0, 3),
    "attention.k": TensorLocation("attn.c_attn", True, 1, 3),
    "attention.v": TensorLocation("attn.c_attn", True, 2, 3),
    "attention.out": TensorLocation("attn.c_proj", True),
    "mlp_norm": TensorLocation("ln_2"),
    "mlp.up": TensorLocation("mlp.c_fc", True),
    "mlp.down": TensorLocation("mlp.c_proj", True),
}


def _locate_gpt2(name: str) -> TensorLocation:
    if name in _GPT2_OUTER:
        return TensorLocation(_GPT2_OUTER[name])
    index, part, kind = _parts(name)
    location = _GPT2_LAYER[part]
    transposed = location.transposed and kind == "weight"
    return TensorLocation(f"transformer.h.{index}.{location.name}.{kind}", transposed, location.index, location.count)


# ---- Llama, and Mistral, which is Llama with a sliding window


def _read_llama(config: ConfigKeys) -> ConfigKeys:
    _require(config, "hidden_act", "silu")
    ropes = [config.get(key) or {} for key in ("rope_scaling", "rope_parameters")]  # the first takes precedence
    for keys in ropes:
        _require(keys, "rope_type", "default")
        _require(keys, "type", "default")
    for keys in (*ropes, config):
        _require(keys, "partial_rotary_factor", 1.0, None)
    rope: ConfigKeys = next(filter(None, ropes), {})
    bias = config.get("attention_bias", False)
    _require(config, "mlp_bias", bias)
    _require_divides(config, "num_attention_heads", "hidden_size")
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    _require(config, "head_dim", hidden // heads, None)
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


def _write_llama(model: ModelConfig) -> ConfigKeys:
    if any(model.windows):
        raise ValueError("no window")
    return _llama_keys(model) | {"attention_bias": model.bias, "mlp_bias": model.bias}


def _read_mistral(config: ConfigKeys) -> ConfigKeys:
    for key in ("attention_bias", "mlp_bias"):
        _require(config, key, False)
    window = config.get("sliding_window", 4096)
    return _read_llama(config) | ({"window": window} if window else {})


def _write_mistral(model: ModelConfig) -> ConfigKeys:
    windows = set(model.windows)
    if len(windows) > 1 or None in windows:
        raise ValueError("one window for all layers")
    if model.bias:
        raise ValueError("no bias")
    return _llama_keys(model) | {"sliding_window": windows.pop()}


def _llama_keys(model: ModelConfig) -> ConfigKeys:
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
_LLAMA_OUTER = {
    "embedding.token.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_LLAMA_LAYER = {
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


def _locate_llama(name: str) -> TensorLocation:
    if name in _LLAMA_OUTER:
        return TensorLocation(_LLAMA_OUTER[name])
    index, part, kind = _parts(name)
    return TensorLocation(f"model.layers.{index}.{_LLAMA_LAYER[part]}.{kind}")


def _parts(name: str) -> tuple[str, str, str]:
    """Split layers.INDEX.PART.KIND into index, part and kind."""
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
            _locate_gpt2,
            _GPT2_SIZES,
            (".attn.bias", ".attn.masked_bias"),
        ),
        Family(
            "llama",
            "LlamaForCausalLM",
            _LLAMA,
            _read_llama,
            _write_llama,
            _locate_llama,
            _LLAMA_SIZES,
            (".rotary_emb.inv_freq",),
        ),
        Family(
            "mistral",
            "MistralForCausalLM",
            _LLAMA,
            _read_mistral,
            _write_mistral,
            _locate_llama,
            (*_LLAMA_SIZES, "sliding_window"),
        ),
    )
}
"""Families by the `model_type` of config.json."""
