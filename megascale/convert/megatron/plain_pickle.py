"""Files of torch.save that Megatron-LM writes, read without running code: `args` and enums become records."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from megascale.convert.dcp import CODE_HINT, DAMAGED_HINT, Record
from megascale.core.errors import CheckpointError
from megascale.core.files import why_unreadable

INERT = re.compile(r"(argparse\.Namespace|signal\.Signals|pathlib\.\w+|megatron\.[\w.]+|numpy\.[\w.]+)")
"""Classes and functions that files may name: a `Record` stands for each."""


def read_plain(path: Path) -> Any:
    """Read a file, with tensors mapped from it.

    Raises: CheckpointError if it is missing or damaged, or names other classes than `INERT`
    """
    if reason := why_unreadable(path):
        raise CheckpointError(reason, hint=DAMAGED_HINT)
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
        if refused := sorted(name for name in names if not INERT.fullmatch(name)):
            raise CheckpointError(f"{path} names {', '.join(refused)}, which is not opened", hint=CODE_HINT)
        with torch.serialization.safe_globals([(Record, name) for name in names]):
            return torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
    except CheckpointError:
        raise
    except Exception as error:  # of many classes, as the bytes may be any
        what = str(error).splitlines()[0] if str(error) else repr(error)
        raise CheckpointError(f"{path} is damaged: {what}", hint=DAMAGED_HINT) from None
