"""Shards of tensors, of which each tensor-parallel rank has one. The distributed optimizer stores them as
`dp_reshardable`: for each rank of tensor and pipeline parallelism the buckets of its buffers, in which parameters lie
from last to first and have no names. They are found by their master weights, which must equal the weights.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megascale.convert.dcp import DcpFolder
from megascale.convert.families.megatron_lm import FAMILY, SPLIT_INPUTS, SPLIT_OUTPUTS
from megascale.convert.megatron_lm.iteration import MASTER, MOMENTS, RESHARDABLE_HINT
from megascale.core.errors import CheckpointError

BUCKETS = "optimizer.distributed."  # part of the names of buckets
BUCKET = re.compile(rf"{re.escape(BUCKETS)}dp_group_idx_(\d+)\.gbuf_idx_(\d+)\..*\.bucket_idx_(\d+)\.param")
ALIGNMENT = 64  # elements, at which parameters begin in a bucket


class Shards:
    """Shards by state, name and tensor-parallel rank, of a model with Megatron-LM's `args`; each is read by a call."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        self._gated = bool(args.get("swiglu"))  # each shard of fc1 has its gate, then its up
        self._experts_whole = args.get("expert_tensor_parallel_size") == 1
        self.found: dict[str, dict[str, dict[int, Callable[[], Tensor]]]] = defaultdict(lambda: defaultdict(dict))

    def join(self, state: str, name: str) -> Tensor | None:
        """The tensor of all ranks; None if there is none."""
        ranks = self.found[state].get(name, {})
        whole = (".experts." in name and self._experts_whole) or not self._is_split(name)
        shards = [ranks[rank]() for rank in sorted(ranks)[: 1 if whole else None]]
        if len(shards) < 2:
            return shards[0] if shards else None
        if self._gated and "linear_fc1." in name:
            return torch.cat([shard.unflatten(0, (2, -1)) for shard in shards], 1).flatten(0, 1)
        return torch.cat(shards, 1 if SPLIT_INPUTS.search(name) else 0)

    def shard(self, name: str, tensor: Tensor, rank: int, tp: int) -> Tensor:
        """The shard of a rank."""
        if self._gated and "linear_fc1." in name:
            return tensor.unflatten(0, (2, -1)).chunk(tp, 1)[rank].flatten(0, 1)
        return tensor.chunk(tp, 1 if SPLIT_INPUTS.search(name) else 0)[rank] if self._is_split(name) else tensor

    def _is_split(self, name: str) -> bool:
        return bool(SPLIT_OUTPUTS.search(name) or SPLIT_INPUTS.search(name))


def read_buckets(folder: DcpFolder, args: Mapping[str, Any], weight: Callable[[str], Tensor | None]) -> Shards:
    """Find the shards of the optimizer's states. `weight`: reads a tensor of the model; None if there is none.

    Raises: CheckpointError if there are experts, or a buffer has other parameters than the model
    """
    kinds = ("tensor", "pipeline", "virtual_pipeline")
    tp, pp, chunks = (args.get(f"{kind}_model_parallel_size") or 1 for kind in kinds)
    stored: dict[tuple[int, int], dict[int, str]] = {}
    for found in filter(None, map(BUCKET.fullmatch, folder.tensors)):
        stored.setdefault((int(found[1]), int(found[2])), {})[int(found[3])] = found[0].removesuffix("param")
    what = f"{folder.folder}: the optimizer is stored as dp_reshardable"
    if args.get("num_experts") or stored.keys() != set(itertools.product(range(tp * pp), range(chunks))):
        raise CheckpointError(f"{what}, of experts or of other ranks than its args say", hint=RESHARDABLE_HINT)
    shards = Shards(args)
    for (group, chunk), by_number in stored.items():
        (stage, rank), buckets = divmod(group, tp), [bucket for _, bucket in sorted(by_number.items())]
        for fused in (True, False):
            names = _names(args["num_layers"], chunk * pp + stage, pp * chunks, fused)
            whole = {name: tensor for name in names if (tensor := weight(name)) is not None}
            own = {name: shards.shard(name, tensor, rank, tp) for name, tensor in whole.items()}
            if (places := _places(folder, own, buckets)) is not None:
                break
        else:
            raise CheckpointError(f"{what}, with other parameters of group {group}", hint=RESHARDABLE_HINT)
        for (name, (bucket, start)), state in itertools.product(places.items(), (MASTER, *MOMENTS)):
            key = bucket + ("param" if state == MASTER else state)
            shards.found[state][name][rank] = partial(_view, folder, key, start, own[name].shape)
    return shards


def _places(folder: DcpFolder, own: Mapping[str, Tensor], buckets: list[str]) -> dict[str, tuple[str, int]] | None:
    """The bucket and the first element of each of a rank's `own` parameters; None if the buckets have others."""
    places, left, start = dict[str, tuple[str, int]](), iter(buckets), 0
    bucket, length = "", 0
    for name, tensor in reversed(list(own.items())):
        start = -(-start // ALIGNMENT) * ALIGNMENT
        if start >= length:
            bucket, start = next(left, ""), 0
            length = folder.tensors[f"{bucket}param"].shape[0] if bucket else 0
        if start + tensor.numel() > length:
            return None
        if not _view(folder, f"{bucket}param", start, tensor.shape).to(tensor.dtype).equal(tensor):
            return None
        places[name] = bucket, start
        start += tensor.numel()
    return places if not next(left, "") and start + ALIGNMENT > length else None


def _view(folder: DcpFolder, bucket: str, start: int, shape: torch.Size) -> Tensor:
    return folder.read(bucket, ((start,), (shape.numel(),))).view(shape)


def _names(layers: int, stage: int, stages: int, fused: bool) -> Iterator[str]:
    """Names that the parameters of a stage may have, in the order of its modules. `fused`: a module has the norm before
    attention and the projection after it, as in Transformer Engine, where the former follows the latter.
    """
    (first, second, *others), outer = FAMILY.layer, [*FAMILY.outer.values()]
    own = range(stage * layers // stages, (stage + 1) * layers // stages)
    yield from outer[:2] if stage == 0 else ()
    for layer, module in itertools.product(own, (second, first, *others) if fused else FAMILY.layer):
        yield from (f"decoder.layers.{layer}.{module}.{kind}" for kind in ("weight", "bias"))
    yield from outer[2:] if stage == stages - 1 else ()
