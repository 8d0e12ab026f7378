"""The result of a rule that a configuration breaks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A broken rule: the key to change, what is wrong, and a hint."""

    key: str
    message: str
    hint: str
