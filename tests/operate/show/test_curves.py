"""The curves of a run: resumes joined, what is cut left out, no spike lost by thinning."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megascale.operate.show.curves import Curves, MetricsFile
from megascale.record.metrics import Alert
from tests.operate.show.folders import metrics_record, write_metrics


def test_what_is_appended_is_added(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    assert file.read().last_step == 0
    write_metrics(tmp_path, [1, 2])
    assert file.read().steps.tolist() == [1, 2]
    with open(tmp_path / "metrics.jsonl", "a") as lines:
        lines.write(json.dumps({"step": 2, "valid_loss": 4.5, "valid_tokens": 9}) + "\n")
        lines.write(json.dumps({"step": 2, "alert": "loss", "value": 9.0, "recent": 3.0}) + "\n")
        lines.write('{"step": 3, "lo')
    curves = file.read()
    assert curves.valid == ((2, 4.5),)
    assert curves.alerts == (Alert(2, "loss", 9.0, 3.0),)
    assert curves.steps.tolist() == [1, 2], "a line that is still being written does not count"
    with open(tmp_path / "metrics.jsonl", "a") as lines:
        lines.write('ss": 2.5}\n')
    curves = file.read()
    assert curves.last["loss"] == 2.5
    assert math.isnan(curves.last["mfu_full"])


def test_casts_and_sharpness_follow_a_resume(tmp_path: Path) -> None:
    lines = [metrics_record(step) | {"fp8": {"layers.0.mlp.up.input": {"rms": float(step)}}} for step in (1, 2, 3)]
    lines += [{"step": step, "logit_sharpness": 0.1 * step} for step in (2, 3, 2)]
    lines.append(metrics_record(3) | {"fp8": {"layers.0.mlp.up.input": {"rms": 9.0}}})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    curves = MetricsFile(tmp_path / "metrics.jsonl").read()
    assert [(step, stats["layers.0.mlp.up.input"]["rms"]) for step, stats in curves.casts] == [(1, 1), (2, 2), (3, 9)]
    assert curves.sharpness == ((2, 0.2),)


def test_a_later_record_of_a_step_overrides_it_and_all_after_it(tmp_path: Path) -> None:
    write_metrics(tmp_path, range(1, 9))
    write_metrics(tmp_path, [5, 6], loss=0.5)
    curves = MetricsFile(tmp_path / "metrics.jsonl").read()
    assert curves.steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert curves.values["loss"][-2:].tolist() == [0.5, 0.5]


def test_a_file_that_a_resume_has_replaced_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_metrics(tmp_path, range(1, 9))
    file = MetricsFile(path)
    assert file.read().last_step == 8
    new = tmp_path / "new"
    new.write_text("".join(json.dumps(metrics_record(step, loss=1.0)) + "\n" for step in range(1, 12)))
    new.replace(path)
    curves = file.read()
    assert curves.last_step == 11
    assert set(curves.values["loss"]) == {1.0}


def test_lines_that_are_no_records_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('[1]\n{"loss": 1}\nnonsense\n' + "[" * 100_000 + '\n{"step": 1, "loss": null}\n')
    write_metrics(tmp_path, [2])
    assert MetricsFile(path).read().steps.tolist() == [2]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(2, 50))
def test_thinning_keeps_order_ends_and_extremes(values: list[float], points: int) -> None:
    x, y = np.arange(len(values)), np.array(values)
    thin_x, thin_y = Curves(x, {"y": y}).drawn("y", points)
    assert len(thin_x) <= max(points, 2) + 1
    assert (np.diff(thin_x) > 0).all()
    assert (thin_y.min(), thin_y.max(), thin_x[-1]) == (y.min(), y.max(), x[-1])
    assert (y[thin_x] == thin_y).all()
