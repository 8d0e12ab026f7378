"""The order of a ring's messages and of attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megascale.layout.sequence_shard import SequenceShard, TokenSpan
from megascale.ops.core_attention import AttentionMask
from megascale.parallel import kv_exchange
from megascale.parallel.kv_exchange import RingKV, VisibleScores

PARTS = ((TokenSpan(0, 4),), (TokenSpan(4, 8),))


class Message:
    """A message whose wait is recorded."""

    def __init__(self, moments: list[str]) -> None:
        self._moments = moments

    def wait(self) -> None:
        self._moments.append("wait")


@pytest.mark.parametrize(
    ("overlap", "expected"),
    [(True, ["send", "attend", "wait", "attend"]), (False, ["send", "wait", "attend", "attend"])],
)
def test_keys_travel_during_attention_or_before_it(
    overlap: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    moments: list[str] = []

    def send_on(group: Any, out: torch.Tensor, into: torch.Tensor, *ranks: int, label: Any) -> Message:
        moments.append("send")
        return Message(moments)

    monkeypatch.setattr(kv_exchange, "send_on", send_on)
    group: Any = object()
    ring = RingKV(group, VisibleScores(SequenceShard(8, PARTS, 0), AttentionMask()), layer=0, overlap=overlap)
    ring.forward(torch.zeros(2, 1, 1, 4, 2), lambda block, blocks: moments.append("attend"))
    assert moments == expected
