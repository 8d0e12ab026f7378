"""`megascale report`: what is known about a run as one HTML file, without torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from megascale.cli.arguments import own_file
from megascale.cli.command_output import warn, writing
from megascale.core.errors import Exit
from megascale.core.files import write_text


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    from megascale.operate.show.html_report import FILE_START

    sub.add_argument("folder", metavar="RUN", type=Path, help="the run's folder")
    output = "the report (default: RUN/report.html)"
    sub.add_argument("--output", metavar="FILE.html", type=own_file(".html", FILE_START), help=output)


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    from megascale.operate.show.charts.timeline import render_svg
    from megascale.operate.show.html_report import render_report
    from megascale.operate.show.run_reader import RunReader
    from megascale.operate.show.step_events import pictured_events
    from megascale.operate.show.store_view import read_store_view
    from megascale.operate.store.query import StoreError

    view = RunReader(options.folder).read()
    notes = list[str]()
    store = None
    try:
        store = read_store_view(options.folder)
    except StoreError as error:
        notes.append(f"without the analyses of events: {error.message}")
    notes += store.notes if store is not None else ()
    warn(notes)
    events = pictured_events(options.folder, view.topology)
    report = render_report(view, store, render_svg(events) if events else "", notes)
    path = options.output or options.folder / "report.html"
    with writing(path):
        write_text(path, report)
    print(f"{path}: {len(report.encode()) / 1024:.0f} KiB, open it in a browser")
    return Exit.OK
