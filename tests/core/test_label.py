"""Labels: fields that programs read, and the text that people do."""

from __future__ import annotations

import pytest

from megascale.core.label import BACKWARD, FORWARD, Label

QKV = Label.of_layer(3, "qkv")


@pytest.mark.parametrize(
    ("label", "text"),
    [
        (Label(), ""),
        (Label.of("totals"), "totals"),
        (QKV, "layer 3 qkv"),
        (Label.of_layer(0, "up").then("2/4"), "layer 0 up 2/4"),
        (QKV.backward("gradient").then("1/2"), "layer 3 qkv gradient 1/2"),
        (Label().then("1/2"), "1/2"),
        (Label(stage=0, direction=FORWARD), "forward stage 0"),
    ],
)
def test_the_text(label: Label, text: str) -> None:
    assert label.text() == text


def test_a_message_names_its_micro_batch() -> None:
    assert Label(stage=5, direction=BACKWARD).text(2) == "backward m2 stage 5"
    assert QKV.text(2) == "layer 3 qkv", "what a layer sends has its micro-batch in a field alone"


def test_what_belongs_to_a_tensor_keeps_its_place() -> None:
    assert QKV.then("scales") == Label("qkv scales", 3, -1, FORWARD)
    assert QKV.backward("again") == Label("qkv again", 3, -1, BACKWARD)
    assert Label.of(QKV) is QKV
