"""The result of a rule that a configuration breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """A broken rule: the key to change, what is wrong, and how to mend it."""

    key: str
    found: str
    mend: str


Rule = Callable[[Any], Iterator[Finding]]
"""Takes the sections of a configuration as attributes."""
