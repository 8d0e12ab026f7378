"""The pictures of the architecture are what the tool draws, and show the code's layout and schedule."""

from __future__ import annotations

import re

from megascale.layout.stages import looped
from tools import architecture_pictures
from tools.architecture_pictures import CHUNKS, MARKED, MICROBATCHES, TOPOLOGY, layout_picture, step_of


def test_the_pictures_are_current() -> None:
    for name, picture in architecture_pictures.PICTURES.items():
        assert (architecture_pictures.FOLDER / name).read_text(encoding="utf-8") == picture() + "\n", "make docs"


def test_every_rank_is_drawn_and_the_marked_rank_s_pipeline_is_named() -> None:
    texts = re.findall(r"<text[^>]*>([^<]+)<", layout_picture())
    assert {str(rank) for rank in range(TOPOLOGY.world_size)} <= set(texts)
    assert [text for text in texts if re.fullmatch(r"rank \d+", text)] == [
        f"rank {rank}" for rank in TOPOLOGY.group(MARKED, "pp")
    ]


def test_the_step_has_every_action_once() -> None:
    spans = step_of(looped(TOPOLOGY.pp, CHUNKS)).spans
    actions = [(span.rank, span.action) for span in spans if span.row == "compute"]
    assert len(actions) == len(set(actions)) == 2 * TOPOLOGY.pp * CHUNKS * MICROBATCHES
