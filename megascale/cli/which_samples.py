"""The documents that a step of a run has read, by arithmetic: from the run's configuration and the sample indices."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from megascale.config.batch_rampup import batch_sizes
from megascale.config.run import RunConfig
from megascale.core.errors import DataError
from megascale.data.mix.blend import ChangingBlend, Part, blend_parts
from megascale.data.mix.mixture import Mixture
from megascale.data.read.epoch_index import Piece
from megascale.train.run_splits import mixture_spec

METRICS_FILE = "metrics.jsonl"

T = TypeVar("T")


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

    Raises: DataError for mock data, for a step beyond the run's or whose samples the run's metrics do not tell, and for
    datasets or indices that cannot be used
    """
    if config.data.mock:
        raise DataError("mock data has no documents", hint="a run with data.train")
    if step > (last := max(config.train.steps, recorded_steps(config))):
        raise DataError(f"{config.folder} has no step {step}: train.steps is {last}", hint=f"--step 1 to {last}")
    first, count = step_range(config, step)
    unweighted = config.data.model_copy(update={"sample_weight": None})  # a plug-in that this host may lack
    spec = mixture_spec(config.model_copy(update={"data": unweighted}), "train")
    mixture = Mixture(spec, config.samples)
    if config.data.policy:
        mixture.follow(ChangingBlend(blend_parts(spec.weights, _policy_changes(config))))
    found = []
    for sample in range(first, first + count):
        dataset, number = mixture.locate(sample)
        epoch = number // dataset.shape.samples
        found.append(ReadSample(sample, mixture.order(sample), dataset.prefix, epoch, dataset.pieces(number)))
    return found


def recorded_steps(config: RunConfig) -> int:
    """The last step in the run's metrics, 0 without metrics."""
    return max(_recorded_samples(config.folder / METRICS_FILE), default=0)


def step_range(config: RunConfig, step: int) -> tuple[int, int]:
    """The first sample of a step, and the number of its samples: by the configured batches, if they agree with the
    samples in the run's metrics; else by the metrics alone.

    Raises: DataError for a batch that may have changed between two records
    """
    recorded = {0: 0} | _recorded_samples(config.folder / METRICS_FILE)
    before = max(number for number in recorded if number < step)
    after = min((number for number in recorded if number >= step), default=None)
    sizes, ends = batch_sizes(config.batch), [recorded[before]]
    for _ in range(before, after or step):
        ends.append(ends[-1] + sizes.at(ends[-1]))
    if after is None or ends[-1] == recorded[after]:
        return ends[step - 1 - before], ends[step - before] - ends[step - 1 - before]
    batch = _equal_batch(config, recorded, before, after)
    return recorded[before] + (step - 1 - before) * batch, batch


def _equal_batch(config: RunConfig, recorded: dict[int, int], before: int, after: int) -> int:
    """The batch of all steps between two records of a run with another batch than configured. It may have changed
    between the two: an equal mean before or after them is the proof that it has not.

    Raises: DataError
    """
    steps = sorted(recorded)
    means = {last: (recorded[last] - recorded[first]) / (last - first) for first, last in pairwise(steps)}
    mean = means.pop(after)
    place = steps.index(after)
    beside = [means[number] for number in (before, *steps[place + 1 : place + 2]) if number in means]
    if mean.is_integer() and (after - before == 1 or mean in beside):
        return int(mean)
    read = f"{recorded[after] - recorded[before]} samples in steps {before + 1} to {after}"
    what = f"the run has read {read}, by another batch.global or batch.rampup than those of its config.toml"
    raise DataError(what, hint="set them in that file as they were at that time, if they were the same in these steps")


def _recorded_samples(path: Path) -> dict[int, int]:
    """Samples of the run by step, at each record; after a resume the later record counts."""
    return dict(_records(path, lambda record: (int(record["step"]), int(record["samples"]))))


def _policy_changes(config: RunConfig) -> list[Part]:
    """The weights that a data policy has found, each with the place in the order of samples where they begin.

    Raises: DataError for a run whose first steps are in another run's records, with changes that are missing here
    """
    path = config.folder / METRICS_FILE
    if (first := min(_recorded_samples(path), default=1)) > 1:
        what = f"{path} begins with step {first}: how {config.data.policy} has changed the weights before is not known"
        hint = "put the records of the run that it began from, up to that checkpoint's step, before those of this file"
        raise DataError(what, hint=hint)

    def part(record: Any) -> Part:
        return int(record["place"]), [float(numbers["weight"]) for numbers in record["mixture"].values()]

    return list(_records(path, part))


def _records(path: Path, facts: Callable[[Any], T]) -> Iterator[T]:
    """Yield `facts` of the records of a metrics file, but of other kinds of records, and of those that were cut."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            yield facts(json.loads(line))
        except (ValueError, LookupError, TypeError):
            continue
