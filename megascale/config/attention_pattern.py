"""The kinds of attention of a model's layers, by the letters of `model.attention_pattern`."""

from __future__ import annotations

from pydantic_core import PydanticCustomError

from megascale.catalog.layers import ATTENTIONS
from megascale.core.registry import Card


def check_attention_pattern(pattern: str) -> str:
    """Return the pattern. Raises: PydanticCustomError for a letter of no kind of attention"""
    known = {card.facts["letter"]: card.help for card in ATTENTIONS.cards.values()}
    if unknown := next((letter for letter in pattern or " " if letter not in known), None):
        context = {
            "letter": repr(unknown) if pattern else "no letter",
            "kinds": "; ".join(f"{letter}: {help}" for letter, help in known.items()),
            "hint": 'letters of these kinds, such as "LLLLLLLS", or remove the key',
        }
        raise PydanticCustomError("attention_pattern", "has {letter}; kinds of attention are {kinds}", context)
    return pattern


def kind_of_letter(letter: str) -> Card:
    """Return the kind of attention with a letter of a checked pattern."""
    return next(card for card in ATTENTIONS.cards.values() if card.facts["letter"] == letter)


def has_no_scores(pattern: object) -> bool:
    """Return True for a pattern without softmax attention."""
    return not any("attention" in kind_of_letter(letter).facts["operations"] for letter in str(pattern or "S"))


def has_states(pattern: object) -> bool:
    """Return True for a pattern with attention that carries a state."""
    return any(kind_of_letter(letter).facts["carries_state"] for letter in str(pattern or "S"))
