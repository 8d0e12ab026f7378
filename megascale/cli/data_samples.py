"""`megascale data samples`: the documents that a step has read, by arithmetic from configuration and indices."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from megascale.cli.arguments import add_json, add_run, positive_int
from megascale.config.batch_rampup import BatchSizes, batch_sizes
from megascale.config.run import RunConfig
from megascale.core.errors import DataError, Exit
from megascale.core.named_run import no_run
from megascale.core.run_folder import METRICS_FILE
from megascale.data.mix.blend import ChangingBlend, Part, blend_parts
from megascale.data.mix.mixture import Mixture
from megascale.data.read.epoch_index import Piece
from megascale.train.run_splits import mixture_spec

T = TypeVar("T")


@dataclass(frozen=True)
class ReadSample:
    """A sample: its number in the run, its place in the order of samples, dataset, epoch, and parts of documents."""

    sample: int
    order: int
    dataset: str
    epoch: int
    pieces: list[Piece]


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    add_run(sub)
    sub.add_argument("--step", metavar="N", type=positive_int, required=True, help="a step of the run, from 1")
    add_json(sub)


def run(options: argparse.Namespace) -> int:
    """Run the verb and return its exit status."""
    from megascale.operate.show.run_config import read_run_config

    if (config := read_run_config(Path(options.run))) is None:
        raise no_run(options.run)
    step, samples = options.step, samples_of_step(config, options.step)
    recorded = max(recorded_samples(config.folder))
    if options.json:
        parts = [asdict(sample) | {"pieces": [piece._asdict() for piece in sample.pieces]} for sample in samples]
        print(json.dumps({"step": step, "recorded": step <= recorded, "samples": parts}))
        return Exit.OK
    if step > recorded:
        print(f"the records of the run end at step {recorded}: by its configuration, step {step} reads")
    first, last = samples[0], samples[-1]
    print(
        f"step {step}: samples {first.sample} to {last.sample}, in the order of samples {first.order} to {last.order}"
    )
    for sample in samples:
        documents = ", ".join(f"{piece.document} [{piece.start}:{piece.stop}]" for piece in sample.pieces)
        print(f"{sample.order}  {sample.dataset}  epoch {sample.epoch}  documents {documents}")
    return Exit.OK


def samples_of_step(config: RunConfig, step: int) -> list[ReadSample]:
    """The samples of a step, counted from 1.

    Raises: DataError for mock data, for a step beyond the run's or whose samples the run's metrics do not tell, and for
    datasets or indices that cannot be used
    """
    if config.data.mock:
        raise DataError("mock data has no documents", hint="a run with data.train")
    if step > (last := max(config.train.steps, *recorded_samples(config.folder))):
        raise DataError(f"{config.folder} has no step {step}: train.steps is {last}", hint=f"--step 1 to {last}")
    first, count = step_range(batch_sizes(config.batch), config.folder, step)
    spec = mixture_spec(config.changed(data={"sample_weight": None}), "train")  # a plug-in that this host may lack
    mixture = Mixture(spec, config.samples)
    if config.data.blend_policy:
        mixture.follow(
            ChangingBlend(blend_parts(spec.weights, _policy_changes(config.folder, config.data.blend_policy)))
        )
    found = []
    for sample in range(first, first + count):
        dataset, number = mixture.locate(sample)
        epoch = number // dataset.shape.samples
        found.append(ReadSample(sample, mixture.order(sample), dataset.prefix, epoch, dataset.pieces(number)))
    return found


def step_range(sizes: BatchSizes, folder: Path, step: int) -> tuple[int, int]:
    """The first sample of a step, and the number of its samples: by the configured batches, `sizes`, if they agree with
    the samples in the run's metrics; else by the metrics alone.

    Raises: DataError for a batch that may have changed between two records
    """
    recorded = recorded_samples(folder)
    before = max(number for number in recorded if number < step)
    after = min((number for number in recorded if number >= step), default=None)
    ends = [recorded[before]]
    for _ in range(before, after or step):
        ends.append(ends[-1] + sizes.at(ends[-1]))
    if after is None or ends[-1] == recorded[after]:
        return ends[step - 1 - before], ends[step - before] - ends[step - 1 - before]
    equal = _equal_batch(recorded, before, after)
    return recorded[before] + (step - 1 - before) * equal, equal


def _equal_batch(recorded: Mapping[int, int], before: int, after: int) -> int:
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


def recorded_samples(folder: Path) -> dict[int, int]:
    """Samples of a run by step, at each record of its metrics and at step 0; after a resume the later record counts."""
    return {0: 0} | dict(_records(folder, lambda record: (int(record["step"]), int(record["samples"]))))


def _policy_changes(folder: Path, policy: str | None) -> list[Part]:
    """The weights that a data policy has found, each with the place in the order of samples where they begin.

    Raises: DataError for a run whose first steps are in another run's records, with changes that are missing here
    """
    if (first := min(filter(None, recorded_samples(folder)), default=1)) > 1:
        unknown = f"how {policy} has changed the weights before is not known"
        hint = "put the records of the run that it began from, up to that checkpoint's step, before those of this file"
        raise DataError(f"{folder / METRICS_FILE} begins with step {first}: {unknown}", hint=hint)

    def part(record: Any) -> Part:
        return int(record["place"]), [float(numbers["weight"]) for numbers in record["mixture"].values()]

    return list(_records(folder, part))


def _records(folder: Path, facts: Callable[[Any], T]) -> Iterator[T]:
    """Yield `facts` of the records of a run's metrics, but of other kinds of records, and of those that were cut."""
    try:
        lines = (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            yield facts(json.loads(line))
        except (ValueError, LookupError, TypeError):
            continue
