"""Attempts of a run that are killed at random, with other layouts, hosts and batches: every sample once, in order."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from megascale.config.run import RunConfig
from megascale.data.host_reader.host_samples import HostSamples
from megascale.data.host_reader.reader_memory import MemoryShape, ReaderMemory
from megascale.data.host_reader.reader_process import ReaderWork, SplitReader
from megascale.data.host_reader.reader_supervisor import ReaderSupervisor
from megascale.data.host_reader.sample_record import record_bytes
from megascale.data.mix.batch_shape import BatchShape, StepOrder
from megascale.train.run_splits import mixture_spec
from tests.data.datasets import SEQUENCE, mixture_of
from tests.data.host_reader.test_host_reader import blend

SAMPLES = 600
KILLS = 30
BATCHES = {1: (4, 6, 10, 12), 2: (4, 8, 12), 4: (4, 8, 16)}
"""Batches of attempts, by their dp."""


class Host:
    """A host of an attempt: the reader of its replicas, in this process or in its own, and a rank of each replica."""

    def __init__(self, config: RunConfig, order: StepOrder, replicas: list[int], process: bool) -> None:
        rows = order.shape.rows_of(replicas)
        shape = MemoryShape(1, len(replicas), config.data.prefetch, len(rows), record_bytes(SEQUENCE))
        memory = ReaderMemory.allocate(shape)
        work = ReaderWork({"train": mixture_spec(config, "train")}, shape, {"train": order}, replicas)
        self.ranks = [
            (replica, HostSamples(memory, 0, order, rows, number, (0, os.getpid())))
            for number, replica in enumerate(replicas)
        ]
        self.reader = None if process else SplitReader(work, "train", memory)
        self.supervisor = ReaderSupervisor(work, memory) if process else None
        if self.supervisor is not None:
            self.supervisor.start()

    def begin(self, consumed: int) -> None:
        for _, samples in self.ranks:
            samples.begin(consumed)

    def read(self, order: StepOrder, consumed: int) -> dict[int, list[int]]:
        """The tokens of a step by the number of their sample, as the loaders of the ranks read them."""
        while self.reader is not None and self.reader.fill_next():
            pass
        found = {}
        for replica, samples in self.ranks:
            with samples.step(consumed):
                for index in range(order.shape.num_microbatches):
                    for row in order.shape.rows(index, replica):
                        found[consumed + row] = samples[consumed + row].tokens.tolist()
        return found


def attempt(config: RunConfig, random: np.random.Generator, consumed: int, process: bool) -> list[dict[int, list[int]]]:
    """The steps of an attempt that resumes after `consumed` samples, in a random layout, until it is killed."""
    dp = int(random.choice([1, 2, 4]))
    hosts = int(random.choice([count for count in (1, 2, 4) if count <= dp]))
    order = StepOrder(BatchShape(int(random.choice(BATCHES[dp])), 1, dp), SAMPLES)
    by_host = [list(map(int, part)) for part in np.array_split(np.arange(dp), hosts)]
    opened = [Host(config, order, replicas, process) for replicas in by_host]
    steps, end = [], int(random.integers(1, 12))
    try:
        for host in opened:
            host.begin(consumed)
        position: int | None = consumed
        while position is not None and len(steps) < end and position + order.shape.global_batch <= SAMPLES:
            if process and random.random() < 0.2:
                supervisor = opened[0].supervisor
                assert supervisor is not None
                os.kill(supervisor.pid, signal.SIGKILL)
            steps.append({number: tokens for host in opened for number, tokens in host.read(order, position).items()})
            position = order.after(position)
    finally:
        for host in opened:
            if host.supervisor is not None:
                host.supervisor.close()
    return steps


@pytest.mark.parametrize(
    ("kills", "process"), [(KILLS, False), pytest.param(KILLS, True, marks=pytest.mark.slow)], ids=["reader", "process"]
)
def test_every_sample_is_read_once_and_in_order(kills: int, process: bool, tmp_path: Path) -> None:
    """What an attempt reads after its last checkpoint is lost with it, and read again by the next."""
    config, random = blend(tmp_path, data__skip_samples=[[40, 55]]), np.random.default_rng(11)
    read: dict[int, list[int]] = {}
    for _ in range(kills):
        steps = attempt(config, random, len(read), process)
        for step in steps[: int(random.integers(0, len(steps) + 1))]:  # until the last checkpoint
            assert sorted(step) == list(range(len(read), len(read) + len(step))), "one step after another"
            read |= dict(sorted(step.items()))
    assert len(read) > SAMPLES // 3
    expected = mixture_of(config)
    assert list(read.items()) == [(number, expected[number].tokens.tolist()) for number in range(len(read))]
