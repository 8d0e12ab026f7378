"""Whole runs whose samples come from the reader of the host."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megascale.core.rank import Rank
from megascale.record.layout import TAGS
from megascale.train.loop import train
from megascale.train.reporter import Reporter
from tests.data.datasets import ORIGIN, write_dataset, write_documents
from tests.jobs import Job, curve, finish, job_config, lives
from tests.recorded_events import drain
from tests.runs import GPT, build_run, config_of, settings
from tests.slow_storage import slow_storage

MODEL = GPT | {"vocab_size": 8192, "num_layers": 2, "seq_length": 32}


@pytest.mark.slow
def test_a_step_that_waited_for_slow_storage_is_named(tmp_path: Path) -> None:
    documents = [np.full(1000, number) for number in range(6000)]  # 12 blocks of the cache
    write_documents(tmp_path / "set" / "a", documents, ORIGIN, 8192)
    size = (tmp_path / "set" / "a.bin").stat().st_size
    with slow_storage(tmp_path / "set", delay_s=0.5) as storage:
        overrides = {"data__mock": False, "data__train": f"{storage.url}/a", "data__split": [1.0, 0.0]}
        overrides |= {"data__cache": str(tmp_path / "cache"), "data__reader": "host", "train__steps": 12}
        run = build_run(Rank(0, 1, 0, "host"), config_of(settings(MODEL, tmp_path, **overrides), tmp_path, world=1))
        train(run, Reporter(run.config, run.device, None, [], run.mesh.recorder))
        assert storage.at_once > 1, "the blocks of a step are fetched together"
        assert storage.sent["a.bin"] <= size
    drained, _ = drain(run.mesh.recorder)
    tags = {int(row["step"]): {tag for bit, tag in enumerate(TAGS) if row["tags"] >> bit & 1} for row in drained.steps}
    assert "data" in tags[1] and len(tags) == 12


def readers(rank_0: int) -> list[int]:
    """Process ids of the readers that a rank has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == rank_0 and "reader_process" in (stat.parent / "cmdline").read_text():
                found.append(int(stat.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_a_job_trains_as_without_a_reader_though_readers_are_killed(tmp_path: Path) -> None:
    write_dataset(tmp_path / "a", [70, 300, 30, 600] * 20)
    overrides: dict[str, Any] = {"parallel__tp": 2, "parallel__dp": 2, "train__eval_every": 10, "train__eval_steps": 2}
    overrides |= {"data__mock": False, "data__train": str(tmp_path / "a"), "data__split": [0.8, 0.2]}
    overrides |= {"train__steps": 40, "checkpoint__every": 10}
    model = MODEL | {"vocab_size": 60_000}
    expected = curve(finish(job_config(tmp_path / "rank", model, **overrides)))
    memory = set(os.listdir("/dev/shm"))
    job, seen = Job(job_config(tmp_path / "host", model, **overrides, data__reader="host")), set[int]()
    for step, number in ((5, signal.SIGKILL), (12, signal.SIGSTOP), (20, signal.SIGKILL)):
        job.wait_for_step(step)
        for pid in set(readers(job.ranks()[0])) - seen:
            os.kill(pid, number)
            seen.add(pid)
    status, _, err = job.end()
    assert status == 0, err
    assert curve(job.steps()) == expected
    assert seen and not any(map(lives, seen))
    assert not {name for name in set(os.listdir("/dev/shm")) - memory if "reader" in name}


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["launcher", "rank"])
def test_the_reader_ends_with_its_ranks(victim: str, tmp_path: Path) -> None:
    write_dataset(tmp_path / "a", [70, 300, 30, 600] * 20)
    overrides: dict[str, Any] = {"data__mock": False, "data__train": str(tmp_path / "a"), "data__reader": "host"}
    overrides |= {"data__split": [1.0, 0.0], "parallel__dp": 2, "train__steps": 100_000}
    job = Job(job_config(tmp_path, MODEL | {"vocab_size": 60_000}, **overrides))
    job.wait_for_step(3)
    ranks = job.ranks()
    (reader,) = readers(ranks[0])
    assert not readers(ranks[1])
    os.kill(job.process.pid if victim == "launcher" else ranks[0], signal.SIGKILL)
    job.end()
    while lives(reader) or any(map(lives, ranks.values())):
        pass
