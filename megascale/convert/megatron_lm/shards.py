"""Tensors of which each tensor-parallel rank has a shard."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megascale.convert.families.megatron_lm import SPLIT_INPUTS, SPLIT_OUTPUTS


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
