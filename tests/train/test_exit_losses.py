"""Early exits: losses and every gradient are those of a plain formula, in every layout."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding

from megascale.config.run import RunConfig
from megascale.data.mix.mock_mixture import build_mixture
from megascale.train.evaluate import evaluate
from megascale.train.further_losses import exit_weights, further_metrics
from megascale.train.run_splits import mixture_spec
from megascale.train.step import train_step
from tests.runs import LLAMA, config_of, settings
from tests.thread_world import run_threads
from tests.train.test_prediction_steps import Alone, Outcome, block, norm

EXITS = LLAMA | {"exits": [1, 3], "init_std": 0.2}
TIED = EXITS | {"tie_embeddings": True, "norm": "layernorm", "exits": [2]}
FURTHER = EXITS | {"mtp_layers": 1}
EXPERTS = EXITS | {"experts": 8, "expert_ffn_size": 24, "dense_layers": 1, "router_score": "sigmoid"}
WITHIN = EXPERTS | {"num_layers": 8, "exits": [3, 5]}  # within chunks: segments follow an exit's
MODELS = {"two": EXITS, "tied": TIED, "further": FURTHER, "experts": EXPERTS, "within": WITHIN}

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2 sp": {"tp": 2, "sp": True},
    "cp2": {"cp": 2},
    "dp2 zero1": {"dp": 2, "zero": 1},
    "dp2 zero2": {"dp": 2, "zero": 2},
    "pp2": {"pp": 2},
    "pp4": {"pp": 4},
    "pp2 vpp2": {"pp": 2, "vpp": 2},
    "pp2 zb": {"pp": 2, "schedule": "zb_h1"},
    "pp2 vpp2 zero2": {"pp": 2, "vpp": 2, "dp": 2, "zero": 2},
    "pp4 dp2 zero2": {"pp": 4, "dp": 2, "zero": 2},
    "pp2 v": {"pp": 2, "vpp": 2, "schedule": "zb_v"},
    "pp2 v dp2 zero2": {"pp": 2, "vpp": 2, "schedule": "zb_v", "dp": 2, "zero": 2},
    "pp2 dualpipev": {"pp": 2, "vpp": 2, "schedule": "dualpipev"},
    "pp2 vpp2 zb dp2 zero2": {"pp": 2, "vpp": 2, "schedule": "interleaved_zb", "dp": 2, "zero": 2},
    "pp2 combined dp2 zero1": {"pp": 2, "vpp": 2, "schedule": "combined_1f1b", "dp": 2, "zero": 1},
    "tp2 sp cp2 pp2": {"tp": 2, "sp": True, "cp": 2, "pp": 2},
}
QUICK = [
    ("within", "pp2 dualpipev"),
    ("two", "pp2 v dp2 zero2"),
    ("tied", "tp2 sp"),
    ("two", "cp2"),
    ("two", "pp2 zb"),
]


def configure(model: dict[str, Any], folder: Path, layout: Mapping[str, Any], **keys: Any) -> RunConfig:
    given = {
        "batch__global": 4, "train__steps": 3, "train__exit_warmup_steps": 2, "optimizer__warmup_steps": 0,
        "optimizer__clip_norm": 0.0,
        "train__exit_loss_weight": [0.5, 0.25][: len(model["exits"])], "parallel__zero": 0,
    } | {f"parallel__{key}": value for key, value in layout.items()}  # fmt: skip
    return config_of(settings(model, folder, **given | keys), folder)


def train(run: Any) -> Outcome:
    """Train, and return losses, gradient norms and losses of exits, and gradients of the first step."""
    curve, boxes, config = [], [], run.config
    for step in range(3):
        result = train_step(run, run.train_loader.batch(run.progress.samples))
        exits = further_metrics(config.model, config.train, run.progress.step, result.totals)["exits"]
        curve += [result.loss, result.grad_norm, *(metrics["loss"] for metrics in exits.values())]
        for parameter, spec in run.buffers.shards() if not step and config.parallel.zero < 2 else ():
            row = 0
            for tensor in spec.parts:
                offset, size = tensor.local_box(run.mesh.topology, run.mesh.coord)
                box = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
                boxes.append((tensor.name, box, parameter.main_grad[row : row + size[0]].numpy().copy()))
                row += tensor.local_shape(run.mesh.topology)[0]
    run.buffers.finish_param_gather()
    return Outcome(curve, boxes)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """The outcome of a model on one process."""
    return cache(lambda model: run_threads(configure(MODELS[model], tmp_path_factory.mktemp(model), {}), train)[0])


def check(model: str, layout: str, folder: Path, alone: Outcome) -> None:
    whole = {name: grad for name, _, grad in alone.gradients}
    assert any(name.startswith("exits") for name in whole)
    for found in run_threads(configure(MODELS[model], folder, LAYOUTS[layout]), train):
        assert found.curve == pytest.approx(alone.curve, rel=1e-10)
        for name, box, grad in found.gradients if "zero" not in layout else ():
            np.testing.assert_allclose(grad, whole[name][box], rtol=1e-10, atol=1e-12, err_msg=name)


@pytest.mark.parametrize(("model", "layout"), QUICK)
def test_layouts_are_the_same_run(model: str, layout: str, alone: Alone, tmp_path: Path) -> None:
    check(model, layout, tmp_path, alone(model))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        each
        for each in [*itertools.product([*MODELS][:-1], LAYOUTS), ("within", "pp2 combined dp2 zero1")]
        if each not in (*QUICK, ("experts", "tp2"))
    ],
)
def test_every_layout_is_the_same_run(model: str, layout: str, alone: Alone, tmp_path: Path) -> None:
    check(model, layout, tmp_path, alone(model))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    """The outcomes of ranks without recomputation."""
    return run_threads(configure(EXITS, tmp_path_factory.mktemp("plain"), LAYOUTS["pp2 vpp2"]), train)


@pytest.mark.parametrize(
    "keys",
    [
        {"train__recompute": "full"},
        {"train__memory": ["keep", "keep", "full", "full"]},
        {"train__mlp_tiles": 2},
        pytest.param({"train__recompute": "selective"}, marks=pytest.mark.slow),
    ],
)
def test_recomputation_is_the_same_run(keys: dict[str, Any], plain: list[Outcome], tmp_path: Path) -> None:
    again = run_threads(configure(EXITS, tmp_path, LAYOUTS["pp2 vpp2"], **keys), train)
    for one, two in zip(plain, again, strict=True):
        assert two.curve == pytest.approx(one.curve, rel=1e-12)


@pytest.mark.parametrize("layout", ["dp2 zero2", pytest.param("pp2", marks=pytest.mark.slow)])
def test_chunks_of_sequences_are_the_same_run(layout: str, tmp_path: Path) -> None:
    keys = {"data__sequence_chunk_tokens": 8}
    plain, chunks = (run_threads(configure(EXITS, tmp_path, LAYOUTS[layout], **k), train) for k in ({}, keys))
    for one, two in zip(plain, chunks, strict=True):
        assert two.curve == pytest.approx(one.curve, rel=1e-10)


def test_gradients_are_those_of_the_plain_formula(tmp_path: Path) -> None:
    config = configure(EXITS, tmp_path, {})

    def body(run: Any) -> tuple[dict[str, Tensor], Outcome]:
        weights: dict[str, Tensor] = {}
        for parameter, spec in run.buffers.shards():
            rows = parameter.detach().clone().split([tensor.local_shape(run.mesh.topology)[0] for tensor in spec.parts])
            weights |= {t.name: part[: t.shape[0]] for t, part in zip(spec.parts, rows, strict=True)}
        return weights, train(run)

    ((weights, found),) = run_threads(config, body)
    w = {name: value.clone().requires_grad_() for name, value in weights.items()}
    samples, model = build_mixture(mixture_spec(config, "train")), config.model
    sums, s = [torch.zeros((), dtype=torch.float64) for _ in range(3)], model.seq_length
    for index in range(config.batch.total):
        ids = torch.from_numpy(samples[index].ids)
        x, outputs = embedding(ids[:-1], w["embedding.token.weight"]), []
        for layer in range(model.num_layers):
            x = block(x, w, layer, torch.ones(s, s).tril().bool(), model)
            if layer + 1 in model.exits:
                name = f"exits.{layer + 1}"
                outputs.append(norm(x, w[f"{name}.norm.weight"]) @ w[f"{name}.head.weight"].t())
        outputs.append(norm(x, w["final_norm.weight"]) @ w["head.weight"].t())
        sums = [a + cross_entropy(b, ids[1:], reduction="sum") for a, b in zip(sums, outputs, strict=True)]
    first, second, last = (total / (config.batch.total * s) for total in sums)
    assert [found.curve[0], *found.curve[2:4]] == pytest.approx([float(last), float(first), float(second)], rel=1e-12)
    (last + 0.5 * (0.5 * first + 0.25 * second)).backward()  # half of the weights in the first step of two
    assert {name for name, _, _ in found.gradients} == w.keys()
    for name, _, grad in found.gradients:
        np.testing.assert_allclose(grad, w[name].grad, rtol=1e-10, atol=1e-12, err_msg=name)


def test_an_evaluation_has_the_loss_of_the_last_layer(tmp_path: Path) -> None:
    """As a model without exits, with the same weights."""
    keys = {"parallel__pp": 2, "train__eval_every": 2, "train__eval_steps": 1}
    trees = [settings(model, tmp_path, **keys) for model in (EXITS, EXITS | {"exits": []})]
    losses = [run_threads(config_of(tree, tmp_path), lambda run: evaluate(run).valid_loss) for tree in trees]
    assert losses[0] == losses[1]


def test_weights_warm_up(tmp_path: Path) -> None:
    config = configure(EXITS, tmp_path, {})
    assert [exit_weights(config.model, config.train, step) for step in (1, 2, 3)] == [
        {1: 0.25, 3: 0.125}, {1: 0.5, 3: 0.25}, {1: 0.5, 3: 0.25}
    ]  # fmt: skip
