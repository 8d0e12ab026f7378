"""`megascale trace` as a user meets it."""

from __future__ import annotations

import dataclasses
import gc
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from megascale.cli.main import main
from megascale.operate.store import rank_events
from tests.operate.show.event_files import STEPS, job, on_own_clock
from tests.operate.store.tables import store_run

HEAVY = {"torch", "numpy", "rich", "megatron", "transformers", "tensorboard"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a run of four ranks and three steps."""
    return store_run(tmp_path / "run", job())


def steps_in(path: Path) -> set[int]:
    items = json.loads(path.read_text())["traceEvents"]
    return {item["args"]["step"] for item in items if item["ph"] == "X"}


def ranks_in(path: Path) -> set[int]:
    return {item["pid"] for item in json.loads(path.read_text())["traceEvents"]}


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> dict:
    assert main(["trace", *map(str, words), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def test_the_output_names_the_file_and_a_viewer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[0] == f"{folder}/timeline.json: steps 1-3 of ranks 0-3, 156 slices, 12 arrows"
    assert "https://ui.perfetto.dev" in lines[1]
    assert lines[3] == "means per step:"
    assert lines[4].split() == ["rank", "axis", "calls", "bytes", "communication", "exposed", "hidden"]
    assert [line.split()[:2] for line in lines[5:]] == [[str(rank), axis] for rank in range(4) for axis in AXES]
    assert lines[5].split()[2:] == ["2", "8.00", "KiB", "9.000", "ms", "4.000", "ms", "55.6%"]
    assert steps_in(folder / "timeline.json") == {1, 2, 3}
    assert ranks_in(folder / "timeline.json") == {0, 1, 2, 3}


AXES = ("tp", "pp", "dp")


def test_json_is_one_object(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = answer(capsys, folder)
    assert report["timeline"] == str(folder / "timeline.json") and report["svg"] is None
    assert (report["ranks"], report["steps"], report["notes"]) == ([0, 1, 2, 3], [1, 2, 3], [])
    assert (report["arrows"], report["single"], report["reversed"], report["dropped"]) == (12, 0, 0, 0)
    sums = {(share["rank"], share["axis"]): (share["calls"], share["bytes"]) for share in report["per_step"]}
    for events in job():
        for axis in AXES:
            some = [event for event in events.events if event.axis == axis]
            calls, nbytes = sums[events.rank, axis]
            assert (calls * len(STEPS), nbytes * len(STEPS)) == (len(some), sum(event.bytes for event in some))


@pytest.mark.parametrize(("given", "steps"), [("2", {2}), ("2:3", {2, 3}), ("3:99", {3}), ("0:1", {1})])
def test_steps(folder: Path, capsys: pytest.CaptureFixture[str], given: str, steps: set[int]) -> None:
    report = answer(capsys, folder, "--steps", given)
    assert set(report["steps"]) == steps == steps_in(folder / "timeline.json")
    assert report["per_step"][0]["calls"] == 2  # a mean, whatever the number of steps


@pytest.mark.parametrize(
    ("given", "ranks"), [("2", [2]), ("3,0", [0, 3]), ("0-1,3", [0, 1, 3]), ("1-2,2-3", [1, 2, 3])]
)
def test_ranks(folder: Path, capsys: pytest.CaptureFixture[str], given: str, ranks: list[int]) -> None:
    report = answer(capsys, folder, "--ranks", given)
    assert report["ranks"] == ranks
    assert ranks_in(folder / "timeline.json") == set(ranks)


def test_the_files_can_be_elsewhere(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, svg = tmp_path / "other.json", tmp_path / "picture.svg"
    assert main(["trace", str(folder), "--output", str(path), "--svg", str(svg)]) == 0
    assert f"{svg}: the picture" in capsys.readouterr().out
    assert steps_in(path) == {1, 2, 3}
    assert "rank 3" in [element.text for element in ET.parse(svg).getroot().iter()]
    assert sorted(entry.name for entry in folder.iterdir()) == ["events"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["other.json", "picture.svg", "run"]


def test_a_picture_is_of_the_last_step_unless_others_are_chosen(folder: Path, tmp_path: Path) -> None:
    pictures = []
    for number, words in enumerate(([], ["--steps", "3"], ["--steps", "2:3"], ["--ranks", "1", "--steps", "3"])):
        svg = tmp_path / f"{number}.svg"
        assert main(["trace", str(folder), "--svg", str(svg), *words]) == 0
        pictures.append(svg.read_text())
    assert pictures[0] == pictures[1]
    assert len(set(pictures)) == 3


def test_a_step_that_has_not_ended_is_left_out_unless_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = store_run(tmp_path / "run", job(), incomplete=(3,))
    assert answer(capsys, folder)["steps"] == [1, 2]
    report = answer(capsys, folder, "--steps", "2:3")
    assert report["steps"] == [2, 3]
    assert report["notes"] == ["step 3 shown, but not complete on every chosen rank"]


def test_lost_events_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = store_run(tmp_path / "run", [*job()[:3], dataclasses.replace(job()[3], dropped=2)])
    report = answer(capsys, folder)
    assert report["dropped"] == 2
    assert report["notes"] == ["2 events were dropped on rank 3: overwritten before they were stored"]
    assert main(["trace", str(folder)]) == 0
    assert capsys.readouterr().out.endswith("\n\n" + report["notes"][0] + "\n")


def test_only_the_newest_steps_are_shown_unless_others_are_asked_for(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_events, "NEWEST_EVENTS", 2 * len(job((1,))[0].events) + 1)
    assert answer(capsys, folder)["steps"] == [2, 3]
    assert answer(capsys, folder, "--steps", "1")["steps"] == [1]


def test_events_before_the_first_step_are_no_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = store_run(tmp_path / "run", job(steps=(0, 1)))
    report = answer(capsys, folder)
    assert (report["steps"], report["notes"]) == ([1], [])
    report = answer(capsys, folder, "--steps", "0")
    assert (report["steps"], report["notes"]) == ([0], [])


def test_ranks_without_events_and_unmatched_messages_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = job()
    deaf = dataclasses.replace(ranks[2], events=tuple(e for e in ranks[2].events if e.name != "receive"))
    late = on_own_clock(ranks[3], 9.0)
    folder = store_run(tmp_path / "run", [ranks[0], deaf])
    assert answer(capsys, folder)["notes"] == [
        "ranks 1, 3 of 4 have no events",
        "6 messages without an arrow: only one side was recorded",
    ]
    folder = store_run(tmp_path / "late", [ranks[1], late])
    assert answer(capsys, folder, "--ranks", "1,3")["notes"] == [
        "6 messages without an arrow: seen to arrive before they were sent"
    ]


def test_many_ranks_have_one_row_for_each_axis(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = [dataclasses.replace(job((1,))[0], rank=rank, world=17) for rank in range(17)]
    folder = store_run(tmp_path / "run", ranks)
    assert main(["trace", str(folder)]) == 0
    out = capsys.readouterr().out
    assert [line.split()[:2] for line in out.split("\n\n")[1].splitlines()[2:]] == [["all", axis] for axis in AXES]
    assert len(answer(capsys, folder)["per_step"]) == 17 * 3
    assert main(["trace", str(folder), "--ranks", "0-15"]) == 0
    assert len(capsys.readouterr().out.split("\n\n")[1].splitlines()) == 2 + 16 * 3


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Run the command with status 2; return its one line of error."""
    assert main(["trace", *map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1 and "  -> " in err
    return err


def test_folders_without_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert refusal(capsys, run).startswith(f"{run}: no such folder")
    run.touch()
    assert refusal(capsys, run).startswith(f"{run}: not a folder")
    run.unlink()
    run.mkdir()
    hint = "ranks write events into the run's event store, unless observe.store_events or observe.event_store is off\n"
    err = refusal(capsys, run)
    assert err.startswith(f"{run}: no events") and err.endswith(hint)
    (run / "events").mkdir()
    (run / "events" / "rank-00000.jsonl").touch()
    err = refusal(capsys, run)
    assert err.startswith(f"{run}: no events") and err.endswith(hint)
    assert list(run.iterdir()) == [run / "events"]


@pytest.mark.parametrize("steps", ["7:9", "4", "0:0", "5:99999999999"])
def test_steps_that_no_rank_has(folder: Path, capsys: pytest.CaptureFixture[str], steps: str) -> None:
    err = refusal(capsys, folder, "--steps", steps)
    assert err.startswith("--steps ") and "no chosen rank" in err and err.endswith("choose --steps among steps 1-3\n")


def test_steps_of_an_earlier_attempt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = store_run(tmp_path / "run", job(steps=(1, 2, 3)))
    store_run(folder, job(steps=(3, 4)), attempt=1)
    assert refusal(capsys, folder, "--steps", "1") == (
        "--steps 1:1: no chosen rank has events of these steps in the last attempt  -> choose --steps among steps 3-4\n"
    )


def test_steps_that_ranks_do_not_have_in_common(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = store_run(tmp_path / "run", [job(steps=(1, 2))[0], job(steps=(5,))[1]])
    assert refusal(capsys, folder) == (
        "no step is complete on every chosen rank  -> choose --steps among steps 1-2, 5\n"
    )
    assert answer(capsys, folder, "--steps", "2:5")["steps"] == [2, 5]


def test_records_without_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = store_run(tmp_path / "run", [dataclasses.replace(events, events=()) for events in job()])
    for words in ([], ["--steps", "1"]):
        assert refusal(capsys, folder, *words).endswith("the run took no steps\n")


@pytest.mark.parametrize("given", ["4", "0,9", "2-5", "0-99999999999"])
def test_ranks_that_have_no_events(folder: Path, capsys: pytest.CaptureFixture[str], given: str) -> None:
    err = refusal(capsys, folder, "--ranks", given)
    assert err.startswith("--ranks: rank ") and err.endswith("choose among ranks 0-3\n")


@pytest.mark.parametrize(
    "words",
    [["--steps", "3:1"], ["--steps", "x"], ["--steps", "1:"], ["--steps", "1-2"], ["--steps", ""],
     ["--ranks", "x"], ["--ranks", "1,"], ["--ranks", "3-1"], ["--ranks", "1:2"], ["--ranks", "²"], ["--ranks", ""]],
)  # fmt: skip
def test_malformed_ranges_are_refused(folder: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["trace", str(folder), *words])
    assert caught.value.code == 2
    assert f"argument {words[0]}: {words[1]!r} is not a" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--output", "--svg"])
def test_a_file_that_cannot_be_written(folder: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    path = folder / "none" / ("a.json" if option == "--output" else "a.svg")
    err = refusal(capsys, folder, option, path)
    assert err.startswith(f"{path}: cannot be written: No such file or directory")


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ("--output", "/dev/null"),
        ("--output", "metrics.jsonl"),
        ("--output", "events/steps/a.parquet"),
        ("--output", "a.svg"),
        ("--svg", "timeline.json"),
    ],
)
def test_no_other_file_of_a_run_is_replaced(
    folder: Path, capsys: pytest.CaptureFixture[str], option: str, name: str
) -> None:
    path = folder / name
    path.touch()
    before = path.read_bytes()
    with pytest.raises(SystemExit):
        main(["trace", str(folder), option, str(path)])
    assert "does not end in ." in capsys.readouterr().err
    assert path.read_bytes() == before and (path.is_file() or path == Path("/dev/null"))


@pytest.mark.parametrize(("option", "name"), [("--output", "manifest.json"), ("--svg", "plot.svg")])
def test_a_foreign_file_is_not_replaced(
    folder: Path, capsys: pytest.CaptureFixture[str], option: str, name: str
) -> None:
    path = folder / name
    path.write_text("precious")
    with pytest.raises(SystemExit):
        main(["trace", str(folder), option, str(path)])
    assert "was not written by this command" in capsys.readouterr().err and path.read_text() == "precious"


def test_the_garbage_collector_is_as_it_was(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gc.isenabled()
    answer(capsys, folder)
    refusal(capsys, folder, "--steps", "9")
    assert gc.isenabled()


def test_it_imports_nothing_heavy(folder: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "megascale", "trace", str(folder), "--svg", f"{folder}/a.svg"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "12 arrows" in done.stdout
    assert "argparse" in imported
    assert not imported & HEAVY
