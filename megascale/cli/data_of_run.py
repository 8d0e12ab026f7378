"""`megascale data index` and `which`: the sample indices of a run, and the documents that a step has read."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from megascale.cli.argument_types import positive_int
from megascale.cli.main import add_config_arguments
from megascale.cli.which_samples import ReadSample, recorded_steps, samples_of_step
from megascale.config.loading import load_config
from megascale.core.errors import DataError, Exit
from megascale.core.process import usable_cores
from megascale.core.units import format_bytes
from megascale.data.mix.bucket_summary import describe_buckets
from megascale.data.mix.build_indices import BuiltIndices, build_indices
from megascale.data.mix.mixture import Mixture
from megascale.data.read.index_files import MEMORY_ENTRIES
from megascale.train.run_splits import mixture_spec


def add_index_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the arguments of `index`."""
    add_config_arguments(sub)
    sub.add_argument(
        "--workers", metavar="N", type=positive_int, default=usable_cores(), help="processes (default: one per core)"
    )
    sub.add_argument("--json", action="store_true", help="print one JSON object")


def add_which_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the arguments of `which`."""
    sub.add_argument("run", metavar="RUN", type=Path, help="the run's folder")
    sub.add_argument("--step", metavar="N", type=positive_int, required=True, help="a step of the run, from 1")
    sub.add_argument("--json", action="store_true", help="print one JSON object")


def index(options: argparse.Namespace) -> int:
    """Run `megascale data index`."""
    config = load_config(options.config, options.overrides)
    if config.data.mock:
        raise DataError("mock data has no indices", hint="a configuration with data.train")
    mixtures = [Mixture(mixture_spec(config, "train"), config.samples)]
    if config.train.eval_every:
        mixtures.append(Mixture(mixture_spec(config, "valid"), config.train.eval_steps * config.batch.total))
    if options.json:
        print(json.dumps(asdict(build_indices(mixtures, options.workers))))
        return Exit.OK
    from rich.console import Console
    from rich.progress import Progress

    console = Console()
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("building indices")
        built = build_indices(
            mixtures, options.workers, lambda done, total: bar.update(task, completed=done, total=total)
        )
    print(_index_line(built))
    if config.data.packing == "decompose":
        print(describe_buckets(mixture_spec(config, "train")))
    return Exit.OK


def _index_line(built: BuiltIndices) -> str:
    most = f"{MEMORY_ENTRIES:,} documents and samples"
    small = f"; {built.small} have up to {most}, and need no file" if built.small else ""
    files = f"{built.built + built.found} index files of {format_bytes(built.bytes)}"
    return f"{files}: {built.built} built, {built.found} found{small}"


def which(options: argparse.Namespace) -> int:
    """Run `megascale data which`."""
    from megascale.operate.show.run_config import read_run_config

    if (config := read_run_config(options.run)) is None:
        raise DataError(f"{options.run} is no run's folder: it has no config.toml", hint="the folder of a run")
    samples, recorded = samples_of_step(config, options.step), recorded_steps(config)
    if options.json:
        facts = {"step": options.step, "recorded": options.step <= recorded}
        parts = [asdict(sample) | {"pieces": [piece._asdict() for piece in sample.pieces]} for sample in samples]
        print(json.dumps(facts | {"samples": parts}))
        return Exit.OK
    if options.step > recorded:
        print(f"the records of the run end at step {recorded}: by its configuration, step {options.step} reads")
    for line in _which_lines(options.step, samples):
        print(line)
    return Exit.OK


def _which_lines(step: int, samples: list[ReadSample]) -> Iterator[str]:
    first, last = samples[0], samples[-1]
    yield f"step {step}: samples {first.sample} to {last.sample}, in the order of samples {first.order} to {last.order}"
    for sample in samples:
        parts = ", ".join(f"{piece.document} [{piece.start}:{piece.stop}]" for piece in sample.pieces)
        yield f"{sample.order}  {sample.dataset}  epoch {sample.epoch}  documents {parts}"
