"""A run with sparse attention is the same run in every layout: patterns follow heads and positions over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.runs import LLAMA, config_of, curve_of, settings
from tests.thread_world import run_threads

SPARSE = LLAMA | {
    "num_heads": 8, "num_kv_heads": 4, "seq_length": 24, "init_std": 0.3,
    "sparse_attention": {"local_blocks": 1, "stride": 4, "block": 2},
}  # fmt: skip
DOCUMENTS = {"data__attention_mask": "document", "data__document_length": 11}
SINKS = {"model__attention_sinks": True}


def layout(**keys: Any) -> dict[str, Any]:
    return {f"parallel__{key}": value for key, value in keys.items()}


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 sp": layout(tp=2, sp=True),
    "tp4": layout(tp=4),
    "cp2 ring": layout(cp=2),
    "cp3 ring tp2": layout(cp=3, tp=2),
    "cp2 allgather": layout(cp=2, cp_mode="allgather"),
    "cp2 ulysses tp2 sp": layout(cp=2, cp_mode="ulysses", tp=2, sp=True),
    "cp4 ulysses, repeated heads": layout(cp=4, cp_mode="ulysses", tp=2),
    "cp4 usp": layout(cp=4, cp_mode="usp", cp_a2a_size=2),
    "dp2 zero3": layout(dp=2, zero=3),
    "pp2 vpp2": layout(pp=2, vpp=2),
    "pp2 split backward": layout(pp=2, vpp=2, schedule="interleaved_zb"),
    "tp2 sp pp2 dp2 zero2": layout(tp=2, sp=True, pp=2, dp=2, zero=2),
    "chunks": {"data__sequence_chunk_tokens": 4},
    "chunks tp2": {"data__sequence_chunk_tokens": 6} | layout(tp=2),
    "recompute": {"train__recompute": "full"},
    "recompute attention": {"train__recompute": "selective"},
    "micro-batches of 2": {"batch__micro": 2},
}
CASES = {"rows": {}, "documents": DOCUMENTS, "documents, sinks": DOCUMENTS | SINKS}
QUICK = (
    ("tp2 sp pp2 dp2 zero2", "documents"), ("cp3 ring tp2", "documents, sinks"), ("chunks tp2", "rows"),
)  # fmt: skip


def curves(folder: Path, **changes: Any) -> list[list[tuple[float, float]]]:
    keys = {"train__steps": 2, "batch__global": 2, "optimizer__lr": 1e-3, "optimizer__warmup_steps": 0}
    config = config_of(settings(SPARSE, folder, **(keys | changes)), folder)
    return run_threads(config, lambda run: curve_of(run, 2))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[tuple[float, float]]]:
    """A function that returns the curve of one process."""
    return cache(lambda name: curves(tmp_path_factory.mktemp("alone"), **CASES[name])[0])


def check(name: str, case: str, alone: Any, folder: Path) -> None:
    for curve in curves(folder, **(CASES[case] | LAYOUTS[name])):
        assert sum(curve, ()) == pytest.approx(sum(alone(case), ()), rel=1e-10)


@pytest.mark.parametrize(("name", "case"), QUICK)
def test_layouts_are_the_same_run(name: str, case: str, alone: Any, tmp_path: Path) -> None:
    check(name, case, alone, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_all_layouts_are_the_same_run(name: str, case: str, alone: Any, tmp_path: Path) -> None:
    check(name, case, alone, tmp_path)


def test_the_pattern_changes_the_run(alone: Any, tmp_path: Path) -> None:
    """A stride and blocks each do."""
    given = SPARSE["sparse_attention"]
    others = [given | {"stride": 2}, given | {"local_blocks": 2}, given | {"block": 3}]
    losses = [curves(tmp_path, model__sparse_attention=other)[0][0][0] for other in others]
    assert len({*losses, alone("rows")[0][0]}) == 4
