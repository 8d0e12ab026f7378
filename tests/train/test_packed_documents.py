"""Packed documents are separate documents: equal loss, gradients and counts, in every layout."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.data.mix.mock_mixture import build_mixture
from megascale.data.mix.samples import Sample
from megascale.parallel.microbatch import MicroBatch, StepBatch
from megascale.parallel.rng import Dropout
from megascale.plan.account.flops import token_flops
from megascale.train.batch_totals import per_token, take_scores
from megascale.train.evaluate import evaluate
from megascale.train.run_splits import mixture_spec
from megascale.train.step import train_step
from tests.data.datasets import ORIGIN, write_documents
from tests.runs import MODELS, build_run, config_of, settings
from tests.train.test_layout_invariance import GEMMA_LIKE, LAYOUTS
from tests.worlds import run_world

STEPS = 3
BATCH, QUICK_BATCH = 8, 4
VOCABULARY = 101
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A model, and other keys of the run."""

    family: str
    model: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)


CASES = {
    "gpt": Case("gpt"),
    "llama": Case("llama"),
    "gpt, best fit": Case("gpt", {}, {"data__packing": "best_fit"}),
    "gpt, decomposed": Case(
        "gpt", {}, {"data__packing": "decompose", "data__decompose_min_length": 2, "data__decompose_bucket_samples": 8}
    ),
    "gpt, parallel block, windows": Case("gpt", {"block": "parallel", "window": [5, 0]}),
    "llama, window, recomputed": Case("llama", {"window": 3}, {"train__recompute": "full"}),
    "gemma2, recomputed attention": Case("gemma2", GEMMA_LIKE, {"train__recompute": "selective"}),
    "neox": Case("neox", {"block": "parallel_two_norms"}),
    "olmo2": Case("olmo2", {"qk_norm": "full"}),
}
QUICK_CASES = ["gpt, best fit", "gpt, decomposed", "gemma2, recomputed attention"]
QUICK_LAYOUTS = ["tp2 sp", "cp2 ring pp2 vpp2 zero2"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 1 to 40 tokens, for samples of 16."""
    random = np.random.default_rng(0)
    documents = [random.integers(VOCABULARY, size=length) for length in random.integers(1, 40, size=60)]
    prefix = tmp_path_factory.mktemp("packed") / "documents"
    write_documents(prefix, documents, ORIGIN, VOCABULARY)
    return prefix


def configure(case: Case, dataset: Path, folder: Path, **keys: Any) -> RunConfig:
    """A run of a case on the dataset, which also evaluates on it."""
    given = {
        "data__mock": False, "data__train": str(dataset), "data__valid": str(dataset),
        "data__attention_mask": "document", "train__eval_every": 100, "train__eval_steps": 2, "train__steps": STEPS,
        "optimizer__lr": 1e-3, "optimizer__warmup_steps": 0, "optimizer__clip_norm": 0.0,
    }  # fmt: skip
    return config_of(settings(MODELS[case.family] | case.model, folder, **(given | case.keys | keys)), folder)


@dataclass(frozen=True)
class Outcome:
    """Losses, gradient norms and loss tokens of steps and of an evaluation, FLOPs of attention in both conventions,
    and the parts of the gradient of the first step that this rank has, by name.
    """

    steps: list[tuple[float, float, int]]
    flops: list[tuple[float, float]]
    evaluation: tuple[float, int]
    gradient: dict[str, list[tuple[tuple[slice, ...], np.ndarray]]]
    shapes: dict[str, tuple[int, ...]]


def train_packed(rank: Rank, configs: list[RunConfig]) -> list[Outcome]:
    """Train runs of one layout, one after another."""
    mesh, outcomes = None, []
    for config in configs:
        run = build_run(rank, config, mesh)
        mesh = mesh or run.mesh  # the first model ties its embeddings, so its mesh has every group
        evaluation = evaluate(run)
        outcomes.append(_outcome(run, evaluation, lambda run: run.train_loader.batch(run.progress.samples)))
    return outcomes


def train_separate(rank: Rank, configs: list[RunConfig]) -> list[Outcome]:
    """Train on the documents of each sample, each alone in a micro-batch of its length, with the plain causal mask."""
    outcomes = []
    for config in configs:
        plain = config.model_copy(update={"data": config.data.model_copy(update={"attention_mask": "causal"})})
        run = build_run(rank, plain)
        train, valid = build_mixture(mixture_spec(config, "train")), build_mixture(mixture_spec(config, "valid"))
        total = config.batch.total

        def load(run: Any, mixture: Any = train, config: RunConfig = plain, training: bool = True) -> StepBatch:
            first = run.progress.samples if training else 0
            count = config.batch.total * (1 if training else run.valid_batches)
            parts = [part for index in range(first, first + count) for part in documents_of(mixture[index])]
            return StepBatch(parts)

        class Alone:
            """A loader whose only batch has the documents of all validation batches."""

            def batches(self, count: int, run: Any = run, mixture: Any = valid) -> Iterator[StepBatch]:
                yield load(run, mixture, training=False)

        run.valid_loader = Alone()
        assert total == run.config.batch.total
        outcomes.append(_outcome(run, evaluate(run), load))
    return outcomes


def documents_of(sample: Sample) -> Iterator[MicroBatch]:
    """The documents of a sample as micro-batches."""
    assert sample.documents is not None
    places, end = sample.documents.places, sample.documents.length
    starts = places if sample.documents.is_padded else [*places, end]  # padding is left out
    for start, stop in itertools.pairwise(starts):
        part = slice(start, stop)
        mask = np.ones(stop - start, dtype=np.int64) if sample.mask is None else sample.mask[part]
        tokens, labels, counted = (
            torch.from_numpy(a.copy())[:, None] for a in (sample.tokens[part], sample.labels[part], mask)
        )
        yield MicroBatch(tokens, labels, counted, Dropout(0.0, 0, [0], CPU), loss_tokens=int(mask.sum()))


def _outcome(run: Any, evaluation: Any, load: Any) -> Outcome:
    steps, flops, gradient, shapes = [], [], {}, {}
    for step in range(STEPS):
        batch = load(run)
        result = train_step(run, batch)
        steps.append((result.loss, result.grad_norm, result.loss_tokens))
        flops.append(flops_of(run, batch, result.totals))
        if step == 0:  # the first moment is a tenth of the gradient
            for name, tensor in run.optimizer.global_tensors().items():
                if name.startswith("exp_avg."):
                    places = [
                        tuple(slice(o, o + n) for o, n in zip(shard.offset, shard.size, strict=True))
                        for shard in tensor.shards
                    ]
                    gradient[name] = [
                        (place, shard.data.view(shard.size).numpy().copy())
                        for place, shard in zip(places, tensor.shards, strict=True)
                    ]
                    shapes[name] = tuple(tensor.shape)
    run.buffers.finish_param_gather()
    return Outcome(steps, flops, (evaluation.valid_loss, evaluation.valid_tokens), gradient, shapes)


def flops_of(run: Any, batch: StepBatch, totals: Any) -> tuple[float, float]:
    """FLOPs of attention in a step, full and causal: by its totals, or by the length of each micro-batch."""
    model, scores = run.config.model, take_scores(run.config.model, totals)
    if scores is not None:
        tokens = run.config.batch.total * model.seq_length
        counted = token_flops(model, per_token([scores], tokens))
        return tokens * counted.full_attention, tokens * counted.causal_attention
    lengths = [len(part.tokens) for part in batch.micro_batches if part.tokens is not None]
    each = [(n, token_flops(model.model_copy(update={"seq_length": n}))) for n in lengths]
    full, causal = (sum(n * getattr(flops, f"{kind}_attention") for n, flops in each) for kind in ("full", "causal"))
    return full, causal


def joined(ranks: list[Outcome]) -> dict[str, Tensor]:
    """The whole gradient, from the parts of all ranks."""
    whole: dict[str, Tensor] = {}
    for outcome in ranks:
        for name, shape in outcome.shapes.items():
            tensor = whole.setdefault(name, torch.full(shape, float("nan"), dtype=torch.float64))
            for place, data in outcome.gradient[name]:
                tensor[place] = torch.from_numpy(data)
    return whole


def check(layout: dict[str, Any], names: list[str], batch: int, dataset: Path, folder: Path, separate: Any) -> None:
    in_parts = "parallel__cp" in layout and layout.get("parallel__cp_mode") != "ulysses"
    if in_parts or "data__sequence_chunk_tokens" in layout:
        names = [name for name in names if "attention_softcap" not in CASES[name].model]
    configs = [configure(CASES[name], dataset, folder, batch__global=batch, **layout) for name in names]
    ranks = run_world(configs[0].world_size, train_packed, configs)
    for index, (name, expected) in enumerate(zip(names, separate(names, batch), strict=True)):
        outcomes = [outcomes[index] for outcomes in ranks]
        steps, evaluation = outcomes[0].steps, outcomes[0].evaluation
        assert [tokens for *_, tokens in steps] == [tokens for *_, tokens in expected.steps], name
        assert evaluation[1] == expected.evaluation[1], name
        close(outcomes[0].flops, expected.flops, 1e-12)
        close(evaluation[0], expected.evaluation[0], 1e-12)
        close(steps[0][:2], expected.steps[0][:2], 1e-12)
        close([step[:2] for step in steps], [step[:2] for step in expected.steps], 1e-9)  # Adam amplifies rounding
        gradient, alone = joined(outcomes), joined([expected])
        assert gradient.keys() == alone.keys()
        largest = max(float(part.abs().max()) for part in alone.values())
        for key, part in alone.items():
            torch.testing.assert_close(gradient[key], part, rtol=0, atol=1e-12 * largest)


def close(actual: Any, expected: Any, tolerance: float) -> None:
    pair = [torch.tensor(values, dtype=torch.float64) for values in (actual, expected)]
    torch.testing.assert_close(*pair, rtol=tolerance, atol=0)


@pytest.fixture(scope="module")
def separate(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that returns the outcomes of separate documents."""
    known: dict[tuple[str, int], Outcome] = {}

    def outcomes(names: list[str], batch: int) -> list[Outcome]:
        new = [name for name in names if (name, batch) not in known]
        folder = tmp_path_factory.mktemp("separate")
        configs = [configure(CASES[name], dataset, folder, batch__global=batch) for name in new]
        if new:
            known.update(zip([(name, batch) for name in new], run_world(1, train_separate, configs)[0], strict=True))
        return [known[name, batch] for name in names]

    return outcomes


@pytest.mark.parametrize("layout", QUICK_LAYOUTS)
def test_packed_documents_are_separate_documents(layout: str, dataset: Path, tmp_path: Path, separate: Any) -> None:
    check(LAYOUTS[layout], QUICK_CASES, QUICK_BATCH, dataset, tmp_path, separate)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_documents_are_separate_in_every_layout(
    layout: str, dataset: Path, tmp_path: Path, separate: Any
) -> None:
    check(LAYOUTS[layout], list(CASES), BATCH, dataset, tmp_path, separate)
