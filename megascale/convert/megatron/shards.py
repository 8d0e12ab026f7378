"""Tensors of which each tensor-parallel rank has a shard, and those of a rank in the buffers of its optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from megascale.convert.families.megatron import SPLIT_INPUTS, SPLIT_OUTPUTS
from megascale.convert.megatron.source import MASTER, MOMENTS

ALIGNMENT = 64  # elements, at which parameters begin in a buffer of the distributed optimizer

BUFFER_KEYS = {MASTER: "param"} | {moment: moment for moment in MOMENTS}
"""Names of the states in buffers."""


class Bucket(Protocol):
    """A part of a buffer: a vector, which may be read on demand."""

    def __len__(self) -> int: ...

    def __getitem__(self, elements: slice) -> Tensor: ...


class Shards:
    """Shards by state, name and tensor-parallel rank, of a model with Megatron-LM's `args`."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        self._gated = bool(args.get("swiglu"))  # each shard of fc1 has its gate, then its up
        self._experts_whole = args.get("expert_tensor_parallel_size") == 1
        self.found: dict[str, dict[str, dict[int, Callable[[], Tensor]]]] = defaultdict(lambda: defaultdict(dict))

    def join(self, state: str, name: str) -> Tensor | None:
        """The tensor of all ranks; None if there is none."""
        ranks = self.found[state].get(name, {})
        shards = [ranks[rank]() for rank in sorted(ranks)]
        if ".experts." in name and self._experts_whole:
            return shards[0] if shards else None
        if len(shards) < 2 or not (SPLIT_OUTPUTS.search(name) or SPLIT_INPUTS.search(name)):
            return shards[0] if shards else None
        if self._gated and "linear_fc1." in name:
            return torch.cat([shard.unflatten(0, (2, -1)) for shard in shards], 1).flatten(0, 1)
        return torch.cat(shards, 1 if SPLIT_INPUTS.search(name) else 0)

    def shard(self, name: str, tensor: Tensor, rank: int, tp: int) -> Tensor:
        """The shard of a rank."""
        if self._gated and "linear_fc1." in name:
            return tensor.unflatten(0, (2, -1)).chunk(tp, 1)[rank].flatten(0, 1)
        split = SPLIT_OUTPUTS.search(name) or SPLIT_INPUTS.search(name)
        return tensor.chunk(tp, 1 if SPLIT_INPUTS.search(name) else 0)[rank] if split else tensor

    def add_buffer(self, rank: int, parameters: Mapping[str, Tensor], buckets: Mapping[str, Sequence[Bucket]]) -> bool:
        """Add a rank's parameters, which the `buckets` of a buffer hold from last to first, by state. False if they
        hold other parameters: the masters would not equal the weights.
        """
        masters, places, number, start = buckets[MASTER], list[tuple[str, int, int]](), 0, 0
        for name, weight in reversed(list(parameters.items())):
            start = -(-start // ALIGNMENT) * ALIGNMENT
            if start >= len(masters[number]) and number + 1 < len(masters):
                number, start = number + 1, 0
            if start + weight.numel() > len(masters[number]):
                return False
            if not _view(masters[number], start, weight.shape).to(weight.dtype).equal(weight):
                return False
            places.append((name, number, start))
            start += weight.numel()
        if number + 1 < len(masters) or start + ALIGNMENT <= len(masters[number]):
            return False
        for name, number, start in places:
            for state, listed in buckets.items():
                self.found[state][name][rank] = partial(_view, listed[number], start, parameters[name].shape)
        return True


def _view(bucket: Bucket, start: int, shape: torch.Size) -> Tensor:
    return bucket[start : start + shape.numel()].view(shape)
