"""Pictures of waits: valid SVG, the culprit marked, and few boxes for any number of ranks."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megascale.layout.topology import Topology
from megascale.operate.show.charts.shapes import FILE_START, RED
from megascale.operate.show.charts.wait_picture import MOST_PLACES, wait_picture
from megascale.operate.show.diagnosis import RunDiagnosis, diagnose
from megascale.operate.show.last_states import read_last_states
from megascale.operate.show.run_reader import RunReader
from megascale.record import log_files
from tests.operate.show.folders import make_run
from tests.operate.show.hung_runs import hanging_records, make_hung_run, write_states

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def no_live_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(log_files, "SHARED_MEMORY", tmp_path / "none")


def found_in(run: Path) -> RunDiagnosis:
    view = RunReader(run).read()
    return diagnose(view, read_last_states(view))


def shapes(picture: str) -> tuple[list[str], list[str], list[str]]:
    """The words, the colours of the rectangles, and the arrows."""
    tree = ElementTree.fromstring(picture)
    words = [element.text or "" for element in tree.iter(f"{SVG}text")]
    colours = [element.attrib["fill"] for element in tree.iter(f"{SVG}rect")]
    return words, colours, [e.attrib["d"] for e in tree.iter(f"{SVG}path") if "marker-end" in e.attrib]


def test_the_culprit_is_marked_and_arrows_lead_to_it(tmp_path: Path) -> None:
    found = found_in(make_hung_run(tmp_path))
    picture = wait_picture(found)
    assert picture.encode().startswith(FILE_START)
    words, colours, arrows = shapes(picture)
    assert colours.count(RED) == 1
    assert "rank 5 on node1" in words
    assert len(colours) == 2 * (len(found.waiting) + 1)
    assert len(arrows) >= len(found.waiting)


def test_a_large_job_has_few_boxes(tmp_path: Path) -> None:
    topology = Topology(tp=4, pp=4, dp=2)
    run = make_run(tmp_path, parallel__tp=4, parallel__pp=4, parallel__dp=2, batch__global=16)
    write_states(run, hanging_records(topology=topology))
    found = found_in(run)
    assert len(found.waiting) > MOST_PLACES
    words, colours, _ = shapes(wait_picture(found))
    assert len(colours) / 2 < len(found.waiting) / 2
    assert any(re.fullmatch(r"wait in \d+ places", word) for word in words)


def test_a_run_that_does_not_hang_has_a_title(tmp_path: Path) -> None:
    words, colours, arrows = shapes(wait_picture(found_in(make_hung_run(tmp_path, hanging_records(idle_s=1.0)))))
    assert (words, colours, arrows) == (["test: the run makes progress"], [], [])
