"""The tokens of a rank, as routers have them: their positions in sequences, and which of them are padding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megascale.device import copy_to_device
from megascale.layout.sequence_shard import TokenSpan, cut
from megascale.parallel.microbatch import MicroBatch


@dataclass(frozen=True)
class RankTokens:
    """Position after position of `micro` sequences of `length` tokens. `tp_index`: of this rank, which has the
    positions of its shard in the order of tp. The micro-batches of all `dp` ranks have consecutive samples, the rank's
    own at `dp_index`.
    """

    length: int
    micro: int
    tp_index: int = 0
    dp: int = 1
    dp_index: int = 0

    def positions(self, count: int, batch: MicroBatch, device: torch.device) -> Tensor:
        """Return the position in its sequence of each of the rank's `count` tokens [t], i64."""
        spans = (TokenSpan(0, self.length),) if batch.shard is None else batch.shard.spans
        rows = count // self.micro
        mine = cut(spans, self.tp_index * rows, (self.tp_index + 1) * rows)
        found = torch.cat([torch.arange(*span, device=device) for span in mine])
        return found.repeat_interleave(self.micro, output_size=count)

    def padding(self, count: int, batch: MicroBatch) -> Tensor | None:
        """Return a mask [t, 1] of the padding among the rank's `count` tokens; None if the micro-batch has none."""
        found = batch.boundaries
        if found is None or not found.padded:
            return None
        ends = found.shared("ends", lambda: copy_to_device(np.array(found.filled), found.device))
        return (self.positions(count, batch, found.device) >= ends.repeat(count // self.micro)).unsqueeze(1)
