"""Event stores of real jobs, whoever starts their ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megascale.core.files import SHARED_MEMORY
from megascale.operate.store.query import open_store
from megascale.record.log_files import folder_key
from tests.jobs import Job, job_config
from tests.runs import GPT

STORED = {"observe__event_store": True, "observe__store_interval_s": 1.0, "train__eval_every": 3}


def query(job: Job, sql: str) -> list[tuple[Any, ...]]:
    return open_store(job.folder).execute(sql).fetchall()


def left_logs() -> list[Path]:
    return sorted(SHARED_MEMORY.glob(f"megascale-{os.geteuid()}-test-*.flight"))


def test_each_row_is_stored_once_however_many_launchers_share_the_host(tmp_path: Path) -> None:
    config = job_config(tmp_path, GPT, parallel__tp=2, train__steps=4, observe__event_store=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    place = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    shared = dict(os.environ, OMP_NUM_THREADS="1", MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo", **place)
    command = [sys.executable, "-m", "megascale", "train", str(config)]
    launchers = [subprocess.Popen(command, env=shared | {"RANK": rank}) for rank in "01"]
    assert [launcher.wait() for launcher in launchers] == [0, 0]
    run = tmp_path / "runs" / "test"
    while list(SHARED_MEMORY.glob(f".megascale-*-{folder_key(run):x}.lock")):
        time.sleep(0.1)  # a collector still writes
    store = open_store(run)
    rows = store.execute("SELECT rank, count(*), count(DISTINCT step) FROM steps GROUP BY rank ORDER BY rank")
    assert rows.fetchall() == [(0, 4, 4), (1, 4, 4)]
    assert store.execute("SELECT rank FROM ranks ORDER BY rank").fetchall() == [(0,), (1,)]


@pytest.mark.slow
def test_a_resumed_run_has_two_attempts(tmp_path: Path) -> None:
    config = job_config(tmp_path, GPT, checkpoint__every=2, **STORED)
    assert Job(config, "train.steps=3").end()[0] == 0
    job = Job(config, "train.steps=5", "checkpoint.resume=auto")
    assert job.end()[0] == 0
    tagged = (
        "SELECT DISTINCT attempt, step, tags LIKE '%restart%' FROM steps WHERE tags LIKE 'first step%' ORDER BY ALL"
    )
    assert query(job, tagged) == [(0, 1, False), (1, 4, True)]


@pytest.mark.slow
def test_a_run_without_checkpoints_begins_anew(tmp_path: Path) -> None:
    config = job_config(tmp_path, GPT, **STORED)
    assert Job(config, "train.steps=5").end()[0] == 0
    job = Job(config, "train.steps=3")
    assert job.end()[0] == 0
    assert query(job, "SELECT DISTINCT attempt, max(step) FROM steps GROUP BY ALL") == [(0, 3)]


@pytest.mark.slow
def test_a_killed_rank_leaves_its_last_events(tmp_path: Path) -> None:
    job = Job(job_config(tmp_path, GPT, parallel__tp=2, train__steps=5000, **STORED))
    job.wait_for_step(20)
    pid = job.ranks()[1]
    os.kill(pid, signal.SIGKILL)
    assert job.end()[0] != 0
    [(step,)] = query(job, "SELECT max(step) FROM steps WHERE rank = 1")
    assert step >= 19, "its end was not in a step that the store has"
    [(text,)] = query(job, "SELECT record FROM states WHERE rank = 1")
    assert json.loads(text)["step"] in (step, step + 1) and json.loads(text)["phase"] != "done"
    assert left_logs() == []
