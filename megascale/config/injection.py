"""The grammar of injected faults: `fault.inject`.

    kill rank=2 step=5; stop rank=1 step=9 phase=backward; cut_link node=1 step=4 for_s=3
    random mtbf_s=30 seed=1 kinds=kill,stop,hang

Faults are separated by semicolons. A fault has a kind of `KINDS`, one target, and a step; every word must be known, so
that no slip of a key injects a fault.
"""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megascale.config.section import FEW_CHOICES

Target = Literal["rank", "node", "driver"]

PHASES = (
    "build", "load", "data", "forward", "send", "receive", "backward", "tp", "ep", "grad_reduce", "totals",
    "optimizer", "param_gather", "evaluation", "snapshot", "write", "commit",
)  # fmt: skip
"""Moments of a rank at which a fault can strike; tp: a collective of tensor parallelism, ep: an exchange of tokens with
experts, totals: the all-reduce at the end of a step; snapshot, write and commit: a checkpoint, which a helper process
may write.
"""

COLLECTIVES = ("tp", "grad_reduce", "totals")
BEFORE_STEPS = ("build", "load")
STORAGE = ("load", "data", "write", "commit")


@dataclass(frozen=True)
class FaultKind:
    """A kind of fault: its target, its help, the phases in which it can strike and the default one, its options."""

    target: Target
    help: str
    phase: str = ""
    phases: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    required: tuple[str, ...] = ()


LENGTH = ("for_s",)
SPAN = ("for_s", "steps")

KINDS: Mapping[str, FaultKind] = {
    "kill": FaultKind("rank", "the rank is killed (SIGKILL)", "forward", PHASES),
    "stop": FaultKind("rank", "the rank is stopped (SIGSTOP)", "forward", PHASES, LENGTH),
    "slow": FaultKind(
        "rank", "the rank sleeps delay_s in the phase, in `steps` steps", "forward", PHASES, ("steps",), ("delay_s",)
    ),
    "slow_compute": FaultKind(
        "rank", "the rank's actions take `factor` times as long, in `steps` steps; on processors only", "", (),
        ("steps",), ("factor",),
    ),
    "collect_garbage": FaultKind(
        "rank", "Python's garbage collector pauses the rank for delay_s in the phase, in `steps` steps", "forward",
        PHASES, ("steps",), ("delay_s",),
    ),
    "delay_message": FaultKind(
        "rank", "the rank's messages to other stages leave delay_s later, in `steps` steps; on processors only",
        "send", (), ("steps",), ("delay_s",),
    ),
    "raise": FaultKind("rank", "the rank raises an error", "forward", PHASES),
    "exit": FaultKind("rank", "the rank ends with `status`, without a word", "forward", PHASES, ("status",)),
    "hang": FaultKind("rank", "the rank sleeps: in the data loader, in a collective, ...", "data", PHASES, LENGTH),
    "hold_gil": FaultKind("rank", "the rank computes in C and holds Python's lock", "forward", PHASES, LENGTH),
    "skip_collective": FaultKind(
        "rank", "the rank leaves out its collectives of the phase", "grad_reduce", COLLECTIVES
    ),
    "lose_message": FaultKind("rank", "a message to another stage counts as sent, and does not arrive", "send"),
    "slow_storage": FaultKind("rank", "an access to storage does not return", "data", STORAGE, LENGTH),
    "full_disk": FaultKind("rank", "a write of a checkpoint finds no space", "write", ("write",)),
    "nan": FaultKind("rank", "a weight of the rank becomes NaN", "data"),
    "flip_weight": FaultKind("rank", "bit `bit` of a weight of the rank flips", "data", options=("bit",)),
    "flip_gradient": FaultKind(
        "rank", "bit `bit` of a gradient of the rank flips, after the reduction", "optimizer", options=("bit",)
    ),
    "lose_node": FaultKind(
        "node", "all processes of the node are killed, or its host is cut off, without a last message"
    ),
    "stop_node": FaultKind("node", "all processes of the node are stopped", options=LENGTH),
    "kill_agent": FaultKind("node", "the agent of the node is killed"),
    "cut_link": FaultKind("node", "the node's link is cut, or the one to node `peer`", options=("for_s", "peer")),
    "mute_link": FaultKind(
        "node", "messages from the node are lost, to all or to node `peer`; messages to it arrive",
        options=("for_s", "peer"),
    ),
    "reset_link": FaultKind("node", "the node's connections are reset, or those to node `peer`", options=("peer",)),
    "throttle_link": FaultKind("node", "the node's link has `mbit` Mbit/s", options=SPAN, required=("mbit",)),
    "delay_link": FaultKind("node", "the node's link delays by delay_s", options=SPAN, required=("delay_s",)),
    "throttle_cpu": FaultKind(
        "node", "the node's processes have the time of `cores` cores", options=SPAN, required=("cores",)
    ),
    "fill_disk": FaultKind(
        "node", "the file system of the node's checkpoints is full, for `steps` steps", options=("steps",)
    ),
    "kill_driver": FaultKind("driver", "the driver is killed"),
}  # fmt: skip
"""Kinds of faults by name. Ranks inject their own; the program that runs the test injects the others."""


@dataclass(frozen=True)
class Fault:
    """One injected fault. `rank`, `node`: the target, None for the driver; `peer`: the other node of a link.

    `step`: strikes in this step, from 1, at the first moment of `phase`; 0 before the first step of an attempt.
    `for_s`: its length, None: without end. `times`: how often it strikes over all attempts of the job. `bit`: the bit
    that flips, from 0, the lowest.
    """

    kind: str
    step: int
    rank: int | None = None
    node: int | None = None
    peer: int | None = None
    phase: str = ""
    for_s: float | None = None
    delay_s: float = 0.0
    factor: float = 1.0
    mbit: float = 0.0
    cores: float = 0.0
    bit: int = 0
    steps: int = 1
    status: int = 1
    times: int = 1

    @property
    def target(self) -> Target:
        return KINDS[self.kind].target


@dataclass(frozen=True)
class RandomFaults:
    """Faults of random `kinds` of ranks on random ranks, independent of one another.

    The mean time between two is `mtbf_s` seconds, or `mtbf_steps` steps; the other is 0. `apart`: the least time, in
    the same unit.
    """

    kinds: tuple[str, ...]
    mtbf_s: float = 0.0
    mtbf_steps: float = 0.0
    seed: int = 0
    apart: float = 0.0


@dataclass(frozen=True)
class Injection:
    """The faults of `fault.inject`."""

    faults: tuple[Fault, ...] = ()
    random: RandomFaults | None = None

    def __bool__(self) -> bool:
        return bool(self.faults or self.random)


class InjectionError(ValueError):
    """A text that is no list of faults; says what is wrong and how to fix it."""


def parse_injection(text: str) -> Injection:
    """Parse `fault.inject`. Raises: InjectionError"""
    faults, random = [], None
    for part in _parts(text):
        kind, *words = part.split()
        values = _values(part, words)
        if kind != "random":
            faults.append(_fault(part, kind, values))
        elif random is not None:
            raise InjectionError(f"{part!r}: `random` is given twice")
        else:
            random = _random(part, values)
    return Injection(tuple(faults), random)


def faults_of_ranks(text: str, world: int | None = None) -> str:
    """Return a text of `fault.inject` without faults of nodes and the driver, and of ranks from `world` on.

    Raises: InjectionError
    """

    def keeps(part: str) -> bool:
        ranks = [fault.rank for fault in parse_injection(part).faults]
        return all(rank is not None and (world is None or rank < world) for rank in ranks)

    return "; ".join(filter(keeps, _parts(text)))


def _parts(text: str) -> list[str]:
    return [part for word in text.split(";") if (part := word.strip())]


def _values(part: str, words: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not value:
            raise InjectionError(f"{part!r}: {word!r} is not key=value")
        if key in values:
            raise InjectionError(f"{part!r}: {key} is given twice")
        if key not in _OPTIONS:
            raise InjectionError(f"{part!r}: no key {key!r}{_nearest(key, _OPTIONS)}")
        if number := _OPTIONS[key]:
            values[key] = number.parse(value)
            if values[key] is None:
                raise InjectionError(f"{part!r}: {key}={value}: should be {number.words}")
        else:
            values[key] = tuple(value.split(",")) if key == "kinds" else value
    return values


def _fault(part: str, kind: str, values: dict[str, Any]) -> Fault:
    if (facts := KINDS.get(kind)) is None:
        raise InjectionError(f"{part!r}: no fault {kind!r}{_nearest(kind, KINDS)}")
    target = () if facts.target == "driver" else (facts.target,)
    known = {"step", "times", *target, *facts.options, *facts.required, *(("phase",) if facts.phases else ())}
    if unknown := values.keys() - known:
        raise InjectionError(f"{part!r}: {kind} has no {min(unknown)}, only {', '.join(sorted(known))}")
    phase = values.setdefault("phase", facts.phase)
    if facts.phases and phase not in facts.phases:
        raise InjectionError(f"{part!r}: phase={phase}: should be one of {', '.join(facts.phases)}")
    if phase in BEFORE_STEPS:
        if values.setdefault("step", 0):
            raise InjectionError(f"{part!r}: {phase} comes before the first step: without a step")
    elif values.get("step") == 0:
        raise InjectionError(f"{part!r}: step=0: should be a step from 1 on")
    if missing := [key for key in (*target, "step", *facts.required) if key not in values]:
        raise InjectionError(f"{part!r}: {kind} needs {missing[0]}=")
    return Fault(kind, **values)


def _random(part: str, values: dict[str, Any]) -> RandomFaults:
    if unknown := values.keys() - {"mtbf_s", "mtbf_steps", "apart", "seed", "kinds"}:
        raise InjectionError(f"{part!r}: random has no {min(unknown)}, only apart, kinds, mtbf_s, mtbf_steps, seed")
    if ("mtbf_s" in values) == ("mtbf_steps" in values):
        raise InjectionError(f"{part!r}: random needs mtbf_s= or mtbf_steps=")
    if values.get("apart", 0.0) >= values.get("mtbf_s", values.get("mtbf_steps")):
        raise InjectionError(f"{part!r}: apart should be less than the mean")
    if "kinds" not in values:
        raise InjectionError(f"{part!r}: random needs kinds=, such as kinds=kill,stop,hang")
    for kind in values["kinds"]:
        facts = KINDS.get(kind)
        if facts is None or facts.target != "rank" or facts.required:
            choices = [name for name, card in KINDS.items() if card.target == "rank" and not card.required]
            raise InjectionError(f"{part!r}: kinds={kind}: should be of {', '.join(choices)}")
    return RandomFaults(**values)


def _nearest(word: str, words: Collection[str]) -> str:
    found = difflib.get_close_matches(word, words, n=1)
    few = f", only {', '.join(words)}" if len(words) <= FEW_CHOICES else ""
    return f"; did you mean {found[0]}?" if found else few


@dataclass(frozen=True)
class _Number:
    """Numbers of a kind from `low` to `high`, in `words`."""

    words: str
    kind: type[int] | type[float]
    low: float
    high: float = math.inf

    def parse(self, text: str) -> float | None:
        """Return the number; None for another text."""
        if self.kind is int and not (text.isascii() and text.isdigit() and len(text) <= 9):
            return None
        with contextlib.suppress(ValueError):
            if self.low <= (value := self.kind(text)) <= self.high:
                return value
        return None


_WHOLE = _Number("a whole number from 0 on", int, 0)
_POSITIVE = _Number("a whole number from 1 on", int, 1)
_SECONDS = _Number("a number from 0.001 to 1000000", float, 1e-3, 1e6)
_OPTIONS: Mapping[str, _Number | None] = {
    "rank": _WHOLE, "node": _WHOLE, "peer": _WHOLE, "step": _WHOLE, "phase": None, "for_s": _SECONDS,
    "delay_s": _SECONDS, "steps": _POSITIVE, "status": _Number("an exit status from 0 to 255", int, 0, 255),
    "times": _POSITIVE, "mtbf_s": _SECONDS, "mtbf_steps": _SECONDS, "apart": _SECONDS, "seed": _WHOLE, "kinds": None,
    "bit": _Number("a bit from 0 to 63", int, 0, 63), "mbit": _SECONDS, "cores": _SECONDS,
    "factor": _Number("a number from 1 to 1000", float, 1, 1000),
}  # fmt: skip
