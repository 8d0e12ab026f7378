"""`megascale diagnose`: whether a run hangs, for which rank the others wait, and why; also of an ended run."""

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
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    picture = "write a picture of who waits for whom"
    sub.add_argument("--picture", metavar="FILE.svg", type=own_file(".svg", FILE_START), help=picture)


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
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
