"""Fields and text of labels."""

from __future__ import annotations

import pytest

from megascale.record.label import BACKWARD, FORWARD, Label

QKV = Label.for_layer(3, "qkv")


@pytest.mark.parametrize(
    ("label", "text"),
    [
        (Label(), ""),
        (Label.from_part("totals"), "totals"),
        (QKV, "layer 3 qkv"),
        (Label.for_layer(0, "up").with_suffix("2/4"), "layer 0 up 2/4"),
        (QKV.for_backward("gradient").with_suffix("1/2"), "layer 3 qkv gradient 1/2"),
        (Label().with_suffix("1/2"), "1/2"),
        (Label(stage=0, direction=FORWARD), "forward stage 0"),
    ],
)
def test_the_text(label: Label, text: str) -> None:
    assert label.text() == text


def test_a_message_names_its_micro_batch() -> None:
    assert Label(stage=5, direction=BACKWARD).text(2) == "backward m2 stage 5"
    assert QKV.text(2) == "layer 3 qkv", "only labels of pipeline messages show the micro-batch"


def test_suffixes_keep_layer_and_stage() -> None:
    assert QKV.with_suffix("scales") == Label("qkv scales", 3, -1, FORWARD)
    assert QKV.for_backward("again") == Label("qkv again", 3, -1, BACKWARD)
    assert Label.from_part(QKV) is QKV
