"""Padding of samples with `data.packing = "best_fit"`: no router routes or counts it, in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megascale.config.run import RunConfig
from megascale.core.errors import ConfigError
from megascale.plan.account.step_totals import ROUTER_TOTALS
from megascale.train.step import train_step
from tests.data.datasets import ORIGIN, write_documents
from tests.marks import only_quick_rows
from tests.parallel.experts.test_expert_layouts import CASES, MIXTRAL
from tests.runs import config_of, settings
from tests.thread_world import run_threads

WIDE = 16  # tokens of a sample
FILLED = 10  # tokens of a document, of which a sample has one
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    name: (model, moe | {"batch__micro": 2}) for name, (model, moe) in CASES.items()
} | {
    "everything": (
        MIXTRAL | {"router_score": "sigmoid", "balance_bias": True, "mtp_layers": 1},
        {"moe__balance": "sequence", "moe__balance_weight": 0.5, "moe__z_loss_weight": 0.01, "moe__bias_rate": 0.05,
         "moe__capacity_factor": 0.9, "moe__token_blocks": 2, "batch__micro": 2},
    ),
    "chunks": (MIXTRAL, {"moe__balance": "step", "moe__z_loss_weight": 0.01, "data__sequence_chunk_tokens": 8}),
}  # fmt: skip


def configure(folder: Path, kind: str, lengths: list[int], length: int, **keys: Any) -> RunConfig:
    """A run of samples of `length` tokens, over documents of these lengths."""
    random, prefix = np.random.default_rng(0), folder / "documents"
    if not prefix.with_suffix(".bin").exists():
        write_documents(prefix, [random.integers(1, 101, size=size) for size in lengths], ORIGIN, 101)
    model, moe = KINDS[kind]
    given = {
        "data__mock": False, "data__train": str(prefix), "data__split": [1.0, 0.0], "data__packing": "best_fit",
        "data__attention_mask": "document", "train__steps": 2, "optimizer__warmup_steps": 0,
    }  # fmt: skip
    return config_of(settings(model | {"seq_length": length}, folder, **(given | moe | keys)), folder)


def steps(run: Any) -> list[float]:
    """The loss, gradient norm and routers' totals of each step, and at last the biases."""
    found = []
    for _ in range(run.config.train.steps):
        result = train_step(run, run.train_loader.batch(run.progress.samples))
        run.buffers.finish_param_gather()
        found += [result.loss, result.grad_norm, *(result.totals[name] for name in ROUTER_TOTALS)]
    *_, last = (layer for stage in run.stages for layer in stage.layers.values())
    bias = last.mlp._experts.bias
    return found + ([] if bias is None else bias.flatten().tolist())


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"chunks"}))
def test_padding_changes_nothing(kind: str, tmp_path: Path) -> None:
    """A document to a sample: samples of its length have no padding, and longer ones train as they do."""
    lengths, keys = [FILLED] * 40, {"batch__micro": 4}  # a group of four samples is a micro-batch
    (narrow,), (wide,) = (
        run_threads(configure(tmp_path, kind, lengths, length, **keys), steps) for length in (FILLED, WIDE)
    )
    assert wide == pytest.approx(narrow, rel=1e-11)


LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2 ep2": {"parallel__dp": 2, "parallel__ep": 2, "moe__dispatcher": "all_gather"},
    "tp2 sp dp2 ep4": {"parallel__tp": 2, "parallel__sp": True, "parallel__dp": 2, "parallel__ep": 4},
    "cp2 pp2 ep2": {"parallel__cp": 2, "parallel__pp": 2, "parallel__ep": 2},
    "cp2 ep2, shards of documents": {"parallel__cp": 2, "parallel__ep": 2, "batch__micro": 1},
    "pp2 dp2 ep2 zero2": {"parallel__pp": 2, "parallel__dp": 2, "parallel__ep": 2, "parallel__zero": 2},
}
GROUPS = ("dp2 ep2", "tp2 sp dp2 ep4", "pp2 dp2 ep2 zero2")
COMBINED = {"everything": LAYOUTS, "group": GROUPS, "chunks": GROUPS[1:]}


ALL = [(kind, layout) for kind, names in COMBINED.items() for layout in names]


@pytest.mark.parametrize(
    ("kind", "layout"),
    only_quick_rows(
        ALL,
        ("everything", "cp2 ep2, shards of documents"),
        ("everything", "tp2 sp dp2 ep4"),
        ("group", "dp2 ep2"),
        ("chunks", "pp2 dp2 ep2 zero2"),
    ),
)
def test_layouts_are_the_same_run(kind: str, layout: str, tmp_path: Path) -> None:
    """Samples have padding of any length, and some have none."""
    lengths = np.random.default_rng(1).integers(2, 2 * WIDE, size=60).tolist()
    split = configure(tmp_path, kind, lengths, WIDE, **LAYOUTS[layout])
    alone = configure(tmp_path, kind, lengths, WIDE, batch__micro=4)  # a group of four samples is a micro-batch
    (expected,) = run_threads(alone, steps)
    for found in run_threads(split, steps):
        assert found == pytest.approx(expected, rel=1e-9)


def test_documents_tell_what_is_padding(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.packing.*attention_mask = document"):
        configure(tmp_path, "mixtral", [FILLED] * 8, WIDE, data__attention_mask="causal")
