"""Suggestions for misspelled names, and for names of Megatron-LM, torchtitan and transformers: right, or none."""

from __future__ import annotations

import pytest

from megascale.catalog.schedules import SCHEDULES
from megascale.config import loading
from megascale.config.loading import sections
from megascale.config.section import Choice
from megascale.config.toml_reader import Source
from megascale.core.registry import closest_name

KEYS = {f"{table}.{field.alias or name}" for table, s in sections().items() for name, field in s.model_fields.items()}
CHOICES = {
    f"{table}.{field.alias or name}": metadata.func
    for table, section in sections().items()
    for name, field in section.model_fields.items()
    for metadata in field.metadata
    if isinstance(getattr(metadata, "func", None), Choice)
}


GELUS = {"gelu", "geglu", "gelu_tanh"}
"""Activations with names so close that a typing error may be nearer to another."""


def suggested(key: str, name: str) -> str | None:
    choice = CHOICES[key]
    return choice.registry.nearest(name, choice.also)


@pytest.mark.parametrize("key", CHOICES)
def test_a_misspelled_choice_suggests_the_choice_or_none(key: str) -> None:
    """Typing errors: another case, a letter too few, two letters swapped. Digits are no typing errors."""
    names = [*CHOICES[key].also, *CHOICES[key].registry.names()]
    found = 0
    for name in names:
        assert suggested(key, name.upper()) == name
        letters = [i for i, character in enumerate(name) if character.isalpha() and len(name) > 4]
        typos = {name[:i] + name[i + 1 :] for i in letters}
        typos |= {name[:i] + name[i + 1] + name[i] + name[i + 2 :] for i in letters if i + 1 in letters}
        for typo in typos - set(names):
            assert suggested(key, typo) in {name, None} or {name, suggested(key, typo)} <= GELUS
            found += suggested(key, typo) == name
    assert found or all(len(name) <= 4 for name in names)


@pytest.mark.parametrize(
    ("key", "name", "meant"),
    [
        ("train.precision", "fp16", "bf16"),
        ("train.precision", "FP16", "bf16"),
        ("train.precision", "float16", "bf16"),
        ("train.precision", "half", "bf16"),
        ("train.precision", "bfloat16", "bf16"),
        ("train.precision", "float32", "fp32"),
        ("train.precision", "fp4", "fp8"),
        ("train.precision", "int8", None),
        ("train.precision", "fp128", None),
        ("optimizer.name", "adam", "adamw"),
        ("optimizer.name", "sgd", None),
        ("optimizer.name", "distributed_muon", "muon"),
        ("optimizer.decay", "WSD", "wsd"),
        ("optimizer.decay", "exponential", None),
        ("model.activation", "silu", "swiglu"),
        ("model.activation", "relu", None),
        ("model.activation", "gelu_new", "gelu_tanh"),
        ("model.norm", "RMSNorm", "rmsnorm"),
        ("parallel.schedule", "Interleaved1F1B", "interleaved_1f1b"),
        ("parallel.schedule", "DualPipeV", "dualpipev"),
        ("parallel.schedule", "ZBVZeroBubble", "zb_v"),
        ("parallel.schedule", "InterleavedZeroBubble", "interleaved_zb"),
        ("parallel.schedule", "DualPipe", None),
        ("fp8.recipe", "mx", "mxfp8"),
    ],
)
def test_names_of_choices_elsewhere(key: str, name: str, meant: str | None) -> None:
    choice = CHOICES.get(key, Choice(SCHEDULES))
    assert choice.registry.nearest(name, choice.also) == meant


def hint(key: str) -> str:
    table, _, _ = key.rpartition(".")
    known = [key.partition(".")[2] for key in KEYS if key.startswith(f"{table}.")] if table else list(sections())
    return loading._unknown_key(Source("run.toml"), key, known).hint


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("model.num_attention_heads", "model.num_heads"),
        ("model.ffn_hidden_size", "model.ffn_size"),
        ("model.max_position_embeddings", "model.seq_length"),
        ("model.hidden_act", "model.activation"),
        ("model.rms_norm_eps", "model.norm_eps"),
        ("parallel.tensor_model_parallel_size", "parallel.tp"),
        ("parallel.pipeline_parallel_degree", "parallel.pp"),
        ("train.max_steps", "train.steps"),
        ("train.eval_interval", "train.eval_every"),
        ("train.global_batch_size", "batch.global"),
        ("optimizer.adam_eps", "optimizer.eps"),
        ("optimizer.max_lr", "optimizer.lr"),
        ("model.num_layer", "num_layers"),
        ("paralel", "parallel"),
    ],
)
def test_names_of_keys_elsewhere(key: str, meant: str) -> None:
    assert hint(key).startswith((f"did you mean '{meant}'?", f"write {meant} = ..."))


def test_digits_are_no_typing_errors() -> None:
    assert closest_name("fp16", ["fp64", "fp8", "bf16"]) == "bf16"
    assert closest_name("fp16", ["fp64", "fp8"]) is None
    assert closest_name("lama3-8b", ["llama3-70b", "llama3-8b"]) == "llama3-8b"
    assert closest_name("llama3-7b", ["llama3-70b", "llama3-8b"]) is None
