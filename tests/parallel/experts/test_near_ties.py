"""In bf16, layouts round differently and may choose other experts where scores nearly tie: with the choices of one
process imposed (routing replay), another layout is the same run up to rounding, and every other choice was a near tie.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.ops.routing import Routing
from tests.parallel.experts.test_expert_layouts import MIXTRAL
from tests.runs import config_of, settings, train_curve
from tests.worlds import run_world

ROUNDING = 2**-5
"""Bound of a score's difference between two layouts: the rounding errors of a few layers in bf16, of 2^-9 each."""


@dataclass(frozen=True)
class Replayed:
    """A step's loss and gradient norm, and of each routing [calls, t, ...] the scores and the experts by them."""

    curve: tuple[float, float]
    scores: np.ndarray[Any, Any]
    experts: np.ndarray[Any, Any]


def one_step(rank: Rank, config: RunConfig, imposed: np.ndarray[Any, Any] | None = None) -> Replayed:
    """Train a step. `imposed` [calls, t, k]: experts of whole sequences, in place of the choices."""
    scores, own, choose = list[Tensor](), list[Tensor](), Routing.choose

    def replaying(self: Routing, found: Tensor, bias: Tensor | None = None) -> Tensor:
        own.append(choose(self, found, bias))
        scores.append(found)
        if imposed is None:
            return own[-1]
        shards = torch.from_numpy(imposed[len(own) - 1]).chunk(config.parallel.tp)
        return shards[rank.rank]  # ranks of a tensor group share each sequence

    with patch.object(Routing, "choose", replaying):
        (curve,) = train_curve(rank, config, 1)
    return Replayed(curve, torch.stack(scores).numpy(), torch.stack(own).numpy())


def whole(ranks: list[Replayed]) -> Replayed:
    """Join the sequences that ranks share."""
    scores, experts = (np.concatenate([getattr(each, name) for each in ranks], 1) for name in ("scores", "experts"))
    return Replayed(ranks[0].curve, scores, experts)


def near_ties(alone: Replayed, other: Replayed) -> np.ndarray[Any, Any]:
    """Return of each token that chooses other experts how far the last chosen one was ahead of the next: alone, in its
    score.
    """
    differ = (np.sort(alone.experts, -1) != np.sort(other.experts, -1)).any(-1)
    ordered, k = np.sort(alone.scores[differ], -1)[..., ::-1], alone.experts.shape[-1]
    gaps: np.ndarray[Any, Any] = ordered[..., k - 1] - ordered[..., k]
    return gaps


def test_other_choices_are_near_ties(tmp_path: Path) -> None:
    model = MIXTRAL | {"seq_length": 256, "init_std": 0.2}
    tree = settings(model, tmp_path, train__precision="bf16")
    alone = run_world(1, one_step, config_of(tree, tmp_path))[0]
    tree["parallel"] = {"tp": 2, "sp": True}
    config = config_of(tree, tmp_path)
    other, wrong = (
        whole(run_world(2, one_step, config, imposed)) for imposed in (alone.experts, np.roll(alone.experts, 1, 1))
    )
    gaps = near_ties(alone, other)
    assert 0 < len(gaps) < 0.05 * alone.experts[..., 0].size
    assert gaps.max() < ROUNDING
    assert abs(other.scores - alone.scores).max() < ROUNDING < abs(wrong.scores - alone.scores).max()
    assert other.curve == pytest.approx(alone.curve, rel=2e-3)
    assert wrong.curve != pytest.approx(alone.curve, rel=2e-3)
