"""What layers move off the device: planned bytes are those of the store, and of the file that is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.plan.account.memory import JobMemory
from tests.drawn import ranks_of
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
        written.append(media["nvme"].written if config.train.memory_dir else 0)
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


def test_dry_runs_count_files_as_host_memory(tmp_path: Path) -> None:
    from megascale.plan.dryrun.dry_run import dry_run

    peaks = list[int]()
    for store in ("host", "nvme"):
        keys = {"train__memory": [store, {store: 0.5}], "train__mlp_tiles": 2, "train__precision": "fp32"}
        keys |= {"train__memory_dir": str(tmp_path)} if store == "nvme" else {}
        peaks.append(dry_run(config_of(settings(MODEL, tmp_path, **keys), tmp_path), 0).peak.total())
    assert peaks[0] == peaks[1]


LARGE = LLAMA | {
    "hidden_size": 2048, "num_heads": 16, "num_kv_heads": 8, "ffn_size": 5632, "vocab_size": 4096, "seq_length": 4096,
}  # fmt: skip
PEAKS: dict[str, dict[str, Any]] = {
    "all": {"train__memory": ["host"]},
    "by turns": {"train__memory": ["full", "host", "keep", "host"]},
    "first": {"train__memory": ["host", "keep", "keep", "keep"], "parallel__pp": 2},
    "last": {"train__memory": ["keep", "host"], "parallel__pp": 2, "parallel__vpp": 2},
    "shares": {"train__memory": [{"host": 0.5}], "train__mlp_tiles": 4, "parallel__tp": 2, "parallel__sp": True},
    "split": {"train__memory": ["host", "keep"], "parallel__pp": 2, "parallel__schedule": "zb_h1"},
    "sharded": {"train__memory": ["host", "full"], "parallel__dp": 4, "parallel__zero": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PEAKS)
def test_peaks_are_those_of_dry_runs(name: str, tmp_path: Path) -> None:
    """Of what is beside the state, with sharded weights a bound."""
    from megascale.plan.dryrun.dry_run import dry_run

    keys = {"train__precision": "bf16", "batch__micro": 4, "batch__global": 16} | PEAKS[name]
    config = config_of(settings(LARGE, tmp_path, **keys), tmp_path)
    for rank in ranks_of(config):
        dry = dry_run(config, rank)
        planned, state = JobMemory(config).rank(dry.coord.pp), dry.state.total()
        measured = dry.peak.total() - state
        assert 0.97 < (planned.activations + planned.transient) / measured < 1.08, f"rank {rank}"
