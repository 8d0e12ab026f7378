"""Failed imports of torch, explained: torch reads environment variables as it is imported. No import of torch here."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping

from megascale.core.errors import ConfigError, Problem

PREFIXES = ("TORCH_LOGS", "TORCH_TRACE", "TORCH_DEVICE")
"""Beginnings of the names of environment variables that torch reads as it is imported."""

MAX_CHARACTERS = 200


def torch_import_problem(error: BaseException, env: Mapping[str, str] = os.environ) -> ConfigError | None:
    """The error of a user for an error that `import torch` raised, with torch's variables that are set; None for other
    errors.
    """
    frames = traceback.walk_tb(error.__traceback__)
    if not any(frame.f_code.co_name == "<module>" and frame.f_globals["__name__"] == "torch" for frame, _ in frames):
        return None
    said = " ".join(str(error).split()) or type(error).__name__
    said = said if len(said) <= MAX_CHARACTERS else f"{said[:MAX_CHARACTERS]}..."
    variables = sorted(name for name in env if name.startswith(PREFIXES))
    hint = f"correct or unset {', '.join(variables)}" if variables else "install torch anew"
    return ConfigError([Problem("environment", "", f"torch cannot be imported: {said}", hint)])
