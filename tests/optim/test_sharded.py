"""Flags of a parameter spec (`is_matrix`, `weight_decay`, FP8) act independently."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from numpy.linalg import norm

from megascale.layout import parameters
from megascale.layout.chunks import fp8_layers, fp8_weights
from megascale.layout.tensors import TOKEN_EMBEDDING, ParamSpec
from megascale.train.step import train_step
from tests.runs import FAMILIES, config_of, settings
from tests.thread_world import run_threads

LR = 1e-2
DECAY = 0.1


def without_decay(parameters: list[ParamSpec]) -> list[ParamSpec]:
    return [replace(parameter, decays=False) for parameter in parameters]


def weights(run: Any) -> dict[str, np.ndarray]:
    return {name: p.detach().clone().numpy() for b in run.buffers.buckets for name, p in b.parameters.items()}


def updates(run: Any) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], list[str]]:
    """Return weights before and after a step by parameter, and the FP8 weights."""
    before, config = weights(run), run.config
    train_step(run, run.train_loader.batch(0))
    after = weights(run)
    fp8 = config.model_copy(update={"train": config.train.model_copy(update={"precision": "fp8"})})
    return {name: (before[name], after[name]) for name in before}, list(
        fp8_weights(fp8.model, fp8_layers(fp8.model, fp8.train, fp8.fp8))
    )


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_an_embedding_without_weight_decay(name: str, tmp_path: Path) -> None:
    """No decay; still a matrix for LAMB, which moves it by lr times its norm; the FP8 weights are unchanged."""
    rule = {"name": name, "lr": LR, "weight_decay": DECAY, "warmup_steps": 0, "decay": "constant"}
    tree = settings(FAMILIES["gpt"], tmp_path, **{f"optimizer__{key}": value for key, value in rule.items()})
    config = config_of(tree, tmp_path)
    embedding = parameters.embedding_params
    ((listed, cast),) = run_threads(config, updates)
    with patch.object(parameters, "embedding_params", lambda model: without_decay(embedding(model))):
        ((excluded, cast_then),) = run_threads(config, updates)
    assert cast == cast_then and not any("embedding" in weight for weight in cast)
    for parameter, (before, after) in excluded.items():
        decayed = listed[parameter][1]
        if "embedding" not in parameter:
            assert np.abs(after - decayed).max() < 1e-12, parameter
        elif name == "adamw":
            assert np.abs(after - decayed - LR * DECAY * before).max() < 1e-12, parameter
        else:
            assert norm(after - decayed) > 1e-3 * norm(after - before)
            for updated in (after, decayed):
                assert norm(updated - before) == pytest.approx(LR * norm(before), rel=1e-10)
    assert TOKEN_EMBEDDING in excluded
