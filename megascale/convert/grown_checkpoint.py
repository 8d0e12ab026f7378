"""A checkpoint of a grown model (`grow`): weights, averages and optimizer state, and all other state as saved.

The next run has the same step, samples and tokens, and the same place in the learning rate's schedule. State is by
global name, for any layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
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
from megascale.parallel.stateful import AVERAGE, BALANCE_BIAS, WEIGHTS

MOMENTS = {"exp_avg": 1, "momentum": 1, "exp_avg_sq": 2}  # state that follows the gradient, to a power
LOW = "low"  # what rounding has left of compensated weights
LAYERED = (BALANCE_BIAS, "expert_choices")  # vectors [layers x experts]
BEGINS_ANEW = "fp8_history"  # state by operand


def grow(source: Location, output: Path, to: ModelConfig, seed: int, where: str) -> list[str]:
    """Make a checkpoint of the model `to` with the function of that of `source`. Returns lines on state that begins
    anew. `seed`: of new weights; `where`: the file of `to`.

    Raises: ConfigError if the model cannot grow to it, CheckpointError if the checkpoint is unreadable or has state
        that cannot grow; OSError
    """
    saved = manifest.read(source)
    growth = plan_growth(saved_model(source, saved), to, seed, where)
    config = {**saved.facts.config, "model": to.model_dump(mode="json", by_alias=True)}
    with atomic_folder(output) as folder:
        companions = copy_companions(source, Location(str(folder)))
        offline.write_state(folder, _tensors(source, saved, growth), config, companions, saved.facts.progress)
    return [f"{BEGINS_ANEW} begins anew"] if any(name.startswith(BEGINS_ANEW) for name in saved.tensors) else []


def _tensors(source: Location, saved: manifest.Manifest, growth: ModelGrowth) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of the grown checkpoint."""
    read, kinds = partial(offline.read_tensor, source, saved), defaultdict[str, list[str]](list)
    for kind, _, of in (name.partition(".") for name in saved.tensors if not name.startswith(BEGINS_ANEW)):
        kinds[of].append(kind)  # of state, by tensor
    olds = {name: growth.source(name) for name in growth.tensors}
    others = kinds.keys() - olds.values()
    for name in saved.tensors:
        if name.partition(".")[2] in others:
            whole = read(name)
            yield name, _by_layer(growth, whole) if name in LAYERED else whole
    alike = {_suffix(of): of for of in kinds}  # in a layer that has the state which new layers have
    for name, old in olds.items():
        like = old or alike[_suffix(name)]
        for kind in (kind for kind in kinds[like] if kind != LOW):
            stored, values = saved.tensors[f"{kind}.{like}"], read(f"{kind}.{old}") if old else None
            if values is not None and f"{kind}." == WEIGHTS and LOW in kinds[like]:
                values = values.float() + read(f"{LOW}.{old}").float()
            if f"{kind}." == WEIGHTS or kind.startswith(AVERAGE):
                grown = growth.weight(name, values)
            elif kind in MOMENTS and stored.shape == saved.tensors[f"{WEIGHTS}{like}"].shape:
                grown = growth.moment(name, values, MOMENTS[kind])
            else:
                what = f"{source}: {kind}.{like}, state of its optimizer, has no rule by which it grows"
                raise CheckpointError(what, hint="go on with adamw, lion or muon before, whose moments grow")
            yield f"{kind}.{name}", grown.to(stored.torch_dtype)


def _by_layer(growth: ModelGrowth, values: Tensor) -> Tensor:
    """Return a vector [layers x experts] of the grown model, with zeros for new layers."""
    rows = values.view(growth.model.total_layers, -1)
    return torch.cat([torch.zeros_like(rows[0]) if old is None else rows[old] for old in growth.olds])


def _suffix(name: str) -> str:
    """The name of a tensor inside its layer."""
    kind, _, rest = name.partition(".")
    return rest.partition(".")[2] if kind == "layers" else name
