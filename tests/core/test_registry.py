"""Cards, plug-ins, and the closest name to a typo."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.core import registry
from megascale.core.errors import MegascaleError
from megascale.core.registry import Card, Registry, closest_name

WORDS = ["num_layers", "hidden_size", "num_heads", "seq_length", "warmup_steps"]


@given(st.sampled_from(WORDS), st.data())
def test_one_wrong_letter_finds_the_word(word: str, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(word) - 1))
    typos = [
        word[:place] + word[place + 1 :],
        word[:place] + "#" + word[place + 1 :],
        word[:place] + "#" + word[place:],
    ]
    assert [closest_name(typo, WORDS) for typo in typos] == [word] * 3


@given(st.text(), st.lists(st.text()))
def test_the_closest_name_is_a_known_name(name: str, known: list[str]) -> None:
    assert closest_name(name, known) in {None, *known}
    assert closest_name(name, [*known, name]) == name or not name


def test_nonsense_has_no_close_name() -> None:
    assert closest_name("qqq", WORDS) is None


def test_a_card_loads_its_body() -> None:
    assert Card("root", "square root", "math:sqrt").load() is math.sqrt


def _plug_in(monkeypatch: pytest.MonkeyPatch, card: Card) -> Registry:
    point = SimpleNamespace(load=lambda: card, value="other.package:CARD")
    points = SimpleNamespace(select=lambda group: [point] if group == "megascale.things" else [])
    monkeypatch.setattr(registry, "installed_entry_points", lambda: points)
    return Registry("thing", "megascale.things", [Card("ours", "help", "math:sqrt")])


def test_other_packages_add_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    things = _plug_in(monkeypatch, Card("theirs", "help", "math:cos"))
    assert things.names() == ["ours", "theirs"]
    assert things["theirs"].load() is math.cos


def test_a_name_is_not_taken_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    things = _plug_in(monkeypatch, Card("ours", "help", "math:cos"))
    with pytest.raises(MegascaleError, match=r"thing 'ours' is registered twice, .* by other\.package:CARD  -> rename"):
        things.names()


def test_a_plug_in_without_a_card_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Card:
        raise ImportError("no module")

    for load, message in ((fail, "ImportError: no module"), (lambda: 3, "AttributeError: .*")):
        point = SimpleNamespace(load=load, value="other.package:CARD")
        points = SimpleNamespace(select=lambda group, point=point: [point])
        monkeypatch.setattr(registry, "installed_entry_points", lambda points=points: points)
        with pytest.raises(MegascaleError, match=rf"thing of other\.package:CARD is no card: {message}  -> "):
            Registry("thing", "megascale.things", []).names()


def test_facts_of_a_plug_in_are_known_or_have_values(monkeypatch: pytest.MonkeyPatch) -> None:
    points = SimpleNamespace(select=lambda group: [point])
    monkeypatch.setattr(registry, "installed_entry_points", lambda: points)
    point = SimpleNamespace(load=lambda: Card("theirs", "", "math:cos", {"b": 2}), value="other.package:CARD")
    things = Registry("thing", "megascale.things", [], facts={"a": 0, "b": 1})
    assert things["theirs"].facts == {"a": 0, "b": 2}
    with pytest.raises(
        MegascaleError, match=r"thing of .* is no card: ValueError: the unknown fact 'b', none of a  -> "
    ):
        Registry("thing", "megascale.things", [], facts={"a": 0}).names()
