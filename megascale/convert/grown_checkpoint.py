"""A checkpoint of a grown model (`grow`): weights, averages and optimizer state, and all other state as saved.

The next run has the same step, samples and tokens, and the same place in the learning rate's schedule. State is by
global name, for any layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megascale.checkpoint import offline
from megascale.checkpoint.companions import copy_companions
from megascale.checkpoint.format import manifest
from megascale.config.model import ModelConfig
from megascale.convert.growth import ModelGrowth, plan_growth
from megascale.convert.saved_weights import saved_model
from megascale.core.errors import CheckpointError
from megascale.core.files import atomic_folder
from megascale.core.storage import Location
from megascale.parallel.stateful import AVERAGE, AVERAGE_UPDATES, BALANCE_BIAS, WEIGHTS

MOMENTS = {"exp_avg": 1, "momentum": 1, "exp_avg_sq": 2}  # state that follows the gradient, to a power
LOW = "low"  # what rounding has left of compensated weights
LAYERED = (BALANCE_BIAS, "expert_choices")  # vectors [layers x experts]
BEGINS_ANEW = ("fp8_history",)  # state by operand


def grow(source: Location, output: Path, to: ModelConfig, seed: int, where: str) -> list[str]:
    """Make a checkpoint of the model `to` with the function of that of `source`. Returns lines on state that begins
    anew. `seed`: of new weights; `where`: the file of `to`.

    Raises: ConfigError if the model cannot grow to it, CheckpointError if the checkpoint is unreadable or has state
        that cannot grow; OSError
    """
    saved = manifest.read(source)
    grown = _Grown(source, saved, plan_growth(saved_model(source, saved), to, seed, where))
    grown.check()
    config = {**saved.facts.config, "model": to.model_dump(mode="json", by_alias=True)}
    with atomic_folder(output) as folder:
        companions = copy_companions(source, Location(str(folder)))
        offline.write_state(folder, grown.tensors(), config, companions, saved.facts.progress)
    anew = sorted({name.partition(".")[0] for name in saved.tensors} & {*BEGINS_ANEW})
    return [f"{name} begins anew" for name in anew]


@dataclass(frozen=True)
class _Grown:
    """The tensors of a checkpoint, grown."""

    source: Location
    saved: manifest.Manifest
    growth: ModelGrowth

    @property
    def _kinds(self) -> dict[str, list[str]]:
        """The kinds of state of each tensor of the model before, by its name: weights, moments, averages."""
        known = {tensor for name in self.growth.tensors if (tensor := self.growth.source(name))}
        kinds: dict[str, list[str]] = {}
        for name in self.saved.tensors:
            kind, _, of = name.partition(".")
            if of in known:
                kinds.setdefault(of, []).append(kind)
        return kinds

    def check(self) -> None:
        """Raise CheckpointError for state without a rule."""
        kinds = self._kinds
        for of, found in kinds.items():
            for kind in found:
                shape = self.saved.tensors[f"{WEIGHTS}{of}"].shape
                moment = kind in MOMENTS and self.saved.tensors[f"{kind}.{of}"].shape == shape
                floating = self.saved.tensors[f"{kind}.{of}"].torch_dtype.is_floating_point
                if not (moment and floating) and f"{kind}." not in (WEIGHTS, f"{LOW}.") and not _is_average(kind):
                    what = f"{self.source}: {kind}.{of}, state of its optimizer, has no rule by which it grows"
                    raise CheckpointError(what, hint="go on with adamw, lion or muon before, whose moments grow")

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors of the grown checkpoint."""
        kinds, growth = self._kinds, self.growth
        alike = {_suffix(name): name for name in kinds}  # a layer that has the state which new layers have
        for name in growth.tensors:
            source = growth.source(name)
            for kind in kinds[source or alike[_suffix(name)]]:
                dtype = self.saved.tensors[f"{kind}.{source or alike[_suffix(name)]}"].torch_dtype
                if kind != LOW:
                    yield f"{kind}.{name}", self._tensor(kind, name, source).to(dtype)
        bound = {f"{kind}.{of}" for of, found in kinds.items() for kind in found}
        for name in self.saved.tensors:
            if name not in bound and name.partition(".")[0] not in BEGINS_ANEW:
                whole = offline.read_tensor(self.source, self.saved, name)
                yield name, self._by_layer(whole) if name in LAYERED else whole

    def _tensor(self, kind: str, name: str, source: str | None) -> Tensor:
        """Make a tensor of the grown model, f64."""
        old = None if source is None else self._read(kind, source)
        if f"{kind}." == WEIGHTS or _is_average(kind):
            return self.growth.weight(name, old)
        if old is None:
            return torch.zeros(self.growth.tensors[name][1].shape)
        return self.growth.moment(name, old, MOMENTS[kind])

    def _read(self, kind: str, source: str) -> Tensor:
        """Read a tensor; a compensated weight with what rounding has left of it, f32."""
        values = offline.read_tensor(self.source, self.saved, f"{kind}.{source}")
        if f"{kind}." == WEIGHTS and f"{LOW}.{source}" in self.saved.tensors:
            return values.float() + offline.read_tensor(self.source, self.saved, f"{LOW}.{source}").float()
        return values

    def _by_layer(self, values: Tensor) -> Tensor:
        """Return a vector [layers x experts] of the grown model, with zeros for new layers."""
        growth = self.growth
        rows = values.view(growth.model.total_layers, -1)
        olds = map(growth.old_layer, range(growth.to.total_layers))
        return torch.stack([rows.new_zeros(rows.shape[1]) if old is None else rows[old] for old in olds]).flatten()


def _is_average(kind: str) -> bool:
    return kind.startswith(AVERAGE) and kind != AVERAGE_UPDATES


def _suffix(name: str) -> str:
    """The name of a tensor inside its layer."""
    kind, _, rest = name.partition(".")
    return rest.partition(".")[2] if kind == "layers" else name
