"""Frozen parameters: those that training leaves as they are (`train.freeze`).

A parameter is frozen if the patterns match the names of all of its tensors: q, k and v, which share a weight, are
trained or frozen together. It has weights alone: no gradient, optimizer state, reduction, weight decay or share of the
gradient norm. Backward computes the gradient of its layer's input (dgrad), also before the first trained parameter,
and not that of its weight (wgrad).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from megascale.layout.tensors import ParamSpec


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return True if a pattern matches the name of a tensor."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def mark_frozen(parameters: Iterable[ParamSpec], patterns: Sequence[str]) -> list[ParamSpec]:
    """Return parameters, of which those that the patterns match are `frozen`."""
    return [
        replace(parameter, frozen=True) if all(matches(part.name, patterns) for part in parameter.parts) else parameter
        for parameter in parameters
    ]
