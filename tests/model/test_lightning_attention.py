"""Lightning attention: the released model's layer, and losses and gradients of every layout equal to one process's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megascale.config.model import ModelConfig
from megascale.core.rank import Rank
from megascale.layout.parameters import all_params, layer_params
from megascale.model.lightning_attention import LightningAttention
from megascale.parallel.segments import finish
from tests.marks import only_quick
from tests.model.test_latent_attention import gradients
from tests.optim.test_lamb import resume
from tests.oracles.ours import Arrays, join
from tests.runs import GPT, LLAMA, MLA, build_run, config_of, curve_of, given, micro_batch, settings
from tests.thread_world import run_threads
from tests.worlds import run_world

HYBRID = LLAMA | {"num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "attention_pattern": "LLS", "seq_length": 24}
EXPERTS = {"experts": 8, "experts_per_token": 2, "expert_ffn_size": 24, "router_score": "sigmoid"}
DOCUMENTS = {"data__attention_mask": "document", "data__document_length": 7}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (HYBRID | {"mup_base_width": 16}, {}),
    "documents": (HYBRID | {"window": [0, 0, 5], "qk_norm": "full"}, DOCUMENTS),
    "experts": (HYBRID | EXPERTS | {"block": "sandwich", "norm": "rmsnorm_1p"}, DOCUMENTS),
    "gpt": (GPT | {"attention_pattern": "L", "seq_length": 24, "dropout": 0.2}, {}),
    "latent": (MLA | {"attention_pattern": "LS", "seq_length": 24}, {}),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"parallel__tp": 2},
    "tp4 sp": {"parallel__tp": 4, "parallel__sp": True},
    "pp2": {"parallel__pp": 2},
    "pp2 vpp2 dp2": {"parallel__pp": 2, "parallel__vpp": 2, "parallel__dp": 2},
    "zb_v": {"parallel__pp": 2, "parallel__vpp": 2, "parallel__schedule": "zb_v"},
    "zb_v tp2 sp": {"parallel__pp": 2, "parallel__vpp": 2, "parallel__schedule": "zb_v", "parallel__tp": 2,
                    "parallel__sp": True},
    "domino": {"parallel__tp": 2, "parallel__sp": True, "overlap__tp": "domino"},
}  # fmt: skip
SHARED: dict[str, dict[str, Any]] = {
    "ring 2": {"parallel__cp": 2},
    "ring 3": {"parallel__cp": 3},
    "ring 4 by document": {"parallel__cp": 4, "parallel__cp_sharding": "document", "batch__micro": 1},
    "allgather 2": {"parallel__cp": 2, "parallel__cp_mode": "allgather"},
    "ulysses 2": {"parallel__cp": 2, "parallel__cp_mode": "ulysses"},
    "usp 2x2": {"parallel__cp": 4, "parallel__cp_mode": "usp", "parallel__cp_a2a_size": 2},
    "ring 2, tp2 sp pp2": {"parallel__cp": 2, "parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2},
    "chunks": {"data__sequence_chunk_tokens": 6, "batch__micro": 1},
    "chunks, 2 saved, tp2": {"data__sequence_chunk_tokens": 4, "data__sequence_chunks_saved": 2, "parallel__tp": 2,
                             "batch__micro": 1},
    "chunks, pp2": {"data__sequence_chunk_tokens": 8, "parallel__pp": 2, "batch__micro": 1},
}  # fmt: skip
SELECTIVE = {"train__recompute": "selective", "train__recompute_ops": ["attention", "norm", "activation"]}
FULL = {"train__recompute": "full"}
RECOMPUTED = {"saved": {}, "selective": SELECTIVE, "full": FULL}


def compute(name: str, folder: Path, **keys: Any) -> tuple[float, Arrays]:
    model, of_model = MODELS[name]
    own = {"batch__micro": 2, "parallel__zero": 0} | of_model | keys
    config = config_of(settings(model, folder, **own), folder)
    shapes = {tensor.name: tensor.shape for parameter in all_params(config.model) for tensor in parameter.parts}
    ranks = run_threads(config, gradients)
    return ranks[0][0], join(shapes, [pieces for _, pieces in ranks])


ALONE: dict[str, tuple[float, Arrays]] = {}


def check(name: str, folder: Path, **keys: Any) -> None:
    if name not in ALONE:
        ALONE[name] = compute(name, folder)
    loss, grads = compute(name, folder, **keys)
    assert loss == pytest.approx(ALONE[name][0], rel=1e-12)
    for key, expected in ALONE[name][1].items():
        assert expected.any(), key
        assert np.abs(grads[key] - expected).max() <= 1e-10 * np.abs(expected).max(), key


QUICK = [
    ("llama", "tp4 sp", SELECTIVE), ("documents", "ring 2, tp2 sp pp2", FULL), ("experts", "ring 3", {}),
    ("documents", "usp 2x2", SELECTIVE), ("llama", "chunks", {}), ("gpt", "tp2", FULL), ("latent", "zb_v", {}),
    ("documents", "ring 4 by document", {}), ("documents", "chunks, 2 saved, tp2", {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "layout", "keys"), QUICK)
def test_layouts_have_the_gradients_of_one_process(
    name: str, layout: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    check(name, tmp_path, **(LAYOUTS | SHARED)[layout], **keys)


def possible(name: str, layout: str) -> bool:
    """Return False for what other parts of a model refuse."""
    model, keys = MODELS[name][0], (LAYOUTS | SHARED)[layout]
    dense_only = layout == "domino" or ("parallel__tp" in keys and "parallel__sp" not in keys)
    return not (
        ("document" in layout and not MODELS[name][1])
        or ("dropout" in model and layout in SHARED)
        or ("experts" in model and dense_only)
    )


@pytest.mark.slow
@pytest.mark.parametrize("recompute", RECOMPUTED)
@pytest.mark.parametrize(
    ("name", "layout"), [(name, it) for name in MODELS for it in LAYOUTS | SHARED if possible(name, it)]
)
def test_every_layout_has_the_gradients_of_one_process(name: str, layout: str, recompute: str, tmp_path: Path) -> None:
    check(name, tmp_path, **(LAYOUTS | SHARED)[layout], **RECOMPUTED[recompute])


@pytest.mark.parametrize("zero", only_quick([1, 2, 3], 3))
def test_sharded_runs_are_that_of_one_process(zero: int, tmp_path: Path) -> None:
    model = HYBRID | {"mtp_layers": int(zero < 3)}
    configs = [
        config_of(settings(model, tmp_path, batch__global=4, **DOCUMENTS, **keys), tmp_path)
        for keys in ({}, {"parallel__dp": 2, "parallel__zero": zero})
    ]
    (alone,), *ranks = (run_threads(config, lambda run: curve_of(run, 3)) for config in configs)
    for curve in ranks[0]:
        assert sum(curve, ()) == pytest.approx(sum(alone, ()), rel=1e-10)


def resharded(rank: Rank, first: Any, *others: Any) -> list[list[tuple[float, float]]]:
    """Save after two steps of a run: the curve of two more, there and from the checkpoint in each of the others."""
    run = build_run(rank, first)
    curve_of(run, 2)
    run.checkpoints.save(run.progress)
    return [curve_of(run, 2), *(curve_of(resume(build_run(rank, other)), 2) for other in others)]


def test_a_run_goes_on_in_another_layout(tmp_path: Path) -> None:
    """The decays follow the heads and layers of a rank, and no state is left from a step before."""
    model, keys = MODELS["documents"]
    keys = keys | {"checkpoint__every": 10, "batch__global": 4}
    layouts = LAYOUTS["tp2"], LAYOUTS["pp2"], SHARED["ring 2"]
    configs = [config_of(settings(model, tmp_path, **keys, **layout), tmp_path) for layout in layouts]
    for expected, *curves in run_world(2, resharded, *configs):
        for curve in curves:
            assert sum(curve, ()) == pytest.approx(sum(expected, ()), rel=1e-10)


@pytest.mark.parametrize("index", [0, 3])
def test_the_layer_is_that_of_transformers(index: int) -> None:
    """Results and gradients of the released layer, whose projection has q, k and v head by head."""
    minimax = pytest.importorskip("transformers.models.minimax.modeling_minimax")
    model = ModelConfig.model_validate(HYBRID | {"norm_eps": 1e-6})
    config = minimax.MiniMaxConfig(
        hidden_size=32, num_attention_heads=8, head_dim=4, num_hidden_layers=4, block_size=5,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = minimax.MiniMaxLightningAttention(config, index).double()
    by_head = theirs.qkv_proj.weight.detach().view(8, 3, 4, 32).transpose(0, 1)
    stacked = torch.cat([by_head.flatten(0, 2), theirs.output_gate.weight.detach()])
    theirs.norm.weight.data.uniform_(0.5, 1.5)
    values = {"qkv.weight": stacked, "out.weight": theirs.out_proj.weight, "norm.weight": theirs.norm.weight}
    parameters = {
        f"layers.{index}.attention.{name}": torch.nn.Parameter(value.detach().clone()) for name, value in values.items()
    }
    ours = LightningAttention(given(model, parameters), index)
    x = torch.randn(2, 24, 32, dtype=torch.float64, requires_grad=True)
    expected = theirs(x, None, None)[0]
    found = finish(ours.steps(x.transpose(0, 1), micro_batch([0, 1]))).transpose(0, 1)
    # their factors are in fp32
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-7)
    grad = torch.randn_like(expected)
    their_leaves = x, theirs.out_proj.weight, theirs.norm.weight, theirs.output_gate.weight
    wanted = torch.autograd.grad(expected, their_leaves, grad)
    of_x, of_all, of_out, of_norm = torch.autograd.grad(found, [x, *parameters.values()], grad)
    for ours_of, theirs_of in zip((of_x, of_out, of_norm, of_all[96:]), wanted, strict=True):
        torch.testing.assert_close(ours_of, theirs_of, rtol=1e-5, atol=1e-6)


def test_layers_have_the_parameters_of_their_letters() -> None:
    model = ModelConfig.model_validate(HYBRID)
    assert "".join(model.attention_kind(layer).facts["letter"] for layer in range(4)) == "LLSL"
    of_layers = [
        {part.name.split(".")[3]: part.shape for param in layer_params(model, layer) for part in param.parts
         if ".attention." in part.name}
        for layer in (0, 2)
    ]  # fmt: skip
    assert of_layers == [
        {"q": (32, 32), "k": (32, 32), "v": (32, 32), "gate": (32, 32), "norm": (32,), "out": (32, 32)},
        {"q": (32, 32), "k": (16, 32), "v": (16, 32), "out": (32, 32)},
    ]
