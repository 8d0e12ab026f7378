"""Speed of real steps on one GPU, reported beside what an H100 should reach."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.conftest import Figure
from tests.gpu.machine import rehearsing

pytestmark = pytest.mark.gpu(1)

CONFIGS = Path(__file__).parents[2] / "configs"
TINY = (
    "model.num_layers=1",
    "model.hidden_size=64",
    "model.num_heads=4",
    "model.seq_length=64",
    "model.vocab_size=256",
)
"""What a rehearsal makes of a model."""


def bench(config: str, *words: str) -> dict[str, Any]:
    """The result of `megascale bench mfu` for a file of configs/bench."""
    tiny = TINY + (("model.num_kv_heads=2", "model.ffn_size=128") if "llama" in config else ("model.ffn_size=128",))
    sizes = tiny if rehearsing() else ()
    command = [sys.executable, "-m", "megascale", "bench", "mfu", "--config", str(CONFIGS / "bench" / config), "--json"]
    done = subprocess.run([*command, *sizes, *words], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("config", "least"), [("llama3-8b-slice.toml", 50), ("gpt3-175b-slice.toml", 56)])
def test_a_slice_of_a_large_model(config: str, least: float, figure: Figure) -> None:
    found = bench(config)
    figure("step", found["step_s"]["median"] * 1e3, "ms")
    if (causal := found["mfu"]["causal"]) is not None:
        figure("MFU causal", 100 * causal, "%", least=least)
    figure("idle", 100 * found["kernels"].get("idle", 0.0), "%", most=1.5)
    figure("peak memory", found["peak_memory_bytes"] / 2**30, "GiB")
    first, last = found["losses"]
    assert abs(last - first) < 1, "random tokens: the loss stays about where it began"


@pytest.mark.timeout(600)
def test_the_ledger_costs_little(figure: Figure) -> None:
    seconds = {
        on: bench("llama3-8b-slice.toml", f"observe.record_events={on}")["step_s"]["median"] for on in ("true", "false")
    }
    figure("ledger on over off", 100 * (seconds["true"] / seconds["false"] - 1), "%", most=1.0)
