"""Where metrics go: files that survive a kill and a resume, and lines that people read."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from megascale.record.metrics import (
    EvaluationMetrics,
    MetricsRecord,
    MixtureUpdate,
    RebuiltStages,
    StepMetrics,
    as_json,
)
from megascale.record.metrics_writers import JsonLinesWriter, TensorBoardWriter, TerminalWriter, format_record

RECORD = StepMetrics(
    step=5,
    loss=2.34567,
    grad_norm=1.234,
    lr=3e-4,
    samples=80,
    loss_tokens=20_480,
    step_time_s=2.5,
    tokens_per_s=1638.4,
    loss_tokens_per_s=1638.4,
    tflops_per_device=0.125,
    mfu_full=0.512,
    mfu_causal=0.48,
    hfu_full=0.512,
    hfu_causal=0.48,
    peak_memory_bytes=1 << 20,
    noise_scale=1.5e6,
    kept_updates=0.999,
    communication={"tp": {"calls": 8.0, "bytes": 4096.0, "exposed_s": 0.25}},
    fp8={"layers.1.mlp.down.input": {"amax": 3.5, "saturated": 0.125, "underflow": 0.25}},
    experts={"layers.1": {"load": 1.5}, "router": {"balance": 1.01}},
    mtp={"1": {"loss": 2.5}},
    exits={"2": {"loss": 2.75}},
    objectives={"jepa": {"loss": 0.5, "count": 12.0}},
)


def step(number: int, loss: float = 1.0) -> StepMetrics:
    return replace(RECORD, step=number, loss=loss)


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    """The metrics of a run of six steps, evaluated before the first and after the fourth."""
    path = tmp_path / "metrics.jsonl"
    writer = JsonLinesWriter(path, 0)
    writer.write(EvaluationMetrics(0, 5.0, 100))
    for number in (2, 4, 6):
        writer.write(step(number))
        if number == 4:
            writer.write(EvaluationMetrics(4, 4.0, 100))
    writer.close()
    return path


def test_an_update_of_weights_is_a_line_and_a_curve_of_each_dataset(tmp_path: Path) -> None:
    update = MixtureUpdate(4, 96, {"0 a": {"weight": 0.25, "loss": 2.0}, "1 b": {"weight": 0.75}})
    assert format_record(update, 10) == "step 4/10  weights from sample 96 on: 0.75 1 b, 0.25 0 a"
    assert "as they are" in format_record(replace(update, place=None), 10)
    many = replace(update, mixture={f"{number} x": {"weight": 0.1} for number in range(10)})
    assert format_record(many, 10).endswith(", 2 more")
    tensorboard(tmp_path, 0, update)
    found = scalars(tmp_path)
    assert found["data/mixture/1 b/weight"] == [(4, 0.75)] and found["data/mixture/0 a/loss"] == [(4, 2.0)]


def test_rebuilt_stages_are_a_warning_and_scalars(tmp_path: Path) -> None:
    record = RebuiltStages(8, {"1": {"0": 0.25, "2": 0.75}, "4": {"3": 0.5, "5": 0.5}})
    assert format_record(record, 10) == (
        "WARNING: step 8: state of lost pipeline stages was rebuilt, stage 1 as 0.25 x stage 0 + 0.75 x stage 2, "
        "stage 4 as 0.5 x stage 3 + 0.5 x stage 5"
    )
    tensorboard(tmp_path, 0, record)
    assert scalars(tmp_path)["start/rebuilt/1/2"] == [(8, 0.75)]


def test_json_lines_hold_every_value_that_there_is(metrics: Path) -> None:
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert lines[0] == {"step": 0, "valid_loss": 5.0, "valid_tokens": 100}
    assert lines[1] == vars(step(2))
    unknown = {"mfu_full": None, "mfu_causal": None, "hfu_full": None, "hfu_causal": None}
    assert set(as_json(replace(RECORD, **unknown))) == set(vars(RECORD)) - set(unknown)


def test_json_lines_are_on_disk_at_once(tmp_path: Path) -> None:
    writer = JsonLinesWriter(tmp_path / "metrics.jsonl", 0)
    for number in (1, 2):
        writer.write(step(number))
        writer.write_message("no measurement")
        assert steps_of(tmp_path / "metrics.jsonl")[-1] == number
    writer.close()


def test_a_resumed_run_continues_its_lines(metrics: Path) -> None:
    writer = JsonLinesWriter(metrics, 4)
    assert steps_of(metrics) == [0, 2, 4, 4]
    writer.write(step(6, loss=0.5))
    writer.close()
    assert steps_of(metrics) == [0, 2, 4, 4, 6]
    assert json.loads(metrics.read_text().splitlines()[-1])["loss"] == 0.5


def test_a_run_that_starts_anew_keeps_no_lines(metrics: Path) -> None:
    JsonLinesWriter(metrics, 0).close()
    assert metrics.read_text() == ""


@pytest.mark.parametrize(
    "tail", ['{"step": 4, "lo', '{"step": 4}', "\0\0\0\0", "\0\0\n", "[4]\n", '{"step": null}\n', "{}\n"]
)
def test_what_a_kill_spoilt_goes(metrics: Path, tail: str) -> None:
    metrics.write_text(metrics.read_text() + tail)
    JsonLinesWriter(metrics, 6).close()
    assert steps_of(metrics) == [0, 2, 4, 4, 6]


def test_trimming_replaces_the_file_as_a_whole(metrics: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = metrics.read_text()

    def die(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        JsonLinesWriter(metrics, 2)
    assert metrics.read_text() == before


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads from a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def tensorboard(folder: Path, resumed: int, *records: MetricsRecord) -> None:
    writer = TensorBoardWriter(folder, resumed)
    writer.write_message("no measurement")
    for record in records:
        writer.write(record)
    writer.close()


def test_tensorboard_reads_every_value(tmp_path: Path) -> None:
    tensorboard(tmp_path, 0, EvaluationMetrics(0, 5.0, 100), step(2, 3.0), step(4, 2.5), EvaluationMetrics(4, 4.0, 100))
    found = scalars(tmp_path)
    assert found.pop("valid/loss") == [(0, 5.0), (4, 4.0)]
    assert found.pop("valid/tokens") == [(0, 100.0), (4, 100.0)]
    assert found.pop("train/loss") == [(2, 3.0), (4, 2.5)]
    values_of = vars(RECORD) | {f"communication/tp/{name}": v for name, v in RECORD.communication["tp"].items()}
    for group in ("fp8", "experts", "mtp", "exits", "objectives"):
        values_of |= {f"{group}/{name}/{k}": v for name, part in values_of.pop(group).items() for k, v in part.items()}
    del values_of["communication"]
    for tag, values in found.items():
        expected = values_of[tag.removeprefix("train/")]
        assert [number for number, _ in values] == [2, 4]
        assert all(math.isclose(value, expected, rel_tol=1e-6) for _, value in values)
    assert set(found) == {f"train/{name}" for name in set(values_of) - {"step", "loss"}}


@pytest.mark.parametrize(("resumed", "kept"), [(4, [(2, 1.0), (4, 1.0)]), (6, [(2, 1.0), (4, 1.0), (6, 1.0)]), (0, [])])
def test_tensorboard_drops_what_is_trained_again(tmp_path: Path, resumed: int, kept: list[tuple[int, float]]) -> None:
    tensorboard(tmp_path, 0, EvaluationMetrics(0, 5.0, 100), *(step(number) for number in (2, 4, 6)))
    tensorboard(tmp_path, resumed, step(resumed + 2, 0.5))
    found = scalars(tmp_path)
    assert found["train/loss"] == [*kept, (resumed + 2, 0.5)]
    assert found.get("valid/loss", []) == ([(0, 5.0)] if resumed else [])


def test_plain_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    writer = TerminalWriter(1200, 0)
    writer.write_message("a [bold]note[/bold] :smile: " + "/a/long/path" * 20)
    writer.write(EvaluationMetrics(0, 5.43219, 100))
    writer.write(RECORD)
    writer.close()
    assert capsys.readouterr().out == (
        f"a [bold]note[/bold] :smile: {'/a/long/path' * 20}\n"
        "step 0/1,200  validation loss 5.4322\n"
        "step 5/1,200  loss 2.3457  norm 1.23  lr 3.00e-04  1.64k tok/s  MFU 51.2% full 48.0% causal  49m 47s left\n"
    )


def test_a_terminal_has_a_bar_below_the_same_lines() -> None:
    screen = io.StringIO()
    writer = TerminalWriter(1200, 100, Console(file=screen, force_terminal=True, width=80, legacy_windows=False))
    writer.write_message("/a/long/path" * 20)
    writer.write(step(105))
    writer.close()
    shown = screen.getvalue()
    assert "/a/long/path" * 20 + "\n" in shown
    assert f"{format_record(step(105), 1200)}\n" in shown
    first, last = shown.index(" 100/1200"), shown.rindex(" 105/1200")
    assert first < shown.index("loss 1.0000") < last
    assert "45m 37s left" in shown[last:]
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is back


def test_a_step_in_a_line() -> None:
    assert format_record(RECORD, 5).endswith("MFU 51.2% full 48.0% causal  0s left")
    unknown = format_record(replace(RECORD, mfu_full=None, mfu_causal=None, hfu_full=None, hfu_causal=None), 10)
    assert unknown == "step 5/10  loss 2.3457  norm 1.23  lr 3.00e-04  1.64k tok/s  MFU n/a  12s left"
    assert format_record(EvaluationMetrics(1500, 3.0, 7), 2000) == "step 1,500/2,000  validation loss 3.0000"
