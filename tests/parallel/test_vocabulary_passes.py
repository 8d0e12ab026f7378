"""Vocabulary parallelism over pp trains and evaluates as one process does, in both forms."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megascale.core.errors import ConfigError
from megascale.layout.chunks import chunk_buckets
from megascale.plan.account.memory import JobMemory
from tests.marks import only_quick, only_quick_rows
from tests.runs import GEMMA2, GPT, LLAMA, config_of, curve_of, settings
from tests.thread_world import run_threads

MODELS: dict[str, dict[str, Any]] = {
    "tied": GPT | {"dropout": 0.1},
    "untied": LLAMA,
    "capped": GEMMA2,
    "experts": LLAMA | {"experts": 4, "experts_per_token": 2, "expert_ffn_size": 16},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"parallel__pp": 2},
    "tp2 sp pp2": {"parallel__pp": 2, "parallel__tp": 2, "parallel__sp": True},
    "pp2 vpp2 dp2 zero2": {"parallel__pp": 2, "parallel__vpp": 2, "parallel__dp": 2, "parallel__zero": 2},
    "pp4": {"parallel__pp": 4, "train__recompute": "full"},
    "pp2 zb_h1 dp2 zero2": {
        "parallel__pp": 2,
        "parallel__schedule": "zb_h1",
        "parallel__dp": 2,
        "parallel__zero": 2,
        "batch__micro": 1,
    },
    "tp2 sp pp2 interleaved_zb": {
        "parallel__pp": 2,
        "parallel__vpp": 2,
        "parallel__schedule": "interleaved_zb",
        "parallel__tp": 2,
        "parallel__sp": True,
    },
    "pp2 v": {"parallel__pp": 2, "parallel__vpp": 2, "parallel__schedule": "zb_v"},
    "pp2 v, full recomputation": {
        "parallel__pp": 2,
        "parallel__vpp": 2,
        "parallel__schedule": "zb_v",
        "train__recompute": "full",
    },
}
SHARED = {"train__eval_every": 2, "train__eval_steps": 1, "train__z_loss": 1e-3}
DOCUMENTS = {"data__attention_mask": "document", "data__document_length": 5, "data__eod_mask_loss": False}


def results(model: dict[str, Any], folder: Path, **layout: Any) -> list[float]:
    """Return losses and norms of two steps, and the loss of an evaluation."""
    from megascale.train.evaluate import evaluate

    def body(run: Any) -> list[float]:
        curve = curve_of(run, 2)
        return [*sum(curve, ()), evaluate(run).valid_loss]

    changes = {"batch__global": 4, **SHARED, **layout}
    found = run_threads(config_of(settings(model, folder, **changes), folder), body)
    assert all(each == found[0] for each in found)
    return found[0]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[float]]:
    """The results of a model on one process."""
    return cache(lambda model: results(MODELS[model], tmp_path_factory.mktemp(model)))


CASES = [
    ("tied", "pp2 vpp2 dp2 zero2", 1),
    ("untied", "tp2 sp pp2", 2),
    ("capped", "pp2", 1),
    ("experts", "pp2", 1),
    ("untied", "pp4", 2),
    ("untied", "pp2 zb_h1 dp2 zero2", 1),
    ("experts", "tp2 sp pp2 interleaved_zb", 2),
    ("tied", "pp2 v", 2),
    ("untied", "pp2 v, full recomputation", 1),
]
"""A model, a layout and the barriers of the quick test; slow tests have the other number, and tp without chunks."""


@pytest.mark.parametrize(
    ("model", "layout", "barriers"),
    only_quick_rows(
        [*CASES, *((model, layout, 3 - barriers) for model, layout, barriers in CASES)],
        *(case for case in CASES if case[1] != "tp2 sp pp2"),
    ),
)
def test_a_run_is_that_of_one_process(
    model: str, layout: str, barriers: int, alone: Callable[[str], list[float]], tmp_path: Path
) -> None:
    found = results(MODELS[model], tmp_path, parallel__vocab_pp=barriers, **LAYOUTS[layout])
    assert found == pytest.approx(alone(model), rel=1e-10)


@pytest.mark.parametrize("barriers", only_quick([1, 2], 2))
def test_weights_of_labels_and_documents(barriers: int, tmp_path: Path) -> None:
    expected = results(LLAMA, tmp_path, **DOCUMENTS)
    found = results(LLAMA, tmp_path, **DOCUMENTS, parallel__vocab_pp=barriers, parallel__pp=2)
    assert found == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("barriers", only_quick([1, 2], 1))
def test_bf16_is_as_close_as_the_pipeline_without(barriers: int, tmp_path: Path) -> None:
    exact = results(LLAMA, tmp_path)
    plain, shared = (
        results(LLAMA, tmp_path, train__precision="bf16", parallel__pp=2, parallel__vocab_pp=count)
        for count in (0, barriers)
    )
    errors = [max(abs(a - b) / b for a, b in zip(found, exact, strict=True)) for found in (plain, shared)]
    assert errors[1] < max(2 * errors[0], 5e-3)


def test_ranks_have_equal_rows(tmp_path: Path) -> None:
    """The memory of the ends is that of the stages between, within a tenth."""
    layout = {"parallel__pp": 4, "parallel__vocab_pp": 1, "batch__global": 16, "train__precision": "bf16"}
    config = config_of(settings(LLAMA | {"vocab_size": 32_000}, tmp_path, **layout), tmp_path)
    plain = config.model_copy(update={"parallel": config.parallel.model_copy(update={"vocab_pp": 0})})
    shared, ends = ([rank.total for rank in JobMemory(each).by_stage()] for each in (config, plain))
    assert max(shared) < 1.1 * min(shared) and max(ends) > 5 * min(ends)
    rows = [chunk_buckets(config.model, config.parallel, config.overlap, config.train, rank)[-1] for rank in range(4)]
    assert [[param.name for param in bucket] for bucket in rows[0]] == [["embedding.token.weight", "head.weight"]]
    assert all(bucket == rows[0] for bucket in rows)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "there are no stages to share the vocabulary"),
        ({"parallel__pp": 2, "model__mtp_layers": 1}, "MTP layers use whole embeddings and heads"),
        ({"parallel__pp": 2, "data__sequence_chunk_tokens": 4}, "chunks of sequences are not supported"),
        ({"parallel__pp": 2, "train__noise_scale_every": 1}, "end at different times"),
        (
            {"parallel__pp": 2, "parallel__vpp": 2, "parallel__schedule": "v_half"},
            "no room for passes between forwards and backwards",
        ),
        (
            {"parallel__pp": 2, "parallel__vpp": 2, "parallel__schedule": "dualpipev"},
            "no room for passes between forwards and backwards",
        ),
        ({"parallel__pp": 2, "optimizer__name": "lamb"}, "lamb needs norms of whole parameters"),
        (
            {"parallel__pp": 2, "optimizer__groups": [{"name": "adafactor", "kinds": ["embedding"]}]},
            "adafactor updates embedding.token.weight as a whole, and stages share its rows",
        ),
    ],
)
def test_what_is_not_supported_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(settings(LLAMA, tmp_path, parallel__vocab_pp=1, **changes), tmp_path)
    assert message in str(refused.value)
