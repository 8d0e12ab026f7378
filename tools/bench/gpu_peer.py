"""Task and report of the peers' scripts on one device.

A script reads a file with a Task in JSON and prints one JSON object: a Report, or the reason for refusing the task. The
scripts use only `megascale.device` and `megascale.bench.quartiles` of megascale, which import only torch.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megascale.bench.quartiles import intervals
from megascale.device import Device, detect_device


@dataclass(frozen=True)
class Task:
    """A model as in megascale's `[model]`, with the padded `vocab_size`; the batch, the optimizer and the numbers of
    steps. `cpu`: run on the CPU, with the patches of the folder `patches`.
    """

    model: dict[str, Any]
    precision: str
    micro: int
    total: int
    warm_up: int
    steps: int
    optimizer: dict[str, Any]
    seed: int
    cpu: bool
    patches: str

    def tokens(self, step: int) -> torch.Tensor:
        """Draw the random tokens of a step (from 0): [total, seq_length + 1], int64, on the host."""
        generator = torch.Generator().manual_seed(self.seed + step)
        shape = (self.total, self.model["seq_length"] + 1)
        return torch.randint(self.model["vocab_size"], shape, generator=generator)


@dataclass(frozen=True)
class Report:
    """Seconds of every timed step, the first and the last loss, the number of parameters, and a description (`how`) of
    the system's setup.
    """

    step_s: list[float]
    losses: list[float]
    parameters: int
    how: str


class Refusal(Exception):
    """The system does not support the model or precision that the message names."""


def run(train: Callable[[Task, Device], Report], about: str | None) -> None:
    """Read the task, train and print the report. `about`: text of `--help`."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("task", type=Path, help="a file with a Task in JSON")
    task = Task(**json.loads(parser.parse_args().task.read_text(encoding="utf-8")))
    device = detect_device(allow_gpu=not task.cpu)
    _stand_alone()
    try:
        report: dict[str, Any] = vars(train(task, device))
    except Refusal as refusal:
        report = {"unsupported_reason": str(refusal)}
    machine = {"device": device.name, "torch": torch.__version__, "peak_memory_bytes": device.peak_memory()}
    print(json.dumps(report | machine), flush=True)


def _stand_alone() -> None:
    """Set the environment of a job with one process."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    os.environ |= {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip


def timed(task: Task, device: Device, step: Callable[[int], object]) -> list[float]:
    """Run all steps, counted from 0. Return the seconds of the steps after the warm-up, by marks on the stream."""
    timer = device.timer()
    marks = [timer.mark()]
    for number in range(task.warm_up + task.steps):
        step(number)
        marks.append(timer.mark())
    device.synchronize()
    return intervals(timer, marks)[task.warm_up :]
