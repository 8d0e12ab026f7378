"""Rules between keys: a rule yields a finding for everything that is wrong with the sections it reads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Finding:
    """A broken rule: the key to change, what is wrong, and a hint."""

    key: str
    message: str
    hint: str


Test = Callable[[object], bool]


def only(*values: object) -> Test:
    """Return a test of a value that is one of `values`."""
    return lambda value: value in values


def unless(*values: object) -> Test:
    """Return a test of a value that is none of `values`."""
    return lambda value: value not in values


@dataclass(frozen=True)
class Exclusions:
    """What other keys may be while the value of `key` passes the test `when`. `rows`: a key, the test that its value
    must pass, and message and hint of the finding for one that fails. A message may name the `{value}` of its key, the
    `{given}` value of `key`, and the last part of `key`, its `{name}`.
    """

    key: str
    when: Test
    rows: tuple[tuple[str, Test, str, str], ...]

    @property
    def sections(self) -> tuple[str, ...]:
        """The sections with these keys."""
        return tuple(dict.fromkeys(key.partition(".")[0] for key in (self.key, *(row[0] for row in self.rows))))

    def __call__(self, **sections: Any) -> list[Finding]:
        """Judge sections by name."""

        def read(key: str) -> object:
            section, _, name = key.partition(".")
            return getattr(sections[section], name)

        if not self.when(given := read(self.key)):
            return []
        name, values = self.key.rpartition(".")[2], [read(key) for key, _, _, _ in self.rows]
        return [
            Finding(key, message.format(value=value, given=given, name=name), hint)
            for value, (key, passes, message, hint) in zip(values, self.rows, strict=True)
            if not passes(value)
        ]


Rule = Callable[..., Iterable[Finding]]
"""A rule takes sections by their names."""


class InvalidValueError(Exception):
    """A rule has read a key without a valid value, and judges nothing."""


@cache
def sections_of(rule: Rule) -> frozenset[str]:
    """Return the names of the sections that a rule reads: of a function, its parameters."""
    return frozenset(rule.sections if isinstance(rule, Exclusions) else inspect.signature(rule).parameters)


def run_rules(rules: Iterable[Rule], sections: Mapping[str, Any]) -> Iterator[Finding]:
    """Run the rules whose sections are all there."""
    for rule in rules:
        if sections_of(rule) <= sections.keys():
            try:
                yield from rule(**{name: sections[name] for name in sections_of(rule)})
            except InvalidValueError:
                continue
