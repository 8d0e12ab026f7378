"""The outer optimizer of training across sites (DiLoCo, Douillard et al. 2023, arXiv:2311.08105).

    pseudo-gradient       d = outer weights - master weights, after `sites.every` steps of the inner optimizer
    mean over the sites   g
    Nesterov momentum     m = momentum m + g;  outer weights -= lr (g + momentum m);  master weights = outer weights

With `sites.top_k` below 1 or fewer `bits` (SparseLoCo) a site sends c = compress(e), of e = error_decay r + d, and
keeps the residual r = e - c for its next outer step. Steps that a rank has trained while its weights were on their way
(`sites.overlap`) stay on top: master weights = outer weights + master weights now - master weights then.

A rank does so for its shards of the optimizer. The state of the inner optimizer is its own. Checkpoints have
`outer.NAME`, `outer_momentum.NAME` and `outer_residual.NAME` by the weights' global names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megascale.comm.mesh import Mesh
from megascale.config.sites import SitesConfig
from megascale.layout.buckets import SlotRange
from megascale.layout.chunks import module_of
from megascale.optim.compression import Compression
from megascale.optim.optimizer_shard import OptimizerShard, gather_shares, global_tensors
from megascale.parallel.stateful import WEIGHTS, GlobalTensor

OUTER, OUTER_MOMENTUM, OUTER_RESIDUAL = "outer", "outer_momentum", "outer_residual"


@dataclass(frozen=True)
class PseudoGradient:
    """The pseudo-gradient of `fragments` on a rank: `total` [n], with the residual so far, and the `payload` [bytes],
    u8, that it sends. `masters`: the weights then.
    """

    fragments: Sequence[int]
    total: Tensor
    payload: Tensor
    masters: Tensor


Pieces = Sequence[tuple[OptimizerShard, SlotRange]]
"""The parts of parameters in some fragments that a rank sends."""


class OuterOptimizer:
    """Outer weights and momentum of this rank's `shards`; a part of the run with state (`Stateful`). `layers`: of the
    model, which divide into fragments.
    """

    def __init__(self, settings: SitesConfig, shards: Sequence[OptimizerShard], layers: int, mesh: Mesh) -> None:
        self._settings, self._layers, self._mesh = settings, layers, mesh
        self._compression = Compression(settings.top_k, settings.bits)
        kinds = {OUTER: True, OUTER_MOMENTUM: settings.outer_momentum > 0, OUTER_RESIDUAL: settings.is_lossy}
        names = [name for name, present in kinds.items() if present]
        self.shards = [
            replace(shard, state={name: torch.zeros_like(shard.master) for name in names}, ranges=())
            for shard in shards
        ]
        self._is_loaded = False

    def begin(self) -> None:
        """Begin with the weights as outer weights, unless a checkpoint had some."""
        for shard in self.shards if not self._is_loaded else ():
            shard.state[OUTER].copy_(shard.master)

    def pseudo_gradient(self, fragments: Sequence[int]) -> PseudoGradient:
        """Compress what the inner steps have changed since the last outer step. Changes nothing."""
        pieces = self._pieces(fragments)
        masters = _flat(pieces, [shard.master for shard, _ in pieces])
        total = _flat(pieces, [shard.state[OUTER] for shard, _ in pieces]) - masters
        if self._settings.is_lossy:
            residual = _flat(pieces, [shard.state[OUTER_RESIDUAL] for shard, _ in pieces])
            total += self._settings.error_decay * residual
        payload = self._compression.compress(total, [item.numel for _, item in pieces])
        return PseudoGradient(fragments, total, payload, masters)

    def step(self, own: PseudoGradient, payloads: Sequence[Tensor], *, contributed: bool) -> None:
        """Take the outer step of the mean of `payloads`, those of the sites that have trained, in the sites' order.
        `contributed`: `own` is one of them.
        """
        pieces = self._pieces(own.fragments)
        lengths, dtype = [item.numel for _, item in pieces], own.total.dtype
        terms = (self._compression.decompress(payload, lengths, dtype) for payload in payloads)
        mean = sum(terms, torch.zeros_like(own.total)) / len(payloads)
        since = _flat(pieces, [shard.master for shard, _ in pieces]) - own.masters
        rest = own.total
        if self._settings.is_lossy and contributed:
            rest = own.total - self._compression.decompress(own.payload, lengths, dtype)
        momentum, lr = self._settings.outer_momentum, self._settings.outer_lr
        parts = (flat.split(lengths) for flat in (mean, since, rest))
        for (shard, item), gradient, trained, left in zip(pieces, *parts, strict=True):
            state = {name: item.view(values, shard.start) for name, values in shard.state.items()}
            direction = gradient
            if momentum:
                state[OUTER_MOMENTUM].mul_(momentum).add_(gradient)
                direction = gradient + momentum * state[OUTER_MOMENTUM]
            state[OUTER].sub_(lr * direction)
            item.view(shard.master, shard.start).copy_(state[OUTER] + trained)
            if self._settings.is_lossy and contributed:
                state[OUTER_RESIDUAL].copy_(left)
        gather_shares(self.shards)  # replicas have each taken the step of a share
        for shard in self.shards:
            shard.copy_to_params()

    def _pieces(self, fragments: Sequence[int]) -> Pieces:
        """The parts of parameters of `fragments` that this rank sends, in the same order at every site."""
        return [
            (shard, item)
            for shard in self.shards
            for item in shard.bucket.layout.param_ranges(*shard.bucket.storage.share)
            if self._fragment(item.slot.parameter.name) in fragments
        ]

    def _fragment(self, name: str) -> int:
        """Return the fragment of a parameter, which no layout changes: layers in runs, the embedding with the first."""
        module, _, layer = module_of(name).partition(".")
        place = int(layer) if module == "layers" else 0 if module == "embedding" else self._layers - 1
        return min(place, self._layers - 1) * self._settings.fragments // self._layers

    def taken_over(self) -> Tensor:
        """Return what a site that comes back takes over [bytes], u8: outer weights and momentum of this rank."""
        return torch.cat([values.view(torch.uint8) for values in self._shared()])

    def take_over(self, received: Tensor) -> None:
        """Go on from the state of another site, with its outer weights as master weights."""
        for values in self._shared():
            part, received = received[: values.nbytes], received[values.nbytes :]
            values.copy_(part.clone().view(values.dtype))
        for shard in self.shards:
            shard.master.copy_(shard.state[OUTER])

    def _shared(self) -> list[Tensor]:
        names = (OUTER, OUTER_MOMENTUM)
        return [shard.state[name] for shard in self.shards for name in names if name in shard.state]

    def global_tensors(self) -> dict[str, GlobalTensor]:
        tensors = global_tensors(self.shards, self._mesh)
        return {name: tensor for name, tensor in tensors.items() if not name.startswith(WEIGHTS)}

    def flat_tensors(self) -> list[Tensor]:
        return [values for shard in self.shards for values in shard.state.values()]

    def begin_load(self, saved: Mapping[str, Sequence[int]], config: Mapping[str, Any]) -> dict[str, GlobalTensor]:
        """Read what the checkpoint has of the outer state: all, or with other settings a part."""
        for values in self.flat_tensors():
            values.zero_()
        found = {name: tensor for name, tensor in self.global_tensors().items() if name in saved}
        self._is_loaded = any(name.startswith(f"{OUTER}.") for name in found)
        return found if self._is_loaded else {}

    def end_load(self) -> None:
        gather_shares(self.shards)

    def end_restore(self) -> None:
        self._is_loaded = True


def _flat(pieces: Pieces, tensors: Sequence[Tensor]) -> Tensor:
    """Copy the parts of tensors, each of the shard of its piece, end to end."""
    parts = [item.view(values, shard.start) for (shard, item), values in zip(pieces, tensors, strict=True)]
    return torch.cat(parts) if parts else torch.empty(0)
