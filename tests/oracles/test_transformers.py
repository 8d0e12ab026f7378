"""The same weights give the same logits, loss and gradients as GPT-2, Llama and, with a window, Mistral in
`transformers`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.marks import only_quick_rows
from tests.oracles.ours import LAYOUTS, MODELS, VOCABULARY, Arrays, Batch, Result, compute, difference

BATCH = Batch()


@contextmanager
def wide(dtype: torch.dtype) -> Iterator[None]:
    """In fp64 let everything that transformers forms in fp32, whatever its inputs, be formed in fp64: the variance of
    an RMSNorm, rotary angles, attention weights, the loss.
    """
    with ExitStack() as stack:
        if dtype == torch.float64:
            stack.enter_context(patch.object(torch, "float32", torch.float64))
            stack.enter_context(patch.object(torch, "float", torch.float64))
            stack.enter_context(patch.object(torch.Tensor, "float", torch.Tensor.double))
        yield


def build(model: dict[str, Any]) -> Any:
    """transformers' model, with weights far from where training starts, so that every term counts."""
    import transformers

    common = {
        "vocab_size": model["vocab_size"],
        "tie_word_embeddings": model.get("tie_embeddings", True),
        "attn_implementation": "eager",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if "position" in model:
        kind, window = ("Mistral", {"sliding_window": model["window"]}) if "window" in model else ("Llama", {})
        config = getattr(transformers, f"{kind}Config")(
            num_hidden_layers=model["num_layers"],
            hidden_size=model["hidden_size"],
            intermediate_size=model["ffn_size"],
            num_attention_heads=model["num_heads"],
            num_key_value_heads=model["num_kv_heads"],
            max_position_embeddings=model["seq_length"],
            rms_norm_eps=1e-5,
            rope_theta=model["rope_theta"],
            hidden_act="silu",
            **window,
            **common,
        )
        net = getattr(transformers, f"{kind}ForCausalLM")(config)
    else:
        activation = {"gelu_tanh": "gelu_new", "gelu": "gelu"}[model["activation"]]
        config = transformers.GPT2Config(
            n_layer=model["num_layers"],
            n_embd=model["hidden_size"],
            n_head=model["num_heads"],
            n_positions=model["seq_length"],
            layer_norm_epsilon=1e-5,
            activation_function=activation,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **common,
        )
        net = transformers.GPT2LMHeadModel(config)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in net.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2
        is_gain = parameter.dim() == 1 and name.endswith("weight")
        parameter.data = (drawn + is_gain).bfloat16().to(parameter.dtype)  # exact in every format
    return net


def ours_from_gpt2(theirs: Arrays) -> Arrays:
    """Tensors of GPT-2, weights or gradients, by our names. Its linear layers hold the transpose, q, k and v side by
    side.
    """
    left, found = dict(theirs), {}
    found["embedding.token.weight"] = left.pop("transformer.wte.weight")
    found["embedding.position.weight"] = left.pop("transformer.wpe.weight")
    if "lm_head.weight" in left:
        found["head.weight"] = left.pop("lm_head.weight")
    for kind in ("weight", "bias"):
        found[f"final_norm.{kind}"] = left.pop(f"transformer.ln_f.{kind}")
    for index in range(sum(name.endswith("ln_1.weight") for name in theirs)):
        ours, there = f"layers.{index}", f"transformer.h.{index}"
        for kind in ("weight", "bias"):
            found[f"{ours}.attention_norm.{kind}"] = left.pop(f"{there}.ln_1.{kind}")
            found[f"{ours}.mlp_norm.{kind}"] = left.pop(f"{there}.ln_2.{kind}")
            for part, numbers in zip("qkv", np.split(left.pop(f"{there}.attn.c_attn.{kind}"), 3, -1), strict=True):
                found[f"{ours}.attention.{part}.{kind}"] = numbers.T
            found[f"{ours}.attention.out.{kind}"] = left.pop(f"{there}.attn.c_proj.{kind}").T
            found[f"{ours}.mlp.up.{kind}"] = left.pop(f"{there}.mlp.c_fc.{kind}").T
            found[f"{ours}.mlp.down.{kind}"] = left.pop(f"{there}.mlp.c_proj.{kind}").T
    assert not left, f"of transformers' tensors nobody compares {list(left)}"
    return found


def ours_from_llama(theirs: Arrays) -> Arrays:
    """Tensors of Llama, weights or gradients, by our names."""
    left, found = dict(theirs), {}
    found["embedding.token.weight"] = left.pop("model.embed_tokens.weight")
    found["final_norm.weight"] = left.pop("model.norm.weight")
    if "lm_head.weight" in left:
        found["head.weight"] = left.pop("lm_head.weight")
    names = {
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
    for index in range(sum(name.endswith("input_layernorm.weight") for name in theirs)):
        for ours, there in names.items():
            found[f"layers.{index}.{ours}.weight"] = left.pop(f"model.layers.{index}.{there}.weight")
    assert not left, f"of transformers' tensors nobody compares {list(left)}"
    return found


@cache
def reference(name: str, dtype: torch.dtype) -> tuple[Arrays, Result]:
    """Weights by our names, and what transformers computes with them in `dtype`."""
    model = MODELS[name]
    rename = ours_from_llama if "position" in model else ours_from_gpt2
    labels = BATCH.labels.roll(1, 1).masked_fill(BATCH.mask.roll(1, 1) == 0, -100)  # transformers shifts them itself
    with wide(dtype):
        net = build(model).to(dtype)
        out = net(BATCH.tokens, labels=labels, num_items_in_batch=1)
        out.loss.backward()
    weights = {key: p.detach().double().numpy() for key, p in net.named_parameters()}
    gradients = {key: p.grad.double().numpy() for key, p in net.named_parameters()}
    assert out.logits.dtype == dtype and out.logits.shape[-1] == VOCABULARY
    logits = out.logits.detach().double().numpy()
    return rename(weights), Result(logits, float(out.loss), rename(gradients))


ENDS = ["one process", "tp2 sp pp2 vpp2"]
PAIRS = [
    *((name, layout) for name in ("gpt gelu_tanh tied", "llama untied") for layout in LAYOUTS),
    *((name, layout) for name in ("gpt gelu untied", "llama tied", "llama window") for layout in ENDS),
]


QUICK = [
    ("gpt gelu_tanh tied", "one process"),
    ("gpt gelu_tanh tied", "tp2 sp pp2 vpp2"),
    ("llama untied", "tp2 sp"),
    ("gpt gelu untied", "one process"),
    ("llama tied", "tp2 sp pp2 vpp2"),
    ("llama window", "one process"),
]


@pytest.mark.parametrize(("name", "layout"), only_quick_rows(PAIRS, *QUICK))
def test_fp64(name: str, layout: str, tmp_path: Path) -> None:
    weights, theirs = reference(name, torch.float64)
    ours = compute(MODELS[name], weights, tmp_path, "fp64", **LAYOUTS[layout])
    found = difference(ours, theirs)
    assert max(found.values()) < 1e-12, found


@pytest.mark.parametrize("name", ["gpt gelu_tanh tied", "llama untied"])
def test_fp32(name: str, tmp_path: Path) -> None:
    """With transformers exactly as it is, where `wide` changes nothing."""
    weights, theirs = reference(name, torch.float32)
    ours = compute(MODELS[name], weights, tmp_path, "fp32")
    found = difference(ours, theirs)
    assert max(found.values()) < 1e-5, found


def errors(result: Result, exact: Result) -> dict[str, float]:
    """Relative root mean square error of logits, and of all gradients."""
    pairs = {"logits": [(result.logits, exact.logits)]}
    pairs["gradients"] = [(g, exact.gradients[name]) for name, g in result.gradients.items()]
    return {
        what: float(np.sqrt(sum(((a - b) ** 2).sum() for a, b in both) / sum((b**2).sum() for _, b in both)))
        for what, both in pairs.items()
    }


@pytest.mark.parametrize("layout", ["one process", "tp2 sp"])
@pytest.mark.parametrize("name", ["gpt gelu_tanh tied", "llama untied"])
def test_bf16_is_as_near_to_the_exact_numbers_as_transformers(name: str, layout: str, tmp_path: Path) -> None:
    weights, exact = reference(name, torch.float64)
    same_weights, theirs = reference(name, torch.bfloat16)
    assert all((weights[key] == same_weights[key]).all() for key in weights)
    ours = compute(MODELS[name], weights, tmp_path, "bf16", **LAYOUTS[layout])
    found, expected = errors(ours, exact), errors(theirs, exact)
    assert all(found[what] < 1.5 * expected[what] for what in found), (found, expected)
