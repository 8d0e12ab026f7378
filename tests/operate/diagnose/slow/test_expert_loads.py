"""Imbalance of experts: what stays overloaded is named, chance is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megascale.operate.diagnose.slow.expert_loads import MOST_LAYERS, ExpertLoads, imbalance, recent_loads
from megascale.operate.store.query import open_store
from tests.operate.show.stores import store_loads


def found(loads: np.ndarray) -> ExpertLoads:
    steps, layers, _ = loads.shape
    return ExpertLoads(10 * np.arange(1, steps + 1), np.arange(layers), loads)


def test_the_fullest_expert_is_named_with_its_onset_and_idle_experts() -> None:
    loads = np.ones((6, 4, 16))
    loads[2:, 1, 7] = 2.5
    loads[3:, 3, 2] = 5.0
    loads[:, 3, 10:] = 0.01
    (finding,) = imbalance(found(loads))
    assert (str(finding.culprit), finding.since, finding.until) == ("layer 3 expert 2", 40, None)
    assert str(finding) == "layer 3 expert 2: takes more tokens than its share, since step 40"
    assert finding.evidence == (
        "layer 3: expert 2 has 5 times the mean load; 6 of 16 experts have less than 0.1 of it",
        "layer 1: expert 7 has 2.5 times the mean load; 0 of 16 experts have less than 0.1 of it",
    )
    assert finding.to_json()["culprit"] == "layer 3 expert 2"


def test_a_fullest_expert_that_changes_is_no_finding() -> None:
    loads = np.ones((6, 1, 16))
    loads[np.arange(6), 0, np.arange(6)] = 4.0
    assert not list(imbalance(found(loads)))
    loads[-3:-1, 0, 9] = 4.0
    assert not list(imbalance(found(loads))), "two of the newest three steps"
    loads[-1, 0, 9] = 4.0
    assert len(list(imbalance(found(loads)))) == 1
    assert not list(imbalance(found(loads[-2:]))), "too few steps"


def test_many_unbalanced_layers_are_one_finding() -> None:
    loads = np.full((3, 61, 256), 0.5)
    loads[:, :, 4] = 3.0
    (finding,) = imbalance(found(loads))
    assert finding.evidence[-1] == f"and {61 - MOST_LAYERS} more layers with an expert above 2"


def test_the_store_gives_the_newest_steps_of_the_last_attempt(tmp_path: Path) -> None:
    store_loads(tmp_path, np.ones((9, 2, 4)))
    loads = np.arange(40.0).reshape(5, 2, 4)
    store_loads(tmp_path, loads, first_step=51, attempt=1)
    newest = recent_loads(open_store(tmp_path), 3)
    assert (newest.steps.tolist(), newest.layers.tolist()) == ([71, 81, 91], [0, 1])
    assert newest.loads.tolist() == loads[2:].tolist()
