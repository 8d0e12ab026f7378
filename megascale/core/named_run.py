"""The folder of a run as a user names it: one error for a path without a run, which offers the runs that are near."""

from __future__ import annotations

import contextlib
from pathlib import Path

from megascale.core.errors import Exit, MegascaleError
from megascale.core.files import exists, is_file, is_folder
from megascale.core.registry import closest_name

CONFIG_FILE = "config.toml"

USUAL_PARENT = Path("runs")  # the default of output_dir

MOST_OFFERED = 5


class RunFolderError(MegascaleError):
    """A folder that is not a run's, or a file in it that cannot be read."""

    exit_status = Exit.CONFIG


def no_run(path: str | Path) -> RunFolderError:
    """Return the error for a path, or a URL, at which there is no run."""
    folder = Path(path)
    if "://" in str(path) or not exists(folder):
        problem = "no such folder"
    else:
        problem = f"not a run's folder: it has no {CONFIG_FILE}" if is_folder(folder) else "not a folder"
    parents = dict.fromkeys((folder, folder.parent, USUAL_PARENT))
    near = {str(run): run.name for parent in parents for run in _runs(parent)}
    close = closest_name(folder.name, near.values())
    alike = [run for run, name in near.items() if name == close][:1] or [*near][:MOST_OFFERED]
    hint = "give a run's folder: output_dir/name of its configuration"
    if alike:
        hint = f"did you mean {alike[0]}?" if close else f"a run's folder, such as {', '.join(alike)}"
    return RunFolderError(f"{path}: {problem}", hint=hint)


def check_run(folder: Path) -> None:
    """Check that a folder is a run's that has trained. Raises: RunFolderError"""
    if not is_file(folder / CONFIG_FILE):
        raise no_run(folder)


def _runs(parent: Path) -> list[Path]:
    """List the runs in a folder, the newest first."""
    with contextlib.suppress(OSError):
        files = sorted(parent.glob(f"*/{CONFIG_FILE}"), key=lambda file: -file.stat().st_mtime)
        return [file.parent for file in files]
    return []
