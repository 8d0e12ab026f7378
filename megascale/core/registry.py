"""What can be chosen by name: cards that describe a thing without importing it, and the nearest name to a typo.

A card's body is `module:attribute`, imported only when the thing is used, so that configuration can be checked and
jobs planned where torch is not installed. Other packages add cards through entry points in the group of the registry.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.metadata import entry_points
from typing import Any

from megascale.core.errors import MegascaleError


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The known name most like `name`, large letters or small, or None if none is close."""
    known = {each.lower(): each for each in names}
    found = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.6)
    return known[found[0]] if found else None


@cache
def installed() -> Any:
    """What all packages register: one look at their metadata serves every registry."""
    return entry_points()


@dataclass(frozen=True)
class Card:
    """One choosable thing: its name, a line of help, where its body is, and the facts a planner needs."""

    name: str
    help: str
    body: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> Any:
        """Import and return the body."""
        module, _, attribute = self.body.partition(":")
        return getattr(importlib.import_module(module), attribute)


class Registry:
    """The cards of one kind, ours and those that other packages registered under `group`."""

    def __init__(self, kind: str, group: str, cards: Iterable[Card]) -> None:
        self.kind = kind
        self.group = group
        self._own = tuple(cards)

    @cached_property
    def cards(self) -> dict[str, Card]:
        """All cards by name.

        Raises: MegascaleError if a plug-in takes a name that is already in use.
        """
        cards = {card.name: card for card in self._own}
        for point in installed().select(group=self.group):
            card: Card = point.load()
            if card.name in cards:
                raise MegascaleError(
                    f"{self.kind} {card.name!r} is registered twice, the second time by {point.value}",
                    mend="rename it or uninstall one of the packages",
                )
            cards[card.name] = card
        return cards

    def names(self) -> list[str]:
        return list(self.cards)

    def __getitem__(self, name: str) -> Card:
        return self.cards[name]
