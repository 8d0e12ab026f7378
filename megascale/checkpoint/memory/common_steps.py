"""Steps with an in-memory copy of every rank, on any host (`find_common_steps`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megascale.checkpoint.memory.copies import CopySlot

SlotsByHost = Sequence[Mapping[int, Mapping[int, int]]]
"""Slot of a copy by holding rank, rank and step."""


class CommonSteps(NamedTuple):
    """`steps`: newest first; `slots`: of all copies; `problems`: why steps newer than these are not used."""

    steps: list[int]
    slots: SlotsByHost
    problems: list[str]


def find_common_steps(copies: Sequence[tuple[Sequence[CopySlot], Sequence[int]]], min_step: int) -> CommonSteps:
    """Find steps of `min_step` or later. `copies`: usable copies on every rank's host, and steps of unusable ones."""
    slots = [_by_rank(usable) for usable, _ in copies]
    common = {step for step in _steps_on_all_ranks(slots) if step >= min_step}
    unusable = {step: "they are of another layout, model or optimizer" for _, steps in copies for step in steps}
    unusable |= {step: "not every rank has one" for host in slots for steps in host.values() for step in steps}
    problems = [
        f"the copies of step {step} in memory are not used: {why}"
        for step, why in sorted(unusable.items())
        if step > max(common, default=min_step)
    ]
    return CommonSteps(sorted(common, reverse=True), slots, problems)


def _steps_on_all_ranks(slots: SlotsByHost) -> set[int]:
    steps: list[set[int]] = [set() for _ in slots]
    for host in slots:
        for rank, slot_by_step in host.items():
            steps[rank] |= slot_by_step.keys()
    return set.intersection(*steps)


def _by_rank(copies: Sequence[CopySlot]) -> dict[int, dict[int, int]]:
    """Return the slots by rank and step."""
    slots: dict[int, dict[int, int]] = {}
    for rank, step, slot in copies:
        slots.setdefault(rank, {})[step] = slot
    return slots
