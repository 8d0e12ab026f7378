"""The iteration of a folder of Megatron-LM: its own folder, its step, and its pickles, read as plain data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megascale.convert.dcp import CODE_HINT, DAMAGED_HINT, Record
from megascale.core.errors import CheckpointError
from megascale.core.files import exists, is_folder, why_unreadable

TRACKER = "latest_checkpointed_iteration.txt"
FOLDER_HINT = f"the folder of --save, which has {TRACKER}, or an iter_NNNNNNN in it"
RESHARDABLE_HINT = "save it with --ckpt-format torch_dist and --dist-ckpt-optim-fully-reshardable"

MODEL, MASTER, MOMENTS = "model", "master", ("exp_avg", "exp_avg_sq")
"""States of a tensor: the weights that compute, the optimizer's fp32 copy, and Adam's moments."""

INERT = re.compile(r"(argparse\.Namespace|signal\.Signals|pathlib\.\w+|megatron\.[\w.]+|numpy\.[\w.]+)")
"""Classes and functions that pickles may name: a `Record` stands for each."""


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
    path = folder / (f"iter_{int(text):07d}" if text.isdecimal() else text)
    if not is_folder(path):
        raise CheckpointError(f"{folder / TRACKER} names {path.name}, which is not there", hint=FOLDER_HINT)
    return path


def read_plain(path: Path) -> Any:
    """Read a file of torch.save, with tensors mapped from it, and without running code.

    Raises: CheckpointError if it is missing or damaged, or names other classes than `INERT`
    """
    if reason := why_unreadable(path):
        raise CheckpointError(reason, hint=DAMAGED_HINT)
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
        refused = sorted(name for name in names if not INERT.fullmatch(name))
        if not refused:
            with torch.serialization.safe_globals([(Record, name) for name in names]):
                return torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # of many classes, as the bytes may be any
        raise CheckpointError(f"{path} is damaged: {str(error).partition(chr(10))[0]}", hint=DAMAGED_HINT) from None
    raise CheckpointError(f"{path} names {', '.join(refused)}, which is not opened", hint=CODE_HINT)


def read_common(path: Path) -> Mapping[str, Any]:
    """Read the state of no rank. Raises: CheckpointError if it is unreadable, or an entry that is used is odd"""
    stored = read_plain(path)
    entries = stored if isinstance(stored, Mapping) else {}
    odd = {
        "the whole": not isinstance(stored, Mapping),
        "args": "args" in entries and not hasattr(entries["args"], "__dict__"),
        "iteration": not isinstance(entries.get("iteration", 0), int),
        "opt_param_scheduler": not isinstance(entries.get("opt_param_scheduler") or {}, Mapping),
    }
    if wrong := next((name for name, is_odd in odd.items() if is_odd), None):
        kind = type(entries.get(wrong, stored)).__name__
        raise CheckpointError(f"{path} is not what Megatron-LM writes: {wrong} is a {kind}", hint=DAMAGED_HINT)
    return entries


def optimizers_of(stored: Any) -> list[Mapping[str, Any]]:
    """The optimizers of the entry `optimizer`: one, or those that are chained."""
    if isinstance(stored, Mapping) and stored and all(isinstance(key, int) for key in stored):
        return list(stored.values())
    return stored if isinstance(stored, list) else [stored] if stored else []


def step_of(optimizers: list[Mapping[str, Any]]) -> int | None:
    """The finished steps of optimizers; None without a count."""
    counts: list[Any] = []
    for inner in (optimizer.get("optimizer", optimizer) for optimizer in optimizers):
        state = inner.get("state", {})
        entries = [*inner.get("param_groups", ()), *(each for each in state.values() if isinstance(each, Mapping))]
        counts += [state.get("common_step"), *(entry.get("step") for entry in entries)]
    return max((int(count) for count in counts if count is not None), default=None)
