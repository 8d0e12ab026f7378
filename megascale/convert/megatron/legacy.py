"""Folders of Megatron-LM's format `torch`: for each rank of tensor, pipeline and expert parallelism mp_rank_TT_PPP_EEE,
with model_optim_rng.pt and, of the distributed optimizer, distrib_optim.pt.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from megascale.convert.dcp import DAMAGED_HINT
from megascale.convert.families.megatron import ALIASES
from megascale.convert.megatron.plain_pickle import read_plain
from megascale.convert.megatron.source import MASTER, MODEL, MOMENTS, RESHARDABLE_HINT, optimizers_of, step_of
from megascale.convert.megatron.tensor_shards import BUFFER_KEYS, find_in_buffer, join, view_in_buffer
from megascale.core.errors import CheckpointError
from megascale.core.files import exists

FILE, OPTIMIZER_FILE = "model_optim_rng.pt", "distrib_optim.pt"

NO_PARAMETER = re.compile(r"(\.expert_bias|\.inv_freq|\.local_tokens_per_expert)$")
LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.(\w+\.\w+)|(\w+\.(?:weight|bias))(\d+))$")


class _Rank(NamedTuple):
    tp: int
    pp: int
    ep: int


class LegacyFolder:
    """A `Source` in the format `torch`. Raises: CheckpointError if it is unreadable, or lacks a rank"""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.common: Mapping[str, Any] = read_plain(min(path.glob("mp_rank_*")) / FILE)
        self.step = step_of(optimizers_of(self.common.get("optimizer")))
        self._shards: dict[str, dict[str, dict[int, Tensor]]] = defaultdict(lambda: defaultdict(dict))
        self._read: set[str] = set()
        try:
            self._args = vars(self.common["args"])
            self._load()
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            what = f"{path} is not what Megatron-LM writes as --ckpt-format torch: {error!r}"
            raise CheckpointError(what, hint=DAMAGED_HINT) from None
        self.states = frozenset(self._shards)

    def tensor(self, state: str, name: str, shape: tuple[int, ...]) -> Tensor:
        if not (shards := self._shards[state].get(name)):
            raise CheckpointError(f"{self.path} has no {state} {name}", hint=DAMAGED_HINT)
        self._read.add(name)
        whole = ".experts." in name and self._args.get("expert_tensor_parallel_size") == 1
        return join(name, [shards[rank] for rank in sorted(shards)][: 1 if whole else None], self._args.get("swiglu"))

    def unread(self) -> list[str]:
        tied = set() if self._args.get("untie_embeddings_and_output_weights") else {"output_layer.weight"}
        return sorted(self._shards[MODEL].keys() - self._read - tied)

    def _load(self) -> None:
        """Read the files of all ranks, which are mapped. Raises: CheckpointError if one is missing, or one too many"""
        sizes = [self._args.get(f"{kind}_model_parallel_size") or 1 for kind in ("tensor", "pipeline", "expert")]
        ranks = {
            self._folder(rank, sizes): rank for rank in itertools.starmap(_Rank, itertools.product(*map(range, sizes)))
        }
        found = {folder.name for folder in self.path.glob("mp_rank_*")}
        if different := sorted(found ^ ranks.keys()):
            layout = ", ".join(f"{kind} {size}" for kind, size in zip(("tp", "pp", "ep"), sizes, strict=True))
            what = f"{self.path} {'has' if different[0] in found else 'lacks'} {different[0]}, its args say {layout}"
            raise CheckpointError(what, hint=DAMAGED_HINT)
        files = {rank: read_plain(self.path / name / FILE) for name, rank in ranks.items()}
        first, count = dict[tuple[int, int], int](), 0
        for number, pp in itertools.product(range(len(_chunks(self.common))), range(sizes[1])):
            first[number, pp] = count
            numbers = [int(layer[1]) for layer in map(LAYER.match, _chunks(files[_Rank(0, pp, 0)])[number]) if layer]
            count += max(numbers, default=-1) + 1
        for name, rank in ranks.items():
            experts = rank.ep * ((self._args.get("num_experts") or 0) // sizes[2])
            chunks = [
                {
                    _global_name(key, first[number, rank.pp], experts): tensor
                    for key, tensor in chunk.items()
                    if isinstance(tensor, Tensor)
                }
                for number, chunk in enumerate(_chunks(files[rank]))
            ]
            for key, tensor in itertools.chain.from_iterable(chunk.items() for chunk in chunks):
                self._shards[MODEL][key][rank.tp] = tensor
            self._load_optimizer(self.path / name, rank, files[rank].get("optimizer"), chunks)

    @staticmethod
    def _folder(rank: _Rank, sizes: list[int]) -> str:
        _, pp, ep = sizes
        return f"mp_rank_{rank.tp:02d}" + (f"_{rank.pp:03d}" if pp > 1 else "") + (f"_{rank.ep:03d}" if ep > 1 else "")

    def _load_optimizer(self, folder: Path, rank: _Rank, stored: Any, chunks: list[dict[str, Tensor]]) -> None:
        """Load the moments of a rank, and its master weights, from the optimizers for dense layers, and for experts."""
        sharded = self._args.get("expert_model_parallel_size", 1) > 1
        states: Any = read_plain(folder / OPTIMIZER_FILE) if exists(folder / OPTIMIZER_FILE) else None
        for number, optimizer in enumerate(optimizers_of(stored)):
            parameters = [
                {
                    name: tensor
                    for name, tensor in chunk.items()
                    if not NO_PARAMETER.search(name) and (sharded and ".experts." in name) == bool(number)
                }
                for chunk in chunks
            ]
            if states is None:
                self._load_groups(folder, rank, optimizer, {k: v for chunk in parameters for k, v in chunk.items()})
            else:
                self._load_buffers(folder, rank, states[number] if isinstance(states, list) else states, parameters)

    def _load_groups(
        self, folder: Path, rank: _Rank, optimizer: Mapping[str, Any], parameters: Mapping[str, Tensor]
    ) -> None:
        """Load a plain optimizer, whose groups have parameters with weight decay, or without, in the model's order."""
        inner, masters = optimizer.get("optimizer", optimizer), optimizer.get("fp32_from_fp16_params")
        for number, group in enumerate(inner["param_groups"]):
            names = [
                name
                for name, tensor in parameters.items()
                if (tensor.dim() == 1 or name.endswith(".bias")) == (group["wd_mult"] == 0)
            ]
            if len(names) != len(group["params"]):
                what = (
                    f"{folder / FILE}: a group of the optimizer has {len(group['params'])} parameters, not {len(names)}"
                )
                raise CheckpointError(what, hint=RESHARDABLE_HINT)
            for position, (name, key) in enumerate(zip(names, group["params"], strict=True)):
                for moment in MOMENTS:
                    self._shards[moment][name][rank.tp] = inner["state"][key][moment]
                if masters:
                    self._shards[MASTER][name][rank.tp] = masters[number][position]

    def _load_buffers(
        self, folder: Path, rank: _Rank, stored: Mapping[Any, Any], chunks: list[dict[str, Tensor]]
    ) -> None:
        """Load a distributed optimizer, which has a buffer for each model chunk."""
        for number, parameters in enumerate(chunks):
            (buffer,) = stored[number].values()
            buckets = {key: each if isinstance(each := buffer[key], list) else [each] for key in BUFFER_KEYS.values()}
            if (places := find_in_buffer(parameters, buckets[BUFFER_KEYS[MASTER]])) is None:
                what = f"{folder / OPTIMIZER_FILE}: a buffer has not the parameters of the model, in its order"
                raise CheckpointError(what, hint=RESHARDABLE_HINT)
            for (name, place), (state, key) in itertools.product(places.items(), BUFFER_KEYS.items()):
                self._shards[state][name][rank.tp] = view_in_buffer(buckets[key], place, parameters[name])


def _chunks(file: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The model chunks of a rank: `model`, or `model0`, `model1`, ... Raises: KeyError if there is none"""
    several = [file[f"model{number}"] for number in range(len(file)) if f"model{number}" in file]
    return several or [file["model"]]


def _global_name(key: str, layers: int, experts: int) -> str:
    """The name in the whole model of a rank's tensor, with as many layers, and experts, before the rank's own."""
    for ours, theirs in ALIASES:
        key = key.replace(theirs, ours)
    key = LAYER.sub(lambda found: f"decoder.layers.{int(found[1]) + layers}.", key, count=1)
    return EXPERT.sub(lambda found: f"mlp.experts.{int(found[1] or found[4]) + experts}.{found[2] or found[3]}", key)
