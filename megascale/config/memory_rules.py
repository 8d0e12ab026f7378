"""Rules of `train.memory`, the policy of each layer for tensors saved for backward."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megascale.config.finding import Finding
from megascale.config.model import ModelConfig
from megascale.config.section import AUTO
from megascale.config.train import TrainConfig, may_have


def one_way(train: TrainConfig) -> Iterator[Finding]:
    """Check that no other key sets recomputation, or offload to host memory."""
    others = {"recompute": "none", "recompute_model_chunks": None, "activation_offload": False}
    given = [f"train.{name}" for name, default in others.items() if getattr(train, name) != default]
    if train.memory is not None and given:
        message = f"has a policy for every layer, and so has {' and '.join(given)}"
        yield Finding("train.memory", message, f"keep, selective, full or host in the list, without {given[0]}")


def layer_policies(model: ModelConfig, train: TrainConfig) -> Iterator[Finding]:
    """Check that each policy of the list is of a layer."""
    if isinstance(train.memory, list) and len(train.memory) > model.total_layers:
        message = f"{len(train.memory)} policies, and the model has {model.total_layers} layers"
        yield Finding("train.memory", message, f"at most {model.total_layers}; a shorter list repeats")


def shares(train: TrainConfig) -> Iterator[Finding]:
    """Check that a share of tokens is a number of tiles."""
    tiles = train.mlp_tiles
    for policy in train.memory if isinstance(train.memory, list) else ():
        share = 1.0 if isinstance(policy, str) else next(iter(policy.values()))
        if share < 1 and not (share * tiles).is_integer():
            message = f"a share of {share:g} is no whole number of tiles with train.mlp_tiles = {tiles}"
            yield Finding("train.memory", message, _valid_shares(tiles))
            return


def _valid_shares(tiles: int) -> str:
    if tiles == 1:
        return "train.mlp_tiles above 1, or host or nvme for all that a layer saves"
    return f"a multiple of 1 / {tiles}, or another train.mlp_tiles"


def memory_limit(train: TrainConfig) -> Iterator[Finding]:
    """Check that a limit of memory has a choice to limit."""
    if train.memory_limit is not None and train.memory != AUTO:
        message = "limits the planner's choice, and train.memory is not auto"
        yield Finding("train.memory_limit", message, 'train.memory = "auto", or remove the key')


def saved_tensors_folder(train: TrainConfig) -> Iterator[Finding]:
    """Check that files of saved tensors have a folder, and the folder has files."""
    key, folder, moves = "train.memory_dir", train.memory_dir, may_have(train, "nvme")
    if folder is None and moves and train.memory != "auto":
        yield Finding(key, "train.memory moves tensors to files, which need a folder", "a folder on a local disk")
    elif folder is not None and not moves:
        yield Finding(key, "has no effect without nvme in train.memory", "nvme in train.memory, or remove the key")
    elif folder is not None and not (Path(folder).is_absolute() and os.access(folder, os.W_OK | os.X_OK)):
        message = f"{folder!r} is not the absolute path of a writable folder"
        yield Finding(key, message, "a folder on a local disk, the same on every host")
