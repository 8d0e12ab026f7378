"""The launcher of a job on one host: the report of a failed rank, stops, and no process that outlives its job."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megascale.core.errors import Exit, MegascaleError
from megascale.operate.diagnose.hang import flight
from megascale.operate.driver.one_host import run_on_this_host
from megascale.operate.node import environment
from tests.jobs import Job, heed_signals, job_config, lives, wait_until_gone
from tests.marks import only_quick, only_quick_rows
from tests.operate.diagnose.hang.dumps import Recorder
from tests.runs import GPT

FOUR = {"parallel__tp": 2, "parallel__pp": 2, "train__steps": 1000, "train__precision": "fp32"}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_is_saved_where_the_run_is_lost(ranks: int, tmp_path: Path) -> None:
    """A renamed folder, as a file system that is no longer mounted."""
    job = Job(job_config(tmp_path, GPT, parallel__dp=ranks, train__steps=100_000, checkpoint__every=2))
    job.wait_for_step(4)
    job.folder.rename(tmp_path / "away")
    lines = iter(job.process.stdout or ())
    lost = f"the run's folder {job.folder} is lost"
    assert any("no checkpoint of step" in line and lost in line for line in lines)
    job.signal(signal.SIGTERM)
    status, out, err = job.end()
    assert status not in (Exit.OK, Exit.STOPPED) and lost in err
    assert "saved" not in out and not job.folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_killed_rank_is_named_and_the_others_end(victim: int, tmp_path: Path) -> None:
    job = Job(job_config(tmp_path, GPT, **FOUR))
    job.wait_for_step(2)
    ranks = job.ranks()
    assert sorted(ranks) == [0, 1, 2, 3]
    os.kill(ranks[victim], signal.SIGKILL)
    killed = time.monotonic()
    status, _, err = job.end()
    assert time.monotonic() - killed < 30
    assert status == Exit.UNCLASSIFIED
    last = err[err.index("megascale: rank") :].splitlines()
    assert last[0].startswith(f"megascale: rank {victim} of 4 on {socket.gethostname()} failed: killed by SIGKILL (by")
    assert last[-1] == "the other 3 ranks were ended"
    wait_until_gone(list(ranks.values()))


@pytest.mark.slow
def test_an_aborted_rank_is_named_with_its_last_words(tmp_path: Path) -> None:
    """As when gloo finds tensors of unequal size: the process ends in C++, without a Python error."""
    job = Job(job_config(tmp_path, GPT, **FOUR))
    job.wait_for_step(2)
    log = job.folder / "logs" / "rank-2.log"
    with log.open("a") as file:
        file.write("terminate called after throwing an instance of 'gloo::EnforceNotMet'\n")
    os.kill(job.ranks()[2], signal.SIGABRT)
    status, _, err = job.end()
    assert status == Exit.UNCLASSIFIED
    assert re.search(r"rank 2 of 4 on \S+ failed: killed by SIGABRT\n  \| .*\n?.*EnforceNotMet", err), err
    assert f"its output: {log}" in err


WATCHDOG = """
import os, time
from pathlib import Path
if "RANK" in os.environ:
    from tests.operate.diagnose.hang.dumps import Recorder
    rank = int(os.environ["RANK"])
    recorder = Recorder(rank, "h", dp=[0, 1, 2, 3])
    if rank == {stuck}:
        time.sleep(600)
    if {dump}:
        recorder.collective("dp", done=False)
        recorder.write(Path({folder!r}))
    if rank in {aborting}:
        os.abort()
    time.sleep(600)
"""
"""Ranks that wait until their watchdogs end them, and one that is stuck."""


def run_watchdog(folder: Path, monkeypatch: pytest.MonkeyPatch, **planted: object) -> None:
    """Run four ranks that never get to megascale."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(WATCHDOG.format(folder=str(folder / "flight"), **planted))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder / "site"), str(Path(__file__).parents[3])]))
    assert run_on_this_host(["--version"], 4, folder) == Exit.UNCLASSIFIED


@pytest.mark.parametrize("stuck", only_quick([0, 3], 0))
def test_a_stuck_rank_is_named_and_not_those_that_waited(
    stuck: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    flight.make_dump_folder(tmp_path)
    aborting = [rank for rank in range(4) if rank != stuck]
    run_watchdog(tmp_path, monkeypatch, stuck=stuck, dump=True, aborting=aborting)
    last = capfd.readouterr().err.splitlines()
    named = f"megascale: rank {stuck} of 4 on {socket.gethostname()} failed: never joined all_reduce 1 of group dp"
    assert any(line.startswith(named) for line in last), last
    assert last[-1] == "the other 3 ranks were ended"


def test_a_rank_that_aborts_itself_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As when an assertion fails in C++; the dumps are of an earlier attempt."""
    flight.make_dump_folder(tmp_path)
    for rank in (0, 2, 3):
        recorder = Recorder(rank, "h", dp=[0, 1, 2, 3])
        recorder.collective("dp", done=False)
        recorder.write(tmp_path / "flight")
    flight.make_dump_folder(tmp_path)
    run_watchdog(tmp_path, monkeypatch, stuck=None, dump=False, aborting=[2])
    named = f"megascale: rank 2 of 4 on {socket.gethostname()} failed: killed by SIGABRT"
    assert named in capfd.readouterr().err.splitlines()


ENVIRONMENT = """
import json, os, sys, types
if "RANK" in os.environ:
    def run_rank(config, rank, open_weights, log):
        with open(os.environ["SHOWN"] + str(rank.rank), "w") as file:
            json.dump([dict(os.environ), "torch" in sys.modules], file)
        return 0
    entry = sys.modules["megascale.train.entry"] = types.ModuleType("megascale.train.entry")
    entry.run_rank = run_rank
"""


def test_ranks_have_the_environment_that_they_need_before_torch(tmp_path: Path) -> None:
    """The user's settings stay; dumps of an earlier attempt are removed."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(ENVIRONMENT)
    old = tmp_path / "runs" / "test" / "flight" / f"{socket.gethostname()}_rank_1"
    old.parent.mkdir(parents=True)
    old.touch()
    own = {"CUDA_DEVICE_MAX_CONNECTIONS": "16", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}
    env = {"PYTHONPATH": str(tmp_path / "site"), "SHOWN": f"{tmp_path}/shown-", **own}
    status, _, err = Job(job_config(tmp_path, GPT, parallel__tp=2), env=env).end()
    assert status == Exit.OK, err
    for rank in range(2):
        shown, torch = json.loads((tmp_path / f"shown-{rank}").read_text())
        expected = environment.missing_defaults(own, tmp_path / "runs" / "test") | own
        assert {name: shown.get(name) for name in expected} == expected
        assert "TORCH_FR_BUFFER_SIZE" not in shown
        assert shown["TORCH_FR_DUMP_TEMP_FILE"] == str(old)[: -len("1")]
        assert not torch, "it would not read them any more"
    assert old.parent.is_dir() and not old.exists()


PLANT = """
import os
if os.environ.get("RANK") == "{rank}":
    import megascale.train.scheduled_gc as gc
    def planted(self, run, result):
        if {when}:
            raise {error}
    gc.ScheduledGC.step_ends = planted
"""


def with_planted(folder: Path, rank: int, error: str, when: str = "run.progress.step == 3") -> dict[str, str]:
    """Return an environment in which a rank raises after its third step, or after the first at which `when` holds."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(PLANT.format(rank=rank, error=error, when=when))
    return {"PYTHONPATH": f"{folder}{os.pathsep}{Path(__file__).parents[3]}"}  # and the tree under test


def test_a_rank_that_cannot_be_started_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a limit of processes."""
    started: list[subprocess.Popen] = []

    def popen(*args: Any, **kwargs: Any) -> subprocess.Popen:
        if started:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        started.append(real(*args, **kwargs))
        return started[0]

    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(MegascaleError, match=r"rank 1 of 3 cannot be started on .*: Resource temp.* -> `ulimit -u`"):
        run_on_this_host(["check", "/dev/zero"], 3, tmp_path)
    assert started[0].returncode is not None


LAST_WORDS = """
import os, time
if os.environ.get("RANK") == "1":
    print("\u00dcbung", flush=True)
    os._exit(5)
if os.environ.get("RANK") == "0":
    time.sleep(60)  # until the launcher ends it: its own end would be a failure too
"""


def test_last_words_of_a_rank_are_read_as_they_were_written(tmp_path: Path) -> None:
    """In the encoding of the locale, which ranks share with their launcher."""
    (tmp_path / "sitecustomize.py").write_text(LAST_WORDS)
    code = "import sys; from pathlib import Path; from megascale.operate.driver import one_host\n"
    code += "sys.exit(one_host.run_on_this_host(['--version'], 2, Path(sys.argv[1])))"
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])
    env = dict(os.environ, PYTHONIOENCODING="latin-1", PYTHONUTF8="1", PYTHONPATH=path)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=env, stderr=subprocess.PIPE)
    assert done.returncode == 5 and "  | Übung\n".encode("latin-1") in done.stderr, done.stderr


RENAMES = """
import os, time
if os.environ.get("RANK") == "1":
    os.rename({run!r}, {run!r} + "-elsewhere")
    os._exit(5)
if os.environ.get("RANK") == "0":
    time.sleep(60)
"""


def test_a_failure_in_a_lost_folder_is_reported_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(RENAMES.format(run=str(tmp_path / "run")))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])]))
    assert run_on_this_host(["--version"], 2, tmp_path / "run") == 5
    failed = f"megascale: rank 1 of 2 on {socket.gethostname()} failed: ended with status 5 and no error"
    told = capfd.readouterr().err.splitlines()
    assert (told[-3], told[-1]) == (failed, "the other 1 rank was ended")
    assert told[-2].startswith(f"the run's folder {tmp_path}/run is lost")


@pytest.mark.slow
def test_a_lack_of_threads_is_explained(tmp_path: Path) -> None:
    """Also where the rank would need one to tell its peers."""
    env = with_planted(tmp_path / "site", 0, "no_thread()")
    with (tmp_path / "site" / "sitecustomize.py").open("a") as file:
        file.write("    import threading\n")
        file.write("    def no_thread(*args):\n")
        file.write("        threading.Thread.start = no_thread\n")
        file.write('        raise RuntimeError("can\'t start new thread")\n')
    status, _, err = Job(job_config(tmp_path, GPT, **FOUR), env=env).end()
    assert status == Exit.UNCLASSIFIED and "Traceback" not in err
    assert re.search("rank 0 of 4 .*: a thread cannot be started: can't start new thread  -> `ulimit -u`", err), err


@pytest.mark.slow
def test_a_ranks_own_error_comes_before_those_of_its_neighbours(tmp_path: Path) -> None:
    env = with_planted(tmp_path / "site", 3, "ValueError('planted in rank three')")
    status, _, err = Job(job_config(tmp_path, GPT, **FOUR), env=env).end()
    assert status == Exit.UNCLASSIFIED
    last = err[err.index("megascale: rank") :]
    host = socket.gethostname()
    assert last.startswith(f"megascale: rank 3 of 4 on {host} failed: ValueError: planted in rank three\n")
    log = (tmp_path / "runs" / "test" / "logs" / "rank-3.log").read_text()
    assert "Traceback" in log and "planted in rank three" in log


@pytest.mark.slow
def test_an_error_with_a_hint_keeps_its_status_and_has_no_traceback(tmp_path: Path) -> None:
    planted = "__import__('megascale.core.errors').core.errors.DataError('no such document', hint='prepare again')"
    env = with_planted(tmp_path / "site", 1, planted)
    status, out, err = Job(job_config(tmp_path, GPT, **FOUR), env=env).end()
    assert status == Exit.DATA
    assert "rank 1 of 4" in err and "no such document  -> prepare again" in err
    log = (tmp_path / "runs" / "test" / "logs" / "rank-1.log").read_text()
    assert "Traceback" not in out + err + log


@pytest.mark.slow
def test_ranks_die_with_their_launcher(tmp_path: Path) -> None:
    job = Job(job_config(tmp_path, GPT, **FOUR))
    job.wait_for_step(1)
    ranks = list(job.ranks().values())
    assert len(ranks) == 4
    job.signal(signal.SIGKILL)
    job.process.communicate()
    wait_until_gone(ranks)


@pytest.mark.slow
def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    job = Job(job_config(tmp_path, GPT, **FOUR, checkpoint__every=1000))
    job.wait_for_step(1)
    ranks = list(job.ranks().values())
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)  # no rank can finish its step
    while any(map(lives, ranks)):  # one of the later signals is the second request
        job.signal(signal.SIGINT)
        time.sleep(0.3)
    status, _, err = job.end()
    assert status == Exit.STOPPED
    assert err == "megascale: stopped at once, without saving\n"
    wait_until_gone(ranks)


def test_a_stop_before_the_first_step(tmp_path: Path) -> None:
    job = Job(job_config(tmp_path, GPT, **FOUR, checkpoint__every=1000))
    while len(job.ranks()) < 4:
        time.sleep(0.01)
    job.signal(signal.SIGTERM)
    status, _, err = job.end()
    assert status == Exit.STOPPED, err
    assert "Traceback" not in err


@pytest.mark.slow
def test_the_store_listens_on_loopback_only(tmp_path: Path) -> None:
    job = Job(job_config(tmp_path, GPT, **FOUR))
    job.wait_for_step(1)
    pids = set(job.ranks().values())
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if match := re.match(r"socket:\[(\d+)\]", str(fd.readlink())):
                    inodes.add(match.group(1))
            except OSError:
                continue
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                listening.append(fields[1].split(":")[0])
    job.kill()
    assert listening, "the store and gloo listen somewhere"
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert set(listening) <= loopback


def test_mistakes_are_found_before_any_process_starts(tmp_path: Path) -> None:
    config = job_config(tmp_path, GPT, **FOUR)
    result = subprocess.run(
        [sys.executable, "-m", "megascale", "train", str(config), "parallel.tp=3", "model.hiden_size=8"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == Exit.CONFIG
    lines = result.stderr.splitlines()
    assert len(lines) == 3 and lines[-1] == "2 problems; nothing was launched"
    assert "parallel.tp" in result.stderr and "did you mean 'hidden_size'?" in result.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_two_jobs_do_not_share_a_folder(tmp_path: Path) -> None:
    config = job_config(tmp_path, GPT, **FOUR)
    first = Job(config)
    first.wait_for_step(1)
    logs = sorted((first.folder / "logs").iterdir())
    status, _, err = Job(config).end()
    assert status == Exit.CONFIG
    assert f"a job trains in this folder already: process {first.process.pid} on {socket.gethostname()}" in err
    assert sorted((first.folder / "logs").iterdir()) == logs
    other = f"output_dir={tmp_path / 'other'}"
    status, _, err = Job(config, other, f"checkpoint.dir={first.folder.parent}", "checkpoint.every=1").end()
    assert status == Exit.CONFIG and "a job trains in this folder already: " in err, "checkpoints go there too"
    first.wait_for_step(len(first.steps()) + 2)
    first.kill()
    again = Job(config, "train.steps=5")
    assert again.end()[0] == Exit.OK


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_run_folder_that_cannot_be_written_is_said_in_a_line(ranks: int, tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    status, out, err = Job(job_config(tmp_path, GPT, **(FOUR if ranks == 4 else {}))).end()
    assert status == Exit.CONFIG
    assert out == ""
    assert err.splitlines()[0].startswith(f"{tmp_path}/runs/test  output_dir: cannot be written: Not a directory")
    assert len(err.splitlines()) == 2


def test_a_folder_of_checkpoints_that_cannot_be_written_is_said_before_the_first_step(tmp_path: Path) -> None:
    config = job_config(tmp_path, GPT, checkpoint__every=1000)
    status, out, err = Job(config, "checkpoint.dir=/proc/none").end()
    assert status == Exit.CONFIG and out == ""
    assert err.splitlines()[0].startswith("/proc/none/test  checkpoint.dir: cannot be written: No such file")


@pytest.mark.parametrize("layout", [{}, pytest.param(FOUR, marks=pytest.mark.slow)], ids=["alone", "launcher"])
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_a_request_to_stop_that_all_processes_get_saves(number: int, layout: dict, tmp_path: Path) -> None:
    config = job_config(tmp_path, GPT, **{**layout, "train__steps": 100000, "checkpoint__every": 100000})
    job = Job(config)
    job.wait_for_step(1)
    job.signal_all(number)
    if number == signal.SIGHUP:  # shell and kernel both send it
        job.signal(number)
    status, out, err = job.end()
    assert (status, err) == (Exit.STOPPED, "")
    step = job.steps()[-1]["step"]
    assert out.endswith(f"stopped by a signal after step {step}, which is saved\n")
    assert [folder.name for folder in (job.folder / "checkpoints").iterdir()] == [f"step-{step:08d}"]


@pytest.mark.slow
def test_a_signal_to_one_rank_saves_stops_and_names_it(tmp_path: Path) -> None:
    job = Job(job_config(tmp_path, GPT, **{**FOUR, "train__steps": 100000, "checkpoint__every": 100000}))
    job.wait_for_step(1)
    os.kill(job.ranks()[2], signal.SIGTERM)
    status, out, err = job.end()
    assert status == Exit.STOPPED
    assert err == "megascale: the job has stopped because rank 2 received SIGTERM, which nobody of the job sent\n"
    assert out.endswith(f"stopped by a signal after step {job.steps()[-1]['step']}, which is saved\n")


@pytest.mark.slow
def test_a_reader_that_goes_away_does_not_end_the_training(tmp_path: Path) -> None:
    """As in `megascale train CONFIG | head`."""
    job = Job(job_config(tmp_path, GPT, **FOUR | {"train__steps": 60, "checkpoint__every": 60}))
    job.wait_for_step(1)
    assert job.process.stdout is not None
    job.process.stdout.close()
    assert job.process.wait(60) == Exit.OK
    assert job.steps()[-1]["step"] == 60
    assert (job.folder / "checkpoints" / "step-00000060" / "manifest.json").exists()
    assert job.process.stderr is not None and job.process.stderr.read() == ""


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, FOUR], ids=["alone", "launcher"])
def test_a_host_without_any_network(layout: dict, tmp_path: Path) -> None:
    """As a container with `--network none` whose loopback interface is down: one process needs none."""
    config = job_config(tmp_path, GPT, **{**layout, "train__steps": 3})
    command = ["unshare", "--net", sys.executable, "-m", "megascale", "train", str(config)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if layout:
        assert result.returncode == Exit.CONFIG
        assert "the loopback interface is down, and the ranks need it  -> ip link set lo up" in result.stderr
        assert not list(tmp_path.glob("runs/test/logs/*.log"))
    else:
        assert result.returncode == Exit.OK and "step 3/3" in result.stdout, result.stderr


STOPPED_WHILE_STARTING = """
import os, signal, sys
from megascale.cli.main import main
from megascale.operate.node.workers import Launch
start = Launch.start
def interrupted(launch, rank, **rest):
    if rank == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGINT)
    return start(launch, rank, **rest)
Launch.start = interrupted
sys.exit(main(["train", sys.argv[2]]))
"""


@pytest.mark.parametrize("rank", only_quick([0, 3], 3))
def test_ctrl_c_while_a_rank_is_started_reaches_it(rank: int, tmp_path: Path) -> None:
    config = job_config(tmp_path, GPT, **{**FOUR, "train__steps": 100000})
    command = [sys.executable, "-c", STOPPED_WHILE_STARTING, str(rank), str(config)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, preexec_fn=heed_signals)
    assert result.returncode == Exit.INTERRUPTED, result.stderr
    assert result.stderr.endswith("megascale: stopped before the first step\n")


@pytest.mark.parametrize(
    ("seconds", "layout"),
    only_quick_rows(itertools.product([0.0, 0.1, 0.3, 1.0], [{}, FOUR]), (0.1, {}), (0.0, FOUR), (0.3, FOUR)),
)
def test_ctrl_c_at_any_moment_of_the_start(seconds: float, layout: dict, tmp_path: Path) -> None:
    job = Job(job_config(tmp_path, GPT, **{**layout, "train__steps": 100000, "checkpoint__every": 100000}))
    maps = Path(f"/proc/{job.process.pid}/maps")
    while "_pydantic_core" not in maps.read_text():  # before that Python itself is starting
        time.sleep(0.002)
    time.sleep(seconds)
    job.signal(signal.SIGINT)
    status, _, err = job.end()
    assert "Traceback" not in err
    assert status in (-signal.SIGINT, Exit.INTERRUPTED, Exit.STOPPED)
