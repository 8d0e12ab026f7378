"""Formulas of ranks that share sequences equal dry runs: communication, FLOPs and state exactly, memory within 2%."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megascale.plan.account.memory import JobMemory
from megascale.plan.account.traffic import step_traffic
from tests.marks import only_quick
from tests.plan.account.executed_flops import rank_flops
from tests.plan.account.test_against_dry_run import sent_by
from tests.runs import GPT, LLAMA, config_of, settings

WIDE = {"num_layers": 4, "hidden_size": 256, "num_heads": 8, "seq_length": 2048, "vocab_size": 2000}
GROUPED = LLAMA | WIDE | {"num_kv_heads": 2, "ffn_size": 512}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ulysses": (GPT | WIDE, {"cp": 2, "cp_mode": "ulysses"}),
    "ulysses, repeated heads": (GROUPED, {"cp": 4, "cp_mode": "ulysses"}),
    "ring": (GPT | WIDE, {"cp": 4, "cp_mode": "ring"}),
    "allgather": (GPT | WIDE, {"cp": 2, "cp_mode": "allgather"}),
    "usp, tp": (GROUPED, {"cp": 4, "cp_mode": "usp", "cp_a2a_size": 2, "tp": 2, "sp": True}),
}


SPARSE = {"local_blocks": 2, "stride": 2, "block": 64}  # all offsets on every rank


@pytest.mark.parametrize("window", only_quick([None, [300, 0], SPARSE], None))
@pytest.mark.parametrize("case", only_quick(list(CASES), "usp, tp"))
def test_formulas_are_the_dry_run(case: str, window: Any, tmp_path: Path) -> None:
    from megascale.plan.dryrun.dry_run import dry_run

    model, parallel = CASES[case]
    keys = {f"parallel__{key}": value for key, value in parallel.items()}
    key = "sparse_attention" if window is SPARSE else "window"
    tree = settings(model | {key: window or 0}, tmp_path, train__precision="bf16", batch__global=2, **keys)
    config = config_of(tree, tmp_path)
    dry = dry_run(config, 0)  # whose chunks are apart
    assert step_traffic(config, dry.coord) == sent_by(dry)
    assert rank_flops(config, dry.coord.pp, dry.coord.cp) == dry.flops.total()
    planned, state = JobMemory(config).rank(0), dry.state
    assert (planned.gradients, planned.optimizer) == (state["gradients"], state["optimizer"])
    assert planned.total == pytest.approx(dry.peak.total(), rel=0.02)
