"""Frozen parameters: those that training leaves as they are (`train.freeze`).

A parameter is frozen if the patterns match the names of all of its tensors: q, k and v, which share a weight, are
trained or frozen together. It has weights alone: no gradient, optimizer state, reduction, weight decay or share of the
gradient norm. Backward computes the gradient of its layer's input (dgrad), and not that of its weight (wgrad).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from megascale.config.finding import Finding
from megascale.config.model import ModelConfig
from megascale.layout.tensors import ParamSpec


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return True if a pattern matches the name of a tensor."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def mark_frozen(parameters: Iterable[ParamSpec], patterns: Sequence[str]) -> list[ParamSpec]:
    """Return parameters with their `frozen` flag set as the patterns say."""
    if not patterns:
        return list(parameters)
    return [
        replace(parameter, frozen=all(matches(tensor.name, patterns) for tensor in parameter.parts))
        for parameter in parameters
    ]


def freeze_findings(model: ModelConfig, patterns: Sequence[str]) -> Iterator[Finding]:
    """Check that every pattern matches, that no weight is frozen in part, and that some parameter is trained."""
    from megascale.layout.parameters import all_params  # a layer above: blocks ask `matches`

    key, parameters = "train.freeze", all_params(model)
    tensors = [tensor.name for parameter in parameters for tensor in parameter.parts]
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in tensors):
            yield Finding(key, f"{pattern} matches no parameter", "patterns of names as in `megascale ckpt show`")
    marked = mark_frozen(parameters, patterns)
    for parameter in marked:
        names = [tensor.name for tensor in parameter.parts]
        found = [name for name in names if matches(name, patterns)]
        if found and not parameter.frozen:
            others = ", ".join(name for name in names if name not in found)
            message = f"{found[0]} is in one weight with {others}, which is trained or frozen as a whole"
            yield Finding(key, message, f"also {others}, or none of them")
            return
    if all(parameter.frozen for parameter in marked):
        yield Finding(key, "all parameters are frozen: nothing is trained", "fewer patterns")
