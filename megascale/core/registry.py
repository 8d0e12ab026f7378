"""Registries of named choices: a `Card` describes an implementation without importing the module.

A card's target is `module:attribute`, imported only on use: a configuration is checked and a job planned without torch.
Other packages add cards through entry points in the registry's group. `closest_name` finds the name behind a typo,
`closest_names` similar ones.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
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

    @property
    def built_in(self) -> bool:
        """True for megascale's own implementation."""
        return self.target.startswith("megascale.")

    def load(self) -> Any:
        """Import and return the implementation."""
        module, _, attribute = self.target.partition(":")
        return getattr(importlib.import_module(module), attribute)


class CardError(MegascaleError):
    """A plug-in that is not installed, such as by the name in another host's configuration, or has a mistake."""

    exit_status = Exit.CONFIG


class Registry:
    """The cards of one kind: megascale's, and other packages' from the entry point group `group`.

    `synonyms`: other systems' names with the card that is meant, or "" where no card is, whatever the spelling.
    `facts`: all that cards have, with the values for plug-ins that give others; none: cards may have any.
    """

    def __init__(
        self, kind: str, group: str, cards: Iterable[Card], synonyms: Mapping[str, str] = MappingProxyType({}),
        facts: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.kind = kind
        self._facts = facts
        self._synonyms = synonyms
        self.group = group
        self._builtin_cards = tuple(cards)

    @cached_property
    def cards(self) -> dict[str, Card]:
        """All cards by name. Raises: CardError for a plug-in without a card, with a name in use, or unknown facts"""
        cards = {card.name: card for card in self._builtin_cards}
        for point in installed_entry_points().select(group=self.group):
            try:
                card = self.complete(point.load())
            except Exception as error:
                message = f"{self.kind} of {point.value} is no card: {type(error).__name__}: {error}"
                raise CardError(message, hint="repair or uninstall its package") from error
            if card.name in cards:
                raise CardError(
                    f"{self.kind} {card.name!r} is registered twice, the second time by {point.value}",
                    hint="rename the card, or uninstall one of the packages",
                )
            cards[card.name] = card
        return cards

    def complete(self, card: Card) -> Card:
        """Add the facts that a plug-in's card leaves out. Raises: ValueError for unknown ones"""
        if self._facts and (unknown := sorted(card.facts.keys() - self._facts)):
            raise ValueError(f"the unknown fact {unknown[0]!r}, none of {', '.join(self._facts)}")
        return replace(card, facts={**self._facts, **card.facts})

    def nearest(self, name: str, also: Iterable[str] = ()) -> str | None:
        """Return the card, or name of `also`, that `name` means or is close to; None without one."""
        if (meant := self._synonyms.get(name.lower())) is not None:
            return meant or None
        return closest_name(name, [*also, *self.names()])

    def names(self) -> list[str]:
        return list(self.cards)

    def __getitem__(self, name: str) -> Card:
        """Return the card of a name. Raises: CardError"""
        if name in self.cards:
            return self.cards[name]
        message = f"the {self.kind} {name!r} is not installed on this host"
        raise CardError(message, hint=f"install the package with this entry point of {self.group}")
