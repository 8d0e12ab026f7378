"""Checkpoints of other systems: a folder is written PREFIX:FOLDER on the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from megascale.config.run import RunConfig
from megascale.convert import torchtitan
from megascale.convert.dcp import METADATA
from megascale.convert.megatron_lm.conversion import from_megatron, to_megatron
from megascale.convert.megatron_lm.formats import COMMON
from megascale.convert.megatron_lm.iteration import TRACKER
from megascale.core.storage import Location


class System(NamedTuple):
    """Conversions to a new folder: `read` of a folder, for a run with a configuration if one is given, and `write` of a
    checkpoint. They return what differs, a line each.
    """

    read: Callable[[Path, Path, RunConfig | None], list[str]]
    write: Callable[[Location, Path], list[str]]


SYSTEMS = {  # by prefix
    "torchtitan": System(torchtitan.import_checkpoint, torchtitan.export_checkpoint),
    "megatron": System(from_megatron, to_megatron),
}
MARKS = {TRACKER: "megatron", COMMON: "megatron", METADATA: "torchtitan"}  # prefix by file of a folder
