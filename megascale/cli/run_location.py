"""A path or URL of a run, a checkpoint or weights that a user gives: something must be there."""

from __future__ import annotations

from megascale.core.named_run import no_run
from megascale.core.storage import Location


def run_location(text: str) -> Location:
    """Return where a run, a checkpoint or weights are. Raises: RunFolderError if there is no folder"""
    location = Location(text)
    if not location.is_folder():
        raise no_run(text)
    return location
