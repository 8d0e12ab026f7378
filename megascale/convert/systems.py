"""Checkpoints of other systems: a folder is written PREFIX:FOLDER on the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from megascale.config.run import RunConfig
from megascale.convert import torchtitan
from megascale.convert.megatron_lm.from_megatron import from_megatron
from megascale.convert.megatron_lm.to_megatron import to_megatron
from megascale.core.storage import Location


class System(NamedTuple):
    """A system. `read` makes a checkpoint, in a new folder, of its folder, for a run with a configuration, if one is
    given; `write` makes its folder of a checkpoint. Both return what differs, a line each.
    """

    read: Callable[[Path, Path, RunConfig | None], list[str]]
    write: Callable[[Location, Path], list[str]]


SYSTEMS = {
    "torchtitan": System(torchtitan.import_checkpoint, torchtitan.export_checkpoint),
    "megatron": System(from_megatron, to_megatron),
}
"""Systems by prefix."""
