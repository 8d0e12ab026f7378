"""Distributions of sequence lengths (`parse_lengths`), in tokens, to draw the sequences of a step from.

    fixed:length=4096
    lognormal:median=2000,sigma=1.8
    pareto:min=500,alpha=1.2                     a long tail: P(length > x) = (min / x)^alpha
    shares:1024=0.9,4096=0.08,32768=0.019,262144=0.001     shares of lengths up to each, evenly in log(length)

Lengths of any are cut at the context length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megascale.core.errors import ConfigError, Problem
from megascale.core.registry import closest_name

Draw = Callable[[np.random.Generator, int], np.ndarray]
"""A number of lengths, as floats, drawn by a generator."""

BLOCK = 4096  # lengths drawn at a time


@dataclass(frozen=True)
class LengthDistribution:
    """Lengths of sequences, at most `longest`. `name`: as the user gave it."""

    name: str
    draw: Draw
    longest: int

    def step(self, generator: np.random.Generator, tokens: int) -> list[int]:
        """Draw sequences with at most `tokens` in sum, and with the next more: one sequence at least."""
        lengths, total = list[int](), 0
        while True:
            for length in np.clip(self.draw(generator, BLOCK), 1, self.longest).astype(int).tolist():
                if lengths and total + length > tokens:
                    return lengths
                lengths.append(length)
                total += length


def of_lengths(name: str, lengths: Sequence[int] | np.ndarray, longest: int) -> LengthDistribution:
    """Draw from given lengths, such as a dataset's; longer ones are cut into pieces of `longest`.

    Raises: ConfigError without lengths
    """
    given = np.asarray(lengths, dtype=np.int64)
    given = given[given > 0]
    if not given.size:
        raise ConfigError([Problem("command line", "--lengths", f"{name} has no documents", "give another dataset")])
    rests, whole = given % longest, int((given // longest).sum())
    pieces = np.concatenate([rests[rests > 0], np.full(whole, longest)])
    return LengthDistribution(name, lambda generator, count: generator.choice(pieces, count), longest)


def parse_lengths(text: str, longest: int) -> LengthDistribution:
    """Parse a distribution, as kind:key=value,...

    Raises: ConfigError that says what is expected
    """
    name, _, rest = text.partition(":")
    if name not in KINDS:
        close = closest_name(name, KINDS)
        hint = f"did you mean '{close}'?" if close else f"one of {', '.join(KINDS)}, or the prefix of a dataset"
        raise ConfigError([Problem("command line", f"--lengths {text}", f"there is no distribution '{name}'", hint)])
    kind = KINDS[name]
    try:
        values = {key.strip(): float(value) for key, value in (pair.split("=") for pair in rest.split(","))}
        if kind.keys and (
            values.keys() != set(kind.keys) or not all(0 < value < math.inf for value in values.values())
        ):
            raise ValueError(f"the keys are {', '.join(kind.keys)}")
        return LengthDistribution(text, kind.draw(values), longest)
    except ValueError:
        what, hint = f"the values of {name} cannot be read", f"write it as {kind.example}"
        raise ConfigError([Problem("command line", f"--lengths {text}", what, hint)]) from None


def _shares(values: Mapping[str, float]) -> Draw:
    """Draw from shares of lengths up to each. Raises: ValueError"""
    ends, shares = np.array([float(key) for key in values]), np.array([*values.values()])
    ascending = np.isfinite(ends).all() and np.all(np.diff(ends) > 0) and ends[0] >= 1
    if not ascending or np.any(shares < 0) or not math.isclose(shares.sum(), 1, abs_tol=0.01):
        raise ValueError("lengths must be finite and ascend, and shares sum to 1")
    starts = np.array([max(1.0, ends[0] / 16), *ends[:-1]])

    def draw(generator: np.random.Generator, count: int) -> np.ndarray:
        level = generator.choice(len(ends), count, p=shares / shares.sum())
        return starts[level] * (ends[level] / starts[level]) ** generator.random(count)

    return draw


class Distribution(NamedTuple):
    """A kind of distribution: an example, its `keys`, all above 0, and what `draw`s with their values."""

    example: str
    keys: tuple[str, ...]
    draw: Callable[[Mapping[str, float]], Draw]


KINDS = {
    "fixed": Distribution(
        "fixed:length=4096", ("length",), lambda v: lambda generator, count: np.full(count, v["length"])
    ),
    "lognormal": Distribution(
        "lognormal:median=2000,sigma=1.8",
        ("median", "sigma"),
        lambda v: lambda generator, count: generator.lognormal(math.log(v["median"]), v["sigma"], count),
    ),
    "pareto": Distribution(
        "pareto:min=500,alpha=1.2",
        ("min", "alpha"),
        lambda v: lambda generator, count: v["min"] * (1 + generator.pareto(v["alpha"], count)),
    ),
    "shares": Distribution("shares:1024=0.9,32768=0.099,262144=0.001", (), _shares),
}
