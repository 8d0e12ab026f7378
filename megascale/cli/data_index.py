"""`megascale data index`: the sample indices of a run, built in advance."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from megascale.cli.arguments import add_config_arguments, add_json, positive_int
from megascale.config.loading import load_config
from megascale.core.errors import DataError, Exit
from megascale.core.process import usable_cores
from megascale.core.units import format_bytes
from megascale.data.mix.bucket_summary import describe_buckets
from megascale.data.mix.build_indices import build_indices
from megascale.data.mix.mixture import Mixture
from megascale.data.read.index_files import MEMORY_ENTRIES
from megascale.train.run_splits import mixture_spec


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    add_config_arguments(sub)
    workers = "processes (default: one per core)"
    sub.add_argument("--workers", metavar="N", type=positive_int, default=usable_cores(), help=workers)
    add_json(sub)


def run(options: argparse.Namespace) -> int:
    """Run the verb and return its exit status."""
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
    most = f"{MEMORY_ENTRIES:,} documents and samples"
    small = f"; {built.small} have up to {most}, and need no file" if built.small else ""
    files = f"{built.built + built.found} index files of {format_bytes(built.bytes)}"
    print(f"{files}: {built.built} built, {built.found} found{small}")
    if config.data.packing == "decompose":
        print(describe_buckets(mixture_spec(config, "train")))
    return Exit.OK
