"""Dropout in a run: equal masks in every layout, different masks in every step, none in an evaluation."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from megascale.core.rank import Rank
from megascale.parallel.rng import Dropout
from tests.runs import GPT, build_run, config_of, settings
from tests.worlds import run_world

LAYOUTS: dict[str, dict[str, Any]] = {
    "micro4": {"batch__micro": 4},
    "dp2": {"parallel__dp": 2},
    "tp2": {"parallel__tp": 2},
    "tp2 sp pp2 vpp2": {"parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2, "parallel__vpp": 2},
}

SAMPLES = 4  # of a step

Masks = dict[tuple[str, int], set[str]]
"""Digests of masks by place and sample; an attention place ends in the head index."""


def drawn(rank: Rank, config: Any) -> tuple[list[Masks], int]:
    """Record this rank's masks in two steps, and the number of masks in an evaluation after the steps."""
    from megascale.train.evaluate import evaluate
    from megascale.train.step import train_step

    masks: Masks = {}
    draw = Dropout._keep_mask

    def watch(self: Dropout, shape: tuple[int, int], place: str, sample: int) -> Any:
        keep = draw(self, shape, place, sample)
        masks.setdefault((place, sample), set()).add(hashlib.sha1(keep.numpy().tobytes()).hexdigest())
        return keep

    Dropout._keep_mask = watch  # type: ignore[method-assign]
    run, steps = build_run(rank, config), []
    for _ in range(2):
        train_step(run, run.train_loader.batch(run.progress.samples))
        steps.append(dict(masks))
        masks.clear()
    evaluate(run)
    return steps, len(masks)


def merged(ranks: list[Any], step: int) -> Masks:
    results: Masks = {}
    for steps, _ in ranks:
        for key, digests in steps[step].items():
            results.setdefault(key, set()).update(digests)
    return results


def run_layout(folder: Path, **layout: Any) -> list[Any]:
    more = {"model__dropout": 0.2, "batch__global": SAMPLES, "train__eval_every": 5, "train__eval_steps": 1}
    config = config_of(settings(GPT, folder, **more, **layout), folder)
    return run_world(config.world_size, drawn, config)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_layout(tmp_path_factory.mktemp("alone"))


def test_masks_differ_by_place_and_sample(alone: list[Any]) -> None:
    layers, heads = GPT["num_layers"], GPT["num_heads"]
    places = 1 + layers * (2 + heads)  # the embedding; by layer two branches and the attention heads
    steps = [merged(alone, step) for step in range(2)]
    for index, step in enumerate(steps):
        assert len(step) == places * SAMPLES
        assert {sample for _, sample in step} == set(range(SAMPLES * index, SAMPLES * index + SAMPLES))
    digests = [digest for step in steps for one in step.values() for digest in one]
    assert len(digests) == len(set(digests)) == 2 * places * SAMPLES


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_draws_the_same_masks(name: str, alone: list[Any], tmp_path: Path) -> None:
    ranks = run_layout(tmp_path, **LAYOUTS[name])
    for step in range(2):
        assert merged(ranks, step) == merged(alone, step)


def test_an_evaluation_drops_nothing(alone: list[Any]) -> None:
    assert [count for _, count in alone] == [0]
