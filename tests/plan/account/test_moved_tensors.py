"""What layers move off the device: planned bytes are those of the store, and of the file that is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.plan.account.memory import JobMemory
from tests.runs import LLAMA, build_run, config_of, settings
from tests.worlds import run_world

MODEL = LLAMA | {"hidden_size": 256, "num_heads": 2, "num_kv_heads": 1, "ffn_size": 512, "seq_length": 256}
MARGIN = 0.03
POLICIES: dict[str, dict[str, Any]] = {
    "host": {"train__memory": ["host"]},
    "by turns": {"train__memory": ["host", "keep", "full", "host"]},
    "half of the tiles": {"train__memory": [{"host": 0.5}], "train__mlp_tiles": 4},
    "files": {"train__memory": ["nvme", "keep"]},
}


def moved(rank: Rank, config: RunConfig) -> tuple[int, int]:
    """Train for two steps; return the bytes of host memory that tensors need at once, and those written in a step."""
    from megascale.train.step import train_step

    run = build_run(rank, config)
    media, written = run.pipeline.store.media, list[int]()
    for step in range(2):
        train_step(run, run.train_loader.batch(step * config.batch.total))
        written.append(media["nvme"].written if "nvme" in media else 0)
    return media["host"].pool.nbytes, written[1] - written[0]


@pytest.mark.parametrize("name", POLICIES)
def test_planned_bytes_are_those_of_the_store(name: str, tmp_path: Path) -> None:
    """But for the rotary tables, which move with a layer as well. The last layer's tensors may be back before they are
    written.
    """
    keys = POLICIES[name] | ({"train__memory_dir": str(tmp_path)} if name == "files" else {})
    config = config_of(settings(MODEL, tmp_path, train__precision="fp32", **keys, batch__global=2), tmp_path)
    ((host, written),) = run_world(1, moved, config)
    job = JobMemory(config)
    assert job.moved_bytes(0, "host") == pytest.approx(host, rel=MARGIN)
    if name == "files":
        assert job.moved_in_step(0, "nvme") // 2 <= written <= job.moved_in_step(0, "nvme") * (1 + MARGIN)
        assert job.moved_in_step(0, "nvme") == 2 * job.moved_bytes(0, "nvme")  # two micro-batches, one at a time
