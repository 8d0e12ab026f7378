"""Alerts that rank 0 writes among the metrics reach the log of incidents; nothing is restarted for them."""

from __future__ import annotations

from pathlib import Path

from lab.simulation import Simulation
from megascale.operate.driver.alerts import AlertReader
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
        assert [alert["step"] for alert in reader.new()] == [7]
        assert not list(reader.new())
        file.write(LINE[20:])
    assert len(list(reader.new())) == 1
    path.write_text("")  # a run that resumes earlier cuts the file
    assert not list(reader.new())
    path.write_text(LINE)
    assert len(list(reader.new())) == 1
    assert not list(AlertReader(tmp_path / "absent").new())


def test_an_alert_is_an_incident_without_a_restart() -> None:
    sim: Simulation = simulation()
    sim.job.alert("grad_norm", 12.0, 2.0, sim.now)
    (incident,) = sim.job.history.incidents.values()
    assert (incident.class_, incident.action.kind) == ("alert", "alert")
    assert incident.what == "grad_norm 12 is 6 times its recent median 2"
    before = sim.steps
    sim.run(sim.now + 100)
    assert (sim.job.history.attempt, sim.steps > before) == (0, True)
