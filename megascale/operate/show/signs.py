"""The sign of a rank: one letter and one colour for what it does, or for how slow it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megascale.record.layout import STARTING, Phase
from megascale.record.rank_state import RankStatus

IDLE_S = 10.0  # seconds without progress that are no news
IDLE_STEPS = 3.0  # recent steps without progress that are no news

SLOW = (("#", 0.30), ("x", 0.10), ("+", 0.03))
"""Signs of slowness, and the excess over the peers' median from which they are shown."""


@dataclass(frozen=True)
class Sign:
    """A sign: its letter, meaning, and colour as #rrggbb, which tells no more than the letter does."""

    letter: str
    meaning: str
    colour: str


SIGNS = {
    sign.letter: sign
    for sign in (
        Sign("X", "failed", "#b2182b"),
        Sign("T", "stopped", "#d6604d"),
        Sign("!", "no progress", "#c51b7d"),
        Sign("D", "waits for a disk", "#762a83"),
        Sign("#", "30% slower", "#a63603"),
        Sign("x", "10% slower", "#e6550d"),
        Sign("+", "3% slower", "#fdae6b"),
        Sign("?", "unknown", "#8c8c8c"),
        Sign("s", "starts", "#80cdc1"),
        Sign("d", "data", "#9ecae1"),
        Sign("c", "checkpoint", "#6baed6"),
        Sign("e", "evaluates", "#4292c6"),
        Sign("g", "gc", "#bcbddc"),
        Sign("p", "profiles", "#9e9ac8"),
        Sign("o", "meets sites", "#6a51a3"),
        Sign(".", "trains", "#41ab5d"),
        Sign("=", "done", "#238b45"),
    )
}
"""All signs by letter, the gravest first."""

_GRAVITY = {letter: place for place, letter in enumerate(SIGNS)}

BAD_STATES = "XT!D"  # letters of ranks that do not run as they should

_STATES = {"T": "T", "t": "T", "D": "D", "X": "X", "Z": "X"}
_PHASES = dict.fromkeys(map(str, STARTING), "s") | {
    str(Phase.DATA): "d", str(Phase.EVALUATION): "e", str(Phase.CHECKPOINT): "c", str(Phase.GC): "g",
    str(Phase.DONE): "=", str(Phase.STEP): ".", str(Phase.PROFILE): "p", str(Phase.SITES): "o",
}  # fmt: skip
_SHORT = (Phase.STEP, Phase.DATA, Phase.GC)  # phases that take no longer than a step


def idle_limit_s(step_time_s: float) -> float:
    """Return the seconds without progress from which a rank is said to make none, for steps of `step_time_s`."""
    return max(IDLE_S, IDLE_STEPS * step_time_s) if math.isfinite(step_time_s) else IDLE_S


def letter_of(rank: RankStatus, slowness: float, limit_s: float) -> str:
    """Return the letter of a rank. `slowness`: excess over its peers' compute time, such as 0.1, or NaN; `limit_s`:
    seconds without progress in a step, `standstill.step_limit_s`.
    """
    if rank.state in _STATES and not (rank.state == "D" and rank.idle_s < limit_s):
        return _STATES[rank.state]
    letter = _PHASES.get(rank.phase, "?")
    if rank.phase in _SHORT and rank.idle_s >= limit_s:
        return "!"
    if letter == ".":
        return next((sign for sign, least in SLOW if slowness >= least), letter)
    return letter


def gravest(letters: Sequence[str]) -> str:
    """Return the letter that stands for several ranks: the gravest."""
    return min(letters, key=_GRAVITY.__getitem__)
