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

BLOCK = 4096
"""Lengths drawn at a time."""


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
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        close = closest_name(kind, KINDS)
        hint = f"did you mean '{close}'?" if close else f"one of {', '.join(KINDS)}, or the prefix of a dataset"
        raise _mistake(text, f"there is no distribution '{kind}'", hint)
    try:
        values = {key.strip(): float(value) for key, value in (pair.split("=") for pair in rest.split(","))}
        return LengthDistribution(text, KINDS[kind].make(values), longest)
    except (ValueError, KeyError):
        raise _mistake(text, f"the values of {kind} cannot be read", f"write it as {KINDS[kind].example}") from None


def _mistake(text: str, what: str, hint: str) -> ConfigError:
    return ConfigError([Problem("command line", f"--lengths {text}", what, hint)])


def _exactly(values: Mapping[str, float], *keys: str) -> list[float]:
    """Return the values of keys. Raises: ValueError for other keys, and for values that are not above 0."""
    if values.keys() != set(keys) or not all(0 < value < math.inf for value in values.values()):
        raise ValueError(f"the keys are {', '.join(keys)}")
    return [values[key] for key in keys]


def _fixed(values: Mapping[str, float]) -> Draw:
    (length,) = _exactly(values, "length")
    return lambda generator, count: np.full(count, length)


def _lognormal(values: Mapping[str, float]) -> Draw:
    median, sigma = _exactly(values, "median", "sigma")
    return lambda generator, count: generator.lognormal(math.log(median), sigma, count)


def _pareto(values: Mapping[str, float]) -> Draw:
    least, alpha = _exactly(values, "min", "alpha")
    return lambda generator, count: least * (1 + generator.pareto(alpha, count))


def _shares(values: Mapping[str, float]) -> Draw:
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
    """A kind of distribution: `make` raises ValueError for values that it cannot have."""

    make: Callable[[Mapping[str, float]], Draw]
    example: str


KINDS = {
    "fixed": Distribution(_fixed, "fixed:length=4096"),
    "lognormal": Distribution(_lognormal, "lognormal:median=2000,sigma=1.8"),
    "pareto": Distribution(_pareto, "pareto:min=500,alpha=1.2"),
    "shares": Distribution(_shares, "shares:1024=0.9,32768=0.099,262144=0.001"),
}
