"""What the pages say, asked for as a browser asks."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megascale.operate.show.web.app import make_app
from megascale.operate.show.web.runs import watched_runs
from tests.operate.show.folders import RUNS, incident, live_rank, make_run, write_incidents, write_live
from tests.operate.show.web.client import callback_request

Ask = Callable[..., dict[str, Any]]


@contextlib.contextmanager
def asking(folder: Path) -> Iterator[Ask]:
    """Yield a function that runs the callback of an output with values, and returns its answers by element."""
    runs = watched_runs([folder])
    client = make_app(runs, "token").server.test_client()
    client.get("/?token=token")
    dependencies = client.get("/_dash-dependencies").json

    def ask(output: str, **values: Any) -> dict[str, Any]:
        given = {name.replace("__", "."): value for name, value in values.items()}
        body = callback_request(dependencies, output, {"run.value": next(iter(runs))} | given)
        answer = client.post("/_dash-update-component", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json["response"]

    yield ask
    for run in runs.values():
        run.close()


@pytest.mark.parametrize(
    ("live", "words", "tone"),
    [
        (None, "not running, or on other hosts", "quiet"),
        ({"status": 143}, "stopped", "quiet"),
        ({"status": 130}, "stopped", "quiet"),
        ({"status": 0}, "done", "good"),
        ({}, "runs", "good"),
        ({"stage": "gather"}, "waits for nodes", "warning"),
        ({"status": 93}, "failed with status 93", "bad"),
    ],
)
def test_the_pill_has_the_tone_of_the_state(tmp_path: Path, live: dict[str, Any] | None, words: str, tone: str) -> None:
    folder = make_run(tmp_path)
    if live is not None:
        write_live(folder, [RUNS] * 4, age_s=-3600, **live)
    with asking(folder) as ask:
        pill = ask("header.children")["header"]["children"][1]["props"]
        verdict = ask("verdict.children", tabs__value="overview")["verdict"]["children"]["props"]["children"][0]
    assert (pill["children"], pill["className"]) == (words, f"state {tone}")
    assert verdict["props"]["className"] == f"verdict {tone}"


def test_a_run_is_titled_as_it_is_listed(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    folder = folder.rename(folder.with_name("copied"))
    with asking(folder) as ask:
        assert ask("header.children")["header"]["children"][0]["props"]["children"] == "copied"
        assert '"copied"' in json.dumps(ask("runs.children", tabs__value="overview"))


def test_a_rank_before_its_first_step_and_an_incident_without_evidence(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    write_live(folder, [live_rank("build")] * 4, age_s=-3600)
    write_incidents(folder, [incident()])
    with asking(folder) as ask:
        details = json.dumps(ask("rank-details.children", tabs__value="ranks", picked__data=1))
    assert '"none yet"' in details and '"-1"' not in details
    assert "incident 1, step 7: rank 1 was killed by SIGKILL" in details and "[]" not in details
