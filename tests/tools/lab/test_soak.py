"""A soak: the verdict about each injected fault, its table, and what a job holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lab import resource_usage, soak
from lab.__main__ import main
from lab.outside_faults import RUN_VARIABLE
from lab.resource_usage import ResourceUsage, growth, look
from megascale.operate.driver.incidents import Action, Culprit, Incident


def fault(time: float, rank: int, kind: str = "stop") -> dict[str, object]:
    return {"kind": kind, "phase": "data", "rank": rank, "step": 4, "time": time}


def incident(number: int, verdict: float, *ranks: int, recovered: float | None = None) -> Incident:
    times = verdict - 4, verdict
    return Incident(
        number, "hang", "", Culprit(ranks), (), "", "", 0, 4, *times, (), Action("restart"), recovered, 4, 1
    )


def test_each_fault_has_the_verdict_of_the_first_incident_after_it() -> None:
    faults = [fault(100.0, 2), fault(130.0, 5), fault(160.0, 7, "kill"), fault(300.0, 1)]
    incidents = [incident(1, 104.5, 2, recovered=112.0), incident(2, 135.0, 4, 5, recovered=150.0)]
    first, second, third = soak.find_verdicts(faults, incidents)
    assert (first.named, first.alone, first.verdict_s, first.new_step_s, first.steps_lost) == (True, True, 4.5, 7.5, 1)
    assert (second.named, second.alone) == (True, False)
    assert (third.class_, third.named, third.verdict_s) == ("", False, None)
    *_, stop, all_kinds = soak.table([first, second, third])
    assert stop == "| stop | 2 | 2 | 1 | hang 2 | 4.8, at most 5.0 | 11.2, at most 15.0 | at most 1 |"
    assert all_kinds.startswith("| all | 3 | 2 | 1 | hang 2, no incident 1 |")


def test_a_wait_for_the_network_counts_until_the_restart_after_it() -> None:
    waits = replace(incident(1, 104.0, 1, 5), class_="network", action=Action("wait"), steps_lost=None)
    restarts = incident(2, 110.0, 1, 5, recovered=120.0)
    (verdict,) = soak.find_verdicts([fault(100.0, 1, "lose_message")], [waits, restarts])
    assert (verdict.class_, verdict.action, verdict.verdict_s, verdict.new_step_s) == ("network", "restart", 4.0, 16.0)


def test_growth_compares_both_ends() -> None:
    looks = [ResourceUsage(descriptors=count) for count in (10, 10, 11, 15, 20, 20, 21, 20, 30, 30)]
    assert growth(looks)["descriptors"] == (10, 30)
    assert growth([]) == {}


def test_a_look_counts_what_a_process_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource_usage, "LONG_LIVED", ("",))
    program = "import socket, sys; kept = [socket.socket() for _ in range(7)]; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program], env=os.environ | {RUN_VARIABLE: str(tmp_path)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stdout.readline()
        found = look(tmp_path)
        process.communicate()
    assert (found.processes, found.sockets, found.threads, found.shared_files) == (1, 7, 1, 0)
    assert found.descriptors >= 10 and found.memory_mib > 1


def test_kinds_of_a_soak_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["faults", "--soak", "5", "--kinds", "stop,hangs"])
    assert "kinds=hangs: should be of kill, stop" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_soak_of_ten_minutes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["faults", "--soak", "600", "--every", "60", "--output", str(tmp_path), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert (status, result["same_curve"], result["left_behind"]) == (0, True, [])
    assert result["faults"] >= 3
    assert result["named"] >= 0.9 * result["faults"]
    for name in ("descriptors", "sockets", "threads", "shared_files"):
        first, last = result["held"][name]
        assert last <= 1.2 * first, (name, result["held"])
