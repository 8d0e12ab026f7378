"""Files of in-memory copies on a host (`CopyFolder`): per rank two slots, each a copy and a `Header` with checksums.

rank-00000.a   rank-00000.a.json   rank-00000.b   ...

Nodes of `driver.scheduler` have a folder each (`core.run_folder`), even where several are processes of one host.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from megascale.checkpoint.format import manifest
from megascale.core.files import exists, write_text
from megascale.core.rank import NODE_VARIABLE
from megascale.core.run_folder import copies_folder
from megascale.operate.node.stored_copies import hold_copies, remove_copies

SLOTS = "ab"

CopySlot = tuple[int, int, int]
"""Rank, step and slot of a copy."""

_COPY = re.compile(r"rank-(\d+)\.([ab])")


class Header(BaseModel):
    """Header of a copy: ids of run and start, hash of the layout (`what` on disk), CRC-32 of every checksum block."""

    run: str
    layout_hash: str = Field(alias="what")
    facts: manifest.Facts
    sums: tuple[int, ...]

    @property
    def step(self) -> int:
        return self.facts.progress.step


class CopyFolder:
    """The folder of a run's copies on this node, for this user alone. `token`: file of the run's ids."""

    def __init__(self, parent: Path, run_id: str, token: Path, env: Mapping[str, str] = os.environ) -> None:
        self._of_run = copies_folder(parent, run_id, token)
        self._run = token.parent
        self.path = copies_folder(parent, run_id, token, env.get(NODE_VARIABLE, ""))

    def create(self) -> None:
        """Make the folder, whose copies are in use as long as this object is. Raises: CheckpointError"""
        self._in_use = hold_copies(self.path, self._run)

    def copy_path(self, rank: int, slot: int) -> Path:
        return self.path / f"rank-{rank:05d}.{SLOTS[slot]}"

    def header_path(self, rank: int, slot: int) -> Path:
        return _header_path(self.copy_path(rank, slot))

    def find(self, runs: Collection[str], layout_hash: str, rank: int, step: int) -> tuple[int, Header | None]:
        """Return the slot of a rank's copy of `step` in any of `runs`, and its header; None without a copy."""
        for slot in range(len(SLOTS)):
            header = _read_header(self.header_path(rank, slot))
            if header and header.run in runs and (header.layout_hash, header.step) == (layout_hash, step):
                return slot, header
        return 0, None

    def usable_copies(self, runs: Collection[str], hashes: Sequence[str]) -> tuple[list[CopySlot], list[int]]:
        """Return the copies in any of `runs` whose layout is their rank's, and the steps of the rest.

        `hashes`: the layout's hash by rank. A copy of another layout must not be sent: its size may differ.
        """
        usable: list[CopySlot] = []
        unusable = set()
        for path in self.path.glob("rank-*.json"):
            match, header = _COPY.fullmatch(path.stem), _read_header(path)
            if not (match and header and header.run in runs):
                continue
            rank = int(match.group(1))
            if rank < len(hashes) and header.layout_hash == hashes[rank]:
                usable.append((rank, header.step, SLOTS.index(match.group(2))))
            else:
                unusable.add(header.step)
        return usable, sorted(unusable)

    def adopt(self, runs: Collection[str], new_run: str, step: int | None, mapped: set[int], keep_others: bool) -> str:
        """Make copies of `step` in any of `runs` copies of `new_run`, and invalidate all others. Returns why a copy of
        `step` was lost, else "": without space for its header.

        `mapped`: ranks whose processes have the file mapped, so that only headers are removed. `keep_others`: also
        keep copies of other ranks.
        """
        problem = ""
        for path in self.path.glob("rank-*.?"):
            is_mapped, place = int(path.stem.removeprefix("rank-")) in mapped, _header_path(path)
            header = _read_header(place)
            of_step = header is not None and header.run in (*runs, new_run) and header.step == step
            if header is not None and of_step and (is_mapped or keep_others):
                try:
                    write_text(place, header.model_copy(update={"run": new_run}).model_dump_json(by_alias=True))
                except OSError as error:
                    problem = f"{place}: {error.strerror}"
                    place.unlink(missing_ok=True)
            else:
                place.unlink(missing_ok=True)
                if not is_mapped:
                    path.unlink(missing_ok=True)
        return problem

    def remove_unused(self, rank: int) -> None:
        """Free the memory of a rank's slots without a complete copy."""
        for slot in range(len(SLOTS)):
            if not exists(self.header_path(rank, slot)):
                self.copy_path(rank, slot).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another rank removes the folder, too
            if not any(self.path.glob("rank-*")):
                remove_copies(self.path)

    def remove(self) -> None:
        """Remove all copies of the run on this host, also those of lost nodes."""
        remove_copies(self._of_run)


def _header_path(copy: Path) -> Path:
    return copy.with_name(f"{copy.name}.json")


def _read_header(path: Path) -> Header | None:
    """Read a header; None if it is missing or malformed."""
    try:
        return Header.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
