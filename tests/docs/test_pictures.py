"""Pictures of the pages are shown, and their texts are in the field's words."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest

from tests.docs.test_language import PAGES, ROOT, foreign

PICTURES = sorted((ROOT / "docs/pictures").iterdir())
DRAWINGS = [path for path in PICTURES if path.suffix == ".svg"]
TEXT = re.compile(r"<(?:text|tspan|title)\b[^>]*>([^<]+)<|<!-- (.+?) -->")
"""Texts of a drawing; matplotlib draws some as outlines, with the text as a comment."""

SHOWN = re.compile(r"pictures/([\w.-]+)")


def texts(drawing: str) -> list[str]:
    return [unescape(text or comment) for text, comment in TEXT.findall(drawing)]


@pytest.mark.parametrize("picture", DRAWINGS, ids=lambda path: path.name)
def test_a_picture_s_words_are_the_field_s(picture: Path) -> None:
    found = texts(picture.read_text(encoding="utf-8"))
    assert found
    assert not [f"{text} -> {ours}" for text in found for ours in foreign(text)]


def test_every_picture_is_shown_and_there() -> None:
    shown = {name for page in PAGES for name in SHOWN.findall(page.read_text(encoding="utf-8"))}
    assert shown == {path.name for path in PICTURES}


def test_texts_of_all_kinds_are_found() -> None:
    drawing = "<svg><title>spoilt &amp; sent</title><text x='1'>8-bit products</text><!-- eight bits --></svg>"
    assert texts(drawing) == ["spoilt & sent", "8-bit products", "eight bits"]
    assert all(foreign(text) for text in texts(drawing))
