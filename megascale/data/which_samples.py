"""The documents that a step of a run has read, by arithmetic: from the run's configuration and the sample indices."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from megascale.config.batch_rampup import batch_sizes, samples_of_run
from megascale.config.run import RunConfig
from megascale.core.errors import DataError
from megascale.data.epochs import Piece
from megascale.data.mixture import Mixture


@dataclass(frozen=True)
class ReadSample:
    """A sample: its number in the run, its place in the order of samples, dataset, epoch, and parts of documents."""

    sample: int
    order: int
    dataset: str
    epoch: int
    pieces: list[Piece]


def samples_of_step(config: RunConfig, step: int) -> list[ReadSample]:
    """The samples of a step, counted from 1.

    Raises: DataError for mock data, and for datasets or indices that cannot be used
    """
    if config.data.mock:
        raise DataError("mock data has no documents", hint="a run with data.train")
    first, count = step_range(config, step)
    mixture = Mixture(config, "train", samples_of_run(config))
    found = []
    for sample in range(first, first + count):
        dataset, number = mixture.locate(sample)
        epoch = number // dataset.shape.samples
        found.append(ReadSample(sample, mixture.order(sample), dataset.prefix, epoch, dataset.pieces(number)))
    return found


def step_range(config: RunConfig, step: int) -> tuple[int, int]:
    """The first sample of a step, and the number of its samples. The run's metrics tell where the global batch has
    changed during the run, exactly where it is the same between two records.
    """
    recorded = {0: 0} | _recorded_samples(config.folder / "metrics.jsonl")
    before = max(number for number in recorded if number < step)
    after = min((number for number in recorded if number >= step), default=None)
    sizes = batch_sizes(config)
    if recorded[before] < sizes.samples:  # a ramp-up is arithmetic
        first = recorded[before]
        for _ in range(step - 1 - before):
            first += sizes.at(first)
        return first, sizes.at(first)
    batch = config.batch.total
    if after is not None:
        batch = (recorded[after] - recorded[before]) // (after - before)
    return recorded[before] + (step - 1 - before) * batch, batch


def _recorded_samples(path: Path) -> dict[int, int]:
    """Samples of the run by step, at each record; after a resume the later record counts."""
    found: dict[int, int] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return found
    for line in lines:
        try:
            record = json.loads(line)
            found[int(record["step"])] = int(record["samples"])
        except (ValueError, LookupError, TypeError):  # another kind of record, or one that was cut
            continue
    return found
