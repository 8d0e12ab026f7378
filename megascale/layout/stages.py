"""Virtual pipeline stages: the assignment of layers to model chunks and pipeline ranks.

With p pipeline ranks and v model chunks per rank the network is split in order into p v virtual stages; stage s is
chunk s // p of rank s % p (Narayanan et al. 2021, 2.2): for p = v = 2, rank 0 has stages 0 and 2, rank 1 has 1 and 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

RECENT = 64
"""Cached splits: queries about a configuration ask for its split repeatedly."""


@dataclass(frozen=True)
class Stages:
    """The layers of the virtual stages: stage s has layers [starts[s], starts[s + 1])."""

    pp: int
    vpp: int
    starts: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of virtual stages."""
        return self.pp * self.vpp

    def index(self, rank: int, chunk: int) -> int:
        """The virtual stage of model chunk `chunk` on pipeline rank `rank`."""
        return chunk * self.pp + rank

    def layers(self, stage: int) -> range:
        """The layers of a virtual stage."""
        return range(self.starts[stage], self.starts[stage + 1])


@lru_cache(RECENT)
def split_layers(num_layers: int, pp: int, vpp: int, layers_per_chunk: tuple[int, ...] | None = None) -> Stages:
    """Split the layers as evenly as possible, or by `layers_per_chunk`.

    Left-over layers go to the stages after the first, a layer per stage: the first and the last stage, with embedding
    and head, come last, and the layers of two ranks differ by at most 1.
    """
    count = pp * vpp
    quotient, extra = divmod(num_layers, count)
    even = tuple(quotient + (1 <= stage <= extra) for stage in range(count))
    sizes = even if layers_per_chunk is None else layers_per_chunk
    starts = [0]
    for layers in sizes:
        starts.append(starts[-1] + layers)
    if len(starts) != count + 1 or starts[-1] != num_layers:
        raise ValueError(f"{list(sizes)} does not split {num_layers} layers into {count} chunks")
    return Stages(pp, vpp, tuple(starts))
