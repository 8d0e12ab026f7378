"""Ranks with latent attention: communication, FLOPs and state as in dry runs, and the peak of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megascale.config.model import ModelConfig
from megascale.plan.account.flops import token_flops
from tests.plan.account.test_against_dry_run import compare
from tests.runs import MLA, config_of, settings

WIDE = MLA | {
    "hidden_size": 2048, "num_heads": 48, "num_kv_heads": 48, "vocab_size": 4000, "seq_length": 4096, "ffn_size": 2048,
    "kv_lora_rank": 512, "q_lora_rank": 1024, "head_dim": 128, "rope_head_dim": 64, "value_head_dim": 128,
}  # fmt: skip
EXPERTS = WIDE | {
    "num_heads": 16, "num_kv_heads": 16, "experts": 64, "experts_per_token": 8, "expert_ffn_size": 768,
    "shared_ffn_size": 768, "dense_layers": 1,
}  # fmt: skip
SP = {"parallel__tp": 2, "parallel__sp": True}
PACKED = {"data__attention_mask": "document", "data__document_length": 512}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sp": (WIDE, SP),
    "16 experts sp ep4": (EXPERTS | {"experts": 16}, SP | {"parallel__dp": 2, "parallel__ep": 4}),
    "experts sp ep4": (EXPERTS, SP | {"parallel__dp": 2, "parallel__ep": 4}),
    "sp zero2": (WIDE, SP | {"parallel__tp": 8, "parallel__dp": 4, "parallel__zero": 2}),
    "alone": (WIDE, {}),
    "tp": (WIDE, {"parallel__tp": 2}),
    "no q latent": (WIDE | {"q_lora_rank": 0}, {}),
    "full": (WIDE, SP | {"train__recompute": "full"}),
    "selective": (WIDE, {"train__recompute": "selective", "train__recompute_ops": ["attention", "norm"]}),
    "ring": (WIDE, {"parallel__cp": 2}),
    "ulysses": (WIDE, {"parallel__cp": 2, "parallel__cp_mode": "ulysses"}),
    "allgather": (WIDE, {"parallel__cp": 2, "parallel__cp_mode": "allgather"}),
    "documents": (WIDE, PACKED),
    "fp8 sp": (WIDE, SP | {"train__precision": "fp8"}),
    "fp8 rows sp": (WIDE, SP | {"train__precision": "fp8", "fp8__recipe": "rowwise"}),
    "fp8 blocks": (WIDE, {"parallel__tp": 2, "train__precision": "fp8", "fp8__recipe": "blockwise"}),
    "dropout": (WIDE | {"dropout": 0.1, "seq_length": 1024}, {"batch__micro": 8}),
}
QUICK = ("16 experts sp ep4",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]
)
def test_the_peak_is_that_of_a_dry_run(name: str, tmp_path: Path) -> None:
    model, keys = CASES[name]
    changes = {"train__precision": "bf16", "batch__micro": 2} | keys
    changes["batch__global"] = 2 * changes["batch__micro"] * keys.get("parallel__dp", 1)  # two micro-batches a rank
    peak, error = compare(config_of(settings(model, tmp_path, **changes), tmp_path), 0)
    assert peak > 1e9 and -0.03 < error < 0.03, error


PUBLISHED = {
    ("deepseek-v3", 0): (250.45, 281.15),
    ("deepseek-v3", 1): (260.64, 291.85),
    ("kimi-k2", 0): (205.47, 220.82),
}
"""GFLOP per token at 4,096 tokens, causal and full, from published tables of throughput and MFU, by `mtp_layers`."""


@pytest.mark.parametrize(("name", "depths"), PUBLISHED)
def test_flops_of_published_models(name: str, depths: int) -> None:
    flops = token_flops(ModelConfig.model_validate({"preset": name, "seq_length": 4096, "mtp_layers": depths}))
    assert (flops.causal / 1e9, flops.full / 1e9) == pytest.approx(PUBLISHED[name, depths], rel=1e-3)
