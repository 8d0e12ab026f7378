"""`megascale bench links` and `megascale bench profile`: benchmarks run by several ranks of this host. The command
launches the ranks, unless a job did.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megascale.cli.arguments import add_json, at_least, positive_int
from megascale.cli.command_output import print_progress
from megascale.config.profile_files import THIS_MACHINE, path_of
from megascale.core.errors import ConfigError, Problem
from megascale.core.files import exists, is_folder, write_text
from megascale.core.process import usable_cores
from megascale.core.rank import Rank, die_with_torchrun, rank_from_environment
from megascale.operate.driver.one_host import run_on_this_host
from megascale.operate.node import environment
from megascale.operate.node.failure import write_end, write_error

if TYPE_CHECKING:
    from megascale.device import Device

RankWork = Callable[["Device", Rank], None]

SEVERAL = at_least(2, "communication needs two ranks or more")


def add_links(one: argparse.ArgumentParser) -> None:
    """Declare the arguments of `bench links`."""
    processes = "ranks, 2 or more (default: one per GPU, or per core)"
    one.add_argument("--processes", type=SEVERAL, metavar="N", help=processes)
    sizes = "tensor sizes (default: 4 KiB to 32 MiB)"
    one.add_argument("--sizes", type=positive_int, nargs="+", metavar="BYTES", help=sizes)
    add_json(one)


def run_links(options: argparse.Namespace) -> int:
    """Time every operation with every tensor size."""
    environment.set_defaults()

    def work(device: Device, rank: Rank) -> None:
        from megascale.bench import links

        timings = links.measure_links(device, rank.rank, rank.world_size, options.sizes or links.SIZES)
        if rank.rank == 0:
            print(json.dumps(links.as_json(timings, device)) if options.json else links.table(timings, device))

    if rank_from_environment() is not None:
        return _run_rank(work, gpus=True)
    sizes = ["--sizes", *map(str, options.sizes)] if options.sizes else []
    return _start(["bench", "links", *sizes, *["--json"] * options.json], options.processes or _default(gpus=True))


def add_profile(one: argparse.ArgumentParser) -> None:
    """Declare the arguments of `bench profile`."""
    processes = "concurrent ranks, 2 or more (default: one per core)"
    one.add_argument("--processes", type=SEVERAL, metavar="N", help=processes)
    output = f"the profile (default: the file of --hardware this, {path_of('hardware', THIS_MACHINE)})"
    one.add_argument("--output", type=Path, metavar="FILE.toml", help=output)
    add_json(one)
    one.add_argument("--oversubscribed", type=Path, help=argparse.SUPPRESS)  # result of the first job, for the second


def run_profile(options: argparse.Namespace) -> int:
    """Measure this machine and write its profile, in two jobs: one with two ranks per core, then one with one."""
    environment.set_defaults()
    output = (options.output or path_of("hardware", THIS_MACHINE)).resolve()
    _check_output(output)
    if options.oversubscribed is None and rank_from_environment() is None:
        words = ["bench", "profile", "--output", str(output), *["--json"] * options.json]
        processes = options.processes or _default(gpus=False)
        with tempfile.TemporaryDirectory() as folder:
            words += ["--oversubscribed", f"{folder}/oversubscribed.json"]
            return _start(words, 2 * processes) or _start(words, processes)

    def work(device: Device, rank: Rank) -> None:
        from megascale.bench import profile, profile_fit, profile_steps

        log = print_progress if rank.rank == 0 else lambda text: None
        oversubscribed = None
        if first := options.oversubscribed:
            if not exists(first):
                log("steps with two ranks per core")
                steps = profile_steps.measure_oversubscribed(device, rank)
                if rank.rank == 0:
                    write_text(first, json.dumps(vars(steps)))
                return
            oversubscribed = profile_steps.OversubscribedSteps(**json.loads(first.read_text(encoding="utf-8")))
        measured = profile.measure_profile(device, rank.rank, rank.world_size, log, oversubscribed=oversubscribed)
        if measured is None:
            return
        profile_fit.write_profile(output, measured, device.name, rank.world_size)
        if options.json:
            print(json.dumps({"output": str(output), **profile_fit.as_json(measured)}))
        else:
            print(f"{profile_fit.table(measured)}\n\nwritten: {output}")

    return _run_rank(work, gpus=False)


def _check_output(path: Path) -> None:
    """Check the output file before minutes of measurements. Raises: ConfigError if the file cannot be written."""
    try:
        if path.suffix != ".toml":
            raise OSError(0, "a profile's name must end in .toml")
        path.parent.mkdir(parents=True, exist_ok=True)
        if is_folder(path) or not os.access(path.parent, os.W_OK):
            raise OSError(0, "cannot be written")
    except OSError as error:
        problem = Problem("command line", "--output", f"{path}: {error.strerror}", "give another file")
        raise ConfigError([problem]) from None


def _start(words: list[str], processes: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        return run_on_this_host(words, processes, Path(folder))


def _run_rank(work: RankWork, *, gpus: bool) -> int:
    rank = rank_from_environment()
    assert rank is not None, "a rank runs inside a job"
    die_with_torchrun()
    from megascale.comm import init
    from megascale.device import detect_device

    try:
        device = detect_device(rank.local_rank, allow_gpu=gpus)
        init.init_distributed(rank, device)
        work(device, rank)
        init.shutdown_distributed()
        write_end(rank, 0)
    except Exception as error:
        write_error(error, rank)
        raise
    return 0


def _default(*, gpus: bool) -> int:
    from megascale import device

    return max(2, (device.gpu_count() if gpus else 0) or usable_cores())


VERBS = {"links": (add_links, run_links), "profile": (add_profile, run_profile)}
