"""Layers to chunks to pipeline ranks.

With p pipeline ranks and v chunks on each, the network is cut into p v pieces in order, its virtual stages; stage s is
chunk s // p of rank s % p (Narayanan et al. 2021, 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

RECENT = 64
"""Cuts that are kept: what is asked of one configuration asks for its cut again and again."""


@dataclass(frozen=True)
class Stages:
    """Layers of each virtual stage: stage s has layers starts[s] to starts[s + 1]."""

    pp: int
    vpp: int
    starts: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of virtual stages."""
        return self.pp * self.vpp

    def index(self, rank: int, chunk: int) -> int:
        """The virtual stage that is `chunk` of pipeline rank `rank`."""
        return chunk * self.pp + rank

    def layers(self, stage: int) -> range:
        """The layers of a virtual stage."""
        return range(self.starts[stage], self.starts[stage + 1])


@lru_cache(RECENT)
def split(num_layers: int, pp: int, vpp: int, layers_per_chunk: tuple[int, ...] | None = None) -> Stages:
    """Cut the layers as evenly as can be, or as `layers_per_chunk` says.

    What is left over goes, a layer each, to the stages after the first: the first and the last, which also have the
    embedding and the head, come last, and no rank gets two more than another.
    """
    count = pp * vpp
    each, extra = divmod(num_layers, count)
    even = tuple(each + (1 <= stage <= extra) for stage in range(count))
    sizes = even if layers_per_chunk is None else layers_per_chunk
    starts = [0]
    for layers in sizes:
        starts.append(starts[-1] + layers)
    if len(starts) != count + 1 or starts[-1] != num_layers:
        raise ValueError(f"{list(sizes)} does not cut {num_layers} layers into {count} chunks")
    return Stages(pp, vpp, tuple(starts))
