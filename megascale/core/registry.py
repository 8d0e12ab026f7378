"""Registries of named choices: a `Card` describes an implementation without importing the module.

A card's target is `module:attribute`, imported only on use: a configuration is checked and a job planned without torch.
Other packages add cards through entry points in the registry's group. `closest_name` finds the name behind a typo,
`closest_names` similar ones.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any

from megascale.core.errors import Exit, MegascaleError


def closest_name(name: str, names: Iterable[str]) -> str | None:
    """Return the known name closest to `name`, ignoring case; None if no name is close. Other digits are no typing
    error: fp16 is not close to fp64.
    """
    digits = _digits(name)
    known = {known.lower(): known for known in names if not (digits and _digits(known)) or digits == _digits(known)}
    matches = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.6)
    return known[matches[0]] if matches else None


def closest_names(name: str, names: Iterable[str], most: int) -> list[str]:
    """Return up to `most` known names that are similar to `name`, the closest first, also with other digits."""
    known = {known.lower(): known for known in names}
    return [known[match] for match in difflib.get_close_matches(name.lower(), list(known), n=most, cutoff=0.4)]


def _digits(name: str) -> list[str]:
    return sorted(character for character in name if character.isdecimal())


@cache
def installed_entry_points() -> Any:
    """Entry points of all installed packages, read once for all registries."""
    return entry_points()


@dataclass(frozen=True)
class Card:
    """A named choice: name, one line of help, `module:attribute` of the implementation, and facts for the planner."""

    name: str
    help: str
    target: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> Any:
        """Import and return the implementation."""
        module, _, attribute = self.target.partition(":")
        return getattr(importlib.import_module(module), attribute)


class MissingCardError(MegascaleError):
    """A name, such as of another host's configuration, whose plug-in is not installed."""

    exit_status = Exit.CONFIG


class Registry:
    """The cards of one kind: megascale's, and other packages' from the entry point group `group`.

    `synonyms`: other systems' names with the card that is meant, or "" where no card is, whatever the spelling.
    """

    def __init__(
        self, kind: str, group: str, cards: Iterable[Card], synonyms: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.kind = kind
        self._synonyms = synonyms
        self.group = group
        self._builtin_cards = tuple(cards)

    @cached_property
    def cards(self) -> dict[str, Card]:
        """All cards by name. Raises: MegascaleError if a plug-in's name is already in use"""
        cards = {card.name: card for card in self._builtin_cards}
        for point in installed_entry_points().select(group=self.group):
            card: Card = point.load()
            if card.name in cards:
                raise MegascaleError(
                    f"{self.kind} {card.name!r} is registered twice, the second time by {point.value}",
                    hint="rename the card, or uninstall one of the packages",
                )
            cards[card.name] = card
        return cards

    def nearest(self, name: str, also: Iterable[str] = ()) -> str | None:
        """Return the card, or name of `also`, that `name` means or is close to; None without one."""
        if (meant := self._synonyms.get(name.lower())) is not None:
            return meant or None
        return closest_name(name, [*also, *self.names()])

    def names(self) -> list[str]:
        return list(self.cards)

    def __getitem__(self, name: str) -> Card:
        """Return the card of a name. Raises: MissingCardError"""
        if name in self.cards:
            return self.cards[name]
        message = f"the {self.kind} {name!r} is not installed on this host"
        raise MissingCardError(message, hint=f"install the package with this entry point of {self.group}")
