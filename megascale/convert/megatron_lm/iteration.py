"""The iteration of a folder of Megatron-LM: its own folder, its step, and its pickles, read as plain data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megascale.convert.dcp import DAMAGED_HINT, load_plain
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


def read_common(path: Path) -> Mapping[str, Any]:
    """Read the state of no rank. Raises: CheckpointError if it is unreadable, or an entry that is used is odd"""
    if reason := why_unreadable(path):
        raise CheckpointError(reason, hint=DAMAGED_HINT)
    stored = load_plain(path, str(path), INERT)
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
