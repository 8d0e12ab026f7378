"""The secret that the endpoints of a job's nodes and their clients know."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megascale.core.secret import job_secret


def check_secret(arguments: Mapping[str, Any]) -> bytes:
    """Return the job's secret, from the environment or from the file in `secret_folder` (`core.secret`).

    Raises: ConfigError
    """
    folder = arguments.get("secret_folder")
    return job_secret(Path(folder) if folder else None)
