"""Ranks with linear attention: communication, FLOPs and state as in dry runs, the peak of memory, and times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megascale.config.loading import load_config
from megascale.config.model import ModelConfig
from megascale.layout.blocks import block_spec
from megascale.layout.parts.linear_attention import BLOCK
from megascale.layout.recompute_policy import NO_RECOMPUTE
from megascale.plan.account.flops import token_flops
from megascale.plan.simulate import profiles
from megascale.plan.simulate.chunk_time import block_times
from megascale.plan.simulate.layer_time import LayerTimes
from tests.plan.account.test_against_dry_run import compare
from tests.runs import LLAMA, config_of, settings

WIDE = LLAMA | {
    "num_layers": 3, "hidden_size": 2048, "num_heads": 16, "num_kv_heads": 4, "vocab_size": 4000, "seq_length": 4096,
    "ffn_size": 2048, "head_dim": 128, "attention_pattern": "L",
}  # fmt: skip
SP = {"parallel__tp": 2, "parallel__sp": True}
PACKED = {"data__attention_mask": "document", "data__document_length": 512}
CASES: dict[str, dict[str, Any]] = {
    "alone": {},
    "hybrid": {"model__attention_pattern": "LLS"},
    "fp32": {"train__precision": "fp32"},
    "sp": SP,
    "tp": {"parallel__tp": 2},
    "selective": {"train__recompute": "selective", "train__recompute_ops": ["attention", "norm"]},
    "full": SP | {"train__recompute": "full"},
    "ring": {"parallel__cp": 2},
    "usp": {"parallel__cp": 4, "parallel__cp_mode": "usp", "parallel__cp_a2a_size": 2},
    "documents": PACKED,
    "documents, ring": PACKED | {"parallel__cp": 2, "batch__micro": 1},
    "chunks": {"data__sequence_chunk_tokens": 1024},
    "fp8 blocks sp": SP | {"train__precision": "fp8", "fp8__recipe": "blockwise"},
    "split": {"parallel__pp": 2, "parallel__vpp": 2, "parallel__schedule": "zb_v", "model__num_layers": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_peak_is_that_of_a_dry_run(name: str, tmp_path: Path) -> None:
    changes = {"train__precision": "bf16", "batch__micro": 2} | CASES[name]
    changes["batch__global"] = 4 * changes["batch__micro"]
    peak, error = compare(config_of(settings(WIDE, tmp_path, **changes), tmp_path), 0)
    assert peak > 1e9 and -0.03 < error < 0.05, error


def test_flops_do_not_grow_with_the_sequence() -> None:
    """But for 7 of 8 layers: per token they have 4 h (block + d) with all of a block's scores, or half of them."""
    short, long = (token_flops(ModelConfig.model_validate(WIDE | {"seq_length": length})) for length in (4096, 65536))
    assert short == long
    width, layers = 2048, 3
    assert short.full_attention == 3 * layers * 4 * width * (BLOCK + 128)
    assert short.causal_attention == 3 * layers * 4 * width * (BLOCK / 2 + 128)
    softmax, hybrid = (
        token_flops(ModelConfig.model_validate(WIDE | {"num_layers": 8, "attention_pattern": pattern}))
        for pattern in ("S", "LLLLLLLS")
    )
    assert hybrid.causal_attention == pytest.approx(softmax.causal_attention / 8 + short.causal_attention * 7 / 3)


def test_times_of_a_layer_do_not_grow_per_token() -> None:
    """Softmax attention to 4 times as many tokens takes about 16 times as long, linear attention 4 times."""

    def attention(pattern: str, length: int) -> float:
        keys = [f"model.attention_pattern={pattern}", f"model.seq_length={length}", "model.block=serial"]
        config = load_config("configs/gpu/megascale-175b.toml", keys, world_size=256)
        times = LayerTimes.from_config(config, profiles.hardware("h100"), profiles.stack("megascale"))
        return block_times(times, block_spec(config.model, 0), False, NO_RECOMPUTE).attention

    assert attention("L", 65536) / attention("L", 16384) == pytest.approx(4, rel=0.05)
    assert attention("S", 65536) / attention("S", 16384) == pytest.approx(16, rel=0.05)
