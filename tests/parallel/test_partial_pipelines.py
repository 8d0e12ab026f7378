"""Partial pipelines: a micro-batch that skips stages has the gradients of a network without their layers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megascale.layout.parameters import all_params
from tests.marks import only_quick
from tests.oracles.ours import Arrays, boxes_of, join, parameters_of
from tests.runs import GPT, LLAMA, config_of, curve_of, settings, total_of, train_order
from tests.thread_world import run_threads

Skips = Mapping[int, list[int]]
"""The layers that each of four micro-batches skips."""

MODELS = {"gpt": GPT | {"dropout": 0.1}, "llama": LLAMA}
HALF: Skips = {0: [1], 1: [2], 2: [1], 3: [2]}  # layers 1 and 2 are the stages between the first and the last
QUARTER: Skips = {0: [1], 1: [], 2: [2], 3: []}
LAYOUTS: dict[str, tuple[float, Skips, dict[str, Any]]] = {
    "pp4": (0.5, HALF, {"pp": 4}),
    "pp4 dp2, a quarter": (0.25, QUARTER, {"pp": 4, "dp": 2}),
    "pp4 tp2 sp": (0.5, HALF, {"tp": 2, "sp": True, "pp": 4}),
    "pp4 tp2": (0.25, QUARTER, {"tp": 2, "pp": 4}),
    "pp3, two layers": (0.5, {0: [0, 1], 1: [], 2: [0, 1], 3: []}, {"pp": 3, "layers_per_chunk": [0, 2, 2]}),
}
LARGER = {"dp": 2, "pp": 4, "skip_ratio": 0.5}


def config_with(model: str, folder: Path, parallel: dict[str, Any], **keys: Any) -> Any:
    changes = {f"parallel__{key}": value for key, value in parallel.items()}
    return config_of(settings(MODELS[model], folder, **changes, **keys), folder)


def skip_layers(run: Any, skips: Skips) -> None:
    """Let a micro-batch pass by its layers in the one stage of a run."""
    (stage,), started = run.pipeline.stages, list[Any]()
    compute = stage._run_block

    def run_block(index: str, block: Any, x: Any, batch: Any) -> Any:
        if all(batch is not each for each in started):
            started.append(batch)
        return x if int(index) in skips[len(started) - 1] else compute(index, block, x, batch)

    stage._run_block = run_block


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


def joined(config: Any, ranks: list[tuple[float, Any]]) -> tuple[float, Arrays]:
    shapes = {tensor.name: tensor.shape for parameter in all_params(config.model) for tensor in parameter.parts}
    return ranks[0][0], join(shapes, [pieces for _, pieces in ranks])


@pytest.mark.parametrize("layout", only_quick(LAYOUTS, "pp4 dp2, a quarter", "pp4 tp2 sp", "pp3, two layers"))
@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_those_of_a_network_without_the_skipped_layers(model: str, layout: str, tmp_path: Path) -> None:
    ratio, skips, parallel = LAYOUTS[layout]
    dp = parallel.get("dp", 1)
    alone = config_with(model, tmp_path, {"zero": 0}, batch__micro=dp, batch__global=4 * dp)
    loss, expected = joined(alone, run_threads(alone, lambda run: (skip_layers(run, skips), gradients(run))[1]))
    config = config_with(model, tmp_path, {"zero": 0, "skip_ratio": ratio, **parallel}, batch__global=4 * dp)
    found, grads = joined(config, run_threads(config, gradients))
    assert found == pytest.approx(loss, rel=1e-12)
    for name, of_all in expected.items():
        assert of_all.any(), name
        assert np.abs(grads[name] - of_all).max() <= 1e-10 * np.abs(of_all).max() + 1e-17, name  # biases of keys: 0


@pytest.mark.parametrize("zero", [1, 2])
def test_sharded_gradients_and_states_are_the_same_run(zero: int, tmp_path: Path) -> None:
    configs = [config_with("llama", tmp_path, {**LARGER, "zero": stage}) for stage in (0, zero)]
    whole, sharded = (run_threads(config, lambda run: curve_of(run, 3))[0] for config in configs)
    assert np.allclose(sharded, whole, rtol=1e-10, atol=0)


def test_an_evaluation_skips_nothing(tmp_path: Path) -> None:
    from megascale.train.evaluate import evaluate

    keys = {"train__eval_every": 2, "train__eval_steps": 1}
    configs = [config_with("llama", tmp_path, parallel, **keys) for parallel in ({}, LARGER)]
    whole, partial = (run_threads(config, lambda run: evaluate(run).valid_loss)[0] for config in configs)
    assert partial == pytest.approx(whole, rel=1e-12)
