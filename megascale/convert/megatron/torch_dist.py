"""Folders of megatron-core's format `torch_dist`: global tensors in a folder of torch.distributed.checkpoint, and the
common state in common.pt. Layers of one kind are a stack [layers, ...], experts one [experts, ...] within.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megascale.convert.dcp import DAMAGED_HINT, DcpFolder
from megascale.convert.families.megatron import ALIASES, FAMILY
from megascale.convert.megatron.dp_buckets import BUCKETS, DpBuckets
from megascale.convert.megatron.plain_pickle import read_plain
from megascale.convert.megatron.source import MASTER, MODEL, MOMENTS, RESHARDABLE_HINT, optimizers_of, step_of
from megascale.core.errors import CheckpointError
from megascale.core.files import exists
from megascale.layout.tensors import HEAD, TOKEN_EMBEDDING

COMMON, METADATA = "common.pt", "metadata.json"

LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(.+)")
CHAINED = re.compile(r"chained_\d+\.")

PREFIXES = {MODEL: ("",), MASTER: ("optimizer.state.param.", "optimizer.state.fp32_param.")} | {
    moment: (f"optimizer.state.{moment}.",) for moment in MOMENTS
}
"""Beginnings of the names of a state's tensors: of masters those of the distributed optimizer, and of the plain one."""


class TorchDist:
    """A `Source` in the format `torch_dist`. Raises: CheckpointError if it is unreadable"""

    def __init__(self, path: Path) -> None:
        if not exists(path / COMMON):
            what = f"{path} has no {COMMON}: it is of another format than torch_dist, such as fsdp_dtensor"
            raise CheckpointError(what, hint="save it with --ckpt-format torch_dist")
        self.path, self._folder = path, DcpFolder(path)
        self.common: Mapping[str, Any] = read_plain(path / COMMON)
        self._stored = {CHAINED.sub("", name, count=1): name for name in self._folder.tensors}
        self._read: set[str] = set()
        self.step = step_of(optimizers_of(self.common.get("optimizer")))
        self.states = frozenset(
            state
            for state, prefixes in PREFIXES.items()
            if any(name.startswith(prefix) for name in self._stored for prefix in prefixes)
        )
        self._buckets: DpBuckets | None = None
        if any(BUCKETS in name for name in [*self._folder.tensors, *self._folder.objects]):
            self._open_buckets()

    def tensor(self, state: str, name: str, shape: tuple[int, ...]) -> Tensor:
        if weight := self._find(MODEL, name):
            self._read.add(weight[0])  # also by its master
        if self._buckets is not None and state != MODEL:
            return self._buckets.tensor(state, name)
        if (found := self._find(state, name)) is None:
            raise CheckpointError(f"{self.path} has no tensor {PREFIXES[state][0]}{name}", hint=DAMAGED_HINT)
        return _unflattened(self._load(*found), shape)

    def unread(self) -> list[str]:
        return sorted(name for name in self._stored if not name.startswith("optimizer.") and name not in self._read)

    def _find(self, state: str, name: str) -> tuple[str, tuple[int, ...]] | None:
        """The stored name of a state of a tensor, and its index in stacks; None if there is none."""
        for prefix, (stored, index) in itertools.product(PREFIXES[state], stored_forms(name)):
            if prefix + stored in self._stored:
                return prefix + stored, index
        return None

    def _load(self, stored: str, index: tuple[int, ...]) -> Tensor:
        whole = self._folder.tensors[self._stored[stored]].shape[len(index) :]
        region = (*index, *(0 for _ in whole)), (*(1 for _ in index), *whole)
        return self._folder.read(self._stored[stored], region).view(whole)

    def _open_buckets(self) -> None:
        """Find the states of a distributed optimizer. Raises: CheckpointError if they are stored in an unknown way"""
        kind = self.common["optimizer"].get("param_state_sharding_type", "")
        if kind != "dp_reshardable" or "args" not in self.common:
            raise CheckpointError(f"{self.path}: the optimizer is stored as {kind!r}", hint=RESHARDABLE_HINT)
        args = vars(self.common["args"])
        head, embedding = FAMILY.outer[HEAD], FAMILY.outer[TOKEN_EMBEDDING]
        copied = (
            not args.get("untie_embeddings_and_output_weights") and (args.get("pipeline_model_parallel_size") or 1) > 1
        )

        def weight(name: str) -> Tensor | None:
            found = self._find(MODEL, embedding if name == head and copied else name)
            return self._load(*found) if found else None

        names = (name for name in self._folder.objects if name.endswith(".optimizer/shard_0_1"))
        self.step = step_of([each for name in names for each in self._folder.read_object(name)])
        self._buckets = DpBuckets(self._folder, args, weight)
        self.states |= {MASTER, *MOMENTS}


def stored_forms(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names under which a tensor may be stored, each with its index in a stack of layers, and of experts."""
    others = (name.replace(ours, theirs) for ours, theirs in ALIASES if ours in name)
    for form in [name, *others]:
        if not (layer := LAYER.fullmatch(form)):
            yield form, ()
            continue
        number, rest = int(layer[1]), layer[2]
        expert = EXPERT.fullmatch(rest)
        rest, inner = (f"mlp.experts.experts.{expert[2]}", (int(expert[1]),)) if expert else (rest, ())
        yield f"decoder.layers.{rest}", (number, *inner)
        yield f"decoder.layers.{number}.{rest}", inner


def _unflattened(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor of `shape` that older versions stored as a grid of shards, the last dimension the elements of each
    (`fully_sharded_model_space`); any other as it is.
    """
    if tensor.dim() != len(shape) + 1:
        return tensor
    *grid, elements = tensor.shape
    inner = [size // count for size, count in zip(shape[1:], grid[1:], strict=True)]
    rows = elements // max(1, torch.Size(inner).numel())
    shards = tensor.view(*grid, rows, *inner)
    order = [dim + offset for dim in range(len(shape)) for offset in (0, len(shape))]
    return shards.permute(order).reshape([a * b for a, b in zip(grid, (rows, *inner), strict=True)])
