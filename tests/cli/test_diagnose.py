"""`megascale diagnose` as the person on call meets it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lab.fleet_times import FleetFault
from megascale.cli.main import main
from megascale.core.errors import Exit
from megascale.core.storage import Location
from megascale.operate.store.table_files import TableFile, write_rows
from tests.jobs import Job, job_config
from tests.operate.show.folders import make_run
from tests.operate.show.hung_runs import CULPRIT, make_hung_run
from tests.operate.show.stores import make_stored_run, store_host_metrics
from tests.operate.store.tables import rows
from tests.runs import GPT

SECONDS = 120


def diagnosed(run: Path, *arguments: str) -> dict:
    command = [sys.executable, "-m", "megascale", "diagnose", str(run), "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == Exit.OK, done.stderr
    return json.loads(done.stdout)


def test_text_json_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, picture = make_hung_run(tmp_path), tmp_path / "waits.svg"
    for _ in range(2):
        assert main(["diagnose", str(run), "--picture", str(picture)]) == Exit.OK
        assert capsys.readouterr().out.startswith(f"HUNG when last seen: rank {CULPRIT} on node1 ")
        assert picture.read_text().startswith("<svg")
    assert main(["diagnose", str(run), "--json"]) == Exit.OK
    assert json.loads(capsys.readouterr().out)["verdict"]["ranks"] == [CULPRIT]


def test_without_torch(tmp_path: Path) -> None:
    run = make_hung_run(tmp_path)
    code = "import sys; sys.modules['torch'] = None; from megascale.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "diagnose", str(run), "--picture", str(tmp_path / "a.svg")]
    assert subprocess.run(command, capture_output=True, timeout=SECONDS, check=False).returncode == Exit.OK


def test_wrong_input_is_one_clear_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(tmp_path / "absent")]) == Exit.CONFIG
    assert "no such folder" in capsys.readouterr().err
    run = make_run(tmp_path)
    config = run / "config.toml"
    config.write_text(config.read_text().replace('name = "test"', f'name = "{tmp_path.name}"'))
    run = run.rename(run.with_name(tmp_path.name))  # flight records are found by the run's name, and others run here
    assert main(["diagnose", str(run)]) == Exit.CONFIG
    error = capsys.readouterr().err
    assert "nothing tells what the ranks do" in error and error.count("\n") == 1
    run = make_hung_run(tmp_path / "other")
    assert main(["diagnose", str(run), "--picture", str(tmp_path / "absent" / "a.svg")]) == Exit.CONFIG
    assert "cannot be written: No such file or directory" in capsys.readouterr().err


def test_says_what_slows_a_run_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = make_stored_run(tmp_path)
    assert main(["diagnose", str(run), "--slow"]) == Exit.OK
    first, *evidence = capsys.readouterr().out.splitlines()
    assert first.startswith("rank 5: computes slowly, since step 2; costs ")
    assert evidence[0].startswith("    rank 5 computes longer than its 3 peers of stage 1: ")
    assert main(["diagnose", str(run), "--slow", "--json"]) == Exit.OK
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert (found["kind"], found["ranks"], found["summary"]) == ("compute", [5], first)
    assert main(["diagnose", str(run), "--slow", "--picture", str(tmp_path / "a.svg")]) == Exit.CONFIG
    assert "leave --slow out" in capsys.readouterr().err


def test_a_healthy_run_is_not_called_slow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = make_stored_run(tmp_path, FleetFault())
    assert main(["diagnose", str(run), "--slow"]) == Exit.OK
    assert capsys.readouterr().out == "nothing slows the run down that its event store shows\n"


def store_hosts(run: Path, hosts: int, low: int = -1, samples: int = 120) -> None:
    """Write metrics of hosts with a rank each, of which host `low` has half the power of the others."""
    store_host_metrics(run, hosts, low, samples)
    for host in range(hosts):
        columns = rows("ranks", rank=host, node=f"n{host}")
        write_rows(Location(str(run / "events")), TableFile("ranks", f"n{host}", 0, 1, 2), columns)


def test_names_hosts_whose_metrics_stay_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)
    store_hosts(run, hosts=6, low=3)
    assert main(["diagnose", str(run), "--hosts"]) == Exit.OK
    compared, line = capsys.readouterr().out.splitlines()
    assert compared == "compared 6 hosts by their metrics over 10 min"
    assert re.fullmatch(r"n3: gpu.power_w of gpu0 (29|30)[0-9.]+, other hosts (59|60)[0-9.]+, for 10 min", line)
    assert main(["diagnose", str(run), "--hosts", "--json"]) == Exit.OK
    found = json.loads(capsys.readouterr().out)
    assert [(one["node"], one["device"], one["summary"]) for one in found["outliers"]] == [("n3", "gpu0", line)]
    assert main(["diagnose", str(run), "--hosts", "--picture", str(tmp_path / "a.svg")]) == Exit.CONFIG
    assert "leave --hosts out" in capsys.readouterr().err


def test_hosts_that_are_alike_few_or_without_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alike, few = make_run(tmp_path / "alike"), make_run(tmp_path / "few")
    store_hosts(alike, hosts=6)
    store_hosts(few, hosts=3, low=1)
    assert main(["diagnose", str(alike), "--hosts"]) == Exit.OK
    assert capsys.readouterr().out.endswith("\nno host stays far from the others\n")
    assert main(["diagnose", str(few), "--hosts"]) == Exit.OK
    assert capsys.readouterr().out == (
        "compared 0 hosts by their metrics over 10 min; "
        "3 in stages of fewer than 4 hosts, which have no majority\n"
        "nothing can be said about these hosts\n"
    )
    early = make_run(tmp_path / "early")
    store_hosts(early, hosts=6, low=1, samples=24)
    assert main(["diagnose", str(early), "--hosts"]) == Exit.OK
    assert "nothing can be said yet: a host is named once it has stayed apart for 4 min" in capsys.readouterr().out
    run, _ = make_stored_run(tmp_path / "none")
    assert main(["diagnose", str(run), "--hosts"]) == Exit.CONFIG
    assert "has no metrics of hosts" in capsys.readouterr().err


@pytest.mark.slow
def test_a_real_job_that_hangs_lives_again_and_is_killed(tmp_path: Path) -> None:
    """A stopped rank is named with its stack, and from the store alone once all processes are gone."""
    config = job_config(
        tmp_path, GPT, parallel__tp=2, parallel__pp=2, train__steps=10**6, train__precision="fp32",
        observe__event_store=True, observe__store_interval_s=1.0,
    )  # fmt: skip
    job = Job(config)
    job.wait_for_step(2)
    assert diagnosed(job.folder)["condition"] == "makes progress"
    os.kill(job.ranks()[3], signal.SIGSTOP)
    found = _wait_for_hang(job.folder)
    assert (found["verdict"]["kind"], found["verdict"]["ranks"]) == ("stopped", [3])
    assert found["verdict"]["confident"] and found["chain"][-1]["awaited"] == 3
    assert "megascale/train" in found["culprits"][0]["stack"]
    time.sleep(3)  # the store's interval
    job.kill()
    found = diagnosed(job.folder)
    assert (found["condition"], found["verdict"]["ranks"]) == ("hangs", [3])
    assert {source["source"] for source in found["sources"]} == {"event store"}


def _wait_for_hang(run: Path) -> dict:
    deadline = time.monotonic() + SECONDS
    while (found := diagnosed(run))["condition"] != "hangs":
        assert time.monotonic() < deadline, found
        time.sleep(1)
    return found
