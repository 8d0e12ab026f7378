"""Distillation and auxiliary objectives in plans: traffic, FLOPs, state and memory against dry runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.plan.account.test_against_dry_run import compare
from tests.plan.account.test_expert_memory import LARGE
from tests.runs import config_of, settings

SOFT = {"train__distill_teacher": "mock", "train__distill_top_k": 64}
JEPA = {
    "train__objectives": [{"type": "jepa", "weight": 1.0, "predictor": 5}],
    "data__attention_mask": "document", "data__document_length": 512, "data__eod": 5,
}  # fmt: skip
SP = {"parallel__tp": 2, "parallel__sp": True}
CASES: dict[str, dict[str, Any]] = {
    "soft pp2 sp": SOFT | SP | {"parallel__pp": 2},
    "soft": SOFT,
    "soft tp2": SOFT | {"parallel__tp": 2},
    "soft cp2": SOFT | {"parallel__cp": 2},
    "jepa sp cp2 dp2": JEPA | SP | {"parallel__cp": 2, "parallel__dp": 2},
    "jepa cp2": JEPA | {"parallel__cp": 2},
    "jepa sp pp2": JEPA | SP | {"parallel__pp": 2},
}
QUICK = ("soft pp2 sp", "jepa sp cp2 dp2")


@pytest.mark.parametrize("name", [pytest.param(it, marks=() if it in QUICK else pytest.mark.slow) for it in CASES])
def test_stages_are_those_of_a_dry_run(name: str, tmp_path: Path) -> None:
    keys = CASES[name]
    changes = {"train__precision": "bf16", "batch__micro": 2, "batch__global": 8 * keys.get("parallel__dp", 1)}
    config = config_of(settings(LARGE, tmp_path, **changes, **keys), tmp_path)
    ranks = config.world_size // config.parallel.pp
    for stage in range(config.parallel.pp):
        peak, error = compare(config, stage * ranks)
        print(f"{name} {stage}: {peak / 1e9:.2f} GB {error:+.2%}")
        assert -0.03 < error < 0.05
