"""The same weights give the same logits, loss and gradients as the blocks of Gemma 2 and 3, OLMo 2 and GPT-NeoX in
`transformers`, which draws a tiny model of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megascale.config.model import ModelConfig
from megascale.layout.tensors import TOKEN_EMBEDDING
from megascale.model.embedding import Embedding
from megascale.ops.norm import rms_norm_1p
from megascale.parallel.vocabulary import VocabularyRange
from tests.marks import only_quick
from tests.model.test_transformer import micro_batch
from tests.oracles.ours import LAYOUTS, VOCABULARY, Arrays, Result, compute, difference
from tests.oracles.test_transformers import BATCH, wide
from tests.runs import GEMMA2, NEOX, OLMO2, given

GEMMA = GEMMA2 | {
    "window": [5, 0], "rope_theta": 500.0, "embedding_scale": float(np.float32(32**0.5)),  # transformers holds fp32
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "gemma2": GEMMA,
    "gemma3": GEMMA | {"logit_softcap": "auto", "local_rope_theta": 50.0, "qk_norm": "head"},
    "olmo2": OLMO2 | {"qk_norm": "full", "rope_theta": 500.0},
    "neox": NEOX | {"rope_theta": 500.0, "rotary_fraction": 0.5},
    "neox serial": NEOX | {"rope_theta": 500.0, "rotary_fraction": 0.5, "block": "serial"},
}


def build(name: str) -> Any:
    """transformers' model, with weights far from where training starts, so that every term counts."""
    import transformers

    model = MODELS[name]
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": model["hidden_size"], "num_hidden_layers": model["num_layers"],
        "num_attention_heads": model["num_heads"], "num_key_value_heads": model.get("num_kv_heads"),
        "intermediate_size": model.get("ffn_size", 4 * model["hidden_size"]), "rms_norm_eps": 1e-5,
        "max_position_embeddings": model["seq_length"], "attn_implementation": "eager", "head_dim": 8,
        "tie_word_embeddings": model["tie_embeddings"], "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None,
    }  # fmt: skip
    layers = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(model["num_layers"])]
    gemma = {"query_pre_attn_scalar": 8, "sliding_window": 5, "layer_types": layers, "attn_logit_softcapping": None}
    if name == "gemma2":
        rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
        config = transformers.Gemma2Config(**common, **gemma, **rope, final_logit_softcapping=model["logit_softcap"])
        net: Any = transformers.Gemma2ForCausalLM(config)
    elif name == "gemma3":
        ropes = {
            "full_attention": {"rope_type": "default", "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        }
        net = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**common, **gemma, rope_parameters=ropes))
    elif name == "olmo2":
        rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
        net = transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**common, **rope))
    else:
        rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}
        parallel = model["block"] == "parallel_two_norms"
        config = transformers.GPTNeoXConfig(**common, **rope, layer_norm_eps=1e-5, use_parallel_residual=parallel)
        net = transformers.GPTNeoXForCausalLM(config)
    generator = torch.Generator().manual_seed(2)
    for key, parameter in net.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2
        is_gain = parameter.dim() == 1 and key.endswith("weight") and not name.startswith("gemma")
        parameter.data = (drawn + is_gain).bfloat16().to(parameter.dtype)  # exact in every format
    return net


LLAMA_NAMES = {
    "attention.q": "self_attn.q_proj", "attention.k": "self_attn.k_proj", "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj", "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm",
    "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
}  # fmt: skip
POST_NORMS = {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
SANDWICH = POST_NORMS | {"attention_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm"}
NEOX_NAMES = {
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "attention.out": "attention.dense",
    "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h",
}  # fmt: skip
OUTER = {
    "model.embed_tokens": "embedding.token", "gpt_neox.embed_in": "embedding.token", "model.norm": "final_norm",
    "gpt_neox.final_layer_norm": "final_norm", "lm_head": "head", "embed_out": "head",
}  # fmt: skip


def by_our_names(name: str, theirs: Arrays) -> Arrays:
    """Tensors of transformers' model, weights or gradients, by our names."""
    names = NEOX_NAMES if name.startswith("neox") else LLAMA_NAMES | (POST_NORMS if name == "olmo2" else SANDWICH)
    ours = {there: here for here, there in names.items()}
    return dict(pair for key, numbers in theirs.items() for pair in _renamed(key, numbers, ours))


def _renamed(key: str, numbers: Any, names: dict[str, str]) -> Iterator[tuple[str, Any]]:
    module, _, kind = key.rpartition(".")
    if module in OUTER:
        yield f"{OUTER[module]}.{kind}", numbers
        return
    index, _, part = module.split("layers.")[1].partition(".")
    if part != "attention.query_key_value":
        yield f"layers.{index}.{names[part]}.{kind}", numbers
        return
    heads = numbers.reshape(NEOX["num_heads"], 3, -1, *numbers.shape[1:])  # q, k and v of a head side by side
    for i, letter in enumerate("qkv"):
        yield f"layers.{index}.attention.{letter}.{kind}", heads[:, i].reshape(-1, *numbers.shape[1:])


@cache
def reference(name: str, dtype: torch.dtype) -> tuple[Arrays, Result]:
    """Weights by our names, and what transformers computes with them in `dtype`."""
    labels = BATCH.labels.roll(1, 1).masked_fill(BATCH.mask.roll(1, 1) == 0, -100)  # transformers shifts them itself
    with wide(dtype):
        net = build(name).to(dtype)
        out = net(BATCH.tokens, labels=labels, num_items_in_batch=1)
        out.loss.backward()
    weights = {key: p.detach().double().numpy() for key, p in net.named_parameters()}
    gradients = {key: p.grad.double().numpy() for key, p in net.named_parameters()}
    logits = out.logits.detach().double().numpy()
    return by_our_names(name, weights), Result(logits, float(out.loss), by_our_names(name, gradients))


@pytest.mark.parametrize("layout", only_quick(LAYOUTS, "tp2 sp"))
@pytest.mark.parametrize("name", MODELS)
def test_fp64(name: str, layout: str, tmp_path: Path) -> None:
    weights, theirs = reference(name, torch.float64)
    ours = compute(MODELS[name], weights, tmp_path, "fp64", **LAYOUTS[layout])
    found = difference(ours, theirs)
    assert max(found.values()) < 1e-11, found


@pytest.mark.parametrize("name", only_quick(MODELS, "gemma3", "neox"))
def test_fp32(name: str, tmp_path: Path) -> None:
    """With transformers exactly as it is, where `wide` changes nothing."""
    weights, theirs = reference(name, torch.float32)
    found = difference(compute(MODELS[name], weights, tmp_path, "fp32"), theirs)
    assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_embedding_is_scaled_as_by_transformers(dtype: torch.dtype) -> None:
    """To the bit: the factor is rounded to the dtype first. sqrt(2560) differs from its bf16 neighbour."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    scale, ids = 2560**0.5, torch.arange(VOCABULARY).view(-1, 1)
    theirs = Gemma3TextScaledWordEmbedding(VOCABULARY, 32, padding_idx=None, embed_scale=scale).to(dtype)
    model = ModelConfig.model_validate(GEMMA2 | {"embedding_scale": scale})
    context = given(model, {TOKEN_EMBEDDING: theirs.weight})
    ours = Embedding(context, VocabularyRange(0, VOCABULARY, VOCABULARY))
    assert torch.equal(ours(ids, micro_batch(ids)), theirs(ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_norm_is_that_of_transformers(dtype: torch.dtype) -> None:
    """In bf16 the gain multiplies before the result is rounded, which RMSNorm of Llama in transformers does after."""
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

    generator = torch.Generator().manual_seed(0)
    theirs = Gemma2RMSNorm(64, eps=1e-6).to(dtype)
    theirs.weight.data = torch.randn(64, generator=generator).to(dtype)
    x = (3 * torch.randn(50, 64, generator=generator)).to(dtype)
    ours, expected = rms_norm_1p(x, theirs.weight, None, 1e-6), theirs(x)
    torch.testing.assert_close(ours, expected, rtol=1e-6 if dtype == torch.float32 else 2.0**-8, atol=0)
    assert (ours == expected).double().mean() > 0.5
