"""The model of a run: what its folder says, at any moment of the run's life."""

from __future__ import annotations

import contextlib
import os
import time
import tomllib
from pathlib import Path

import pytest

from megascale.cli.main import main
from megascale.core.errors import Exit
from megascale.core.named_run import RunFolderError
from megascale.core.rank import Rank
from megascale.operate.show.live_reader import STALE_S, LiveStateReader
from megascale.operate.show.run_reader import RunReader
from megascale.record import log_files
from megascale.record.live_file import LIVE_FILE
from megascale.record.log_files import ATTEMPT_VARIABLE, FLIGHT_RECORD_VARIABLE, log_of_rank
from tests.operate.show.folders import RUNS, incident, live_rank, make_run, write_incidents, write_live, write_metrics
from tests.operate.show.stores import make_stored_run
from tests.runs import toml


@pytest.fixture(autouse=True)
def records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder for records of ranks on this host, without any."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(log_files, "SHARED_MEMORY", folder)
    return folder


def test_a_run_that_trains(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=10, total=20)
    write_live(folder, [live_rank("step", 12)] * 4, stage="run")
    view = RunReader(folder).read()
    assert (view.name, view.state, view.step, view.steps, view.attempt) == ("test", "runs", 12, 20, 0)
    assert (view.topology.tp, view.topology.pp, view.world) == (2, 2, 4)
    assert view.layout == "4 ranks: tp 2, pp 2, dp 1"
    assert view.model.startswith("54.62k parameters in fp64, 4 layers of 32")
    assert view.is_live
    assert not view.has_ended


def test_a_run_before_its_first_step(tmp_path: Path) -> None:
    """Neither configuration nor metrics are there before all ranks have joined."""
    write_live(tmp_path, [live_rank("import", 0)] * 8)
    view = RunReader(tmp_path).read()
    assert (view.name, view.world, view.steps, view.model) == (tmp_path.name, 8, 0, "")
    assert view.state == "runs"


@pytest.mark.parametrize(
    ("status", "state"), [(Exit.OK, "done"), (Exit.STOPPED, "stopped"), (93, "failed with status 93")]
)
def test_a_run_that_has_ended(status: int, state: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    write_live(folder, [live_rank("done", 10)] * 4, status=int(status), age_s=1e6)
    write_metrics(folder, [])
    view = RunReader(folder).read()
    assert view.has_ended is False, "metrics that are newer than the file are another job's"
    write_live(folder, [live_rank("done", 10)] * 4, status=int(status))
    view = RunReader(folder).read()
    assert (view.state, view.has_ended) == (state, True)


def test_a_run_whose_live_file_nobody_writes_any_more(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    write_live(folder, [RUNS] * 4, age_s=100.0)
    view = RunReader(folder).read()
    assert view.state == "no sign of life for 100 s"
    assert not view.is_live


def test_a_file_that_advances_is_not_stale_whatever_the_writer_s_clock_says(tmp_path: Path) -> None:
    now = [time.time()]
    reader = LiveStateReader(tmp_path, lambda: now[0])
    write_live(tmp_path, [RUNS], age_s=3600.0)
    assert reader.read().stale
    write_live(tmp_path, [RUNS], age_s=3598.0)
    now[0] += 2.0
    assert not reader.read().stale
    now[0] += STALE_S + 2
    found = reader.read()
    assert (found.stale, round(found.age_s)) == (True, round(STALE_S + 2))


def test_a_job_that_has_shrunk_has_the_ranks_of_its_newest_attempt(tmp_path: Path, records: Path) -> None:
    """The log of an ended rank of the larger attempt is still there."""
    with contextlib.ExitStack() as open_logs:
        for rank, world, attempt in ((3, 4, 0), (0, 2, 1), (1, 2, 1)):
            path = records / f"megascale-{os.geteuid()}-run-{attempt}-{rank:05d}.flight"
            variables = {FLIGHT_RECORD_VARIABLE: str(path), ATTEMPT_VARIABLE: str(attempt)}
            open_logs.enter_context(log_of_rank(tmp_path / "run", Rank(rank, world, rank, "host"), variables))
        live = LiveStateReader(tmp_path / "run").read()
    assert (live.attempt, [status.rank for status in live.ranks]) == (1, [0, 1])


def test_a_run_that_stands_still(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    write_live(folder, [live_rank("step", 5, 50)] * 3 + [live_rank("step", 5, 0)])
    assert RunReader(folder).read().standstill == ""
    write_live(folder, [live_rank("step", 5, 50)] * 3 + [live_rank("done", 5, 99)])
    view = RunReader(folder).read()
    assert view.standstill == "no rank has made progress for 50 s"
    assert view.state == "stands still"


def test_a_folder_that_may_not_be_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **options: bool) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    folder = make_run(tmp_path)
    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(RunFolderError, match="cannot be read: Permission denied"):
        RunReader(folder)


@pytest.mark.parametrize(
    ("phase", "seconds"), [("import", 299), ("checkpoint", 60), ("evaluation", 59), ("profile", 299), ("sites", 659)]
)
def test_a_phase_that_takes_long_is_no_standstill(phase: str, seconds: int, tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    write_live(folder, [live_rank("step", 5, seconds)] * 3 + [live_rank(phase, 5, seconds)])
    assert RunReader(folder).read().standstill == ""
    write_live(folder, [live_rank("step", 5, seconds + 61)] * 3 + [live_rank(phase, 5, seconds + 61)])
    assert RunReader(folder).read().state == "stands still"


def test_a_first_step_that_takes_long_is_no_standstill(tmp_path: Path) -> None:
    """Neither of a run, nor after a restart, nor one that the ranks' own records tell of."""
    folder = make_run(tmp_path, steps=0)
    slow, hung = [live_rank("step", 1, 25)] * 4, [live_rank("step", 1, 301)] * 4
    write_live(folder, slow)
    view = RunReader(folder).read()
    assert (view.standstill, view.step_limit_s) == ("", 300.0)
    assert view.letters(()) == ["."] * 4
    write_live(folder, hung)
    assert RunReader(folder).read().state == "stands still"
    write_metrics(folder, range(1, 11))
    write_live(folder, slow)
    assert RunReader(folder).read().state == "stands still"
    write_incidents(folder, [incident(1)])
    assert RunReader(folder).read().standstill == ""


def test_the_records_of_ranks_on_this_host_tell_the_time_of_a_step(tmp_path: Path, records: Path) -> None:
    folder = make_run(tmp_path)
    write_live(folder, [live_rank("step", 11, 25)] * 4)
    env = {FLIGHT_RECORD_VARIABLE: str(records / f"megascale-{os.geteuid()}-test-1-00000.flight")}
    with log_of_rank(folder, Rank(0, 4, 0, "h"), env) as record:
        record.begin_step(11)
        assert RunReader(folder).read().step_limit_s == 300.0
        record.end_step(20.0, {})
        view = RunReader(folder).read()
        assert (view.standstill, view.step_limit_s) == ("", 60.0)


def test_a_run_with_a_driver_has_incidents_attempts_and_an_end(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    reader = RunReader(folder)
    assert reader.read().incidents == []
    write_incidents(folder, [incident(1), incident(2, step=9)])
    view = reader.read()
    assert [each.id for each in view.incidents] == [1, 2]
    assert (view.attempt, view.status) == (2, None)
    write_incidents(folder, [incident(1)], status=93)
    assert reader.read().state == "failed with status 93"


def test_a_finished_run_without_a_live_file(tmp_path: Path) -> None:
    assert RunReader(make_run(tmp_path, steps=20, total=20)).read().has_ended
    folder = make_run(tmp_path / "cut", steps=10, total=20)
    view = RunReader(folder).read()
    assert (view.state, view.has_ended) == ("not running, or on other hosts", False)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no such folder"):
        RunReader(tmp_path / "absent")
    with pytest.raises(RunFolderError, match="not a run's folder"):
        RunReader(tmp_path)
    folder = make_run(tmp_path)
    (folder / LIVE_FILE).write_text("{")
    with pytest.raises(RunFolderError, match=r"live\.json: not a live file"):
        RunReader(folder).read()
    (folder / LIVE_FILE).unlink()
    (folder / "config.toml").write_text("name = 3")
    with pytest.raises(RunFolderError, match=r"config\.toml: not a run's configuration"):
        RunReader(folder).read()


PLUGGED = ("model.block", "model.norm", "model.activation", "parallel.schedule", "optimizer.name", "optimizer.decay",
           "data.blend_policy", "data.sample_weight", "data.tokenizer", "fp8.recipe", "backends.linear")  # fmt: skip
"""Keys whose value may be a plug-in's name."""


def test_a_run_is_read_without_its_plug_ins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = make_stored_run(tmp_path)
    tree = tomllib.loads((run / "config.toml").read_text())
    for key in PLUGGED:
        table, _, name = key.partition(".")
        tree[table][name] = "mine"
    tree["model"]["rope_scaling"] = {"type": "mine", "strength": 3}
    (run / "config.toml").write_text(toml(tree))
    outputs = {}
    for words in (["watch", "--once"], ["dashboard", "--file", str(tmp_path / "run.html")], ["diagnose", "--mfu"]):
        assert main([words[0], str(run), *words[1:]]) == 0
        outputs[words[0]] = capsys.readouterr().out
    assert "8 ranks: tp 2, pp 2, dp 2" in outputs["watch"]
    assert "8 ranks: tp 2, pp 2, dp 2" in (tmp_path / "run.html").read_text()
    assert RunReader(run).read().model == (
        "an unknown number of parameters (the block 'mine' is not installed on this host) in fp64, "
        "4 layers of 32, sequences of 16"
    )
    assert "the bubble is not computed: the schedule 'mine' is not installed on this host" in outputs["diagnose"]


def test_a_damaged_configuration_is_not_to_be_removed(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    (folder / "config.toml").write_text((folder / "config.toml").read_text().replace("num_layers = 4", "layers = 4"))
    with pytest.raises(RunFolderError, match=r"config\.toml: not a run's configuration: model\.num_layers: ") as caught:
        RunReader(folder).read()
    assert "remove" not in caught.value.hint
