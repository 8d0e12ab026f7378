"""Attention of today's families: outputs and gradients equal those of `transformers`, in fp64 and fp32."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.model.attention import Attention
from tests.marks import only_quick_rows
from tests.model.test_transformer import micro_batch, stage_of
from tests.oracles.test_transformers import wide
from tests.runs import LLAMA

SEQUENCE, SAMPLES, VOCABULARY = 16, 2, 101

SIZES = LLAMA | {"num_layers": 2, "rope_theta": 500.0}


@dataclass(frozen=True)
class Case:
    """A family of `transformers`, its configuration beside the common sizes, and our keys of `[model]`."""

    family: str
    theirs: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)


def rope(kind: str, **keys: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **keys}}


ORIGINAL = {"original_max_position_embeddings": 8}
YARN = {"type": "yarn", "factor": 4.0, "original_seq_length": 8}
MORE = {"beta_fast": 4.0, "beta_slow": 0.5, "mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 0.5, "high_freq_factor": 2.0}

TOLERANCES = [(torch.float64, 1e-12), (torch.float32, 1e-5)]
CASES = {
    "linear": Case("Llama", rope("linear", factor=4.0), {"rope_scaling": {"type": "linear", "factor": 4}}),
    "dynamic": Case(
        "Llama",
        rope("dynamic", factor=3.0) | {"max_position_embeddings": 8},
        {"rope_scaling": {"type": "dynamic", "factor": 3.0, "original_seq_length": 8}},
    ),
    "llama3": Case(
        "Llama",
        rope("llama3", **LLAMA3, **ORIGINAL),
        {"rope_scaling": {"type": "llama3", **LLAMA3, "original_seq_length": 8}},
    ),
    "yarn": Case("Llama", rope("yarn", factor=4.0, **ORIGINAL), {"rope_scaling": YARN}),
    "yarn with all keys": Case(
        "Llama",
        rope("yarn", factor=4.0, **MORE, **ORIGINAL),
        {"rope_scaling": YARN | MORE},
    ),
    "yarn with attention_factor": Case(
        "Llama",
        rope("yarn", factor=4.0, attention_factor=1.5, **ORIGINAL),
        {"rope_scaling": YARN | {"attention_factor": 1.5}},
    ),
    "head_dim": Case("Mistral", {"head_dim": 12, "sliding_window": None}, {"head_dim": 12}),
    "qkv_bias": Case("Qwen2", {}, {"qkv_bias": True}),
    "qk_norm head": Case("Qwen3", {"head_dim": 12}, {"head_dim": 12, "qk_norm": "head"}),
    "qk_norm full": Case("Olmo2", {}, {"qk_norm": "full"}),
    "gemma 3": Case(
        "Gemma3Text",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
            },
            "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "head_dim": 16,
            "query_pre_attn_scalar": 20,
        },
        {
            "norm": "rmsnorm_1p", "qk_norm": "head", "head_dim": 16, "local_rope_theta": 50.0, "window": [5, 0],
            "rope_scaling": {"type": "linear", "factor": 8.0}, "softmax_scale": 20**-0.5,
        },
    ),
    "rotary_fraction": Case("StableLm", rope("default", partial_rotary_factor=0.5), {"rotary_fraction": 0.5}),
    "attention_softcap": Case(
        "Gemma2",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, "sliding_window": 5},
        {"head_dim": 16, "attention_softcap": 2.0, "window": [5, 0]},
    ),
    "softmax_scale": Case(
        "Gemma2",
        {"head_dim": 16, "query_pre_attn_scalar": 40, "attn_logit_softcapping": None, "sliding_window": 5},
        {"head_dim": 16, "softmax_scale": 40**-0.5, "window": [5, 0]},
    ),
}  # fmt: skip


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Let quotients of whole numbers, as in dynamic scaling, be `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def their_attention(case: Case, layer: int, dtype: torch.dtype) -> tuple[Any, tuple[Tensor, Tensor], Tensor]:
    """Build transformers' module of a layer, with weights far from where training starts. Returns the module, cos and
    sin, and an additive mask.
    """
    import transformers

    config = getattr(transformers, f"{case.family}Config")(
        **{
            "num_hidden_layers": SIZES["num_layers"], "hidden_size": SIZES["hidden_size"],
            "intermediate_size": SIZES["ffn_size"], "num_attention_heads": SIZES["num_heads"],
            "num_key_value_heads": SIZES["num_kv_heads"], "max_position_embeddings": SEQUENCE,
            "rms_norm_eps": 1e-5, "rope_theta": 500.0, "vocab_size": VOCABULARY, "attn_implementation": "eager",
        }
        | case.theirs
    )  # fmt: skip
    net = getattr(transformers, f"{case.family.removesuffix('Text')}ForCausalLM")(config).to(dtype).model
    module, positions, types = net.layers[layer].self_attn, torch.arange(SEQUENCE)[None], ()
    if hasattr(config, "layer_types") and case.family.startswith("Gemma3"):
        types = (config.layer_types[layer],)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in module.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
        parameter.data = (drawn + ("norm" in name)).to(dtype)
    window = getattr(module, "sliding_window", None) or SEQUENCE
    distance = positions.T - positions
    mask = torch.zeros(SEQUENCE, SEQUENCE, dtype=dtype).masked_fill((distance < 0) | (distance >= window), -math.inf)
    return module, net.rotary_emb(torch.zeros(1, SEQUENCE, 1, dtype=dtype), positions, *types), mask[None, None]


def our_attention(case: Case, layer: int, weights: dict[str, Tensor]) -> tuple[Attention, dict[str, Any]]:
    """Return our module with the given weights, and the parameter or its rows for each of transformers' names."""
    module: Any = stage_of(SIZES | case.ours).layers[str(layer)].attention.to(next(iter(weights.values())).dtype)
    heads = SIZES["num_heads"], SIZES["num_kv_heads"], SIZES["num_kv_heads"]
    rows = torch.tensor([0, *heads]).cumsum(0) * (weights["o_proj.weight"].shape[1] // heads[0])
    places: dict[str, Any] = {"o_proj.weight": (module.out.weight, slice(None))}
    for kind in ("weight", "bias"):
        for index, part in enumerate("qkv"):
            places[f"{part}_proj.{kind}"] = getattr(module.qkv, kind), slice(*rows[index : index + 2].tolist())
    for part in ("q_norm", "k_norm"):
        if f"{part}.weight" in weights:
            places[f"{part}.weight"] = getattr(module.norms, part[0]).weight, slice(None)
    assert weights.keys() == {name for name, (parameter, _) in places.items() if parameter is not None}
    with torch.no_grad():
        for name, weight in weights.items():
            parameter, box = places[name]
            parameter[box] = weight
    return module, {name: places[name] for name in weights}


@pytest.mark.parametrize(("dtype", "tolerance"), only_quick_rows(TOLERANCES, TOLERANCES[0]), ids=str)
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(name: str, layer: int, dtype: torch.dtype, tolerance: float) -> None:
    case, generator = CASES[name], torch.Generator().manual_seed(3)
    x, upstream = (torch.randn(SAMPLES, SEQUENCE, SIZES["hidden_size"], generator=generator) for _ in range(2))
    x, upstream = x.to(dtype).requires_grad_(), upstream.to(dtype)
    with wide(dtype), default_dtype(dtype):
        module, angles, mask = their_attention(case, layer, dtype)
        expected = module(x, position_embeddings=angles, attention_mask=mask)[0]
        weights = dict(module.named_parameters())
        wanted = torch.autograd.grad(expected, [x, *weights.values()], upstream)
    ours, places = our_attention(case, layer, weights)
    parameters = list(dict.fromkeys(parameter for parameter, _ in places.values()))
    out = ours(x.transpose(0, 1), micro_batch(None)).transpose(0, 1)
    grad_x, *grads = torch.autograd.grad(out, [x, *parameters], upstream)
    by_parameter = dict(zip(map(id, parameters), grads, strict=True))
    found = [out, grad_x, *(by_parameter[id(parameter)][rows] for parameter, rows in places.values())]
    for actual, exact in zip(found, (expected, *wanted), strict=True):
        largest = max(float(exact.abs().max()), float(wanted[0].abs().max()))
        assert float((actual - exact).abs().max()) < tolerance * largest


def test_the_parts_change_the_output() -> None:
    """No two cases on one family agree."""
    outputs = {}
    for name, case in CASES.items():
        module, angles, mask = their_attention(case, 0, torch.float64)
        x = torch.randn(1, SEQUENCE, SIZES["hidden_size"], generator=torch.Generator().manual_seed(4)).double()
        outputs[name] = module(x, position_embeddings=angles, attention_mask=mask)[0]
    for name, out in outputs.items():
        assert all(name == other or not torch.allclose(out, there) for other, there in outputs.items())
