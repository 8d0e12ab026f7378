"""Numbers in environment variables, checked like keys of a configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping

from megascale.core.errors import ConfigError, Problem

MAX_DIGITS = 10  # most digits of a number in a variable; the largest are Slurm's job numbers, below 2^32


def whole_number(
    env: Mapping[str, str],
    name: str,
    default: int = 0,
    *,
    least: int = 0,
    most: int = 10**MAX_DIGITS,
    hint: str = "unset the variable, or start the ranks with torchrun or srun",
) -> int:
    """Read a whole number from `least` to `most`; `default` for a variable that is not set.

    Raises: ConfigError for anything else.
    """
    text = env.get(name, str(default)).strip()
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError([Problem("environment", name, f"{_shortened(text)!r} is not a whole number", hint)])
    if len(text.lstrip("0")) > MAX_DIGITS or not least <= int(text) <= most:
        bounds = f"from {least} to {most}" if most < 10**MAX_DIGITS else f"of {least} or more"
        raise ConfigError([Problem("environment", name, f"{_shortened(text)} is not a number {bounds}", hint)])
    return int(text)


def openmp_threads(env: Mapping[str, str] = os.environ) -> int | None:
    """The threads of OMP_NUM_THREADS, of its first level if it is a list; None if it is not set.

    Raises: ConfigError for a value that is not a number above 0.
    """
    if not env.get("OMP_NUM_THREADS"):
        return None
    first = env["OMP_NUM_THREADS"].partition(",")[0]
    hint = "unset the variable, or give a number of threads"
    return whole_number({"OMP_NUM_THREADS": first}, "OMP_NUM_THREADS", least=1, most=2**16, hint=hint)


def _shortened(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."
