"""Names, shapes, padding and flags of the parameters."""

from __future__ import annotations

import pytest

from megascale.config.model import ModelConfig
from megascale.layout.parameters import all_params, embedding_params, head_params, layer_params
from megascale.layout.tensors import ParamSpec, TensorSpec, padded_vocab
from megascale.layout.topology import Topology
from tests.runs import GPT, LLAMA

MODELS = {"gpt": ModelConfig(**GPT), "llama": ModelConfig(**LLAMA)}


@pytest.mark.parametrize("family", MODELS)
def test_norms_and_biases_are_vectors_without_decay_and_fp8_is_for_blocks_only(family: str) -> None:
    for p in all_params(MODELS[family]):
        is_matrix = p.name.endswith("weight") and "norm" not in p.name
        in_block = is_matrix and p.name.startswith("layers.")
        assert (p.is_matrix, p.weight_decay, p.fp8) == (is_matrix, is_matrix, in_block), p.name


def test_a_tied_head_is_the_embedding() -> None:
    assert [p.name for p in head_params(MODELS["gpt"])][-1] == embedding_params(MODELS["gpt"])[0].name
    assert [p.name for p in head_params(MODELS["llama"])][-1] == "head.weight"
    assert len(all_params(MODELS["gpt"])) == len({parameter.name for parameter in all_params(MODELS["gpt"])})


@pytest.mark.parametrize(("vocab", "tp", "padded"), [(50_257, 1, 50_304), (50_257, 8, 50_688), (64_000, 8, 64_000)])
def test_vocabulary_padding(vocab: int, tp: int, padded: int) -> None:
    model = ModelConfig(**GPT | {"vocab_size": vocab})
    assert padded_vocab(model, tp) == padded
    assert embedding_params(model)[0].local_shape(Topology(tp=tp)) == (padded // tp, 32)


def test_qkv_and_gate_up_are_one_matrix_of_named_parts() -> None:
    parameters, two = {p.name: p for p in layer_params(MODELS["llama"], 3)}, Topology(tp=2)
    qkv = parameters["layers.3.attention.qkv.weight"]
    assert [part.name for part in qkv.parts] == [f"layers.3.attention.{part}.weight" for part in "qkv"]
    assert qkv.local_shape(two) == ((32 + 16 + 16) // 2, 32)
    gate_up = parameters["layers.3.mlp.gate_up.weight"]
    assert gate_up.local_shape(two) == (48, 32)
    assert parameters["layers.3.mlp.down.weight"].local_shape(two) == (32, 24)


def test_parts_have_equal_sharding() -> None:
    with pytest.raises(AssertionError, match="the parts of qk must have equal sharding"):
        ParamSpec("qk", (TensorSpec("q", (8, 8), {"tp": 0}), TensorSpec("k", (8, 8), {"tp": 1})))
