"""What a conversion reads of a checkpoint of Megatron-LM, and the folder that holds it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from megascale.core.errors import CheckpointError
from megascale.core.files import exists

TRACKER = "latest_checkpointed_iteration.txt"

FOLDER_HINT = f"the folder of --save, which has {TRACKER}, or an iter_NNNNNNN in it"
RESHARDABLE_HINT = "save it with --ckpt-format torch_dist and --dist-ckpt-optim-fully-reshardable"

MODEL, MOMENTS = "model", ("exp_avg", "exp_avg_sq")
MASTER = "master"  # fp32 copies of the weights, which the optimizer keeps


class Source(Protocol):
    """A checkpoint. `path`: of its iteration. `common`: what is not of a rank, such as `args` and `iteration`. `step`:
    of the optimizer, None if there is no optimizer. `states`: those of `MODEL`, `MASTER` and `MOMENTS` that it has.
    """

    path: Path
    common: Mapping[str, Any]
    step: int | None
    states: frozenset[str]

    def tensor(self, state: str, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read a state of a tensor by the name of `families.megatron`. `shape`: that of the model's arguments.

        Raises: CheckpointError if it is missing or damaged
        """

    def unread(self) -> list[str]:
        """Names of tensors that nobody has read in any state."""


def iteration_folder(folder: Path) -> Path:
    """The folder of the latest iteration in `folder`, which may be one itself. Raises: CheckpointError"""
    if exists(folder / "common.pt") or exists(folder / ".metadata") or next(folder.glob("mp_rank_*"), None):
        return folder
    try:
        text = (folder / TRACKER).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        raise CheckpointError(f"{folder} is no checkpoint of Megatron-LM", hint=FOLDER_HINT) from None
    if not text.isdecimal() and text != "release":
        raise CheckpointError(f"{folder / TRACKER} is {text[:40]!r}, no iteration", hint=FOLDER_HINT)
    path = folder / (text if text == "release" else f"iter_{int(text):07d}")
    if not path.is_dir():
        raise CheckpointError(f"{folder / TRACKER} names {path.name}, which is not there", hint=FOLDER_HINT)
    return path


def optimizers_of(stored: Any) -> list[Mapping[str, Any]]:
    """The optimizers of the entry `optimizer`: one, or those that are chained."""
    if isinstance(stored, list):
        return stored
    chained = isinstance(stored, Mapping) and stored and all(isinstance(key, int) for key in stored)
    return list(stored.values()) if chained else [stored] if stored else []


def step_of(optimizers: list[Mapping[str, Any]]) -> int | None:
    """The finished steps of optimizers; None without a count."""
    for optimizer in optimizers:
        inner = optimizer.get("optimizer", optimizer)
        state = inner.get("state", {})
        counts = [state.get("common_step"), *(group.get("step") for group in inner.get("param_groups", ()))]
        counts += [entry.get("step") for entry in state.values() if isinstance(entry, Mapping)]
        if found := [int(count) for count in counts if count is not None]:
            return max(found)
    return None
