"""`megascale diagnose`: whether a run hangs, for which rank the others wait, and why; also of an ended run. From its
event store: `--slow`, what slows it down; `--mfu`, where its time goes; `--hosts`, hosts unlike the others.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from megascale.cli.arguments import add_json, add_run, own_file
from megascale.cli.command_output import warn, writing
from megascale.core.errors import Exit
from megascale.core.files import is_file, write_text
from megascale.core.named_run import CONFIG_FILE, RunFolderError
from megascale.core.process import exit_on_stop_signals

if TYPE_CHECKING:
    import duckdb

    from megascale.operate.diagnose.slow.drift import Drift
    from megascale.operate.diagnose.slow.mfu_breakdown import MfuBreakdown


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    from megascale.operate.show.charts.shapes import FILE_START

    add_run(sub, "the run's folder; with --slow, --mfu and --hosts also its event store: a folder or a URL")
    instead = sub.add_mutually_exclusive_group()
    slow = "say what slows the run down, from its event store, instead of whether it hangs"
    instead.add_argument("--slow", action="store_true", help=slow)
    loss = "show where the run's time goes, from the peak to the achieved MFU, and what grew since its start"
    instead.add_argument("--mfu", action="store_true", help=loss)
    hosts = "name hosts whose metrics (CPU, GPUs, links, disks) stay far from the others', from the event store"
    instead.add_argument("--hosts", action="store_true", help=hosts)
    add_json(sub)
    picture = "write a picture of who waits for whom"
    sub.add_argument("--picture", metavar="FILE.svg", type=own_file(".svg", FILE_START), help=picture)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    from megascale.operate.show.run_reader import RunReader

    for name, show in (("slow", _print_slow), ("mfu", _print_mfu), ("hosts", _print_hosts)):
        if getattr(options, name):
            if options.picture is not None:
                what = "--picture shows who waits for whom in a run that hangs"
                raise RunFolderError(what, hint=f"leave --{name} out")
            with exit_on_stop_signals():
                show(options)
            return Exit.OK
    from megascale.operate.node.stacks import stack_of
    from megascale.operate.show.diagnosis import diagnose
    from megascale.operate.show.diagnosis_text import diagnosis_json, diagnosis_text
    from megascale.operate.show.last_states import read_last_states

    with exit_on_stop_signals():
        view = RunReader(Path(options.run)).read()
        found = diagnose(view, read_last_states(view), stack_of)
        print(json.dumps(diagnosis_json(found)) if options.json else diagnosis_text(found))
        if options.picture is not None:
            from megascale.operate.show.charts.wait_picture import wait_picture

            with writing(options.picture):
                write_text(options.picture, wait_picture(found))
    return Exit.OK


def _print_slow(options: argparse.Namespace) -> None:
    """Print the findings about the run's event store, the costliest first, and then those that are over."""
    from megascale.operate.diagnose.slow.cube_queries import read_places
    from megascale.operate.diagnose.slow.findings import crowd_note, findings
    from megascale.operate.store.reading import read_store

    reading = read_store(options.run, lambda store: (findings(store), crowd_note(read_places(store))))
    found, note = reading.value
    warn([*reading.notes, *filter(None, [note])])
    if options.json:
        print(json.dumps({"findings": [finding.to_json() for finding in found]}))
        return
    if not any(finding.until is None for finding in found):
        print("nothing slows the run down that its event store shows")
    for finding in found:
        print(finding, *finding.evidence, sep="\n    ")


def _print_mfu(options: argparse.Namespace) -> None:
    """Print the waterfall from the peak to the achieved MFU, and what has changed since the start."""
    from megascale.operate.diagnose.slow.cube_queries import peak_flops, read_places, recent_cube, sampled_cube
    from megascale.operate.diagnose.slow.drift import drift
    from megascale.operate.diagnose.slow.findings import crowd_note
    from megascale.operate.show.run_breakdown import BUBBLE_STEPS, run_breakdown
    from megascale.operate.store.query import StoreError
    from megascale.operate.store.reading import read_store
    from megascale.operate.store.table_files import STORE_FOLDER

    folder = Path(options.run)
    if folder.name == STORE_FOLDER and is_file(folder.resolve().parent / CONFIG_FILE):
        folder = folder.resolve().parent

    def read(store: duckdb.DuckDBPyConnection) -> tuple[MfuBreakdown | None, Drift, str]:
        breakdown = run_breakdown(store, folder, recent_cube(store, BUBBLE_STEPS))
        return breakdown, drift(sampled_cube(store), peak_flops(store)), crowd_note(read_places(store))

    reading = read_store(options.run, read)
    breakdown, change, note = reading.value
    warn([*reading.notes, *filter(None, [note])])
    if breakdown is None:
        raise StoreError(f"{options.run}: no complete step yet", hint="rows come some seconds after their step")
    if options.json:
        print(json.dumps({"breakdown": breakdown.to_json(), "drift": change.to_json()}))
        return
    print(f"steps {breakdown.first_step} to {breakdown.last_step}, {breakdown.wall_s:.4g} s, means over ranks:")
    print(breakdown.to_text(), change.to_text(), sep="\n\n")


def _print_hosts(options: argparse.Namespace) -> None:
    """Print the hosts whose newest metrics stay far from the others', the farthest first."""
    from megascale.operate.diagnose.slow.host_outliers import recent_host_outliers
    from megascale.operate.store.query import StoreError
    from megascale.operate.store.reading import read_store

    reading = read_store(options.run, recent_host_outliers, tables=("host_metrics", "ranks"))
    warn(reading.notes)
    found = reading.value
    if not found.hosts:
        what = f"{options.run}: the event store has no metrics of hosts"
        raise StoreError(what, hint="agents of megascale launch write them, and others with observe.metrics_port")
    print(json.dumps(found.to_json()) if options.json else found)
