"""What the scripts of the peers on one device share: the task that they are given, and what they print.

A script is started with a file that holds a Task in JSON. It prints one JSON object: a report, or why the system cannot
do the task at all. It needs nothing of megascale but `megascale.device` and `megascale.bench.spread`, which need torch.
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

from megascale.bench.spread import between
from megascale.device import Device, detect


@dataclass(frozen=True)
class Task:
    """A model as megascale's `[model]` holds it, but with `vocab_size` rows in the vocabulary, padding among them; the
    batch, the optimizer, and how many steps. `cpu`: run on the CPU, with what the scripts in `patches` change for that.
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
        """The random tokens of a step from 0, and one more of each sequence: [total, s + 1], i64, on the host."""
        generator = torch.Generator().manual_seed(self.seed + step)
        shape = (self.total, self.model["seq_length"] + 1)
        return torch.randint(self.model["vocab_size"], shape, generator=generator)


@dataclass(frozen=True)
class Report:
    """Seconds of each timed step, losses of the first step and of a late one, numbers in the model, and how the system
    did it, in words.
    """

    step_s: list[float]
    losses: list[float]
    parameters: int
    how: str


class Refusal(Exception):
    """The system has no such model or precision; says which."""


def run(train: Callable[[Task, Device], Report], about: str | None) -> None:
    """A script's life: read the task, train, print. `about`: what `--help` says."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("task", type=Path, help="a file with a Task in JSON")
    task = Task(**json.loads(parser.parse_args().task.read_text(encoding="utf-8")))
    device = detect(allow_gpu=not task.cpu)
    _stand_alone()
    try:
        found: dict[str, Any] = vars(train(task, device))
    except Refusal as refusal:
        found = {"refusal": str(refusal)}
    more = {"device": device.name, "torch": torch.__version__, "peak_memory_bytes": device.peak_memory()}
    print(json.dumps(found | more), flush=True)


def _stand_alone() -> None:
    """Say in the environment that this is a world of one process."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    os.environ |= {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip


def timed(task: Task, device: Device, step: Callable[[int], object]) -> list[float]:
    """Take all steps, counted from 0. Returns the seconds of those after the warm-up, by marks in the device's work."""
    timer = device.timer()
    marks = [timer.mark()]
    for number in range(task.warm_up + task.steps):
        step(number)
        marks.append(timer.mark())
    device.synchronize()
    return between(timer, marks)[task.warm_up :]
