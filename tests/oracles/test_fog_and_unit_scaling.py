"""FOG's block and unit scaling against their definitions, written in torch: loss and gradients in every layout, and
with unit scaling the training of weights of variance 1, with multipliers of outputs and the published learning rates.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megascale.config.model import ModelConfig
from megascale.layout.parameters import all_params
from megascale.layout.tensors import TensorSpec
from megascale.train.run import Run
from tests.marks import only_quick_rows
from tests.oracles.ours import LAYOUTS, Arrays, Batch, Result, boxes_of, compute, difference, parameters_of
from tests.runs import LLAMA, config_of, curve_of, settings
from tests.thread_world import run_threads

FOG = LLAMA | {"block": "fog", "activation": "gelu", "embedding_scale": 50.0, "softmax_scale": 0.5}
UNIT = LLAMA | {"block": "post_norm", "activation": "gelu", "unit_scaling": True, "mup_base_width": 8}
MODELS: dict[str, dict[str, Any]] = {
    "fog fixed": FOG | {"qk_norm": "fixed"}, "fog tanh": FOG | {"qk_norm": "tanh"}, "unit": UNIT,
    "unit tau": UNIT | {"residual_tau": 0.3, "norm": "layernorm"},
}  # fmt: skip
BATCH = Batch()


def logits_of(model: ModelConfig, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Map tokens [b, s] to logits [b, s, vocabulary]. `weights`: with unit scaling those of variance 1."""
    tau, eps = model.residual_tau, model.norm_eps

    def linear(x: Tensor, name: str) -> Tensor:
        weight = weights[f"{name}.weight"]
        return x @ weight.t() * (weight.shape[1] ** -0.5 if model.unit_scaling else 1.0)

    def norm(x: Tensor, name: str) -> Tensor:
        gain, shape = weights[f"{name}.weight"], (model.hidden_size,)
        if model.norm == "layernorm":
            return F.layer_norm(x, shape, gain, weights[f"{name}.bias"], eps)
        return F.rms_norm(x, shape, gain, eps)

    def attention(x: Tensor, name: str) -> Tensor:
        q, k, v = (linear(x, f"{name}.{part}").unflatten(-1, (-1, model.head_dim)).transpose(1, 2) for part in "qkv")
        q, k = (rotated(normed(t, weights, f"{name}.{i}", model), model.rope_theta) for i, t in (("q", q), ("k", k)))
        k, v = (t.repeat_interleave(model.num_heads // model.num_kv_heads, 1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=model.attention_scale)
        return linear(out.transpose(1, 2).flatten(2), f"{name}.out")

    def add(x: Tensor, branch: Tensor) -> Tensor:
        return (1 - tau) ** 0.5 * x + tau**0.5 * branch if tau else x + branch

    x = weights["embedding.token.weight"][tokens] * model.embedding_scale
    for name in (f"layers.{index}" for index in range(model.num_layers)):
        x = add(x, norm(attention(x, f"{name}.attention"), f"{name}.attention_post_norm"))
        branch = linear(F.gelu(linear(x, f"{name}.mlp.up")), f"{name}.mlp.down")
        x = add(x, norm(branch, f"{name}.mlp_post_norm"))
    factor = 1 / model.hidden_size if model.unit_scaling else 1.0
    return norm(x, "final_norm") @ weights["head.weight"].t() * factor


def normed(x: Tensor, weights: dict[str, Tensor], name: str, model: ModelConfig) -> Tensor:
    """The norm of queries or keys [b, heads, s, d]."""
    if model.qk_norm == "tanh":
        return torch.tanh(weights[f"{name}_norm.weight"] * x)
    return x / (x.square().mean(-1, keepdim=True) + model.norm_eps).sqrt() if model.qk_norm == "fixed" else x


def rotated(x: Tensor, theta: float) -> Tensor:
    """Queries or keys [b, heads, s, d] with rotary embeddings."""
    s, d = x.shape[-2:]
    angles = torch.arange(s, dtype=x.dtype)[:, None] * theta ** -(torch.arange(0, d, 2, dtype=x.dtype) / d)
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def tensors_of(model: ModelConfig) -> dict[str, TensorSpec]:
    return {tensor.name: tensor for parameter in all_params(model) for tensor in parameter.parts}


def multiplier(model: ModelConfig, name: str) -> float:
    """The multiplier of a layer's output, which our weights contain (table 2 of Narayan et al. 2025)."""
    if not model.unit_scaling or "norm" in name or name.startswith("embedding"):
        return 1.0
    inputs = tensors_of(model)[name].shape[1]
    return float(1 / inputs if name == "head.weight" else inputs**-0.5)


@cache
def reference(name: str) -> tuple[Arrays, Result]:
    """Weights by our names, and what the definition computes with them in fp64."""
    model, generator = ModelConfig.model_validate(MODELS[name]), torch.Generator().manual_seed(3)
    ours = dict[str, Tensor]()
    for key, tensor in tensors_of(model).items():
        drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        ours[key] = (drawn * (tensor.std or 0.2) + (1.0 if key.endswith("norm.weight") else 0.0)).requires_grad_()
    unit = {key: weight / multiplier(model, key) for key, weight in ours.items()}
    logits = logits_of(model, unit, BATCH.tokens)
    losses = F.cross_entropy(logits.flatten(0, 1), BATCH.labels.flatten(), reduction="none")
    loss = (losses * BATCH.mask.flatten()).sum()
    loss.backward()
    gradients = {key: np.asarray(weight.grad) for key, weight in ours.items()}
    weights = {key: weight.detach().numpy() for key, weight in ours.items()}
    return weights, Result(logits.detach().numpy(), float(loss), gradients)


ROWS = [(name, layout) for name in MODELS for layout in LAYOUTS]
QUICK = (("fog fixed", "one process"), ("fog tanh", "tp2 sp"), ("unit", "tp2"), ("unit tau", "pp2"))


@pytest.mark.parametrize(("name", "layout"), only_quick_rows(ROWS, *QUICK))
def test_loss_and_gradients(name: str, layout: str, tmp_path: Path) -> None:
    weights, theirs = reference(name)
    ours = compute(MODELS[name], weights, tmp_path, "fp64", **LAYOUTS[layout])
    found = difference(ours, theirs)
    assert max(found.values()) < 1e-11, found


LR, DECAY, EPS, STEPS = 0.05, 0.1, 1e-8, 4


def trained(run: Run) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]], list[float]]:
    """The initial weights of a process, its batches [b, s] of tokens and labels, and the losses of training."""
    boxes = [(target, box) for target, _, spec in parameters_of(run) for box in boxes_of(spec, run.mesh)]
    weights = {tensor.name: target.detach()[rows].clone() for target, (tensor, _, rows) in boxes}
    batches = []
    for step in range(STEPS):
        parts = run.train_loader.batch(8 * step).micro_batches
        batches.append(tuple(torch.cat([getattr(part, key).t() for part in parts]) for key in ("tokens", "labels")))
    return weights, batches, [loss for loss, _ in curve_of(run, STEPS)]


def test_training_is_that_of_unit_weights_with_multipliers(tmp_path: Path) -> None:
    """AdamW with lr for embedding, head and norms, lr sqrt(base width / width) for hidden layers, and a decay of
    weights that no width changes: the losses of the weights that contain the multipliers, whose gradients are larger.
    """
    keys = {"lr": LR, "weight_decay": DECAY, "eps": EPS, "clip_norm": 0.0, "decay": "constant", "warmup_steps": 0}
    overrides = {f"optimizer__{key}": value for key, value in keys.items()}
    config = config_of(settings(UNIT, tmp_path, train__steps=STEPS, **overrides), tmp_path)
    model, (ours, batches, losses) = config.model, run_threads(config, trained)[0]
    unit = {key: (ours[key] / multiplier(model, key)).requires_grad_() for key in ours}
    hidden = torch.cat([unit[key].detach().flatten() for key in unit if ".attention." in key or ".mlp." in key])
    assert float(hidden.std()) == pytest.approx(1, rel=0.01)
    groups = []
    for key, weight in unit.items():
        rate = LR * (8 / 32) ** 0.5 if ".attention." in key or ".mlp." in key else LR
        decay = 0.0 if "norm" in key else DECAY * LR / rate
        groups.append({"params": [weight], "lr": rate, "weight_decay": decay, "eps": EPS * multiplier(model, key)})
    optimizer, theirs = torch.optim.AdamW(groups, betas=tuple(config.optimizer.betas)), []
    for tokens, labels in batches:
        loss = F.cross_entropy(logits_of(model, unit, tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        theirs.append(float(loss))
    assert losses == pytest.approx(theirs, rel=1e-12)
