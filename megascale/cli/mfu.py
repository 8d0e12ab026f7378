"""`megascale mfu`: where a run's time went, from the peak to the achieved MFU, and what grew since its start."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from megascale.cli.command_output import warn
from megascale.core.errors import Exit
from megascale.core.files import is_file

if TYPE_CHECKING:
    import duckdb

    from megascale.operate.diagnose.slow.drift import Drift
    from megascale.operate.diagnose.slow.mfu_breakdown import MfuBreakdown


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    sub.add_argument("run", metavar="RUN", help="the run's folder, or its event store (a folder or a URL)")
    json_help = "print one JSON object: the breakdown with its waterfall, and the drift"
    sub.add_argument("--json", action="store_true", help=json_help)


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    from megascale.operate.diagnose.slow.cube_queries import peak_flops, recent_cube, sampled_cube
    from megascale.operate.diagnose.slow.drift import drift
    from megascale.operate.show.run_breakdown import BUBBLE_STEPS, run_breakdown
    from megascale.operate.show.run_config import CONFIG_FILE
    from megascale.operate.store.query import StoreError
    from megascale.operate.store.reading import read_store
    from megascale.operate.store.table_files import STORE_FOLDER

    folder = Path(options.run)
    if folder.name == STORE_FOLDER and is_file(folder.resolve().parent.joinpath(CONFIG_FILE)):
        folder = folder.resolve().parent

    def read(store: duckdb.DuckDBPyConnection) -> tuple[MfuBreakdown | None, Drift]:
        breakdown = run_breakdown(store, folder, recent_cube(store, BUBBLE_STEPS))
        return breakdown, drift(sampled_cube(store), peak_flops(store))

    reading = read_store(options.run, read)
    warn(reading.notes)
    breakdown, change = reading.value
    if breakdown is None:
        raise StoreError(f"{options.run}: no complete step yet", hint="rows come some seconds after their step")
    if options.json:
        print(json.dumps({"breakdown": breakdown.to_json(), "drift": change.to_json()}))
        return Exit.OK
    print(f"steps {breakdown.first_step} to {breakdown.last_step}, {breakdown.wall_s:.4g} s, means over ranks:")
    print(breakdown.to_text(), change.to_text(), sep="\n\n")
    return Exit.OK
