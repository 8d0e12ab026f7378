"""The distributed optimizer as `dp_reshardable` stores it: for each rank of tensor and pipeline parallelism the buckets
of its buffers, in which parameters lie one after the other and have no names. A parameter is where its master weights
equal the weights of the model.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megascale.convert.dcp import DcpFolder
from megascale.convert.families.megatron import FAMILY
from megascale.convert.megatron.source import MASTER, RESHARDABLE_HINT
from megascale.convert.megatron.tensor_shards import BUFFER_KEYS, find_in_buffer, join, shard
from megascale.core.errors import CheckpointError

BUCKETS = "optimizer.distributed."  # part of the names of buckets
BUCKET = re.compile(rf"{re.escape(BUCKETS)}dp_group_idx_(\d+)\.gbuf_idx_(\d+)\..*\.bucket_idx_(\d+)\.param")

FUSED_NORM = ("input_layernorm", "self_attention.linear_proj")
"""Modules that a layer of Transformer Engine has the other way round: it fuses the norm with linear_qkv."""


class _Place(NamedTuple):
    bucket: str
    start: int
    shape: torch.Size


class DpBuckets:
    """The optimizer's states in buckets. `weights`: reads a tensor of the model by its name, if it has one.

    Raises: CheckpointError if there are experts, or a buffer has other parameters than the model
    """

    def __init__(self, folder: DcpFolder, args: Mapping[str, Any], weights: Callable[[str], Tensor | None]) -> None:
        self._folder, self._args, self._weights = folder, args, weights
        self._tp, self._pp, self._chunks = (
            args.get(f"{kind}_model_parallel_size") or 1 for kind in ("tensor", "pipeline", "virtual_pipeline")
        )
        self._places: dict[str, dict[int, _Place]] = {}
        buckets: dict[tuple[int, int], list[str]] = {}
        for found in filter(None, map(BUCKET.fullmatch, folder.tensors)):
            buckets.setdefault((int(found[1]), int(found[2])), []).append(found[0].removesuffix(".param"))
        ranks = itertools.product(range(self._pp), range(self._tp), range(self._chunks))
        expected = {(pp * self._tp + tp, number): (pp, tp, number) for pp, tp, number in ranks}
        if args.get("num_experts") or buckets.keys() != expected.keys():
            self._refuse("of experts, or of other ranks than the args say")
        for key, rank in expected.items():
            self._locate(*rank, sorted(buckets[key], key=lambda name: int(name.rpartition("_")[2])))

    def tensor(self, state: str, name: str) -> Tensor:
        """Read a state of a tensor, which the model has. Raises: CheckpointError if it is damaged"""
        shards = []
        for _, (bucket, start, shape) in sorted(self._places[name].items()):
            elements = self._folder.read(f"{bucket}.{BUFFER_KEYS[state]}", ((start,), (shape.numel(),)))
            shards.append(elements.view(shape))
        return join(name, shards, bool(self._args.get("swiglu")))

    def _locate(self, pp: int, tp: int, number: int, buckets: list[str]) -> None:
        """Find the parameters of a rank's model chunk in its buckets. Raises: CheckpointError"""
        masters = [self._folder.read(f"{bucket}.{BUFFER_KEYS[MASTER]}") for bucket in buckets]
        for norm_first in (False, True):
            names = self._names(pp, number, norm_first)
            parameters = {
                name: shard(name, tensor, tp, self._tp, bool(self._args.get("swiglu")))
                for name in names
                if (tensor := self._weights(name)) is not None
            }
            if (found := find_in_buffer(parameters, masters)) is not None:
                for name, (bucket, start) in found.items():
                    place = _Place(buckets[bucket], start, parameters[name].shape)
                    self._places.setdefault(name, {})[tp] = place
                return
        self._refuse(f"of other parameters than the model chunk {number} of rank {tp} of tp, {pp} of pp")

    def _names(self, pp: int, number: int, norm_first: bool) -> Iterator[str]:
        """Names that parameters of a model chunk may have, in its order."""
        stage, stages = number * self._pp + pp, self._pp * self._chunks
        count = self._args["num_layers"] // stages
        modules = list(FAMILY.layer)
        if not norm_first:
            first, second = map(modules.index, FUSED_NORM)
            modules[first], modules[second] = modules[second], modules[first]
        if stage == 0:
            yield from ("embedding.word_embeddings.weight", "embedding.position_embeddings.weight")
        for layer, module in itertools.product(range(stage * count, (stage + 1) * count), modules):
            yield from (f"decoder.layers.{layer}.{module}.{kind}" for kind in ("weight", "bias"))
        if stage == stages - 1:
            yield from ("decoder.final_layernorm.weight", "decoder.final_layernorm.bias", "output_layer.weight")

    def _refuse(self, what: str) -> None:
        message = f"{self._folder.folder}: the optimizer is stored as dp_reshardable, {what}"
        raise CheckpointError(message, hint=RESHARDABLE_HINT)
