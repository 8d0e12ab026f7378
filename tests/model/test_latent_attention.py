"""Latent attention (MLA): its formula, and losses and gradients of every layout equal to those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megascale.config.model import ModelConfig
from megascale.layout.parameters import all_params
from megascale.layout.parts.latent_projections import latent_attention
from tests.oracles.ours import Arrays, boxes_of, join, parameters_of
from tests.runs import MLA, config_of, settings, total_of, train_order
from tests.thread_world import run_threads

EXPERTS = {
    "experts": 8, "experts_per_token": 2, "expert_ffn_size": 24, "dense_layers": 1, "shared_ffn_size": 16,
    "router_score": "sigmoid", "balance_bias": True,
}  # fmt: skip
YARN = {"type": "yarn", "factor": 4.0, "original_seq_length": 8, "mscale": 0.7, "mscale_all_dim": 0.9}
MODELS = {
    "experts": MLA | EXPERTS | {"rope_scaling": YARN},
    "no q latent": MLA | {"q_lora_rank": 0, "value_head_dim": 8},
    "dropout": MLA | {"dropout": 0.2, "latent_norm_eps": 1e-2, "mup_base_width": 16},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2 sp": {"tp": 2, "sp": True},
    "ring 2": {"cp": 2},
    "ulysses 2": {"cp": 2, "cp_mode": "ulysses"},
    "usp 2x2": {"cp": 4, "cp_mode": "usp", "cp_a2a_size": 2},
    "pp2": {"pp": 2},
    "pp2 vpp2 dp2": {"pp": 2, "vpp": 2, "dp": 2},
    "tp4 sp pp2": {"tp": 4, "sp": True, "pp": 2},
}
EXPERT_LAYOUTS = {
    "tp2 sp cp2 ep4": {"tp": 2, "sp": True, "cp": 2, "ep": 4},
    "tp2 sp, ulysses 2, dp2, ep8": {"tp": 2, "sp": True, "cp": 2, "cp_mode": "ulysses", "dp": 2, "ep": 8},
}
SELECTIVE = {"train__recompute": "selective", "train__recompute_ops": ["attention", "norm", "activation"]}
FULL = {"train__recompute": "full"}


def gradients(run: Any) -> tuple[float, Any]:
    run.buffers.begin_step()
    loss = total_of(run, run.pipeline.run_actions(train_order(run), run.train_loader.batch(0)))
    list(run.buffers.finish_reductions())
    pieces = [
        (tensor.name, box, grad[rows].clone().numpy())
        for _, grad, parameter in parameters_of(run)
        for tensor, box, rows in boxes_of(parameter, run.mesh)
    ]
    return loss, pieces


def compute(model: dict[str, Any], folder: Path, layout: dict[str, Any], **keys: Any) -> tuple[float, Arrays]:
    parallel = {f"parallel__{key}": value for key, value in layout.items()}
    config = config_of(settings(model, folder, batch__micro=2, parallel__zero=0, **parallel, **keys), folder)
    shapes = {tensor.name: tensor.shape for parameter in all_params(config.model) for tensor in parameter.parts}
    ranks = run_threads(config, gradients)
    return ranks[0][0], join(shapes, [pieces for _, pieces in ranks])


ALONE: dict[str, tuple[float, Arrays]] = {}


def check(name: str, folder: Path, layout: dict[str, Any], **keys: Any) -> None:
    if name not in ALONE:
        ALONE[name] = compute(MODELS[name], folder, {})
    loss, grads = compute(MODELS[name], folder, layout, **keys)
    assert loss == pytest.approx(ALONE[name][0], rel=1e-12)
    for key, expected in ALONE[name][1].items():
        assert expected.any(), key
        assert np.abs(grads[key] - expected).max() <= 1e-10 * np.abs(expected).max(), key


QUICK = [
    ("experts", "tp2 sp cp2 ep4", {}), ("no q latent", "tp2 sp", SELECTIVE), ("dropout", "tp2", FULL),
    ("experts", "ulysses 2", SELECTIVE), ("experts", "pp2", {}), ("no q latent", "ring 2", {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "layout", "keys"), QUICK)
def test_layouts_have_the_gradients_of_one_process(
    name: str, layout: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    check(name, tmp_path, (LAYOUTS | EXPERT_LAYOUTS)[layout], **keys)


EVERY = [
    (name, layout)
    for name in MODELS
    for layout, parallel in (LAYOUTS | EXPERT_LAYOUTS).items()
    if (name == "experts" or layout not in EXPERT_LAYOUTS)  # ep is of experts
    and (name != "experts" or parallel.get("tp", 1) == 1 or "sp" in parallel)  # experts need sp with tp
    and (name != "dropout" or "cp" not in parallel)  # cp has no dropout
]


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{}, SELECTIVE, FULL], ids=["saved", "selective", "full"])
@pytest.mark.parametrize(("name", "layout"), EVERY)
def test_every_layout_has_the_gradients_of_one_process(
    name: str, layout: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    check(name, tmp_path, (LAYOUTS | EXPERT_LAYOUTS)[layout], **keys)


def test_heads_are_logical_parts() -> None:
    """Optimizers that work by head find the rows of q, k and v, and of what is rotated apart from the rest."""
    model = ModelConfig.model_validate(MLA)
    projections, core = latent_attention(model, 0)
    parts = {part.name: part for param in projections.params("layers.0", model) for part in param.parts}
    rows = {name.split(".")[3]: part.head_dim for name, part in parts.items() if part.head_dim}
    assert rows == {"q": 8, "q_rope": 4, "k": 8, "v": 6}
    assert parts["layers.0.attention.k_rope.weight"].shape == (4, 32) and core.head_dim == 12


def test_muP_takes_the_widths_of_latents_as_given() -> None:
    model = ModelConfig.model_validate(MLA | {"mup_base_width": 8})
    parts = {part.name.split(".")[3]: part for param in latent_attention(model, 0)[0].params("layers.0", model)
             for part in param.parts}  # fmt: skip
    assert {name: part.width_ratio for name, part in parts.items() if part.std} == {
        "q_latent": 4.0, "kv_latent": 4.0, "k_rope": 4.0, "q": 1.0, "q_rope": 1.0, "k": 1.0, "v": 1.0,
    }  # fmt: skip
    assert parts["q"].std == model.init_std and parts["kv_latent"].std == model.init_std / 2


def test_the_scale_of_scores_has_the_factor_of_yarn() -> None:
    scale = ModelConfig.model_validate(MLA).attention_scale
    assert scale == 12**-0.5
    stretched = ModelConfig.model_validate(MLA | {"rope_scaling": YARN | {"mscale_all_dim": 1.0, "factor": 40.0}})
    assert stretched.attention_scale == pytest.approx(scale * 1.3688879454**2, rel=1e-9)  # DeepSeek-V3's
