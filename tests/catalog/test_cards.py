"""Cards have help, unique names, equal facts, and targets to import."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import megascale.catalog
from megascale.config.model import ModelConfig
from megascale.core.registry import Card, Registry


def _registries() -> list[Registry]:
    names = [module.name for module in pkgutil.iter_modules(megascale.catalog.__path__)]
    modules = [importlib.import_module(f"megascale.catalog.{name}") for name in names]
    registries = [value for module in modules for value in vars(module).values() if isinstance(value, Registry)]
    return list({id(registry): registry for registry in registries}.values())


REGISTRIES = _registries()
CARDS = [card for registry in REGISTRIES for card in registry._builtin_cards]


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_a_card_loads(card: Card) -> None:
    assert card.load() is not None
    assert card.help and "\n" not in card.help


def test_only_the_catalog_names_functions_in_strings() -> None:
    """Import-linter sees no imports in strings, which may point upward: they stand in one room."""
    root, target = Path(megascale.__file__).parent, re.compile(r'"megascale\.[\w.]+:\w+"')
    naming = {path.relative_to(root).parts[0] for path in root.rglob("*.py") if target.search(path.read_text())}
    assert naming == {"catalog"}


def test_names_and_groups_are_unique() -> None:
    assert len(REGISTRIES) >= 7
    groups = [registry.group for registry in REGISTRIES]
    assert len(set(groups)) == len(groups)
    for registry in REGISTRIES:
        names = [card.name for card in registry._builtin_cards]
        assert len(set(names)) == len(names), registry.kind


def test_cards_of_a_kind_have_the_same_facts() -> None:
    for registry in REGISTRIES:
        facts = [set(card.facts) for card in registry._builtin_cards]
        assert all(names == facts[0] for names in facts), registry.kind


def test_defaults_are_cards() -> None:
    fields = ModelConfig.model_fields
    kinds = {registry.kind: registry for registry in REGISTRIES}
    for key in ("norm", "activation"):
        assert fields[key].default in kinds[key].names()
