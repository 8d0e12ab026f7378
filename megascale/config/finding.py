"""The result of a rule that a configuration breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """A broken rule: the key to change, what is wrong, and a hint."""

    key: str
    message: str
    hint: str


Rule = Callable[[Any], Iterator[Finding]]
"""A function from a configuration's sections (attributes of the argument) to findings."""
