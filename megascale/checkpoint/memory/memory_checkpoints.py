"""In-memory checkpoints: copies of the state in host memory that outlive the processes (MegaScale, section 4).

A rank has two slots, files in an in-memory file system, used in turn; a complete copy has a header with its checksums:

    MEMORY_DIR/megascale-UID/RUN_KEY/rank-00000.a   rank-00000.a.json   rank-00000.b   ...

After processes died and their hosts survived, all ranks load the newest step with a copy of every rank: a rank's own,
or one that another rank finds on its host and sends.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import shutil
import socket
import stat
import uuid
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from megascale.checkpoint.format import manifest
from megascale.checkpoint.memory.replication import COPY_BLOCK_BYTES
from megascale.checkpoint.save.snapshot import Snapshot
from megascale.checkpoint.save.writer_process import WriterProcess
from megascale.comm.gloo_interface import first_host, own_address
from megascale.comm.mesh import Mesh
from megascale.core.errors import CheckpointError
from megascale.core.files import write_text
from megascale.core.limits import os_error_hint
from megascale.core.network import LOOPBACK, is_loopback, listen

SLOTS = "ab"
TOKEN = ".memory"
"""File in a run's folder with two ids, a line each: of the folder, and of the last start.

Copies belong to a folder and a start: a folder made anew is another run, and a later start may have gone back to
earlier steps.
"""

HostMemory = tuple[str, int, int]
"""Host name, and device and inode of the folder of copies: equal for ranks that share memory."""

CopySlot = tuple[int, int, int]
"""Rank, step and slot of a copy."""

_COPY = re.compile(r"rank-(\d+)\.([ab])")


class Header(BaseModel):
    """Header of a copy: ids of run and start, hash of the layout (`what` on disk), and the CRC-32 of every block."""

    run: str
    layout_hash: str = Field(alias="what")
    facts: manifest.Facts
    sums: tuple[int, ...]


class MemoryCheckpoints:
    """This rank's two slots of in-memory checkpoints. All ranks call `load_newest` and `keep_only_step` together.

    `replica_rank`: the rank whose host keeps a replica of this rank's copies, or None. `unreplicated_ranks`: number of
    ranks without the replica asked for.

    Ranks on several hosts receive copies at `listener`, from peers that know `secret`, the job's.

    Raises: CheckpointError if the folder of the copies cannot be made
    """

    def __init__(self, parent: Path, run: Path, replicate: bool, mesh: Mesh, secret: bytes) -> None:
        self._mesh = mesh
        self._control = mesh.world.control
        self._token = run.resolve() / TOKEN
        ids = _read_token(self._token) if mesh.rank == 0 else ("", "")
        self._id, start = self._control.broadcast(ids, "ids of the run")
        self._secret = secret.hex()
        self._run = f"{self._id} {start}"
        self.folder = _folder(parent, self._id, self._token)
        _make_private_folder(self.folder.parent)
        _make_private_folder(self.folder)
        self._listener: socket.socket | None = None
        self._addresses = self._gather_addresses()
        self.replica_rank = self._find_replica_rank() if replicate else None
        unreplicated = replicate and self.replica_rank is None
        self.unreplicated_ranks = sum(self._control.all_gather(unreplicated, "replicas"))
        self._replicate = replicate
        self._newest_complete_slot: int | None = None

    @property
    def listeners(self) -> list[int]:
        """Descriptor of the socket that receives copies; none on a job's only host."""
        return [] if self._listener is None else [self._listener.fileno()]

    @property
    def receiver_args(self) -> dict[str, Any] | None:
        """Arguments of `serve_replicas` for the writer; None on a job's only host."""
        if self._listener is None:
            return None
        return {"listener": self._listener.fileno(), "folder": str(self.folder), "secret": self._secret}

    def sender_args(self, path: str | Path, rank: int) -> dict[str, Any]:
        """Return the arguments of `send_replica` to the host of `rank`."""
        return {"path": str(path), "to": self._addresses[rank][:2], "secret": self._secret}

    def copy_path(self, slot: int, rank: int | None = None) -> Path:
        """Return the file of a slot of `rank`, by default this rank."""
        return self.folder / f"rank-{self._mesh.rank if rank is None else rank:05d}.{SLOTS[slot]}"

    def header_path(self, slot: int) -> Path:
        """Return the header of a slot of this rank."""
        return _header_path(self.copy_path(slot))

    def header_fields(self, layout_hash: str, facts: manifest.Facts) -> dict[str, Any]:
        """Return the header of a copy without its checksums."""
        return {"run": self._run, "what": layout_hash, "facts": facts.model_dump(mode="json")}

    def next_slot(self) -> int:
        """Return the slot to overwrite, not the newest complete one, and invalidate its copy."""
        slot = 0 if self._newest_complete_slot is None else 1 - self._newest_complete_slot
        self.header_path(slot).unlink(missing_ok=True)
        return slot

    def mark_complete(self, slot: int) -> None:
        """Record that the copy in `slot` is complete on every rank."""
        self._newest_complete_slot = slot

    def load_newest(
        self, slots: Sequence[Snapshot], layout_hash: str, writer: WriterProcess, min_step: int
    ) -> tuple[manifest.Facts | None, list[str]]:
        """Load the newest step, `min_step` or later, with intact copies of all ranks.

        Returns the facts of the run, None without such a step, and a warning for every newer step passed over.
        """
        hashes = self._control.all_gather(layout_hash, "the layout of copies")
        on_hosts = self._control.all_gather(self._copies_on_host(hashes), "copies in memory")
        copies = [_by_rank(usable) for usable, _ in on_hosts]
        common = {step for step in _steps_on_all_ranks(copies) if step >= min_step}
        unusable = {step: "they are of another layout or model" for _, steps in on_hosts for step in steps}
        unusable |= {step: "not every rank has one" for host in copies for steps in host.values() for step in steps}
        problems = [
            f"the copies of step {step} in memory are not used: {why}"
            for step, why in sorted(unusable.items())
            if step > min_step and step not in common
        ]
        for step in sorted(common, reverse=True):
            problem = self._send_missing(step, copies, writer)
            slot, header = self._find(step, layout_hash)
            problem = problem or self._copy_problem(slot, header, slots[slot])
            by_rank = self._control.all_gather(problem, f"the copies of step {step}")
            failures = [f"rank {rank}: {text}" for rank, text in enumerate(by_rank) if text]
            if header is not None and not failures:
                slots[slot].copy_to_tensors()
                self._newest_complete_slot = slot
                return header.facts, problems
            problems.append(f"the copy of step {step} in memory is not used: {failures[0]}")
        return None, problems

    def keep_only_step(self, step: int | None) -> None:
        """Begin a new start: on every host, copies of `step` become its copies, and all others are invalidated.

        `step`: the step resumed from memory, or None.
        """
        start = self._control.broadcast(uuid.uuid4().hex, "the id of this start")
        new_run, here = f"{self._id} {start}", self._addresses[self._mesh.rank][2]
        local_ranks = {rank for rank, (_, _, memory) in enumerate(self._addresses) if memory == here}
        for path in self.folder.glob("rank-*.?"):
            is_local = int(path.stem.removeprefix("rank-")) in local_ranks
            header = _read_header(_header_path(path))
            of_step = header is not None and header.run in (self._run, new_run) and header.facts.progress.step == step
            if header is not None and of_step and (is_local or self._replicate):
                renamed = header.model_copy(update={"run": new_run})
                write_text(_header_path(path), renamed.model_dump_json(by_alias=True))
            else:
                _header_path(path).unlink(missing_ok=True)
                if not is_local:  # no rank on this host has the file mapped
                    path.unlink(missing_ok=True)
        self._control.barrier("valid copies")
        if self._mesh.rank == 0:
            write_text(self._token, f"{self._id}\n{start}\n")
        self._control.barrier("the id of this start")  # a copy made before would not count
        self._run = new_run

    def remove_unused(self) -> None:
        """Free the memory of slots without a complete copy."""
        for slot in range(len(SLOTS)):
            if not self.header_path(slot).exists():
                self.copy_path(slot).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty: copies of another rank or run
            self.folder.rmdir()
            self.folder.parent.rmdir()

    def remove_copies(self) -> None:
        """Free the memory of this run's copies on this host."""
        _remove_folder(self.folder)

    def _gather_addresses(self) -> Sequence[tuple[str, int, HostMemory]]:
        """Return the address and port that receive copies, and the host memory, by rank. Start to listen, if there are
        several hosts, at the address that the others reach.
        """
        facts = self.folder.stat()
        memory = socket.gethostname(), facts.st_dev, facts.st_ino
        memories = [tuple(each) for each in self._control.all_gather(memory, "hosts")]
        if len(set(memories)) == 1:
            return [(LOOPBACK, 0, memory)] * len(memories)
        here = own_address(first_host())
        hosts = self._control.all_gather(here, "addresses")
        if is_loopback(here):  # rank 0's host sees itself under another address than the rest
            here = own_address(next((host for host in hosts if not is_loopback(host)), here))
        self._listener = listen(here)
        addresses = self._control.all_gather((here, self._listener.getsockname()[1]), "ports")
        return [(address, port, memory) for (address, port), memory in zip(addresses, memories, strict=True)]

    def _find_replica_rank(self) -> int | None:
        """Return the next data-parallel rank on another host; None without one."""
        ranks, index = self._mesh.dp.ranks, self._mesh.dp.index
        here = self._addresses[self._mesh.rank][2]
        next_ranks = [ranks[(index + distance) % len(ranks)] for distance in range(1, len(ranks))]
        return next((rank for rank in next_ranks if self._addresses[rank][2] != here), None)

    def _copies_on_host(self, hashes: Sequence[str]) -> tuple[list[CopySlot], list[int]]:
        """Return the copies on this host whose layout is their rank's, and the steps of the rest.

        `hashes`: the layout's hash by rank. A copy of another layout must not be sent: its size may differ.
        """
        usable: list[CopySlot] = []
        unusable = set()
        for path in self.folder.glob("rank-*.json"):
            match = _COPY.fullmatch(path.stem)
            header = _read_header(path)
            if not (match and header and header.run == self._run):
                continue
            rank, step = int(match.group(1)), header.facts.progress.step
            if rank < len(hashes) and header.layout_hash == hashes[rank]:
                usable.append((rank, step, SLOTS.index(match.group(2))))
            else:
                unusable.add(step)
        return usable, sorted(unusable)

    def _send_missing(self, step: int, copies: Sequence[Mapping[int, Mapping[int, int]]], writer: WriterProcess) -> str:
        """Send copies of `step` to ranks without their own copy on their host. Returns the error on this rank."""
        problem = ""
        for rank in range(self._mesh.world.size):
            if step in copies[rank].get(rank, {}):
                continue
            holder = next(holder for holder, host in enumerate(copies) if step in host.get(rank, {}))
            if holder == self._mesh.rank:
                try:
                    writer.submit(send=self.sender_args(self.copy_path(copies[holder][rank][step], rank), rank))
                    writer.result(math.inf)
                except CheckpointError as error:
                    problem = error.message
        self._control.barrier(f"the copies of step {step}")  # all copies have arrived
        return problem

    def _find(self, step: int, layout_hash: str) -> tuple[int, Header | None]:
        """Return this rank's slot with a copy of `step`, and its header."""
        for slot in range(len(SLOTS)):
            header = _read_header(self.header_path(slot))
            wanted = self._run, layout_hash, step
            if header and (header.run, header.layout_hash, header.facts.progress.step) == wanted:
                return slot, header
        return 0, None

    def _copy_problem(self, slot: int, header: Header | None, snapshot: Snapshot) -> str:
        """Check a copy against its checksums; "" if intact."""
        if header is None:
            return "it has not arrived"
        sums = tuple(zlib.crc32(block.numpy()) for block in snapshot.buffer.split(COPY_BLOCK_BYTES))
        return "" if sums == header.sums else f"the CRC-32 of {self.copy_path(slot)} does not match"


def invalidate_copies(parent: Path, run: Path, mesh: Mesh) -> None:
    """Invalidate and remove all copies of a run: a start without in-memory checkpoints may go back to earlier steps."""
    token = run.resolve() / TOKEN
    run_id = ""
    if mesh.rank == 0 and token.exists():
        run_id, _ = _read_token(token)
        write_text(token, f"{run_id}\n{uuid.uuid4().hex}\n")
    run_id = mesh.world.control.broadcast(run_id, "copies to invalidate")
    if run_id:
        _remove_folder(_folder(parent, run_id, token))


def _remove_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # not empty: copies of another run
        folder.parent.rmdir()


def _folder(parent: Path, run_id: str, token: Path) -> Path:
    """Return the folder of a run's copies on this host."""
    key = hashlib.sha256(f"{run_id} {token}".encode()).hexdigest()[:16]
    return parent / f"megascale-{os.geteuid()}" / key


def _make_private_folder(folder: Path) -> Path:
    """Make a folder for this user alone.

    Raises: CheckpointError
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()  # not what a stranger's link names
        if facts.st_uid == os.geteuid() and stat.S_ISDIR(facts.st_mode):
            folder.chmod(0o700)
    except OSError as error:
        hint = os_error_hint(error, "checkpoint.memory_dir")
        raise CheckpointError(f"cannot make {folder}: {error.strerror}", hint=hint) from None
    if facts.st_uid != os.geteuid() or not stat.S_ISDIR(facts.st_mode):
        what = f"{folder} belongs to user {facts.st_uid}" if facts.st_uid != os.geteuid() else f"{folder} is no folder"
        raise CheckpointError(what, hint="another checkpoint.memory_dir")
    return folder


def _steps_on_all_ranks(copies: Sequence[Mapping[int, Mapping[int, int]]]) -> set[int]:
    """Return the steps with a copy of every rank, on any host."""
    steps: list[set[int]] = [set() for _ in copies]
    for host in copies:
        for rank, slot_by_step in host.items():
            steps[rank] |= slot_by_step.keys()
    return set.intersection(*steps)


def _by_rank(copies: Sequence[CopySlot]) -> dict[int, dict[int, int]]:
    """Return the slots by rank and step."""
    slots: dict[int, dict[int, int]] = {}
    for rank, step, slot in copies:
        slots.setdefault(rank, {})[step] = slot
    return slots


def _header_path(copy: Path) -> Path:
    """Return the header of a copy."""
    return copy.with_name(f"{copy.name}.json")


def _read_token(path: Path) -> tuple[str, str]:
    """Read (run id, start id) from the token file, and create it if absent.

    The path is part of the name of the copies' folder, so a copy of a run's folder has none of its copies.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, f"{uuid.uuid4().hex}\n\n")
    run_id, _, start_id = path.read_text(encoding="ascii").partition("\n")
    return run_id, start_id.strip()


def _read_header(path: Path) -> Header | None:
    """Read a header; None if it is missing or malformed."""
    try:
        return Header.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
