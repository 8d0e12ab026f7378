"""In-memory checkpoints: copies of the state in host memory that outlive the processes (MegaScale, section 4).

A rank has two slots, files in an in-memory file system, used in turn; a complete copy has a header (`copies.py`). After
processes died and their hosts survived, all ranks load the newest step with a copy of every rank: a rank's own, or one
that another rank finds on its host and sends.
"""

from __future__ import annotations

import math
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megascale.checkpoint.collective_errors import on_all_ranks, on_first_rank
from megascale.checkpoint.format import manifest
from megascale.checkpoint.memory.copies import SLOTS, CopyFolder, CopySlot
from megascale.checkpoint.memory.placement import replica_ranks
from megascale.checkpoint.memory.receivers import open_receivers
from megascale.checkpoint.memory.replication import COPY_BLOCK_BYTES, SAVE_TIMEOUT_S, TIMEOUT_S
from megascale.checkpoint.save.snapshot import Snapshot
from megascale.core.errors import CheckpointError
from megascale.core.run_folder import TOKEN, read_token, write_token

if TYPE_CHECKING:
    from megascale.checkpoint.save.writer_process import WriterProcess
    from megascale.comm.mesh import Mesh
    from megascale.device import Device

SlotsByHost = Sequence[Mapping[int, Mapping[int, int]]]
"""Slot of a copy by holding rank, rank and step."""

CanLose = Callable[[int, frozenset[int]], bool]
"""Function (step, ranks): True if the copies of a step serve without those of `ranks`: always of none, never of the
first.
"""


class MemoryCheckpoints:
    """This rank's two slots of in-memory checkpoints. All ranks call `load_newest` and `keep_only_step` together.

    Copies belong to a folder and a start: a later start may have gone back to earlier steps. While a start makes copies
    of earlier ones its own, the ids of those follow in the token: if it dies meanwhile, copies of all of them count for
    the next start.

    `replica_rank`: the rank whose host keeps a replica of this rank's copies, or None. `unreplicated_ranks`: number of
    ranks without the replica asked for. `newest_complete_slot`: of a copy that is complete on every rank.

    Writers of ranks on several hosts receive copies from peers that know `secret`, the job's.

    Raises: CheckpointError if the run's folder cannot be written, or the folder of the copies cannot be made
    """

    def __init__(self, parent: Path, run: Path, replicate: bool, mesh: Mesh, secret: bytes) -> None:
        self._mesh = mesh
        self._control = mesh.world.control
        self._run = run.resolve()
        self._id, self._starts = on_first_rank(mesh.world, lambda: read_token(self._run), "ids of the run")
        self._secret = secret.hex()
        self._folder = CopyFolder(parent, self._id, self._run / TOKEN)
        self._folder.create()
        self._receivers, self._reserved = open_receivers(mesh, self._folder.path)
        hosts = [receiver.memory for receiver in self._receivers]
        self.replica_rank = replica_ranks(mesh.topology, hosts)[mesh.rank] if replicate else None
        unreplicated = replicate and self.replica_rank is None
        self.unreplicated_ranks = sum(self._control.all_gather(unreplicated, "replicas"))
        self._replicate = replicate
        self.newest_complete_slot: int | None = None

    @property
    def _runs(self) -> list[str]:
        """The ids in the headers of copies that count, the last start's first."""
        return [f"{self._id} {start}" for start in self._starts]

    @property
    def receiver_args(self) -> dict[str, Any] | None:
        """Arguments of `serve_replicas` for the writer; None on a job's only host."""
        if self._reserved is None:
            return None
        address = self._receivers[self._mesh.rank][:2]
        return {"address": address, "folder": str(self._folder.path), "secret": self._secret}

    def writer_request(
        self, slot: int, snapshot_path: str, layout_hash: str, facts: manifest.Facts, *, replicate: bool
    ) -> dict[str, dict[str, Any]]:
        """Return the request to the writer (`writer.execute`) that makes the snapshot of a slot a valid copy, and with
        `replicate` sends it to the host that keeps a replica.
        """
        rank = self._mesh.rank
        header = {"run": self._runs[0], "what": layout_hash, "facts": facts.model_dump(mode="json")}
        path = str(self._folder.header_path(rank, slot))
        request = {"write_copy_header": {"snapshot_path": snapshot_path, "path": path, "header": header}}
        if replicate and self.replica_rank is not None:
            request["send_replica"] = self._sender_args(rank, slot, self.replica_rank, SAVE_TIMEOUT_S)
        return request

    def _sender_args(self, owner: int, slot: int, to: int, timeout_s: float) -> dict[str, Any]:
        """Return the arguments of `send_replica` for the copy of rank `owner` in a slot."""
        path, receiver = str(self._folder.copy_path(owner, slot)), self._receivers[to]
        peer = f"rank {to} on {receiver.memory[0]}"
        return {"path": path, "peer": peer, "address": receiver[:2], "secret": self._secret, "timeout_s": timeout_s}

    def allocate_slots(self, tensors: Sequence[Tensor], device: Device) -> list[Snapshot]:
        """Allocate this rank's slots.

        Raises: CheckpointError on every rank if a rank has no memory; the memory of all ranks is freed
        """

        def allocate() -> list[Snapshot]:
            paths = (self._folder.copy_path(self._mesh.rank, slot) for slot in range(len(SLOTS)))
            return [Snapshot(tensors, device, path) for path in paths]

        try:
            return on_all_ranks(self._mesh.world, allocate, "memory for copies")
        except CheckpointError:
            self._folder.remove_unused(self._mesh.rank)
            raise

    def next_slot(self) -> int:
        """Return the slot to overwrite, not the newest complete one, and invalidate its copy."""
        slot = 0 if self.newest_complete_slot is None else 1 - self.newest_complete_slot
        self._folder.header_path(self._mesh.rank, slot).unlink(missing_ok=True)
        return slot

    def load_newest(
        self, slots: Sequence[Snapshot], layout_hash: str, writer: WriterProcess, min_step: int, can_lose: CanLose
    ) -> tuple[manifest.Facts | None, frozenset[int], list[str]]:
        """Load the newest step, `min_step` or later, with intact copies of all ranks but those that `can_lose` allows.

        Returns the facts of the run, None without such a step; the ranks whose state was not loaded; and a warning for
        every newer step passed over.
        """
        hashes = self._control.all_gather(layout_hash, "the layout of copies")
        copies = self._control.all_gather(self._folder.usable_copies(self._runs, hashes), "copies in memory")
        steps, holders, problems = find_steps(copies, min_step, can_lose)
        for step, lost in steps.items():
            problem = self._send_missing(step, holders, writer)
            slot, header = self._folder.find(self._runs, layout_hash, self._mesh.rank, step)
            if header is None:
                problem = problem or ("" if self._mesh.rank in lost else "it has not arrived")
            elif not problem:
                sums = tuple(zlib.crc32(block.numpy()) for block in slots[slot].buffer.split(COPY_BLOCK_BYTES))
                path = self._folder.copy_path(self._mesh.rank, slot)
                problem = "" if sums == header.sums else f"the CRC-32 of {path} does not match"
            by_rank = self._control.all_gather(problem, f"the copies of step {step}")
            failures = [f"rank {rank}: {text}" for rank, text in enumerate(by_rank) if text]
            if failures:
                problems.append(f"the copy of step {step} in memory is not used: {failures[0]}")
                continue
            if header is not None:
                slots[slot].copy_to_tensors()
                self.newest_complete_slot = slot
            facts = None if header is None else header.facts
            if lost:
                told = self._control.broadcast(facts and facts.model_dump(mode="json"), f"the run at step {step}")
                facts = manifest.Facts.model_validate(told)
            return facts, lost, problems
        return None, frozenset(), problems

    def keep_only_step(self, step: int | None) -> list[str]:
        """Begin a new start: on every host, copies of `step` become its copies, and all others are invalidated.

        `step`: the step resumed from memory, or None. Returns a warning if copies of `step` were lost.

        Raises: CheckpointError on every rank if the run's folder cannot be written
        """
        start = self._control.broadcast(uuid.uuid4().hex, "the id of this start")
        here = self._receivers[self._mesh.rank].memory
        local_ranks = {rank for rank, receiver in enumerate(self._receivers) if receiver.memory == here}
        self._write_starts(start, *self._starts)
        problem = self._folder.adopt(self._runs, f"{self._id} {start}", step, local_ranks, keep_others=self._replicate)
        problems = [text for text in self._control.all_gather(problem, "valid copies") if text]
        self._write_starts(start)
        self._starts = [start]  # a copy made before would not count
        return [f"a copy in memory of step {step} was lost, {problems[0]}; the next copy is due"] if problems else []

    def _write_starts(self, *starts: str) -> None:
        on_first_rank(self._mesh.world, lambda: write_token(self._run, self._id, *starts), "the id of this start")

    def remove_copies(self) -> None:
        self._folder.remove()

    def _send_missing(self, step: int, holders: SlotsByHost, writer: WriterProcess) -> str:
        """Send copies of `step`, as far as a host has one, to ranks without their own copy on their host. Returns the
        error on this rank.
        """
        problem = ""
        for rank in range(self._mesh.world.size):
            if step in holders[rank].get(rank, {}):
                continue
            holder = next((holder for holder, host in enumerate(holders) if step in host.get(rank, {})), None)
            if holder == self._mesh.rank:
                slot = holders[holder][rank][step]
                try:
                    writer.submit({"send_replica": self._sender_args(rank, slot, rank, TIMEOUT_S)})
                    writer.response(math.inf)
                except CheckpointError as error:
                    problem = error.message
        self._control.barrier(f"the copies of step {step}")  # all copies have arrived
        return problem


def find_steps(
    copies: Sequence[tuple[Sequence[CopySlot], Sequence[int]]], min_step: int, can_lose: CanLose
) -> tuple[dict[int, frozenset[int]], SlotsByHost, list[str]]:
    """Find steps of `min_step` or later with a copy on any host of every rank but those that `can_lose` allows, and
    these ranks: the fewest first, then the newest step. `copies`: usable copies on every rank's host, and steps of
    unusable ones. Returns also the slots of all copies, and why steps newer than these are not used.
    """
    slots: list[dict[int, dict[int, int]]] = [{} for _ in copies]
    steps: list[set[int]] = [set() for _ in copies]
    for host, (usable, _) in zip(slots, copies, strict=True):
        for rank, step, slot in usable:
            host.setdefault(rank, {})[step] = slot
            steps[rank].add(step)
    missing = {
        step: frozenset(rank for rank, of_rank in enumerate(steps) if step not in of_rank)
        for step in sorted(set.union(*steps), reverse=True)
        if step >= min_step
    }
    by_loss = sorted(missing.items(), key=lambda item: len(item[1]))
    serving = {step: lost for step, lost in by_loss if can_lose(step, lost)}
    unusable = {step: "they are of another layout, model or optimizer" for _, found in copies for step in found}
    unusable |= dict.fromkeys(set.union(*steps), "not every rank has one")
    problems = [
        f"the copies of step {step} in memory are not used: {why}"
        for step, why in sorted(unusable.items())
        if step > max(serving, default=min_step)
    ]
    return serving, slots, problems
