"""Sharded weights that stream through two slots of memory: what is exposed of their communication (`streamed`).

A unit computes while the weights of the next one arrive. As it ends, the next but one sets out into its slot, and then
its own gradients (`parallel.sharded_weights`); all take turns on one link. With g and r seconds to gather a unit and to
reduce its gradients, its forward hides g of the next unit and its backward g + r, as far as it takes as long. Units of
little compute, such as an embedding, hide nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple


class UnitTimes(NamedTuple):
    """Seconds of a unit: its compute in a forward and in a backward, its gather, and its gradients' reduction."""

    forward: float
    backward: float
    gather: float
    reduce: float


class Exposed(NamedTuple):
    """Exposed seconds of a forward, of a backward, and once a step, of the first gather and the last reductions."""

    forward: float
    backward: float
    ends: float


class _Use(NamedTuple):
    unit: int
    work: float
    gather: float
    reduce: float


def streamed(units: Sequence[UnitTimes], *, turns: bool, overlap: bool, slowdown: float) -> Exposed:
    """Expose the communication of a chunk's units, in the order of the network, of which `slowdown` at least.

    `turns`: actions of the chunk follow each other, so that the unit where a forward meets a backward is gathered once
    """
    one, two = (_uses(units, cycles, turns) for cycles in (1, 2))
    ended, steady = _seconds(one, overlap), _seconds(two, overlap) - _seconds(one, overlap)
    work = sum(unit.forward + unit.backward for unit in units)
    gathered = sum(use.gather for use in two[len(one) :])
    sent = gathered + sum(unit.reduce for unit in units)
    exposed = max(slowdown * sent, sent - work, steady - work)
    forward = exposed * gathered / 2 / sent if sent else 0.0
    return Exposed(forward, exposed - forward, max(0.0, ended - steady))


def _uses(units: Sequence[UnitTimes], cycles: int, turns: bool) -> list[_Use]:
    """List the uses of units in `cycles` of a forward and a backward; those in a row are one."""
    found = list[_Use]()
    forward = [_Use(at, unit.forward, unit.gather, 0.0) for at, unit in enumerate(units)]
    backward = [_Use(at, unit.backward, unit.gather, unit.reduce) for at, unit in enumerate(units)]
    for use in [*forward, *reversed(backward)] * cycles:
        if turns and found and found[-1].unit == use.unit:
            first = found.pop()
            found.append(use._replace(work=first.work + use.work, reduce=first.reduce + use.reduce))
        else:
            found.append(use)
    return found


def _seconds(uses: Sequence[_Use], overlap: bool) -> float:
    """Time uses from the first gather to the last reduction."""
    if not overlap:
        return sum(use.work + use.gather + use.reduce for use in uses)
    end, reduce = 0.0, 0.0  # of the unit before
    link = arrives = uses[0].gather
    for use, following in zip_longest(uses, uses[1:]):
        here = arrives
        if following:
            link = arrives = max(link, end) + following.gather
        link = max(link, end) + reduce
        end, reduce = max(end, here) + use.work, use.reduce
    return max(link, end) + reduce
