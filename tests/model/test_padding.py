"""Padding rows of the vocabulary do not change training, and training does not change padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.layout import tensors
from megascale.train.step import train_step
from tests.marks import only_quick
from tests.runs import FAMILIES, build_run, config_of, settings, total_of, valid_order
from tests.worlds import run_world

STEPS = 3


def train(rank: Rank, config: RunConfig, multiple: int) -> tuple[list[tuple[float, float]], int, bool, list[float]]:
    """Train with the rows of a rank a multiple of `multiple`.

    Returns losses and norms, number of padding rows, whether padding is zero after training, and the loss of a batch
    before and after padding is overwritten.
    """
    with patch.object(tensors, "VOCAB_MULTIPLE", multiple):
        run: Any = build_run(rank, config)
    curve = []
    for _ in range(STEPS):
        result = train_step(run, run.train_loader.batch(run.progress.samples))
        curve.append((result.loss, result.grad_norm))
    run.buffers.finish_param_gather()
    padding = []
    for bucket in run.buffers.buckets:
        for slot in bucket.layout.slots:
            (tensor, *_) = slot.parameter.parts
            if tensor.pad_multiple > 1:
                _, size = tensor.local_box(run.mesh.topology, run.mesh.coord)
                padding.append(bucket.parameters[slot.parameter.name].data[size[0] :])
    zero = not any(rows.any() for rows in padding)
    losses = []
    for garbage in (False, True):
        for rows in padding:
            rows.fill_(1e3 if garbage else 0.0)
        batch = run.train_loader.batch(run.progress.samples)
        with torch.no_grad():
            losses.append(total_of(run, run.pipeline.run_actions(valid_order(run), batch)))
    return curve, sum(len(rows) for rows in padding), zero, losses


@pytest.mark.parametrize("family", only_quick(FAMILIES, "gpt"))
def test_padding(family: str, tmp_path: Path) -> None:
    """Pad 101 tokens to 101, 128 and 200 rows; with 200 the second of two ranks holds one token."""
    curves = []
    for tp, multiple, rows in ((1, 1, 101), (1, 64, 128), (2, 64, 128), (2, 100, 200)):
        layout = {"parallel__tp": tp, "parallel__dp": 1, "batch__global": 4}
        config = config_of(settings(FAMILIES[family], tmp_path, **layout), tmp_path)
        ranks = run_world(config.world_size, train, config, multiple)
        tables = 1 if config.model.tie_embeddings else 2
        assert sum(padding for _, padding, _, _ in ranks) == (rows - 101) * tables
        for curve, _, zero, (loss, with_garbage) in ranks:
            assert zero, "padding has been trained"
            assert loss == with_garbage, "padding enters the loss"
            curves.append(curve)
    first, *others = (torch.tensor(curve, dtype=torch.float64) for curve in curves)
    assert len(first[:, 0].unique()) == STEPS
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-11, atol=0)
