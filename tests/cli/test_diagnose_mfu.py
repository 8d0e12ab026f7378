"""`megascale diagnose --mfu` as a user meets it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from lab.fleet import Fleet
from lab.fleet_tables import Table, write_store
from lab.fleet_times import BACKWARD_S, FORWARD_S, FleetFault, FleetLayout
from megascale.cli.main import main
from megascale.config.toml_writer import to_toml
from megascale.layout.stages import placement_of
from megascale.layout.topology import Topology
from megascale.plan.simulate.event_simulator import StageTimes
from megascale.plan.simulate.extrapolate import Pipeline
from megascale.plan.simulate.profiles import Overlaps
from megascale.schedule.ir import Kind, each_action
from megascale.schedule.lower import compute_order
from tests.runs import LLAMA, config_of, settings

LAYOUT = FleetLayout(Topology(tp=2, pp=2, dp=2), steps=60)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder: two stages and 8 micro-batches, from step 30 on 30% slower."""
    write_store(Fleet(LAYOUT, 1, FleetFault("job", factor=1.3, since=30)), tmp_path)
    tree = settings(LLAMA, tmp_path, parallel__tp=2, parallel__pp=2, parallel__dp=2, batch__global=16)
    (tmp_path / "config.toml").write_text(to_toml(config_of(tree, tmp_path)))
    (tmp_path / "plan.json").write_text(json.dumps({"step_time_s": 0.3, "causes_s": {"gemm": 0.2, "bubble": 0.1}}))
    return tmp_path


def test_the_waterfall_and_the_drift(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(run), "--mfu"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    rows = {line.split("  ")[0]: line.split() for line in out.splitlines()}
    assert out.startswith("steps 1 to 60")
    assert rows["forward and backward"][-1] == "0.2"
    assert rows["bubble"][-1] == "0.1"
    assert "MFU went from" in out
    assert "backward grew" in out


def test_ranks_that_share_cores_are_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = Fleet(LAYOUT, 1)
    fleet.tables["ranks"] |= {"host": np.full(8, "h", object), "cores": np.full(8, 2)}
    write_store(fleet, run)
    assert main(["diagnose", str(run), "--mfu"]) == 0
    assert "8 ranks share 2 cores of h: they slow each other down" in capsys.readouterr().err


def test_the_bubble_is_that_of_the_schedule(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(run), "--mfu", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    seconds = answer["breakdown"]["seconds"]
    assert sum(seconds.values()) == pytest.approx(answer["breakdown"]["wall_s"])
    first, last = 1.1 * (FORWARD_S + BACKWARD_S), 1.3 * (FORWARD_S + BACKWARD_S)
    slower = (20 + 30 * 1.3) / 50  # in the newest 50 steps
    ideal = slower * (8 * last + first - 8 * (first + last) / 2)
    assert seconds["bubble"] / 60 == pytest.approx(ideal, rel=0.05)
    assert seconds["pp"] == 0  # no message is slow
    assert answer["drift"]["growths"][0]["part"] == "backward"


def test_the_bubble_of_a_schedule_that_splits_some_backwards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """W takes half of the backwards that are split."""
    topology, v, m, name = Topology(pp=2), 2, 8, "dualpipev"
    fleet = Fleet(FleetLayout(topology, chunks=v, steps=60), 1)
    fleet.tables["step_parts"] = divided(fleet.tables["step_parts"], name, topology.pp, v, m)
    write_store(fleet, tmp_path)
    layout = {"parallel__pp": topology.pp, "parallel__vpp": v, "parallel__schedule": name}
    (tmp_path / "config.toml").write_text(to_toml(config_of(settings(LLAMA, tmp_path, **layout), tmp_path)))
    assert main(["diagnose", str(tmp_path), "--mfu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["breakdown"]["seconds"]["bubble"] / 60
    scale = {(0, 0): 1.1, (0, 1): 1.0, (1, 0): 1.0, (1, 1): 1.3}
    forward, backward = ({place: one * of for place, of in scale.items()} for one in (FORWARD_S, BACKWARD_S))
    weights = {place: seconds / 2 for place, seconds in backward.items()}
    times = StageTimes(forward, backward, 0.0, 0.0, {}, {}, weight_gradient=weights)
    ideal = Pipeline(name, topology.pp, v, m).simulate(times, Overlaps(tp="none", pp=True, dp=True)).last
    busy = m * (sum(forward.values()) + sum(backward.values())) / topology.pp
    assert found == pytest.approx(ideal - busy, rel=0.02)


def divided(rows: Table, schedule: str, p: int, v: int, m: int) -> Table:
    """Divide the backwards that a schedule splits into I and W of equal lengths."""
    places = Counter(
        (rank, action.chunk)
        for rank, order in enumerate(compute_order(schedule, placement_of(schedule, p, v), m))
        for action in each_action(order)
        if action.kind is Kind.W
    )
    of_rows = np.array([places[place] / m for place in zip(rows["rank"], rows["chunk"], strict=True)])
    whole, split = rows["name"] == str(Kind.B), dict[str, Table]()
    for kind, share in ((Kind.B, 1 - of_rows), (Kind.I, of_rows / 2), (Kind.W, of_rows / 2)):
        split[kind] = {column: values[whole] for column, values in rows.items()}
        split[kind]["name"] = np.full(whole.sum(), str(kind), object)
        for column in ("total_ns", "exposed_ns"):
            split[kind][column] = np.rint(rows[column][whole] * share[whole]).astype(rows[column].dtype)
    return {
        column: np.concatenate([values[~whole], *(each[column] for each in split.values())])
        for column, values in rows.items()
    }


def test_a_run_without_configuration_or_plan(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("config.toml", "plan.json"):
        (run / name).unlink()
    assert main(["diagnose", str(run), "--mfu"]) == 0
    out = capsys.readouterr().out
    assert "the bubble is computed" not in out
    assert "no plan: " in out


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(tmp_path / "none"), "--mfu"]) == 2
    assert "no such folder" in capsys.readouterr().err
    fleet = Fleet(LAYOUT, 1)
    fleet.tables = {"ranks": fleet.tables["ranks"]}
    write_store(fleet, tmp_path)
    assert main(["diagnose", str(tmp_path), "--mfu"]) == 2
    assert "no complete step" in capsys.readouterr().err


def test_the_store_s_folder_stands_for_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(run), "--mfu"]) == 0
    whole = capsys.readouterr().out
    assert main(["diagnose", str(run / "events"), "--mfu"]) == 0
    assert capsys.readouterr().out == whole


@pytest.mark.parametrize("content", [None, "name = ["])
def test_without_a_configuration_the_bubble_is_said_to_be_missing(
    content: str | None, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "config.toml").unlink() if content is None else (run / "config.toml").write_text(content)
    assert main(["diagnose", str(run), "--mfu"]) == 0
    assert "the bubble is not computed: " in capsys.readouterr().out
