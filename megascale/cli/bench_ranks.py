"""The benchmarks that several ranks of this host run together: `megascale bench links` and `megascale bench profile`.
Outside a job they start their ranks.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascale.bench.overlap import progress
from megascale.bench.profile_file import write
from megascale.cli.numbers import at_least, count
from megascale.core.errors import ConfigError, Problem
from megascale.core.files import write_text
from megascale.core.process import die_with, usable_cores
from megascale.core.rank import Rank, from_environment
from megascale.launch import local
from megascale.launch.failure import write_error
from megascale.simulate.profiles import THIS, path_of

if TYPE_CHECKING:
    from megascale.device import Device

Work = Callable[["Device", Rank], None]

SEVERAL = at_least(2, "two ranks or more have something to send")
"""The type of `--processes`."""


def add_links(benchmarks: Any) -> None:
    """Declare `links`."""
    help_line = "bandwidth and latency of what ranks of this host send each other, in the ways that training uses"
    one = benchmarks.add_parser("links", help=help_line, description=f"{help_line[0].upper()}{help_line[1:]}.")
    one.add_argument("--processes", type=SEVERAL, metavar="N", help="ranks (default: one a GPU, or a core; 2 or more)")
    one.add_argument("--sizes", type=count, nargs="+", metavar="BYTES", help="of tensors (default: 4 KiB to 32 MiB)")
    one.add_argument("--json", action="store_true", help="print one JSON object")


def run_links(options: argparse.Namespace) -> int:
    """Measure every operation with every size."""

    def work(device: Device, rank: Rank) -> None:
        from megascale.bench import links

        found = links.measure(device, rank.rank, rank.world, options.sizes or links.SIZES)
        if rank.rank == 0:
            print(json.dumps(links.as_json(found, device)) if options.json else links.table(found, device))

    if from_environment() is not None:
        return _work(work, gpus=True)
    sizes = ["--sizes", *map(str, options.sizes)] if options.sizes else []
    return _start(["bench", "links", *sizes, *["--json"] * options.json], options.processes or _default(gpus=True))


def add_profile(benchmarks: Any) -> None:
    """Declare `profile`."""
    help_line = "a hardware profile of this machine's processor, which plan reads"
    one = benchmarks.add_parser("profile", help=help_line, description=f"{help_line[0].upper()}{help_line[1:]}.")
    one.add_argument("--processes", type=SEVERAL, metavar="N", help="ranks that measure at once (default: one a core)")
    one.add_argument(
        "--output", type=Path, metavar="FILE.toml", help="where to write it (default: where --hardware this reads it, "
        f"{path_of('hardware', THIS)})",
    )  # fmt: skip
    one.add_argument("--json", action="store_true", help="print one JSON object")
    one.add_argument("--crowd", type=Path, help=argparse.SUPPRESS)  # what the first of two jobs tells the second


def run_profile(options: argparse.Namespace) -> int:
    """Measure this machine and write its profile: in a job with two ranks a core, and in one with a rank a core."""
    output = (options.output or path_of("hardware", THIS)).resolve()
    _check_output(output)
    if options.crowd is None and from_environment() is None:
        words = ["bench", "profile", "--output", str(output), *["--json"] * options.json]
        processes = options.processes or _default(gpus=False)
        with tempfile.TemporaryDirectory() as folder:
            words += ["--crowd", f"{folder}/crowd.json"]
            return _start(words, 2 * processes) or _start(words, processes)

    def crowded(device: Device, rank: Rank) -> None:
        from megascale.bench import profile

        if rank.rank == 0:
            progress("steps of two ranks a core")
        found = profile.crowded(device, rank)
        if rank.rank == 0:
            write_text(options.crowd, json.dumps(vars(found)))

    def work(device: Device, rank: Rank) -> None:
        from megascale.bench import profile

        crowd = profile.Crowd(**json.loads(options.crowd.read_text(encoding="utf-8"))) if options.crowd else None
        say = progress if rank.rank == 0 else lambda text: None
        found = profile.measure(device, rank.rank, rank.world, say, crowd=crowd)
        if found is None:
            return
        write(output, found.tree, _heading(device, rank.world, found))
        if options.json:
            print(json.dumps({"output": str(output), **profile.as_json(found)}))
        else:
            print(f"{profile.table(found)}\n\nwritten: {output}")

    return _work(crowded if options.crowd and not options.crowd.exists() else work, gpus=False)


def _heading(device: Device, ranks: int, found: Any) -> str:
    import torch

    day = datetime.datetime.now(datetime.UTC).date()
    worst = max(found.quality.values(), key=lambda each: each.ratio).ratio
    return (
        f"{device.name}, {os.cpu_count()} cores: `megascale bench profile` with {ranks} ranks and torch "
        f"{torch.__version__}, {day}\nThe slowest round took at most {worst:.2f} times the quickest."
    )


def _check_output(path: Path) -> None:
    """Before minutes are spent. Raises: ConfigError for a file that cannot be written."""
    try:
        if path.suffix != ".toml":
            raise OSError(0, "plan reads profiles by names that end in .toml")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            raise OSError(0, "it cannot be written")
    except OSError as error:
        raise ConfigError([Problem("command line", "--output", f"{path}: {error.strerror}", "another file")]) from None


def _start(words: list[str], processes: int) -> int:
    """Run a command as so many ranks of this host."""
    with tempfile.TemporaryDirectory() as logs:
        return local.run(words, processes, Path(logs))


def _work(work: Work, *, gpus: bool) -> int:
    """Do a rank's part of the work."""
    rank = from_environment()
    assert rank is not None, "ranks are started by a job"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with(os.getppid())  # torchrun, when it is killed, leaves its workers
    from megascale.comm import init
    from megascale.device import detect

    try:
        device = detect(rank.local, allow_gpu=gpus)
        init.start(rank, device)
        work(device, rank)
        init.stop()
    except Exception as error:
        write_error(error, rank)
        raise
    return 0


def _default(*, gpus: bool) -> int:
    """A rank a device, and two at least."""
    from megascale import device

    return max(2, (device.gpus() if gpus else 0) or usable_cores())
