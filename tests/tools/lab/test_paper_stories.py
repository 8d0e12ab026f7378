"""The paper's two stories, explained by the commands alone from a store on the disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab.fleet_tables import write_store
from lab.paper_stories import mfu_decay, slow_machines
from megascale.cli.main import main


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("replicas", [25, pytest.param(192, marks=pytest.mark.slow)])
def test_half_a_percent_of_the_machines_is_slow(
    replicas: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet, slow = slow_machines(replicas, steps=12)
    assert len(slow) == int(0.005 * fleet.layout.nodes) >= 1
    write_store(fleet, tmp_path)
    found = ask(capsys, "diagnose", str(tmp_path), "--slow")["findings"]
    assert sorted(one["culprit"] for one in found if one["kind"] == "compute") == sorted(slow)
    assert {one["kind"] for one in found} == {"compute"}
    assert (
        ask(capsys, "diagnose", str(tmp_path), "--mfu")["drift"]["growths"] == []
    )  # slow from the start: nothing has changed


@pytest.mark.parametrize("recorded", [True, False])
def test_mfu_falls_by_irregular_garbage_collection(
    recorded: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_store(mfu_decay(300, recorded=recorded), tmp_path)
    change = ask(capsys, "diagnose", str(tmp_path), "--mfu")["drift"]
    assert change["mfu_after"] < 0.95 * change["mfu_before"]
    grown = {growth["part"] for growth in change["growths"]}
    assert grown.isdisjoint({"forward", "backward", "optimizer"})  # as in the paper
    assert change["spread"]["after_s"] > 2 * change["spread"]["before_s"]
    cause = "pauses for garbage collection, on ranks in turn" if recorded else "ranks are late in turn"
    assert change["spread"]["cause"].startswith(cause)
    found = ask(capsys, "diagnose", str(tmp_path), "--slow")["findings"]
    assert found[0]["kind"] == ("gc" if recorded else "host")
    assert found[0]["culprit"] == "all ranks"
