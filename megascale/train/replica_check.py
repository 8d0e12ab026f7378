"""Check that replicas of a parameter are equal bit for bit: over dp, over tp where tp replicates, of experts over edp
alone, and the two ends of a tied embedding.

A checksum of every bucket is compared first, by one small all-reduce for each axis. Only where checksums differ are the
parameters compared, and the ranks named: a rank that differs from the majority, else all ranks that differ.
"""

from __future__ import annotations

import socket
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megascale.comm.collectives import all_reduce
from megascale.comm.group import Group
from megascale.comm.mesh import Mesh
from megascale.comm.totals import sum_over_job
from megascale.core.errors import ReplicasDifferError
from megascale.parallel.bucket import Bucket
from megascale.train.run import Hook

if TYPE_CHECKING:
    from megascale.train.run import Run, StepResult

CHUNK = 1 << 22  # elements of a bucket whose weighted bits are in memory at a time, as int64

MULTIPLIER = -7046029254386353131
"""2^64 divided by the golden ratio, as i64: position times this number, made odd, weights an element."""

MAX_NAMED = 8  # most parameters that a message names

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Copy:
    """Values of which every rank of `group` has a copy. `values`: one-dimensional. `parts`: (name, start, stop)."""

    group: Group
    values: Tensor
    parts: tuple[tuple[str, int, int], ...]


class ReplicaCheck(Hook):
    """The check every `train.check_replicas_every` steps; remembers the last step at which all replicas were equal."""

    def __init__(self) -> None:
        self._equal_at: int | None = None

    def step_ends(self, run: Run, result: StepResult) -> None:
        every = run.config.train.check_replicas_every
        if every and run.progress.step % every == 0:
            self.check(run)

    def check(self, run: Run) -> None:
        """Compare all replicas. A collective of all ranks, between steps.

        Raises: ReplicasDifferError on every rank, with parameters and ranks.
        """
        run.buffers.finish_param_gather()
        copies = list(replicated_values(run))
        differ = _differing([(copy.group, checksum(copy.values)) for copy in copies], run.device.torch_device)
        total = torch.tensor(float(sum(differ)), device=run.device.torch_device)
        sum_over_job(run.mesh, total, label="replicas")
        step = run.progress.step
        if total.item():
            equal = f"up to step {self._equal_at}, where they were equal" if self._equal_at else "before they differed"
            text, ranks = _describe(run, copies)
            raise ReplicasDifferError(
                f"step {step}: replicas differ, so this run is no longer one model:\n{text}",
                ranks=ranks,
                hint=f"test the memory of the hosts named; continue from a checkpoint of a step {equal}",
            )
        self._equal_at = step


def replicated_values(run: Run) -> Iterator[Copy]:
    """Yield weights, and master weights and optimizer state, of which other ranks have copies.

    ZeRO shards master weights and optimizer state over dp, and ZeRO-3 weights; the shards of parameters that tp
    replicates, of a tied embedding, and with hybrid sharding of the inner ranks, have copies all the same.
    """
    for shard in run.optimizer.shards:
        yield from _copies(run.mesh, shard.bucket, "", shard.bucket.storage.held[0], shard.bucket.weights)
        for name, start, values in shard.tensors():
            if name or shard.has_own_master:
                yield from _copies(run.mesh, shard.bucket, f" ({name or 'master weight'})", start, values)
    for bucket, matrix, name, state in run.optimizer.matrix_state():  # every replica is an owner
        parts = ((f"{matrix.name(run.mesh.topology, run.mesh.coord)} ({name})", 0, state.numel()),)
        over_tp = matrix.tp_owner is None and not bucket.layout.has_experts
        for group in (bucket.replicas, *([run.mesh.tp] if over_tp else [])):
            if group.size > 1:
                yield Copy(group, state.view(-1), parts)


def _copies(mesh: Mesh, bucket: Bucket, suffix: str, first: int, values: Tensor) -> Iterator[Copy]:
    """Yield what has copies of `values`, which begin at `first` in a bucket: weights, or state with a `suffix`."""
    low, high = bucket.layout.replicated
    whole = (first, first + values.numel())
    spans = [(mesh.tp, max(low, whole[0]), min(high, whole[1]))]
    holders = bucket.storage.outer if whole == bucket.storage.part else bucket.replicas
    spans.append((bucket.group if whole == (0, bucket.layout.numel) else holders, *whole))
    if bucket.tied:
        spans.append((mesh.tied, *whole))
    for group, begin, end in spans:
        if group.size > 1 and begin < end:
            ranges = bucket.layout.param_ranges(begin, end)
            parts = [(item.slot.parameter.name + suffix, item.start - begin, item.stop - begin) for item in ranges]
            yield Copy(group, values[begin - first : end - first], tuple(parts))


def checksum(values: Tensor) -> Tensor:
    """Return an i64 device scalar that changes if one bit of `values` [n] changes, and in all likelihood if more do.

    The sum, modulo 2^64, of the elements' bits as integers, each times an odd weight of its own: the flip of bit b
    changes the sum by an odd multiple of 2^b.
    """
    bits = values.detach().view(_INTEGERS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for start in range(0, bits.numel(), CHUNK):
        part = bits[start : start + CHUNK]
        positions = torch.arange(start, start + part.numel(), dtype=torch.int64, device=values.device)
        total += positions.mul_(MULTIPLIER).bitwise_or_(1).mul_(part).sum()
    return total


def _differing(sums: Sequence[tuple[Group, Tensor]], device: torch.device) -> list[bool]:
    """For each (group, checksum), return True if the group's ranks differ: one all-reduce for every group.

    The maximum of the checksums' complements is the complement of their minimum.
    """
    differ = [False] * len(sums)
    groups = {group.ranks: group for group, _ in sums}
    for ranks, group in sorted(groups.items(), key=lambda item: item[1].name):
        numbers = [number for number, (other, _) in enumerate(sums) if other.ranks == ranks]
        mine = torch.stack([sums[number][1].to(device) for number in numbers])
        extremes = torch.stack([mine, ~mine])
        all_reduce(group, extremes, "max", label="replicas")
        for number, unequal in zip(numbers, (extremes[0] != ~extremes[1]).tolist(), strict=True):
            differ[number] = unequal
    return differ


def _describe(run: Run, copies: Sequence[Copy]) -> tuple[str, list[int]]:
    """Describe the parameters that differ, and return the ranks that hold them; the same on every rank."""
    parts = [(copy, name, checksum(copy.values[start:stop])) for copy in copies for name, start, stop in copy.parts]
    differ = _differing([(copy.group, total) for copy, _, total in parts], run.device.torch_device)
    found = [
        [copy.group.name, list(copy.group.ranks), name, str(total.item())]
        for (copy, name, total), differs in zip(parts, differ, strict=True)
        if differs
    ]
    report = {"host": socket.gethostname(), "found": found[:MAX_NAMED]}
    control = run.mesh.world.control
    reports = control.gather(report, "replicas that differ")
    text, ranks = control.broadcast(None if reports is None else describe_reports(reports), "replicas that differ")
    return text, ranks


def describe_reports(reports: Sequence[dict[str, Any]]) -> tuple[str, list[int]]:
    """Describe reports of all ranks, in rank order: a line for each parameter and group. Returns text and odd ranks."""
    sums: dict[tuple[str, str, tuple[int, ...]], dict[int, str]] = defaultdict(dict)
    for rank, report in enumerate(reports):
        for group, ranks, name, total in report["found"]:
            sums[name, group, tuple(ranks)][rank] = total
    hosts = [report["host"] for report in reports]
    lines = [
        f"  {name}, a copy on each rank of {group}: {_describe_odd_ones(by_rank, hosts)}"
        for (name, group, _), by_rank in sums.items()
    ]
    rest = [f"  and {len(lines) - MAX_NAMED} more"] if len(lines) > MAX_NAMED else []
    text = "\n".join([*lines[:MAX_NAMED], *rest]) or "  padding between parameters"
    return text, sorted({rank for by_rank in sums.values() for rank in _odd_ones(by_rank)})


def _odd_ones(by_rank: dict[int, str]) -> list[int]:
    """Return the ranks outside the majority; without a majority all ranks, since nobody knows which is right."""
    (common, votes), *_ = Counter(by_rank.values()).most_common(1)
    return [rank for rank, total in by_rank.items() if total != common or 2 * votes <= len(by_rank)]


def _describe_odd_ones(by_rank: dict[int, str], hosts: Sequence[str]) -> str:
    odd = _odd_ones(by_rank)
    equal = len(by_rank) - len(odd)
    others = f"{equal} other ranks are equal" if equal else "which is right is unknown"
    named = ", ".join(f"rank {rank} ({hosts[rank]})" for rank in odd[:MAX_NAMED])
    more = f" and {len(odd) - MAX_NAMED} more" if len(odd) > MAX_NAMED else ""
    verb = "differ" if len(odd) > 1 else "differs"
    return f"{named}{more} {verb}; {others}"
