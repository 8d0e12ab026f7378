"""Folders of Megatron-LM's format `torch`: for each rank of tensor, pipeline and expert parallelism
mp_rank_TT_PPP_EEE/model_optim_rng.pt, of which the weights are read.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from torch import Tensor

from megascale.convert.dcp import DAMAGED_HINT
from megascale.convert.families.megatron_lm import ALIASES, FAMILY
from megascale.convert.megatron_lm.iteration import MODEL, read_common
from megascale.convert.megatron_lm.shards import Shards
from megascale.core.errors import CheckpointError
from megascale.layout.tensors import HEAD

FILE = "model_optim_rng.pt"
LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
GROUPED = re.compile(r"(.*\.experts)\.weight([12])")
EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.(\w+\.\w+)|(\w+\.(?:weight|bias))(\d+))$")


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
    key = LAYER.sub(lambda found: f"decoder.layers.{int(found[1]) + layers}.", key, count=1)
    return EXPERT.sub(lambda found: f"mlp.experts.{int(found[1] or found[4]) + experts}.{found[2] or found[3]}", key)
