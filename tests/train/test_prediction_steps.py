"""Multi-token prediction: losses and every gradient are those of a plain formula, in every layout, with documents."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding, silu, softmax

from megascale.config.model import ModelConfig
from megascale.config.run import RunConfig
from megascale.data.mix.mock_mixture import build_mixture
from megascale.data.mix.samples import DocumentStarts, Sample, depth_labels
from megascale.parallel.microbatch import StepBatch
from megascale.train.evaluate import evaluate
from megascale.train.further_losses import further_metrics
from megascale.train.run_splits import mixture_spec
from megascale.train.step import train_step
from tests.data.datasets import ORIGIN, write_documents
from tests.runs import LLAMA, config_of, settings
from tests.thread_world import run_threads

TWO = LLAMA | {"mtp_layers": 2, "init_std": 0.2}
TIED = LLAMA | {"mtp_layers": 1, "tie_embeddings": True, "embedding_scale": 2.0}
EXPERTS = LLAMA | {
    "mtp_layers": 2, "experts": 8, "expert_ffn_size": 24, "dense_layers": 1, "shared_ffn_size": 16,
    "router_score": "sigmoid", "balance_bias": True,
}  # fmt: skip
MODELS = {"two": TWO, "tied": TIED, "experts": EXPERTS}
STEP = {"moe__balance": "step", "moe__balance_weight": 0.5, "moe__z_loss_weight": 0.01}

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 sp": {"tp": 2, "sp": True},
    "cp2": {"cp": 2},
    "pp2 vpp2": {"pp": 2, "vpp": 2},
    "dp2 ep2": {"dp": 2, "ep": 2},
    "dp2 zero2": {"dp": 2, "zero": 2},
    "tp2": {"tp": 2},
    "pp2 dp2 zero2": {"pp": 2, "dp": 2, "zero": 2},
    "tp2 sp cp2 pp2": {"tp": 2, "sp": True, "cp": 2, "pp": 2},
    "tp2 sp dp2 ep4": {"tp": 2, "sp": True, "dp": 2, "ep": 4},
    "pp2 vpp2 dp2 ep2": {"pp": 2, "vpp": 2, "dp": 2, "ep": 2},
    "pp2 v": {"pp": 2, "vpp": 2, "schedule": "zb_v"},
    "pp2 v dp2 zero2": {"pp": 2, "vpp": 2, "schedule": "zb_v", "dp": 2, "zero": 2},
    "pp4, last without other layers": {"pp": 4, "layers_per_chunk": [2, 1, 1, 0]},
}
QUICK = [("two", "tp2 sp"), ("tied", "pp2 vpp2"), ("two", "pp2 dp2 zero2"), ("experts", "dp2 ep2"), ("two", "cp2")]


class Outcome(NamedTuple):
    """Losses, gradient norms and losses of depths of steps; of the first step this rank's gradients by name, with the
    regions that they are.
    """

    curve: list[float]
    gradients: list[tuple[str, tuple[slice, ...], np.ndarray]]


Alone = Callable[[str], Outcome]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 1 to 40 tokens, for samples of 16."""
    random = np.random.default_rng(0)
    prefix = tmp_path_factory.mktemp("packed") / "documents"
    documents = (random.integers(101, size=length) for length in random.integers(1, 40, size=60))
    write_documents(prefix, documents, ORIGIN, 101)
    return prefix


def configure(model: dict[str, Any], dataset: Path, folder: Path, layout: Mapping[str, Any], **keys: Any) -> RunConfig:
    given = {
        "data__mock": False, "data__train": str(dataset), "data__attention_mask": "document", "train__steps": 3,
        "batch__global": 4,
        "train__mtp_loss_weight": 0.6, "optimizer__warmup_steps": 0, "optimizer__clip_norm": 0.0, "parallel__zero": 0,
    } | {f"parallel__{key}": value for key, value in layout.items()}  # fmt: skip
    return config_of(settings(model, folder, **given | keys), folder)


def train(run: Any) -> Outcome:
    curve, boxes, config = [], [], run.config
    for step in range(3):
        result = train_step(run, run.train_loader.batch(run.progress.samples))
        depths = further_metrics(config.model, config.train, step + 1, result.totals)["mtp"]
        curve += [result.loss, result.grad_norm, *(metrics["loss"] for metrics in depths.values())]
        if step or config.parallel.zero:
            continue
        for parameter, spec in run.buffers.shards():
            row = 0
            for tensor in spec.parts:
                offset, size = tensor.local_box(run.mesh.topology, run.mesh.coord)
                box = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
                boxes.append((tensor.name, box, parameter.main_grad[row : row + size[0]].numpy().copy()))
                row += tensor.local_shape(run.mesh.topology)[0]
    run.buffers.finish_param_gather()
    return Outcome(curve, boxes)


@pytest.fixture(scope="module")
def alone(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """The outcome of a model on one process."""

    def outcome(model: str) -> Outcome:
        config = configure(MODELS[model], dataset, tmp_path_factory.mktemp(model), {}, **keys_of(model))
        return run_threads(config, train)[0]

    return cache(outcome)


def keys_of(model: str) -> dict[str, Any]:
    return STEP if model == "experts" else {}


def check(model: str, layout: str, dataset: Path, folder: Path, alone: Outcome) -> None:
    whole = {name: grad for name, _, grad in alone.gradients}
    seen = dict.fromkeys(whole, 0)
    for found in run_threads(configure(MODELS[model], dataset, folder, LAYOUTS[layout], **keys_of(model)), train):
        assert found.curve == pytest.approx(alone.curve, rel=1e-10)
        for name, box, grad in found.gradients:
            np.testing.assert_allclose(grad, whole[name][box], rtol=1e-10, atol=1e-12, err_msg=name)
            seen[name] += grad.size
    assert "zero2" in layout or all(seen[name] >= whole[name].size for name in whole)


@pytest.mark.parametrize(("model", "layout"), QUICK)
def test_layouts_are_the_same_run(model: str, layout: str, dataset: Path, alone: Alone, tmp_path: Path) -> None:
    check(model, layout, dataset, tmp_path, alone(model))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout"), [each for each in itertools.product(MODELS, LAYOUTS) if each not in QUICK]
)
def test_every_layout_is_the_same_run(model: str, layout: str, dataset: Path, alone: Alone, tmp_path: Path) -> None:
    if not (model == "experts" and layout == "tp2") and not (model != "experts" and "ep" in LAYOUTS[layout]):
        check(model, layout, dataset, tmp_path, alone(model))


@pytest.mark.parametrize("recompute", ["full", pytest.param("selective", marks=pytest.mark.slow)])
def test_recomputation_is_the_same_run(recompute: str, dataset: Path, tmp_path: Path) -> None:
    plain, again = (
        run_threads(configure(EXPERTS, dataset, tmp_path, LAYOUTS["pp2 vpp2 dp2 ep2"], **keys), train)
        for keys in ({}, {"train__recompute": recompute})
    )
    for one, two in zip(plain, again, strict=True):
        assert two.curve == pytest.approx(one.curve, rel=1e-12)


def test_an_evaluation_has_the_loss_of_the_next_token(tmp_path: Path) -> None:
    """As a model without further depths, with the same weights."""
    keys = {"parallel__pp": 2, "parallel__vpp": 2, "train__eval_every": 2, "train__eval_steps": 1}
    trees = [settings(model, tmp_path, **keys) for model in (TWO, TWO | {"mtp_layers": 0})]
    with_depths, without = (
        run_threads(config_of(tree, tmp_path), lambda run: evaluate(run).valid_loss) for tree in trees
    )
    assert with_depths == without


def test_a_step_without_targets_is_refused(tmp_path: Path) -> None:
    def body(run: Any) -> None:
        parts = [replace(part, depths=()) for part in run.train_loader.batch(0).micro_batches]
        with pytest.raises(ValueError, match="zip"):
            train_step(run, StepBatch(parts))

    run_threads(config_of(settings(TWO, tmp_path), tmp_path), body)


def norm(x: Tensor, gain: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * gain


def block(x: Tensor, weights: Mapping[str, Tensor], layer: int, mask: Tensor, model: ModelConfig) -> Tensor:
    """A layer of Llama for x [s, h]; `mask` [s, s]: the scores that count."""
    w = {name.removeprefix(f"layers.{layer}."): value for name, value in weights.items()}
    normed, s, d = norm(x, w["attention_norm.weight"]), len(x), model.head_dim
    q, k, v = ((normed @ w[f"attention.{part}.weight"].t()).view(s, -1, d).transpose(0, 1) for part in "qkv")
    angles = torch.arange(s).double()[:, None] * model.rope_theta ** (-torch.arange(0, d, 2).double() / d)
    cos, sin = (f(angles).repeat(1, 2) for f in (torch.cos, torch.sin))
    q, k = (t * cos + torch.cat([-t[..., d // 2 :], t[..., : d // 2]], -1) * sin for t in (q, k))
    k, v = (t.repeat_interleave(model.num_heads // model.num_kv_heads, 0) for t in (k, v))
    scores = (q @ k.transpose(1, 2) * d**-0.5).masked_fill(~mask, -torch.inf)
    x = x + (softmax(scores, -1) @ v).transpose(0, 1).reshape(s, -1) @ w["attention.out.weight"].t()
    normed = norm(x, w["mlp_norm.weight"])
    inner = silu(normed @ w["mlp.gate.weight"].t()) * (normed @ w["mlp.up.weight"].t())
    return x + inner @ w["mlp.down.weight"].t()


def plain_losses(sample: Sample, w: Mapping[str, Tensor], model: ModelConfig) -> list[tuple[Tensor, int]]:
    """The sums of losses of each depth over a sample, from 0, and the numbers of their targets."""
    ids, table = torch.from_numpy(sample.ids), w["embedding.token.weight"]
    assert sample.documents is not None
    document = torch.bucketize(torch.arange(len(ids)), torch.from_numpy(sample.documents.starts), right=True)
    s, losses = len(ids) - 1, []
    mask = (document[:s, None] == document[None, :s]) & torch.ones(s, s).tril().bool()
    x = embedding(ids[:s], table)
    for layer in range(model.num_layers):
        x = block(x, w, layer, mask, model)
    x = norm(x, w["final_norm.weight"])
    for depth in range(model.mtp_layers + 1):
        if depth:
            name, end = f"layers.{model.num_layers + depth - 1}", len(x) - (depth > 1)  # the last token has no further
            embedded = norm(embedding(ids[depth:][:end], table), w[f"{name}.embedding_norm.weight"])
            merged = torch.cat([embedded, norm(x[:end], w[f"{name}.hidden_norm.weight"])], -1)
            merged = merged @ w[f"{name}.merge.weight"].t()
            x = block(merged, w, model.num_layers + depth - 1, mask[:end, :end], model)
            x = norm(x, w[f"{name}.final_norm.weight"])
        last = len(ids) - depth - 1  # positions with a target in the sample
        kept = [t for t in range(last) if document[t] == document[t + depth + 1]]
        logits = x[kept] @ w["head.weight"].t()
        losses.append((cross_entropy(logits, ids[[t + depth + 1 for t in kept]], reduction="sum"), len(kept)))
    return losses


def test_gradients_are_those_of_the_plain_formula(dataset: Path, tmp_path: Path) -> None:
    config = configure(TWO, dataset, tmp_path, {})

    def body(run: Any) -> tuple[dict[str, Tensor], Outcome]:
        weights: dict[str, Tensor] = {}
        for parameter, spec in run.buffers.shards():
            rows = parameter.detach().clone().split([tensor.local_shape(run.mesh.topology)[0] for tensor in spec.parts])
            weights |= {t.name: part[: t.shape[0]] for t, part in zip(spec.parts, rows, strict=True)}
        return weights, train(run)

    ((weights, found),) = run_threads(config, body)
    leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
    samples, model = build_mixture(mixture_spec(config, "train")), config.model
    by_sample = [plain_losses(samples[index], leaves, model) for index in range(config.batch.total)]
    sums = [sum(loss for loss, _ in depth) for depth in zip(*by_sample, strict=True)]
    counts = [sum(count for _, count in depth) for depth in zip(*by_sample, strict=True)]
    means = [total / count for total, count in zip(sums, counts, strict=True)]
    assert counts[0] > counts[1] > counts[2] > 0
    assert [found.curve[0], *found.curve[2:4]] == pytest.approx([float(mean) for mean in means], rel=1e-12)
    (means[0] + 0.6 / 2 * (means[1] + means[2])).backward()
    assert {name for name, _, _ in found.gradients} == leaves.keys()
    for name, _, grad in found.gradients:
        np.testing.assert_allclose(grad, leaves[name].grad, rtol=1e-10, atol=1e-12, err_msg=name)


def test_targets_lie_in_the_document() -> None:
    sample = Sample(np.arange(10), np.array([1, 1, 0, 1, 1, 1, 1, 0, 0]), DocumentStarts(np.array([0, 3]), 8, 9))
    labels, weights = depth_labels(sample, 1)
    assert labels.tolist() == [2, 3, 4, 5, 6, 7, 8, 9, 0]
    assert weights.tolist() == [1, 0, 0, 1, 1, 1, 0, 0, 0]
    labels, weights = depth_labels(sample, 2)
    assert labels.tolist() == [3, 4, 5, 6, 7, 8, 9, 0, 0]
    assert weights.tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 0]


def test_labels_without_weight_are_inputs_of_the_next_depth() -> None:
    """A label may have no loss in the middle of a document: the depth beyond has its token as input."""
    sample = Sample(np.arange(6), np.array([1, 0, 0.5, 0, 1], dtype=np.float32))
    labels, weights = depth_labels(sample, 1)
    assert (labels.tolist(), weights.tolist()) == ([2, 3, 4, 5, 0], [0, 0.5, 0, 1, 0])
