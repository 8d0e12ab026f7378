"""Attention runs on a fused kernel of this generation, and nothing copies around it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megascale.core.rank import Rank
from tests.gpu.conftest import Figure
from tests.gpu.machine import run_of, world_of
from tests.runs import GPT, LLAMA, config_of, settings

pytestmark = pytest.mark.gpu(1, only=True)

SIZE = {"num_layers": 1, "hidden_size": 2048, "num_heads": 16, "vocab_size": 1024, "seq_length": 2048}
MLA = LLAMA | SIZE | {
    "num_kv_heads": 16, "ffn_size": 4096, "kv_lora_rank": 512, "q_lora_rank": 1536, "rope_head_dim": 64,
}  # fmt: skip
MODELS = {"llama": LLAMA | SIZE | {"num_kv_heads": 4, "ffn_size": 4096}, "gpt": GPT | SIZE}
FUSED = re.compile(r"cudnn|flash|fmha|sdpa|DotProductAttention", re.IGNORECASE)
COPY = re.compile(r"^(?!triton_).*(copy|CatArray|memcpy)", re.IGNORECASE)
"""A compiled kernel names the conversions of types that it contains `to_copy`."""


def kernels(rank: Rank, config: Any, folder: str) -> list[str]:
    """The names of a step's kernels, in the order in which they ran."""
    import torch

    from megascale.train.step import train_step

    run = run_of(rank, config)
    train_step(run, run.train_loader.batch(0))
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        train_step(run, run.train_loader.batch(run.progress.samples))
        run.device.synchronize()
    path = f"{folder}/trace.json"
    profile.export_chrome_trace(path)
    events = json.loads(Path(path).read_text())["traceEvents"]
    ran = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy")]
    return [event["name"] for event in sorted(ran, key=lambda event: event["ts"])]


@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize("family", MODELS)
def test_the_kernel_is_fused_and_stands_alone(family: str, micro: int, tmp_path: Path, figure: Figure) -> None:
    overrides = {"train__precision": "bf16", "batch__micro": micro, "batch__global": micro}
    config = config_of(settings(MODELS[family], tmp_path, **overrides), tmp_path)
    (names,) = world_of(1, kernels, config, str(tmp_path))
    places = [index for index, name in enumerate(names) if FUSED.search(name)]
    assert places, f"no fused attention among {sorted(set(names))}"
    forward = places[0]
    figure(names[forward][:60], float(len(places)), "kernels")
    around = names[forward - 1 : forward] + names[forward + 1 : forward + 2]
    assert not [name for name in around if COPY.match(name)]


def test_padded_values_take_a_fused_kernel(tmp_path: Path, figure: Figure) -> None:
    """Of latent attention, with 192 elements of q and k and 128 of v in a head."""
    (names,) = world_of(
        1, kernels, config_of(settings(MLA, tmp_path, train__precision="bf16"), tmp_path), str(tmp_path)
    )
    fused = [name for name in names if FUSED.search(name)]
    assert fused, f"no fused attention among {sorted(set(names))}"
    figure(fused[0][:60], float(len(fused)), "kernels")
