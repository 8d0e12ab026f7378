"""Alerts that rank 0 writes among the metrics reach the log of incidents; nothing is restarted for them."""

from __future__ import annotations

from pathlib import Path

from lab.simulation import Simulation
from megascale.operate.driver.alerts import AlertReader
from megascale.record.metrics import Alert, RebuiltStages
from tests.operate.driver.test_job import simulation

LINE = '{"step": 7, "alert": "grad_norm", "value": 12.0, "recent": 2.0}\n'


def test_alerts_are_read_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(LINE)
    reader = AlertReader(path)
    assert not list(reader.new()), "it is older than the driver"
    with open(path, "a") as file:
        file.write('{"step": 8, "loss": 1.0}\n' + LINE + LINE[:20])
        file.flush()
        assert [alert.step for alert in reader.new()] == [7]
        assert not list(reader.new())
        file.write(LINE[20:])
    assert len(list(reader.new())) == 1
    path.write_text("")
    assert not list(reader.new())
    path.write_text(LINE)
    assert len(list(reader.new())) == 1
    anew = tmp_path / "anew"  # a start of the run keeps what is not later, and tells what it has rebuilt
    anew.write_text('{"step": 6, "rebuilt": {"1": {"0": 0.25, "2": 0.75}}}\n')
    anew.rename(path)
    assert list(reader.new()) == [RebuiltStages(6, {"1": {"0": 0.25, "2": 0.75}})]
    assert not list(AlertReader(tmp_path / "absent").new())


def test_a_rebuilt_stage_is_told_once() -> None:
    sim: Simulation = simulation()
    found = RebuiltStages(6, {"1": {"0": 0.25, "2": 0.75}})
    told = [sim.job.alert(found, sim.now), sim.job.alert(found, sim.now)]
    (incident,) = sim.job.history.incidents.values()
    what = "state of lost pipeline stages was rebuilt, stage 1 as 0.25 x stage 0 + 0.75 x stage 2; it is of step 6"
    assert incident.what == what
    assert "fault.rebuild_stage = 0 goes back to an exact state instead" in incident.hint
    assert told[0] and not told[1]


def test_an_alert_is_an_incident_without_a_restart() -> None:
    sim: Simulation = simulation()
    for _ in range(2):  # a start of the run writes the file of metrics anew
        sim.job.alert(Alert(7, "grad_norm", 12.0, 2.0), sim.now)
    (incident,) = sim.job.history.incidents.values()
    assert (incident.class_, incident.action.kind) == ("alert", "alert")
    assert incident.what == "grad_norm 12 is 6 times its recent median 2"
    before = sim.steps
    sim.run(sim.now + 100)
    assert (sim.job.history.attempt, sim.steps > before) == (0, True)
