"""Conversions of config.json to `[model]` and back, by the families."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from megascale.config.model import ModelConfig
from megascale.convert.families import deepseek, gemma, gpt2, gpt_neox, gpt_oss, llama, mixtures, qwen
from megascale.convert.families.family import ConfigKeys, Family, SizeError
from megascale.convert.families.rotary_keys import ROPE_KEYS
from megascale.convert.families.window_keys import WINDOW_KEYS
from megascale.core.errors import CheckpointError

FAMILIES = {
    family.name: family
    for family in (
        gpt2.FAMILY, llama.FAMILY, llama.MISTRAL, qwen.QWEN2, qwen.QWEN3, gemma.GEMMA2, gemma.GEMMA3, llama.OLMO2,
        gpt_neox.FAMILY, llama.PHI3, mixtures.MIXTRAL, mixtures.QWEN2_MOE, mixtures.QWEN3_MOE, mixtures.OLMOE,
        mixtures.GLM4_MOE, gpt_oss.FAMILY, deepseek.V2, deepseek.V3, deepseek.KIMI_K2,
    )
}  # fmt: skip
"""Families by the `model_type` of config.json. The first that computes a model is the one it is exported as."""

GROUPS = (ROPE_KEYS, WINDOW_KEYS)  # keys of config.json that change together

TEXT_ALONE_HINT = "its text model alone, saved with transformers as a causal language model"

BY_EFFECT = ("expert_ffn_size", "value_head_dim", "latent_norm_eps", "residual_tau")
"""Keys with a default, which are compared with it."""

IGNORED = {"preset", "dropout", "window", "unit_scaling", *(f"explicit_{key}" for key in BY_EFFECT)}
"""`[model]` keys that a conversion need not keep; `window` and `BY_EFFECT` are compared by their effect."""

ROPE_ONLY = {"rope_theta", "rope_scaling", "rotary_fraction", "local_rope_theta"}
"""`[model]` keys without effect on learned positions."""


def family_of_config(config: ConfigKeys, where: str) -> Family:
    """The family of a config.json. Raises: CheckpointError for an unknown `model_type`"""
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in FAMILIES:
        return FAMILIES[kind]
    what = f"{where}: model_type is {kind!r}"
    if isinstance(config.get("text_config"), dict):
        raise CheckpointError(f"{what}, a model of text and other inputs", hint=TEXT_ALONE_HINT)
    raise CheckpointError(what, hint=f"a model of {', '.join(FAMILIES)}")


def read_model(config: ConfigKeys, where: str) -> ModelConfig:
    """The `[model]` section for a config.json.

    Raises: CheckpointError for a model whose results megascale would not reproduce, or with sizes that are not above 0
    """
    family = family_of_config(config, where)
    hint = "the config.json that belongs to the weights"
    try:
        return ModelConfig.model_validate(family.model_keys(config))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{where}: {first['input']!r} as {key}: {first['msg']}", hint=hint) from None
    except SizeError as error:
        raise CheckpointError(f"{where}: {error}", hint=hint) from None
    except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else f"a value of the wrong type: {error}"
        raise CheckpointError(f"{where}: {what}", hint=hint) from None
    except ValueError as error:
        hint = "a model without this setting, which megascale does not support"
        raise CheckpointError(f"{where}: {error}", hint=hint) from None


def family_of_model(model: ModelConfig, preferred: str | None = None) -> Family:
    """The family whose config.json reads as `model`: `preferred`, a `model_type`, or the first.

    Raises: CheckpointError if there is none
    """
    reasons = list[tuple[int, str]]()
    for family in sorted(FAMILIES.values(), key=lambda family: family.name != preferred):
        try:
            again = read_model(fresh_config(family, model), "its config.json")
        except CheckpointError as error:
            reasons.append((len(ModelConfig.model_fields), f"{family.name}: {error.message}"))
            continue
        if not (different := differences(again, model)):
            return family
        values = ", ".join(f"{key} = {value!r}" for key, value in different.items())
        reasons.append((len(different), f"{family.name} has {values}"))
    nearest = "; ".join(reason for _, reason in sorted(reasons)[:3])
    raise CheckpointError(f"no supported Hugging Face architecture computes this model; the nearest: {nearest}")


def differences(there: ModelConfig, here: ModelConfig) -> dict[str, Any]:
    """The keys of `[model]` whose effect differs, with the values `there`."""
    ignored = IGNORED | (ROPE_ONLY if here.position == there.position == "learned" else set())
    if here.experts and not here.dense_layers:
        ignored = ignored | {"ffn_size"}
    found = {
        field.alias or key: getattr(there, key)
        for key, field in ModelConfig.model_fields.items()
        if key not in ignored and getattr(there, key) != getattr(here, key)
    }
    found |= {key: getattr(there, key) for key in BY_EFFECT if getattr(there, key) != getattr(here, key)}
    other_windows = there.windows != here.windows and there.sparse_attention == here.sparse_attention
    return found | ({"window": there.window} if other_windows else {})


def make_config(model: ModelConfig, source: ConfigKeys) -> ConfigKeys:
    """The config.json of a model. `source`: the config.json that its weights came with, or {}; the keys that still
    describe the model are kept as they are.

    Raises: CheckpointError if no architecture computes the model
    """
    given = read_model(source, "config.json") if source.get("model_type") in FAMILIES else None
    model = _with_reach(model, given)
    family = family_of_model(model, source.get("model_type"))
    made = fresh_config(family, model)
    if given is None or source["model_type"] != family.name:
        return {key: source[key] for key in source if key.endswith("_token_id")} | made
    before = fresh_config(family, given)
    changed = {key for key, value in made.items() if before[key] != value} | {"architectures"}
    for group in GROUPS:
        if changed.intersection(group):
            source = {key: value for key, value in source.items() if key not in group}
            changed.update(key for key in made if key in group)
    return source | {key: made[key] for key in made if key in changed}


def _with_reach(model: ModelConfig, given: ModelConfig | None) -> ModelConfig:
    """Replace `seq_length` by the length that config.json states. Training on shorter sequences does not shorten the
    reach of learned positions, nor of rotary ones, that of the weights `given`; dynamic scaling counts from its
    original length.
    """
    if model.position != "rope":
        return model.model_copy(update={"seq_length": model.position_rows, "positions": None})
    scaling = model.rope_scaling or {}
    if scaling.get("type") == "dynamic":
        length = scaling.get("original_seq_length", model.seq_length)
        scaling = scaling | {"original_seq_length": length}
        return model.model_copy(update={"seq_length": length, "rope_scaling": scaling})
    return model.model_copy(update={"seq_length": max(model.seq_length, given.seq_length if given else 0)})


def fresh_config(family: Family, model: ModelConfig) -> ConfigKeys:
    """A config.json of the family, in the style that transformers 4 and 5 read."""
    return {"architectures": [family.architecture], "model_type": family.name} | family.config_keys(model)
