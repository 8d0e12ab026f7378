"""Rules of `train.memory`, the policy of each layer for tensors saved for backward."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megascale.config.exclusions import REMOVE, Exclusions, only, unless
from megascale.config.finding import Finding
from megascale.config.model import ModelConfig
from megascale.config.train import TrainConfig, may_have

LAYER_POLICIES = Exclusions("train.memory", unless(None), (
    ("train.recompute", only("none"), "is of all layers, and train.memory has a policy for each",
     f"selective or full in train.memory, or {REMOVE}"),
))  # fmt: skip

NO_CHOICE = Exclusions("train.memory", unless("auto"), (
    ("train.memory_limit", only(None), "limits the planner's choice, and train.memory is not auto",
     f'train.memory = "auto", or {REMOVE}'),
))  # fmt: skip


def layer_policies(model: ModelConfig, train: TrainConfig) -> Iterator[Finding]:
    """Check that each policy of the list is of a layer, and a share of tokens a number of tiles."""
    policies, tiles = train.memory if isinstance(train.memory, list) else [], train.mlp_tiles
    if len(policies) > model.total_layers:
        message = f"{len(policies)} policies, and the model has {model.total_layers} layers"
        yield Finding("train.memory", message, f"at most {model.total_layers}; a shorter list repeats")
    shares = [share for policy in policies if isinstance(policy, dict) for share in policy.values()]
    if share := next((share for share in shares if not (share * tiles).is_integer()), None):
        message = f"a share of {share:g} is no whole number of tiles with train.mlp_tiles = {tiles}"
        several = f"a multiple of 1 / {tiles}, or another train.mlp_tiles"
        hint = several if tiles > 1 else "train.mlp_tiles above 1, or host or nvme for all that a layer saves"
        yield Finding("train.memory", message, hint)


def saved_tensors_folder(train: TrainConfig) -> Iterator[Finding]:
    """Check that files of saved tensors have a folder, and the folder has files."""
    key, folder, moves = "train.memory_dir", train.memory_dir, may_have(train, "nvme")
    if folder is None and moves and train.memory != "auto":
        yield Finding(key, "train.memory moves tensors to files, which need a folder", "a folder on a local disk")
    elif folder is not None and not moves:
        yield Finding(key, "has no effect without nvme in train.memory", "nvme in train.memory, or remove the key")
    elif folder is not None and not (  # hosts of a run may have a folder that this one lacks
        Path(folder).is_absolute() and (not os.path.lexists(folder) or os.access(folder, os.W_OK | os.X_OK))
    ):
        message = f"{folder!r} is not the absolute path of a writable folder"
        yield Finding(key, message, "a folder on a local disk, the same on every host")
