"""A job on datasets that goes on, after half of its steps, in another layout and with another reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.jobs import curve, finish, job_config
from tests.runs import GPT


def check_resumed(folder: Path, data: dict[str, Any], *overrides: str) -> Path:
    """Check that eight steps are those of a job that trains four of them, and the rest with tp 2 and the host's reader.

    `overrides`: of the job in one go, and of the other from its resume on. Returns the configuration of the latter.
    """
    curves, configs = {}, {}
    for name in ("whole", "resumed"):
        (folder / name).mkdir()
        config = configs[name] = job_config(folder / name, GPT | {"vocab_size": 20_000}, **data, train__steps=8)
        if name == "resumed":
            finish(config, "train.steps=4", "parallel.dp=2")
        host = ["data.reader=host", "parallel.tp=2"] if name == "resumed" else []
        curves[name] = curve(finish(config, *overrides, *host))
    for (_, loss, norm), (_, expected, expected_norm) in zip(curves["resumed"], curves["whole"], strict=True):
        assert loss == pytest.approx(expected, rel=1e-10) and norm == pytest.approx(expected_norm, rel=1e-8)
    return configs["resumed"]
