"""The distributed optimizer as `dp_reshardable` stores it: for each rank of tensor and pipeline parallelism the buckets
of its buffers, in which parameters lie one after the other and have no names.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megascale.convert.dcp import DcpFolder
from megascale.convert.families.megatron import FAMILY
from megascale.convert.megatron.shards import BUFFER_KEYS, Shards
from megascale.convert.megatron.source import RESHARDABLE_HINT
from megascale.core.errors import CheckpointError

BUCKETS = "optimizer.distributed."  # part of the names of buckets
BUCKET = re.compile(rf"{re.escape(BUCKETS)}dp_group_idx_(\d+)\.gbuf_idx_(\d+)\..*\.bucket_idx_(\d+)\.param")


@dataclass(frozen=True)
class _StoredBucket:
    """A vector in a folder, of which elements are read on demand."""

    folder: DcpFolder
    name: str

    def __len__(self) -> int:
        return self.folder.tensors[self.name].shape[0]

    def __getitem__(self, elements: slice) -> Tensor:
        return self.folder.read(self.name, ((elements.start,), (elements.stop - elements.start,)))


def read_buckets(folder: DcpFolder, args: Mapping[str, Any], weight: Callable[[str], Tensor | None]) -> Shards:
    """Find the shards of the optimizer's states. `weight`: reads a tensor of the model; None if there is none.

    Raises: CheckpointError if there are experts, or a buffer has other parameters than the model
    """
    tp, pp, chunks = (
        args.get(f"{kind}_model_parallel_size") or 1 for kind in ("tensor", "pipeline", "virtual_pipeline")
    )
    stored: dict[tuple[int, int], dict[int, str]] = {}
    for name in filter(None, map(BUCKET.fullmatch, folder.tensors)):
        stored.setdefault((int(name[1]), int(name[2])), {})[int(name[3])] = name[0].removesuffix("param")
    expected = {(stage * tp + rank, chunk) for stage, rank, chunk in itertools.product(*map(range, (pp, tp, chunks)))}
    what = f"{folder.folder}: the optimizer is stored as dp_reshardable"
    if args.get("num_experts") or stored.keys() != expected:
        raise CheckpointError(f"{what}, of experts or of other ranks than its args say", hint=RESHARDABLE_HINT)
    shards = Shards(args)
    for group, chunk in sorted(expected):
        stage, rank = divmod(group, tp)
        buckets = {
            state: [_StoredBucket(folder, name + key) for _, name in sorted(stored[group, chunk].items())]
            for state, key in BUFFER_KEYS.items()
        }
        for fused in (True, False):
            names = _names(args["num_layers"], chunk * pp + stage, pp * chunks, fused)
            whole = {name: tensor for name in names if (tensor := weight(name)) is not None}
            parameters = {name: shards.shard(name, tensor, rank, tp) for name, tensor in whole.items()}
            if shards.add_buffer(rank, parameters, buckets):
                break
        else:
            raise CheckpointError(f"{what}, with other parameters of group {group}", hint=RESHARDABLE_HINT)
    return shards


def _names(layers: int, stage: int, stages: int, fused: bool) -> Iterator[str]:
    """Names that the parameters of a stage may have, in the order of its modules. `fused`: a module has the norm before
    attention and the projection after it, as in Transformer Engine, where the former follows the latter.
    """
    first, second, *others = FAMILY.layer
    modules, outer = [second, first, *others] if fused else [*FAMILY.layer], [*FAMILY.outer.values()]
    if stage == 0:
        yield from outer[:2]
    for layer, module in itertools.product(range(stage * layers // stages, (stage + 1) * layers // stages), modules):
        yield from (f"decoder.layers.{layer}.{module}.{kind}" for kind in ("weight", "bias"))
    if stage == stages - 1:
        yield from outer[2:]
