"""The document boundaries of a micro-batch: where positions restart, and what attention does not cross.

The host knows where documents begin; what has an element for every token is made on the device, once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from megascale.device import copy_to_device
from megascale.layout.sequence_shard import Spans

T = TypeVar("T")


@dataclass(frozen=True)
class Boundaries:
    """Documents in the rows of a micro-batch. `starts`: for each row the positions at which a document begins, of which
    the first is 0; `length`: tokens of a row, s; `padded`: whether the last document of a row is padding, which costs
    attention but is none of the model's work. Every stage derives what it needs from all of the rows, whatever part
    of the sequence it holds. The tensors are on `device`.
    """

    starts: tuple[tuple[int, ...], ...]
    length: int
    device: torch.device
    padded: tuple[bool, ...] = ()
    _shared: dict[Hashable, object] = field(default_factory=dict, compare=False, repr=False)

    def of_rows(self, rows: slice) -> Boundaries:
        """The boundaries of some rows of the micro-batch."""
        return Boundaries(self.starts[rows], self.length, self.device, self.padded[rows])

    @cached_property
    def lengths(self) -> tuple[tuple[int, ...], ...]:
        """The tokens of each document, by row."""
        return tuple(tuple(end - start for start, end in pairwise((*row, self.length))) for row in self.starts)

    @property
    def filled(self) -> tuple[int, ...]:
        """The tokens of each row, without padding."""
        padded = self.padded or (False,) * len(self.starts)
        return tuple(row[-1] if cut else self.length for row, cut in zip(self.starts, padded, strict=True))

    @property
    def real_lengths(self) -> list[int]:
        """The tokens of each document of all rows, without padding."""
        padded = self.padded or (False,) * len(self.lengths)
        rows = zip(self.lengths, padded, strict=True)
        return [length for lengths, is_padded in rows for length in (lengths[:-1] if is_padded else lengths)]

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(map(max, self.lengths))

    @cached_property
    def positions(self) -> Tensor:
        """The position of each token in its document [s, b], i64."""
        places = torch.arange(self.length * len(self.starts), device=self.device)
        return (places - self._of_tokens(self.cu_seqlens[:-1])).view(len(self.starts), -1).t().contiguous()

    def positions_in(self, spans: Spans | None) -> Tensor:
        """The `positions` of the tokens in spans of the rows; None for all."""
        if spans is None:
            return self.positions
        return torch.cat([self.positions[slice(*span)] for span in spans])

    @cached_property
    def documents(self) -> Tensor:
        """The number of each token's document in its row [b, s], i32."""
        count = sum(map(len, self.starts))
        numbers = self._of_tokens(torch.arange(count, dtype=torch.int32, device=self.device))
        by_row = numbers.view(len(self.starts), -1)
        return by_row - by_row[:, :1]

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """The first token of each document, and the end of the last, in rows laid end to end [documents + 1], i32."""
        lengths = [length for row in self.lengths for length in row]
        return copy_to_device(np.cumsum([0, *lengths], dtype=np.int32), self.device)

    def _of_tokens(self, values: Tensor) -> Tensor:
        """Repeat the value of each document [documents] for its tokens, in rows laid end to end [b s]."""
        return values.repeat_interleave(self.cu_seqlens.diff(), output_size=self.length * len(self.starts))

    def shared(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return the result of `compute`, which is called once for all layers that ask with this `key`."""
        if key not in self._shared:
            self._shared[key] = compute()
        return self._shared[key]  # type: ignore[return-value]

    def release(self) -> None:
        """Drop the shared results, after the last use of the micro-batch."""
        self._shared.clear()
