"""A kind of attention of another package: a card of `megascale.attentions`, by its letter in a pattern."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from megascale.catalog.layers import ATTENTIONS
from megascale.core import registry
from megascale.core.errors import ConfigError
from megascale.core.rank import Rank
from megascale.core.registry import Card
from megascale.layout.windows import score_windows
from megascale.model.attention import Attention
from tests.plan.account.test_against_dry_run import compare
from tests.runs import LLAMA, build_run, config_of, curve_of, settings


class NegatedAttention(Attention):
    """Softmax attention, negated."""

    def _join(self, out_sbnd: Tensor) -> Tensor:
        return -super()._join(out_sbnd)


FACTS = {"letter": "N", "description": "megascale.layout.blocks:softmax_branch", "operations": ("attention", "rope")}
CARD = Card("negated", "softmax attention, negated", f"{__name__}:NegatedAttention", FACTS)


def configured(pattern: str, folder: Path, **keys: Any) -> Any:
    return config_of(settings(LLAMA | {"attention_pattern": pattern}, folder, **keys), folder)


def test_another_package_s_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes its layers in a run, and in the plan, which is that of a dry run."""
    with pytest.raises(ConfigError, match=r"has 'N'; kinds of attention are S: [^;]*; L: [^;]*  ->"):
        configured("NS", tmp_path)
    point = SimpleNamespace(load=lambda: CARD, value="other:CARD")
    points = SimpleNamespace(select=lambda group: [point] if group == "megascale.attentions" else [])
    monkeypatch.setattr(registry, "installed_entry_points", lambda: points)
    monkeypatch.delitem(vars(ATTENTIONS), "cards", raising=False)
    try:
        config = configured("NS", tmp_path)
        run = build_run(Rank(0, 1, 0, "host"), config)
        kinds = [type(module).__name__ for module in run.stages[0].modules() if isinstance(module, Attention)]
        assert kinds == ["NegatedAttention", "Attention"] * 2
        assert len(score_windows(config.model)) == config.model.num_layers
        assert curve_of(run, 2) != curve_of(build_run(Rank(0, 1, 0, "host"), configured("S", tmp_path)), 2)
        assert abs(compare(configured("NS", tmp_path, parallel__tp=2), rank=1)[1]) < 0.02
    finally:
        vars(ATTENTIONS).pop("cards", None)
