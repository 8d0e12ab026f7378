"""Copies of ranks' state in the memory of hosts, which outlive the processes that made them (MegaScale 4).

Each rank has two files in a file system that is memory, which take turns, and beside each that is whole a header with
its checksums. When processes died but their hosts live, every rank takes up the newest step of which all copies are
there: its own, or one that another rank finds on its host and sends.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import shutil
import socket
import uuid
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from megascale.checkpoint import manifest
from megascale.checkpoint.background import Background
from megascale.checkpoint.copies import BLOCK
from megascale.checkpoint.snapshot import Snapshot
from megascale.comm.mesh import Mesh
from megascale.core.errors import CheckpointError
from megascale.core.files import write_text

SLOTS = "ab"
TOKEN = ".memory"
"""File of a run's folder with two names, a line each. The first is the folder's, and of where its copies are: those of
a folder that was there before are of another run. The second is of the last start: copies of another may be of steps
that the run has gone back from.
"""

LOOPBACK = "127."

Place = tuple[str, int, int]
"""A host's name, and the device and number of a folder there."""

Seen = tuple[int, int, int]
"""A copy of a rank, its step, and the slot that it is in."""

_COPY = re.compile(r"rank-(\d+)\.([ab])")


class Header(BaseModel):
    """What a copy is of: `run` names the run and its start, `what` what lies where in it. `sums`: the CRC-32 of each
    block.
    """

    run: str
    what: str
    facts: manifest.Facts
    sums: tuple[int, ...]


class Memory:
    """The two slots of this rank. Every rank calls `recall` and `keep_only` together. `neighbour`: the rank whose host
    keeps a second copy, None without one; `lonely`: how many ranks want one and have none.

    Raises: CheckpointError if there is no folder for them
    """

    def __init__(self, parent: Path, run: Path, replicate: bool, mesh: Mesh) -> None:
        self._mesh = mesh
        self._control = mesh.world.control
        self._token = run.resolve() / TOKEN
        names = _names(self._token) if mesh.rank == 0 else ("", "")
        (self._id, start), self._secret = self._control.broadcast((names, uuid.uuid4().hex), "names")
        self._run = f"{self._id} {start}"
        self.folder = _folder(parent, self._id, self._token)
        _private(self.folder.parent)
        _private(self.folder)
        self._listener = socket.create_server(("", 0))
        self._addresses = self._reached()
        self.neighbour = self._neighbour() if replicate else None
        self.lonely = sum(self._control.gather(replicate and self.neighbour is None, "second copies"))
        self._replicate = replicate
        self._good: int | None = None

    @property
    def listener(self) -> int:
        """The descriptor of the socket at which copies arrive."""
        return self._listener.fileno()

    @property
    def receive(self) -> dict[str, Any]:
        """What the writer needs to take copies."""
        return {"listener": self.listener, "folder": str(self.folder), "secret": self._secret}

    def file(self, slot: int, rank: int | None = None) -> Path:
        """The file of a slot of a rank, by default this one."""
        return self.folder / f"rank-{self._mesh.rank if rank is None else rank:05d}.{SLOTS[slot]}"

    def header(self, slot: int) -> Path:
        """The header of this rank's file of a slot."""
        return _header(self.file(slot))

    def turn(self) -> int:
        """The slot for the next copy, whose header is removed: not the one with the newest that is whole everywhere."""
        slot = 0 if self._good is None else 1 - self._good
        self.header(slot).unlink(missing_ok=True)
        return slot

    def settled(self, slot: int) -> None:
        """The copy in this slot is whole on every rank."""
        self._good = slot

    def sending(self, path: str | Path, rank: int) -> dict[str, Any]:
        """What the writer needs to send a copy to the host of a rank."""
        return {"path": str(path), "to": self._addresses[rank][:2], "secret": self._secret}

    def said(self, what: str, facts: manifest.Facts) -> dict[str, Any]:
        """The header of a copy, but for its checksums."""
        return {"run": self._run, "what": what, "facts": facts.model_dump(mode="json")}

    def recall(
        self, slots: Sequence[Snapshot], what: str, background: Background, since: int
    ) -> tuple[manifest.Facts | None, list[str]]:
        """Take up the newest copies, of one step that is not before `since`. Whose they are, None if there are none;
        and what is wrong with those that were passed over.
        """
        wanted = self._control.gather(what, "what copies are of")
        looked = self._control.gather(self._seen(wanted), "copies in memory")
        seen = [_by_rank(copies) for copies, _ in looked]
        common = {step for step in _common(seen) if step >= since}
        others = {step: "they are of another layout or model" for _, steps in looked for step in steps}
        others |= {step: "not every rank has one" for copies in seen for steps in copies.values() for step in steps}
        problems = [
            f"the copies of step {step} in memory are not used: {why}"
            for step, why in sorted(others.items())
            if step > since and step not in common
        ]
        for step in sorted(common, reverse=True):
            problem = self._fetch(step, seen, background)
            slot, header = self._find(step, what)
            problem = problem or self._wrong(slot, header, slots[slot])
            everyone = self._control.gather(problem, f"the copies of step {step}")
            found = [f"rank {rank}: {text}" for rank, text in enumerate(everyone) if text]
            if header is not None and not found:
                slots[slot].give()
                self._good = slot
                return header.facts, problems
            problems.append(f"the copy of step {step} in memory is not used: {found[0]}")
        return None, problems

    def keep_only(self, step: int | None) -> None:
        """The run goes on from copies of this step, or from elsewhere: only they count from now on, on every host."""
        start = self._control.broadcast(uuid.uuid4().hex, "the name of this start")
        ours, here = f"{self._id} {start}", self._addresses[self._mesh.rank][2]
        living = {rank for rank, (_, _, place) in enumerate(self._addresses) if place == here}
        for path in self.folder.glob("rank-*.?"):
            at_home = int(path.stem.removeprefix("rank-")) in living
            header = _read(_header(path))
            of_step = header is not None and header.run in (self._run, ours) and header.facts.progress.step == step
            if header is not None and of_step and (at_home or self._replicate):
                write_text(_header(path), header.model_copy(update={"run": ours}).model_dump_json())
            else:
                _header(path).unlink(missing_ok=True)
                if not at_home:  # nobody here has it mapped
                    path.unlink(missing_ok=True)
        self._control.barrier("copies that count")
        if self._mesh.rank == 0:
            write_text(self._token, f"{self._id}\n{start}\n")
        self._control.barrier("the name of this start")  # nobody makes a copy that would not count
        self._run = ours

    def clear(self) -> None:
        """Give back what this rank has taken for copies that were never made."""
        for slot in range(len(SLOTS)):
            if not self.header(slot).exists():
                self.file(slot).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others' copies are there
            self.folder.rmdir()
            self.folder.parent.rmdir()

    def remove(self) -> None:
        """The run is complete, or on storage: give the memory back."""
        _give_back(self.folder)

    def _reached(self) -> Sequence[tuple[str, int, Place]]:
        """Of each rank the address at which copies arrive, and its memory."""
        here = _outward(os.environ.get("MASTER_ADDR", "127.0.0.1"))
        others = self._control.gather(here, "addresses")
        if here.startswith(LOOPBACK):  # rank 0's host does not see itself as others do
            here = _outward(next((other for other in others if not other.startswith(LOOPBACK)), here))
        found = self.folder.stat()
        place = socket.gethostname(), found.st_dev, found.st_ino
        everyone = self._control.gather((here, self._listener.getsockname()[1], place), "addresses")
        return [(address, port, tuple(place)) for address, port, place in everyone]

    def _neighbour(self) -> int | None:
        """The next rank of data parallelism that has another memory."""
        ranks, index = self._mesh.dp.ranks, self._mesh.dp.index
        place = self._addresses[self._mesh.rank][2]
        others = [ranks[(index + distance) % len(ranks)] for distance in range(1, len(ranks))]
        return next((rank for rank in others if self._addresses[rank][2] != place), None)

    def _seen(self, wanted: Sequence[str]) -> tuple[list[Seen], list[int]]:
        """The copies on this host, by rank, step and slot, if they are of what that rank wants; and the
        steps of the others, of which none may be sent: they may be larger than the room that it has.
        """
        found: list[Seen] = []
        others = set()
        for path in self.folder.glob("rank-*.json"):
            match = _COPY.fullmatch(path.stem)
            header = _read(path)
            if not (match and header and header.run == self._run):
                continue
            rank, step = int(match.group(1)), header.facts.progress.step
            if rank < len(wanted) and header.what == wanted[rank]:
                found.append((rank, step, SLOTS.index(match.group(2))))
            else:
                others.add(step)
        return found, sorted(others)

    def _fetch(self, step: int, seen: Sequence[Mapping[int, Mapping[int, int]]], background: Background) -> str:
        """Have the copies of this step sent to the ranks that do not see their own. Returns what failed here."""
        problem = ""
        for rank in range(self._mesh.world.size):
            if step in seen[rank].get(rank, {}):
                continue
            holder = next(other for other, copies in enumerate(seen) if step in copies.get(rank, {}))
            if holder == self._mesh.rank:
                try:
                    background.order(send=self.sending(self.file(seen[holder][rank][step], rank), rank))
                    background.answer(math.inf)
                except CheckpointError as error:
                    problem = error.what
        self._control.barrier(f"the copies of step {step}")  # all have been sent
        return problem

    def _find(self, step: int, what: str) -> tuple[int, Header | None]:
        """This rank's slot with a copy of a step."""
        for slot in range(len(SLOTS)):
            header = _read(self.header(slot))
            if header and (header.run, header.what, header.facts.progress.step) == (self._run, what, step):
                return slot, header
        return 0, None

    def _wrong(self, slot: int, header: Header | None, memory: Snapshot) -> str:
        """What is wrong with a copy; "" if nothing is."""
        if header is None:
            return "it has not arrived"
        sums = tuple(zlib.crc32(chunk.numpy()) for chunk in memory.numbers.split(BLOCK))
        return "" if sums == header.sums else f"{self.file(slot)} is not what was written"


def discard(parent: Path, run: Path, mesh: Mesh) -> None:
    """A start that makes no copies: those of the starts before, which the run may go back from now, count no more."""
    token = run.resolve() / TOKEN
    name = ""
    if mesh.rank == 0 and token.exists():
        name, _ = _names(token)
        write_text(token, f"{name}\n{uuid.uuid4().hex}\n")
    name = mesh.world.control.broadcast(name, "copies to discard")
    if name:
        _give_back(_folder(parent, name, token))


def _give_back(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # another run's are there
        folder.parent.rmdir()


def _folder(parent: Path, name: str, token: Path) -> Path:
    """Where the copies of a run of this name are, on this host."""
    key = hashlib.sha256(f"{name} {token}".encode()).hexdigest()[:16]
    return parent / f"megascale-{os.getuid()}" / key


def _private(folder: Path) -> Path:
    """Make a folder that nobody else may look into.

    Raises: CheckpointError
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        owner = folder.stat().st_uid
    except OSError as error:
        raise CheckpointError(f"cannot make {folder}: {error.strerror}", mend="checkpoint.memory_dir") from None
    if owner != os.getuid():
        raise CheckpointError(f"{folder} belongs to user {owner}", mend="another checkpoint.memory_dir")
    return folder


def _outward(host: str) -> str:
    """This host's address on the way to another."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))  # sends nothing
        return str(probe.getsockname()[0])


def _common(seen: Sequence[Mapping[int, Mapping[int, int]]]) -> set[int]:
    """Steps of which there is a copy of every rank."""
    steps: list[set[int]] = [set() for _ in seen]
    for copies in seen:
        for rank, found in copies.items():
            steps[rank] |= found.keys()
    return set.intersection(*steps)


def _by_rank(copies: Sequence[Seen]) -> dict[int, dict[int, int]]:
    """The slot of each step, for each rank."""
    found: dict[int, dict[int, int]] = {}
    for rank, step, slot in copies:
        found.setdefault(rank, {})[step] = slot
    return found


def _header(file: Path) -> Path:
    """The header of a file with a copy."""
    return file.with_name(f"{file.name}.json")


def _names(path: Path) -> tuple[str, str]:
    """What a TOKEN says. A folder that has none gets one; a copy of it has others, by its path."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, f"{uuid.uuid4().hex}\n\n")
    name, _, start = path.read_text(encoding="ascii").partition("\n")
    return name, start.strip()


def _read(path: Path) -> Header | None:
    """A header; None if there is none that can be read."""
    try:
        return Header.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
