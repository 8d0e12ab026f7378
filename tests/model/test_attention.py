"""Sliding windows in the network: their reach, equal in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.config.model import ModelConfig
from megascale.layout.windows import QUERY_BLOCK
from tests.model.test_transformer import SEQUENCE, VOCABULARY, logits, stage_of, tokens_of
from tests.runs import FAMILIES, config_of, settings
from tests.train.test_layout_invariance import train_all
from tests.worlds import run_world


@pytest.mark.parametrize("block", ["serial", "parallel"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("window", [1, 2, 4, [3, 1], [2, 5, 1]])
def test_the_receptive_field_is_the_sum_of_the_windows(window: int | list[int], family: str, block: str) -> None:
    """A layer adds window - 1 earlier positions. An earlier token does not change the output, bit for bit."""
    model = FAMILIES[family] | {"window": window, "block": block}
    pattern = window if isinstance(window, list) else [window]
    reach = sum(pattern[layer % len(pattern)] - 1 for layer in range(model["num_layers"]))
    stage, tokens = stage_of(model), tokens_of(0)
    before = logits(stage, tokens)
    for position in range(SEQUENCE):
        changed = tokens.clone()
        changed[position] = (changed[position] + 1) % VOCABULARY
        after = logits(stage, changed)
        differs = [not torch.equal(*rows) for rows in zip(before, after, strict=True)]
        assert differs == [position <= i <= position + reach for i in range(SEQUENCE)]


def test_zero_and_the_full_sequence_mean_no_window() -> None:
    tokens = tokens_of(0)
    expected = logits(stage_of(FAMILIES["gpt"]), tokens)
    for window in (0, SEQUENCE, 99, [0, SEQUENCE]):
        assert torch.equal(logits(stage_of(FAMILIES["gpt"] | {"window": window}), tokens), expected)
    assert not torch.equal(logits(stage_of(FAMILIES["gpt"] | {"window": [0, 3]}), tokens), expected)


def test_a_pattern_repeats_over_the_layers() -> None:
    model = FAMILIES["gpt"] | {"num_layers": 5}
    windows = {None: (None,) * 5, 7: (7,) * 5, (3, 0): (3, None, 3, None, 3), (16, 15, 1): (None, 15, 1, None, 15)}
    for window, expected in windows.items():
        given = list(window) if isinstance(window, tuple) else window
        assert ModelConfig.model_validate(model | {"window": given}).windows == expected


LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "tp2 sp": {"parallel__tp": 2, "parallel__sp": True},
    "pp2 vpp2": {"parallel__pp": 2, "parallel__vpp": 2},
    "dp2": {"parallel__dp": 2},
}


@pytest.mark.slow
def test_no_layout_changes_a_run_with_windows(tmp_path: Path) -> None:
    """Cover windows shorter and longer than a block of queries, and dropout."""
    runs: list[dict[str, Any]] = [
        {"model__seq_length": QUERY_BLOCK + 8, "model__window": [5, 0, QUERY_BLOCK + 3]},
        {"model__window": [5, 0, 3], "model__dropout": 0.1},
    ]
    curves = {}
    for name, layout in LAYOUTS.items():
        more = {"batch__global": 2, "optimizer__lr": 1e-3}
        configs = [config_of(settings(FAMILIES["gpt"], tmp_path, **run, **more, **layout), tmp_path) for run in runs]
        curves[name] = torch.tensor(run_world(configs[0].world_size, train_all, configs)[0], dtype=torch.float64)
    for name, curve in curves.items():
        expected = curves["alone"]
        assert len(expected.flatten().unique()) == expected.numel()
        torch.testing.assert_close(curve, expected, rtol=1e-10, atol=0, msg=lambda text, name=name: f"{name}: {text}")
