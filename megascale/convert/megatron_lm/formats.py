"""Folders of Megatron-LM's formats. `torch_dist`, of megatron-core: global tensors in a folder of
torch.distributed.checkpoint, and the common state in common.pt; layers of one kind are a stack [layers, ...], experts
one [experts, ...] within. `torch`: for each rank of tensor, pipeline and expert parallelism
mp_rank_TT_PPP_EEE/model_optim_rng.pt, of which the weights are read.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megascale.convert.config_file import read_json
from megascale.convert.dcp import DAMAGED_HINT, DcpFolder
from megascale.convert.families.megatron_lm import ALIASES, FAMILY
from megascale.convert.megatron_lm.iteration import MASTER, MODEL, MOMENTS, RESHARDABLE_HINT, read_common
from megascale.convert.megatron_lm.shards import BUCKETS, Shards, read_buckets
from megascale.core.errors import CheckpointError
from megascale.core.files import exists
from megascale.layout.tensors import HEAD, TOKEN_EMBEDDING

FILE = "model_optim_rng.pt"
GROUPED = re.compile(r"(.*\.experts)\.weight([12])")
LOCAL = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.(\w+\.\w+)|(\w+\.(?:weight|bias))(\d+))$")
COMMON, METADATA = "common.pt", "metadata.json"
LAYER, EXPERT = re.compile(r"decoder\.layers\.(\d+)\.(.+)"), re.compile(r"mlp\.experts\.(\d+)\.(.+)")
CHAINED = re.compile(r"chained_\d+\.")  # before the names of one of several optimizers

PREFIXES = {MODEL: ("",), MASTER: ("optimizer.state.param.", "optimizer.state.fp32_param.")} | {
    moment: (f"optimizer.state.{moment}.",) for moment in MOMENTS
}
"""Beginnings of the names of a state's tensors: of masters those of the distributed optimizer, and of the plain one."""


class TorchDist:
    """An iteration in the format `torch_dist`. `common`: the state of no rank, such as `args`. `step`: of the
    optimizer, None without one. `states`: those that are stored.

    Raises: CheckpointError if it is unreadable
    """

    def __init__(self, path: Path) -> None:
        if not exists(path / COMMON):
            what = f"{path} has no {COMMON}: it is of another format than torch_dist, such as fsdp_dtensor"
            raise CheckpointError(what, hint="save it with --ckpt-format torch_dist")
        if exists(path / METADATA) and (kind := read_json(path / METADATA).get("sharded_backend")) != "torch_dist":
            what = f"{path / METADATA} says that the format is {kind}"
            raise CheckpointError(what, hint="save it with --ckpt-format torch_dist")
        self.path, self._folder = path, DcpFolder(path)
        self.common = read_common(path / COMMON)
        self._stored = {CHAINED.sub("", name, count=1): name for name in self._folder.tensors}
        self._read: set[tuple[str, tuple[int, ...]]] = set()
        optimizers = self.common.get("optimizer") or []
        if isinstance(optimizers, Mapping):  # one, or those that are chained, by number
            optimizers = list(optimizers.values()) if all(isinstance(key, int) for key in optimizers) else [optimizers]
        kinds = {optimizer.get("param_state_sharding_type", "fully_reshardable") for optimizer in optimizers}
        if kinds - {"fully_reshardable", *(["dp_reshardable"] if "args" in self.common else [])}:
            raise CheckpointError(f"{path}: the optimizer is stored as {min(kinds)}", hint=RESHARDABLE_HINT)
        self.step = _step(optimizers)
        self._shards = self._read_buckets() if "dp_reshardable" in kinds else None
        self.states = frozenset(
            state
            for state, prefixes in PREFIXES.items()
            if self._shards or any(name.startswith(prefix) for name in self._stored for prefix in prefixes)
        )

    def tensor(self, state: str, name: str) -> Tensor:
        """Read a state of a tensor by the name of `families.megatron_lm`. Raises: CheckpointError"""
        if weight := self._find(MODEL, name):
            self._read.add(weight)  # also by its master
        found = self._find(state, name)
        tensor = self._load(*found) if found else self._shards.join(state, name) if self._shards else None
        if tensor is None:
            raise CheckpointError(f"{self.path} has no tensor {PREFIXES[state][0]}{name}", hint=DAMAGED_HINT)
        return tensor

    def unread(self) -> list[str]:
        """Names of tensors, and of matrices of stacks with their index, that were not read in any state."""
        depths = {name: len(index) for name, index in self._read}
        return [
            f"{name}{list(index) or ''}"
            for name in sorted(self._stored)
            if not name.startswith("optimizer.")
            for index in itertools.product(*map(range, self._shape(name)[: depths.get(name, 0)]))
            if (name, index) not in self._read
        ]

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._folder.tensors[self._stored[name]].shape

    def _find(self, state: str, name: str) -> tuple[str, tuple[int, ...]] | None:
        """The stored name of a state of a tensor, and its index in stacks; None if there is none."""
        for prefix, (stored, index) in itertools.product(PREFIXES[state], stored_forms(name)):
            if prefix + stored in self._stored:
                return prefix + stored, index
        return None

    def _load(self, stored: str, index: tuple[int, ...]) -> Tensor:
        whole = self._shape(stored)[len(index) :]
        region = (*index, *(0 for _ in whole)), (*(1 for _ in index), *whole)
        return self._folder.read(self._stored[stored], region).view(whole)

    def _read_buckets(self) -> Shards:
        args = vars(self.common["args"])
        tied, stages = not args.get("untie_embeddings_and_output_weights"), args.get("pipeline_model_parallel_size")

        def weight(name: str) -> Tensor | None:
            if tied and (stages or 1) > 1 and name == FAMILY.outer[HEAD]:  # the last stage has a copy
                name = FAMILY.outer[TOKEN_EMBEDDING]
            found = self._find(MODEL, name)
            return self._load(*found) if found else None

        names = (name for name in self._folder.objects if BUCKETS in name and ".optimizer/" in name)
        self.step = _step([each for name in names for each in self._folder.read_value(name)])
        return read_buckets(self._folder, args, weight)


def _step(optimizers: list[Mapping[str, Any]]) -> int | None:
    """The finished steps of optimizers; None without a count."""
    counts = list[Any]()
    for inner in (optimizer.get("optimizer", optimizer) for optimizer in optimizers):
        state = inner.get("state", {})
        entries = [*inner.get("param_groups", ()), *(each for each in state.values() if isinstance(each, Mapping))]
        counts += [state.get("common_step"), *(entry.get("step") for entry in entries)]
    return max((int(count) for count in counts if count is not None), default=None)


def stored_forms(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names under which a tensor may be stored, each with its index in a stack of layers, and of experts."""
    for form in [name, *(name.replace(ours, theirs) for ours, theirs in ALIASES if ours in name)]:
        if not (layer := LAYER.fullmatch(form)):
            yield form, ()
            continue
        number, rest = int(layer[1]), layer[2]
        expert = EXPERT.fullmatch(rest)
        rest, inner = (f"mlp.experts.experts.{expert[2]}", (int(expert[1]),)) if expert else (rest, ())
        yield f"decoder.layers.{rest}", (number, *inner)
        yield f"decoder.layers.{number}.{rest}", inner


class LegacyFolder:
    """An iteration in the format `torch`, read as `TorchDist`. Raises: CheckpointError if it lacks a rank"""

    step: int | None = None
    states = frozenset({MODEL})

    def __init__(self, path: Path) -> None:
        self.path = path
        self.common = read_common(min(path.glob("mp_rank_*")) / FILE)
        self._read: set[str] = set()
        self._args = vars(self.common["args"])
        self._shards = Shards(self._args)
        self._load()

    def tensor(self, state: str, name: str) -> Tensor:
        if (tensor := self._shards.join(state, name)) is None:
            raise CheckpointError(f"{self.path} has no tensor {name}", hint=DAMAGED_HINT)
        self._read.add(name)
        return tensor

    def unread(self) -> list[str]:
        copies = set() if self._args.get("untie_embeddings_and_output_weights") else {FAMILY.outer[HEAD]}
        return sorted(self._shards.found[MODEL].keys() - self._read - copies)

    def _load(self) -> None:
        """Read the files of all ranks, which are mapped. Raises: CheckpointError if one is missing, or one too many"""
        tp, pp, ep = (self._args.get(f"{kind}_model_parallel_size") or 1 for kind in ("tensor", "pipeline", "expert"))
        folders = {
            (t, p, e): f"mp_rank_{t:02d}" + f"_{p:03d}" * (pp > 1) + f"_{e:03d}" * (ep > 1)
            for t, p, e in itertools.product(range(tp), range(pp), range(ep))
        }
        found = {folder.name for folder in self.path.glob("mp_rank_*")}
        if different := sorted(found ^ set(folders.values())):
            verb = "has" if different[0] in found else "lacks"
            what = f"{self.path} {verb} {different[0]}, and its args say tp {tp}, pp {pp}, ep {ep}"
            raise CheckpointError(what, hint=DAMAGED_HINT)
        files = {rank: read_common(self.path / folder / FILE) for rank, folder in folders.items()}
        for rank, file in files.items():
            if (step := file.get("iteration")) != (first := self.common.get("iteration")):
                what = f"{self.path / folders[rank]} is of iteration {step}, the first rank of {first}"
                raise CheckpointError(what, hint=DAMAGED_HINT)
        ranks = {
            rank: [file[key] for number in range(len(file)) if (key := f"model{number}") in file] or [file["model"]]
            for rank, file in files.items()
        }  # model chunks
        layers = 0
        for number, p in itertools.product(range(len(ranks[0, 0, 0])), range(pp)):
            for t, e in itertools.product(range(tp), range(ep)):
                experts = (self._args.get("num_experts") or 0) // ep
                for key, tensor in ranks[t, p, e][number].items():
                    for one, part in _matrices(key, tensor, experts) if isinstance(tensor, Tensor) else ():
                        name = _global_name(one, layers, e * experts)
                        self._shards.found[MODEL][name][t] = partial(Tensor.detach, part)
            own = map(LAYER.match, ranks[0, p, 0][number])
            layers += max((int(layer[1]) for layer in own if layer), default=-1) + 1


def _matrices(key: str, tensor: Tensor, experts: int) -> Iterator[tuple[str, Tensor]]:
    """The tensor, or the matrices of all of a rank's experts that it is with `--moe-grouped-gemm`: [in, out] each."""
    if not (found := GROUPED.fullmatch(key)):
        yield key, tensor
        return
    rows, columns = (len(tensor), -1) if found[2] == "1" else (-1, tensor.shape[1])
    for number, matrix in enumerate(tensor.view(experts, rows, columns)):
        yield f"{found[1]}.local_experts.{number}.linear_fc{found[2]}.weight", matrix.t()


def _global_name(key: str, layers: int, experts: int) -> str:
    """The name in the whole model of a rank's tensor, with as many layers, and experts, before the rank's own."""
    for ours, theirs in ALIASES:
        key = key.replace(theirs, ours)
    key = LAYER.sub(lambda found: f"decoder.layers.{int(found[1]) + layers}.{found[2]}", key)
    return LOCAL.sub(lambda found: f"mlp.experts.{int(found[1] or found[4]) + experts}.{found[2] or found[3]}", key)
