"""Real jobs, scraped by a real Prometheus: the queries of all panels are valid, and the main ones have data."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import Job, job_config
from tests.operate.driver.launched import LaunchedJob, launch_config
from tests.operate.store.prometheus_server import EXAMPLE, Prometheus, prometheus
from tests.runs import GPT

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Debian's package prometheus")

DASHBOARDS = sorted((EXAMPLE.parent / "grafana").glob("*.json"))

NO_DATA_HERE = (
    "megascale_gpu_", "megascale_infiniband_", "pause_frames", 'activity="data"', "spike_alerts_total[",
    "agent_driver_lost_seconds", "megascale_job_incidents_total", "megascale_job_actions_total",
)  # fmt: skip
"""Parts of queries without data in these jobs: devices that this host lacks, and what did not happen."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A server that scrapes a job of the local launcher, "test", and one of `megascale launch`, "launched"."""
    folder = tmp_path_factory.mktemp("prometheus")
    settings = {
        "observe__event_store": True,
        "train__steps": 10**6,
        "checkpoint__every": 20,
        "observe__metrics_port": 19500,
    }
    (folder / "launch").mkdir()
    configs = (
        job_config(folder, GPT, parallel__tp=2, parallel__pp=2, **settings),
        launch_config(folder / "launch", **settings),
    )
    local = Job(configs[0])
    launched = LaunchedJob(configs[1], "name=launched", "fault.check_nodes=false", "--nodes", "2")
    launched.folder = folder / "launch" / "runs" / "launched"
    try:
        with prometheus(folder, [local.folder, launched.folder]) as server:
            local.wait_for_step(21)
            launched.wait_for_step(21)
            for run in ("test", "launched"):
                server.wait_for(
                    f'rate(megascale_rank_train_seconds_total{{run="{run}"}}[10s]) > 0', lambda s: len(s) == 4
                )
                server.wait_for(f'megascale_checkpoint_step{{run="{run}"}}')
                server.wait_for(f'rate(megascale_host_network_sent_bytes_total{{run="{run}"}}[10s])')
            yield server
    finally:
        for job in (local, launched):
            job.process.terminate()
        for job in (local, launched):
            job.end()


def queries(board: dict[str, Any]) -> list[tuple[str, str]]:
    """The queries of a dashboard by their panel."""
    found = [(panel["title"], target["expr"]) for panel in board["panels"] for target in panel.get("targets", ())]
    return found + [(mark["name"], mark["expr"]) for mark in board["annotations"]["list"]]


@pytest.mark.slow
@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_have_valid_queries_and_data(served: Prometheus, path: Path) -> None:
    board = json.loads(path.read_text())
    run = "launched" if "incidents" in path.name else "test"
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            query = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"])
            assert query is not None
            matched = query[1].replace("$run", run)
            assert served.get(f"label/{query[2]}/values", **{"match[]": matched})
    empty = []
    for title, expression in queries(board):
        for old, new in (("$run", run), ("$node", ".*"), ("$__rate_interval", "10s")):
            expression = expression.replace(old, new)
        if not served.query(expression):
            empty.append((title, expression))
    unexpected = [one for one in empty if not any(part in one[1] for part in NO_DATA_HERE)]
    marks = {mark["name"] for mark in board["annotations"]["list"]}
    assert [one for one in unexpected if one[0] not in marks] == []


@pytest.mark.slow
def test_both_kinds_of_launchers_are_found_with_all_their_ranks(served: Prometheus) -> None:
    for run in ("test", "launched"):
        assert len(served.query(f'megascale_rank_step{{run="{run}"}}')) == 4
        (loss,) = served.query(f'megascale_loss{{run="{run}"}}')
        assert set(loss["metric"]) == {"__name__", "run", "node", "instance", "job"}
        assert served.query(f'sum(rate(megascale_tokens_total{{run="{run}"}}[10s]))')[0]["value"][1] != "0"
    targets = {one["labels"]["run"] for one in served.get("targets")["activeTargets"] if one["health"] == "up"}
    assert targets == {"test", "launched"}
    assert len(served.query('up{run="launched"}')) == 3  # driver and two agents
    assert served.query('megascale_job_nodes{run="launched", state="training"}')[0]["value"][1] == "2"
    stages = served.query('megascale:rank_compute:rate5m{run="test"}')
    assert {one["metric"]["pp"] for one in stages} == {"0", "1"}


@pytest.mark.slow
def test_rules_are_evaluated_and_a_healthy_job_raises_no_alert(served: Prometheus) -> None:
    rules = [rule for group in served.get("rules")["groups"] for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}
    firing = {rule["name"] for rule in rules if rule.get("state") == "firing"}
    assert firing - {"MegascaleClockUnsynchronized"} == set()


@pytest.mark.slow
def test_text_is_as_promtool_wants_it(served: Prometheus) -> None:
    """`promtool check metrics` knows Prometheus' conventions."""
    import urllib.request

    for target in served.get("targets")["activeTargets"]:
        with urllib.request.urlopen(target["scrapeUrl"], timeout=60) as answer:
            text = answer.read()
        done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: prometheus)")
def test_the_example_configuration_is_valid(tmp_path: Path) -> None:
    done = subprocess.run(["promtool", "check", "config", str(EXAMPLE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
