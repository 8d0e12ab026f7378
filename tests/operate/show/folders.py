"""Folders of runs as a training job leaves them, without a job."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megascale.config.toml_writer import to_toml
from megascale.operate.driver.incidents import LOG_FILE, Action, Culprit, Incident
from megascale.record.live_file import LIVE_FILE, LiveFile, LiveState
from megascale.record.rank_state import RankStatus
from tests.runs import GPT, config_of, settings


def live_rank(
    phase: str = "", step: int = -1, idle_s: float = 0.0, silent_s: float = 0.0, state: str = ""
) -> RankStatus:
    """A rank as the live file knows it, of any number."""
    return RankStatus(0, 0, phase, step, idle_s=idle_s, silent_s=silent_s, state=state)


RUNS = live_rank("step", 5)


def make_run(folder: Path, steps: int = 10, total: int = 20, **overrides: Any) -> Path:
    """Write configuration and metrics of a run of four ranks, and return its folder."""
    layout = {"parallel__tp": 2, "parallel__pp": 2, "train__steps": total} | overrides
    config = config_of(settings(GPT, folder / "runs", **layout), folder)
    config.folder.mkdir(parents=True)
    (config.folder / "config.toml").write_text(to_toml(config))
    write_metrics(config.folder, range(1, steps + 1))
    return config.folder


def metrics_record(step: int, **values: Any) -> dict[str, Any]:
    """A logged step with plausible values."""
    return {
        "step": step, "loss": 5.0 - step / 10, "grad_norm": 1.0, "lr": 1e-3, "step_time_s": 0.5,
        "tokens_per_s": 1000.0 + step, "mfu_full": 0.25, "mfu_causal": 0.2, "peak_memory_bytes": 1 << 20,
    } | values  # fmt: skip


def write_metrics(folder: Path, steps: Iterable[int], **values: Any) -> None:
    """Append logged steps to the file of metrics."""
    with open(folder / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(metrics_record(step, **values)) + "\n" for step in steps)


def write_live(folder: Path, ranks: Sequence[RankStatus], age_s: float = 0.0, **fields: Any) -> None:
    """Write the live file, as if `age_s` seconds ago."""
    LiveFile(folder / LIVE_FILE).write(LiveState(time.time() - age_s, 0, ranks, **fields))


def incident(number: int = 1, **fields: Any) -> Incident:
    """A killed rank after step 7, and its restart."""
    values: dict[str, Any] = {
        "id": number, "class_": "process", "what": "rank 1 was killed by SIGKILL", "culprit": Culprit((1,), ("node0",)),
        "evidence": (), "hint": "", "signature": "process: rank 1", "attempt": 0, "step": 7, "since": 1000.0,
        "verdict": 1001.0, "action": Action("restart", "restarting the ranks in place"),
    }  # fmt: skip
    return Incident(**(values | fields))


def write_incidents(folder: Path, incidents: Sequence[Incident], status: int | None = None) -> None:
    """Write a job's log with incidents, and its end if it has a `status`."""
    nodes = {"nodes": ["node0"], "world": 4, "overrides": []}
    events: list[dict[str, Any]] = [
        {"event": "launch", "time": 900.0, "run": "test", "nodes": 1, "world": 4, "scheduler": "local"},
        {"event": "driver", "time": 900.0},
        {"event": "attempt", "time": 900.0, "attempt": 0, **nodes},
        *({"event": "incident", "incident": each.to_dict()} for each in incidents),
    ]
    if incidents:
        events.append({"event": "attempt", "time": 1002.0, "attempt": len(incidents), **nodes})
    if status is not None:
        events.append({"event": "ended", "time": 2000.0, "status": status, "step": 10})
    (folder / LOG_FILE).write_text("".join(json.dumps(event) + "\n" for event in events))
