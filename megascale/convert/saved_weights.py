"""Weights and model of a checkpoint, as a conversion reads them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from megascale.checkpoint import folders, offline
from megascale.checkpoint.format import manifest
from megascale.config.model import ModelConfig
from megascale.convert.huggingface import PretrainedWeights, weights_folder
from megascale.convert.tensor_map import model_weights
from megascale.core.errors import CheckpointError
from megascale.core.storage import Location
from megascale.layout.freezing import matches
from megascale.parallel.stateful import AVERAGE, AVERAGE_UPDATES, BALANCE_BIAS, WEIGHTS


def read_model_section(source: Location) -> dict[str, Any]:
    """The keys of `[model]` of Hugging Face weights, or of a checkpoint or a run, without keys that have no value.

    Raises: CheckpointError if there are none, or their model is unsupported
    """
    if folder := weights_folder(source.local_path):
        model = PretrainedWeights(folder).model
    else:
        model = open_weights(folders.find_checkpoint(source)).model
    keys = model.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"preset"})
    return keys | ({"positions": model.position_rows} if model.position_rows else {})  # whatever seq_length becomes


def saved_model(source: Location, saved: manifest.Manifest) -> ModelConfig:
    """Read the `[model]` of a checkpoint. Raises: CheckpointError"""
    try:
        return ModelConfig.model_validate(saved.facts.config.get("model"))
    except ValidationError as error:
        what = f"{source}: this version of megascale cannot read its [model]: {error.errors()[0]['msg']}"
        raise CheckpointError(what, hint="use the version that wrote the checkpoint") from None


def planned_steps(facts: manifest.Facts) -> int:
    """The steps of the run of a checkpoint; 2^32, in which no rate decays, if its configuration has none."""
    return int((facts.config.get("train") or {}).get("steps", 1 << 32))


@dataclass(frozen=True)
class SavedWeights:
    """Tensors of a checkpoint in `source` that are weights: the means of those with the `prefixes`."""

    source: Location
    saved: manifest.Manifest
    prefixes: tuple[str, ...] = (WEIGHTS,)

    @functools.cached_property
    def model(self) -> ModelConfig:
        return saved_model(self.source, self.saved)

    def have(self, states: Iterable[str]) -> bool:
        """Return True if the checkpoint has states of these names, such as `exp_avg`, of all weights."""
        names = [weight.name for weight in model_weights(self.model)]
        return all(f"{state}.{name}" in self.saved.tensors for state in states for name in names)

    def widest_dtype(self) -> torch.dtype:
        """Return the smallest dtype that holds the stored dtypes of the weights."""
        stored = {each.torch_dtype for name, each in self.saved.tensors.items() if name.startswith(self.prefixes[0])}
        return functools.reduce(torch.promote_types, stored or {torch.float32})

    def read(self, name: str, index: tuple[int, ...] = ()) -> Tensor:
        """Read a weight, or of a stack the matrix `index`; or the biases of a layer's experts, f32, never averaged.

        Raises: DamagedError if it is missing or damaged
        """
        if name.startswith(BALANCE_BIAS):
            experts = self.saved.facts.config["model"]["experts"]
            first = int(name.rpartition(".")[2]) * experts
            self._check(BALANCE_BIAS)
            return offline.read_tensor(self.source, self.saved, BALANCE_BIAS, ((first,), (experts,))).float()
        found, frozen = [], (self.saved.facts.config.get("train") or {}).get("freeze", [])
        prefixes = (WEIGHTS,) if matches(name, frozen) else self.prefixes  # frozen weights have no average
        for stored in (prefix + name for prefix in prefixes):
            self._check(stored)
            inner = self.saved.tensors[stored].shape[len(index) :]
            part = (*index, *(0 for _ in inner)), (*(1 for _ in index), *inner)
            found.append(offline.read_tensor(self.source, self.saved, stored, part).view(inner))
        return torch.stack(found).mean(0) if len(found) > 1 else found[0]

    def _check(self, stored: str) -> None:
        if stored not in self.saved.tensors:
            raise manifest.DamagedError(f"{self.source} has no tensor {stored}")


def open_weights(source: Location, average: bool = False) -> SavedWeights:
    """Return the weights of a checkpoint, or their average. Raises: CheckpointError"""
    saved = manifest.read(source)
    return average_of_weights(source, saved) if average else SavedWeights(source, saved)


def average_of_weights(source: Location, saved: manifest.Manifest) -> SavedWeights:
    """Return the average: of `lawa` the mean of the snapshots so far. Raises: CheckpointError without one"""
    kept = {name.partition(".")[0] for name in saved.tensors if name.startswith(AVERAGE)} - {AVERAGE_UPDATES}
    taken = int(offline.read_tensor(source, saved, AVERAGE_UPDATES)) if AVERAGE_UPDATES in saved.tensors else 0
    if not taken:
        hint = "train.weight_average = ema or lawa keeps one, every train.weight_average_every steps"
        raise CheckpointError(f"{source} has no average of the weights", hint=hint)
    return SavedWeights(source, saved, tuple(f"{AVERAGE}{index}." for index in range(min(taken, len(kept)))))
