"""A tensor and its shards, of tensor-parallel ranks; and the parameters of a rank in the buffers of its optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megascale.convert.families.megatron import SPLIT_INPUTS, SPLIT_OUTPUTS
from megascale.convert.megatron.source import MASTER, MOMENTS

ALIGNMENT = 64  # elements, at which parameters begin in a buffer of the distributed optimizer

BUFFER_KEYS = {MASTER: "param"} | {moment: moment for moment in MOMENTS}
"""Names of the states in buffers."""


def join(name: str, shards: Sequence[Tensor], gated: bool) -> Tensor:
    """The tensor of the shards of all tensor-parallel ranks. `gated`: each shard of fc1 has its gate, then its up."""
    if len(shards) == 1 or not SPLIT_OUTPUTS.search(name):
        return torch.cat(list(shards), 1) if len(shards) > 1 and SPLIT_INPUTS.search(name) else shards[0]
    if gated and "linear_fc1." in name:
        return torch.cat([shard.unflatten(0, (2, -1)) for shard in shards], 1).flatten(0, 1)
    return torch.cat(list(shards))


def shard(name: str, tensor: Tensor, rank: int, tp: int, gated: bool) -> Tensor:
    """The shard of a tensor-parallel rank."""
    if SPLIT_INPUTS.search(name):
        return tensor.chunk(tp, 1)[rank]
    if not SPLIT_OUTPUTS.search(name):
        return tensor
    if gated and "linear_fc1." in name:
        return tensor.unflatten(0, (2, -1)).chunk(tp, 1)[rank].flatten(0, 1)
    return tensor.chunk(tp)[rank]


def find_in_buffer(parameters: Mapping[str, Tensor], buckets: Sequence[Tensor]) -> dict[str, tuple[int, int]] | None:
    """The bucket, and the first element in it, of each of a rank's parameters, which a buffer has from last to first.
    None if the `buckets` of their fp32 copies have other parameters, or others of the same sizes.
    """
    found, number, start = dict[str, tuple[int, int]](), 0, 0
    for name, weight in reversed(list(parameters.items())):
        start = -(-start // ALIGNMENT) * ALIGNMENT
        if number < len(buckets) and start + weight.numel() > len(buckets[number]):
            if len(buckets[number]) > start:
                return None
            number, start = number + 1, 0
        if number >= len(buckets) or start + weight.numel() > len(buckets[number]):
            return None
        found[name] = number, start
        if not view_in_buffer(buckets, found[name], weight).to(weight.dtype).equal(weight):
            return None
        start += weight.numel()
    return found if number == len(buckets) - 1 and -(-start // ALIGNMENT) * ALIGNMENT >= len(buckets[-1]) else None


def view_in_buffer(buckets: Sequence[Tensor], place: tuple[int, int], like: Tensor) -> Tensor:
    """View the elements of a parameter at its place."""
    number, start = place
    return buckets[number][start : start + like.numel()].view(like.shape)
