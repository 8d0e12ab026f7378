"""The frame of `megascale watch`: within its size, in ASCII where asked, and saying what matters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megascale.operate.driver.incidents import JobHistory
from megascale.operate.show.curves import METRICS, Curves
from megascale.operate.show.frame import FrameSize, frame
from megascale.operate.show.run_reader import RunReader
from megascale.operate.show.run_view import RunView
from megascale.operate.show.signs import SIGNS
from megascale.record import log_files
from megascale.record.live_file import LiveState
from megascale.record.rank_state import RankStatus
from tests.operate.show.folders import incident, live_rank, make_run, write_incidents, write_live


@pytest.fixture(autouse=True)
def no_records_of_this_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(log_files, "SHARED_MEMORY", tmp_path / "shm")


def text_of(view: RunView, slowness: tuple[float, ...] = (), findings: tuple[str, ...] = (), **size: int) -> str:
    return "\n".join(line.plain for line in frame(view, slowness, findings, FrameSize(**size)))


def view_of(folder: Path, ranks: list[RankStatus]) -> RunView:
    write_live(folder, ranks)
    return RunReader(folder).read()


def test_a_healthy_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=10, total=20)
    lines = text_of(view_of(folder, [live_rank("step", 10)] * 4)).splitlines()
    assert lines[0].split() == ["test", "runs", "step", "10", "of", "20", "(50%),", "5s", "left"]
    assert lines[4].split()[:2] == ["loss", "4.0000"]
    assert lines[6].split()[:3] == ["throughput", "1.01k", "tok/s"]
    assert lines[7].split()[:3] == ["MFU", "full", "25.0%"]
    assert [line.split() for line in lines[10:13]] == [["pp", "0", ".."], ["pp", "1", ".."], [".", "trains", "4"]]
    assert lines[13].split(maxsplit=1) == ["verdict", "all 4 ranks make progress"]


def test_the_state_and_the_slowness_of_ranks(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    view = view_of(folder, [live_rank("step", 5), live_rank("data", 5), live_rank("step", 5, 70, 70, "T"), live_rank()])
    text = text_of(view, slowness=(0.12, 0.2, 0.5, float("nan")))
    assert "pp 0        xd" in text
    assert "pp 1        T?" in text
    assert "T stopped 1  x 10% slower 1  ? unknown 1  d data 1" in text
    assert "verdict     stopped: rank 2" in text


def test_findings_and_incidents(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    view = view_of(folder, [live_rank("step", 5)] * 4)
    assert "verdict     rank 1 is slow (and 1 more: megascale diagnose --slow)" in text_of(
        view, (), ("rank 1 is slow", "and")
    )
    write_incidents(folder, [incident(number) for number in range(1, 7)])
    text = text_of(RunReader(folder).read(), height=40)
    assert "recovers from incident 6: rank 1 was killed by SIGKILL" in " ".join(text.split())
    assert "incidents (the last 4 of 6)" in text
    assert text.count("step 7 process: rank 1 was killed by SIGKILL; restarting the ranks") == 4


def test_what_is_not_analysed_is_said(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    size = FrameSize(80, 24)
    lines = [line.plain for line in frame(RunReader(folder).read(), (), None, size, "none: no event store")]
    assert "verdict     not analysed" in lines
    assert "analyses    none: no event store" in lines
    live = view_of(folder, [live_rank("step", 5)] * 4)
    lines = [line.plain for line in frame(live, (), (), size, f"analysed 5s ago, up to step 4; {'x ' * 200}")]
    assert "verdict     all 4 ranks make progress" in lines
    (first,) = [number for number, line in enumerate(lines) if line.startswith("analyses    analysed 5s ago")]
    assert lines[first + 1].endswith(" ...")


def test_a_run_at_its_last_step_has_no_time_left(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=20, total=20)
    assert "left" not in text_of(view_of(folder, [live_rank("step", 20)] * 4)).splitlines()[0]


@pytest.mark.parametrize(("width", "height"), [(40, 10), (80, 24), (80, 60), (211, 50)])
def test_a_frame_of_12288_ranks_fits(width: int, height: int, tmp_path: Path) -> None:
    folder = make_run(
        tmp_path, parallel__tp=4, parallel__pp=4, parallel__dp=768, model__vocab_size=128, batch__global=768
    )
    config = RunReader(folder).read().config
    ranks = [live_rank("step", 5)] * 12288
    ranks[5000] = live_rank("step", 5, 90, 90, "T")
    curves = Curves(np.arange(3), {name: np.ones(3) for name in METRICS})
    view = RunView(folder, config, curves, JobHistory(), LiveState(0.0, 0, ranks, source="live file"))
    lines = frame(view, (), (), FrameSize(width, height, blocks=False))
    assert len(lines) <= height
    assert all(line.cell_len <= width and line.plain.isascii() for line in lines)
    if height > 20:
        cells = "".join(line.plain[12:] for line in lines if line.plain[12:] and set(line.plain[12:]) <= set(".T"))
        assert cells.count("T") == 1


def test_no_two_signs_look_alike() -> None:
    assert len({sign.colour for sign in SIGNS.values()}) == len({sign.meaning for sign in SIGNS.values()}) == len(SIGNS)


@pytest.mark.parametrize("blocks", [True, False])
def test_curves_fill_what_nothing_else_needs(tmp_path: Path, blocks: bool) -> None:
    """The gradient norm and the MFU of this run are flat."""
    folder = make_run(tmp_path, steps=10, total=20)
    view = view_of(folder, [live_rank("step", 10)] * 4)
    lines = [line.plain for line in frame(view, (), (), FrameSize(200, 50, blocks, fill=True))]
    assert 49 <= len(lines) <= 50
    assert sum(not line.strip() for line in lines) == 2
    loss = lines[4 : [line.startswith("grad norm") for line in lines].index(True)]
    assert len(loss) == 19, "as high as the throughput"
    assert (loss[0].split()[:2], loss[1].split()[:2], loss[-1].split()[:2]) == (
        ["loss", "4.0000"], ["most", "4.9000"], ["least", "4.0000"],
    )  # fmt: skip
    assert all(len(line) == 200 for line in loss)
    filled = [sum(character != " " for character in line[26:]) for line in loss]
    assert filled == sorted(filled) and filled[-1] == 174, "the loss falls from the left to the right"
