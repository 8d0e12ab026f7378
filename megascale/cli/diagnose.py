"""`megascale diagnose`: whether a run hangs, for which rank the others wait, and why; also of an ended run. With
`--slow`: what slows a run down.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megascale.cli.argument_types import own_file
from megascale.core.errors import Exit
from megascale.core.files import write_text
from megascale.core.process import exit_on_stop_signals


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    from megascale.view.charts.shapes import FILE_START

    sub.add_argument("folder", metavar="RUN", type=Path, help="the run's folder")
    slow = "say what slows the run down, from its event store, instead of whether it hangs"
    sub.add_argument("--slow", action="store_true", help=slow)
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    picture = "write a picture of who waits for whom"
    sub.add_argument("--picture", metavar="FILE.svg", type=own_file(".svg", FILE_START), help=picture)


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    if options.slow:
        return _run_slow(options)
    from megascale.view.diagnosis import diagnose
    from megascale.view.diagnosis_text import diagnosis_json, diagnosis_text
    from megascale.view.last_states import read_last_states
    from megascale.view.run_view import RunFolderError, RunReader

    with exit_on_stop_signals():
        view = RunReader(options.folder).read()
        found = diagnose(view, read_last_states(view))
        print(json.dumps(diagnosis_json(found)) if options.json else diagnosis_text(found))
        if options.picture is None:
            return Exit.OK
        from megascale.view.charts.wait_picture import wait_picture

        try:
            write_text(options.picture, wait_picture(found))
        except OSError as error:
            what = f"{options.picture}: cannot be written: {error.strerror}"
            raise RunFolderError(what, hint="give another file") from None
    return Exit.OK


def _run_slow(options: argparse.Namespace) -> int:
    """Print the findings about the run's event store, the costliest first."""
    from megascale.eventstore.query import open_store
    from megascale.observe.findings import findings
    from megascale.view.run_view import RunFolderError

    if options.picture is not None:
        raise RunFolderError("--picture shows who waits for whom in a run that hangs", hint="leave --slow out")
    with exit_on_stop_signals():
        found = findings(open_store(options.folder))
    if options.json:
        print(json.dumps([finding.to_json() for finding in found]))
    for finding in () if options.json else found:
        print(finding, *finding.evidence, sep="\n    ")
    if not found and not options.json:
        print("nothing slows the run down that its event store shows")
    return Exit.OK
