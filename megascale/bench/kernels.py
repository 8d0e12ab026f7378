"""What a device does in a step: its kernels, sorted by purpose, and the time in which none runs.

torch's profiler writes what happened as a trace of intervals: on a GPU its kernels and copies, each with the call that
launched it, on a CPU the operators. A kernel's name tells a product or a fused attention; a multiplication may belong
to anything, so the operators and named ranges that it was launched in decide (`trace.recorder` names the actions of a
step while a profiler runs).
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megascale.core.events import OPTIMIZER_ACTIONS
from megascale.device import Device
from megascale.observe.summary import covered

_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
"""Categories of the trace that are work of a GPU."""

_HOST = {"cpu_op", "user_annotation"}
"""Categories that enclose others."""


def _words(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(patterns), re.IGNORECASE)


_ATTENTION = _words(r"flash[_:]", r"flash_?att", r"fmha", r"sdpa", r"dot_?product_(\w+_)?attention", r"flex_attention",
                    r"ScaledDotProduct", r"AttentionKernel")  # fmt: skip
_PRODUCT = _words(r"gemm", r"nvjet", r"gemv", r"splitKreduce", r"cublas", r"triton_(tem|mm)\w*mm",
                  r"^aten::(mm|addmm|addmm_|bmm|baddbmm|matmul|linear|_scaled_mm)$")  # fmt: skip
_COMMUNICATION = _words(r"nccl", r"gloo", r"c10d::")

_NAMES = (("communication", _COMMUNICATION), ("attention", _ATTENTION), ("gemm", _PRODUCT))
"""Purposes that a kernel's own name tells, whatever it was launched in."""

_PURPOSES = (
    ("optimizer", _words(r"Optimizer\.step", r"adam", r"lamb(?!da)", r"multi_tensor_apply")),
    ("norms", _words(r"layer_?norm", r"rms_?norm", r"GammaBeta", r"rsqrt")),
    ("activation", _words(r"gelu", r"silu", r"swiglu", r"sigmoid")),
    ("rope", _words(r"(?<![a-z])rope(?![a-z])", r"rotary", r"RotateHeads")),
    ("loss", _words(r"cross_?entropy", r"log_?softmax", r"nll_loss")),
    ("quantise", _words(r"quanti[sz]e", r"cast_transpose", r"fp8", r"float8")),
    ("attention", _ATTENTION),
    ("gemm", _PRODUCT),
)
"""Purposes that a name may tell, a kernel's or that of what it was launched in."""

_COPIES = _words(r"memcpy", r"memset", r"copy", r"(?<!broad)cast", r"CatArray", r"fill", r"zero_",
                 r"^aten::(to|cat|contiguous)$")  # fmt: skip

CLASSES = (
    "gemm", "attention", "norms", "activation", "rope", "loss", "quantise", "optimizer", "communication", "copies",
    "other",
)  # fmt: skip
"""What `classify` returns, in the order in which it is shown."""


@dataclass(frozen=True)
class Kernel:
    """Work of the device: a kernel or copy, on a CPU an operator without those that it calls. `within`: what it was
    launched in, the innermost first.
    """

    name: str
    within: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Profile:
    """`busy_s`: seconds in which the device did anything at all; kernels of several streams may run at once."""

    kernels: tuple[Kernel, ...]
    busy_s: float


def classify(name: str, within: Sequence[str] = ()) -> str:
    """The purpose of a kernel or operator, one of CLASSES."""
    if OPTIMIZER_ACTIONS.intersection(within):
        return "optimizer"
    for purpose, pattern in _NAMES:
        if pattern.search(name):
            return purpose
    for text in (name, *within):
        for purpose, pattern in _PURPOSES:
            if pattern.search(text):
                return purpose
    return "copies" if _COPIES.search(name) else "other"


def shares(profile: Profile, span: float) -> dict[str, float]:
    """What each purpose takes of `span` seconds, and `idle`, in which the device does nothing."""
    found = dict.fromkeys(CLASSES, 0.0)
    for kernel in profile.kernels:
        found[classify(kernel.name, kernel.within)] += kernel.seconds / span
    return found | {"idle": max(0.0, 1 - profile.busy_s / span)}


def profile(work: Callable[[], object], device: Device) -> Profile:
    """Run `work` under torch's profiler."""
    with torch.profiler.profile() as profiler:
        work()
        device.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    return from_trace(events)


def from_trace(events: Iterable[dict[str, Any]]) -> Profile:
    """Read the `traceEvents` of a trace that torch's profiler exported; its times are microseconds."""
    intervals = [event for event in events if event.get("ph") == "X"]
    device = [event for event in intervals if event.get("cat") in _DEVICE]
    if not device:
        operators = tuple(_operators(intervals))
        return Profile(operators, sum(operator.seconds for operator in operators))
    within = _launched_in(intervals)
    kernels = (Kernel(e["name"], within.get(_correlation(e) or -1, ()), e["dur"] / 1e6) for e in device)
    return Profile(tuple(kernels), covered((e["ts"], e["ts"] + e["dur"]) for e in device) / 1e6)


def _operators(intervals: Sequence[dict[str, Any]]) -> Iterator[Kernel]:
    """Operators without those that they call."""
    inside: dict[int, float] = {}
    found = list(_nested([event for event in intervals if event.get("cat") in _HOST]))
    for event, around in found:
        if around:
            inside[id(around[-1])] = inside.get(id(around[-1]), 0.0) + event["dur"]
    for event, around in found:
        if event["cat"] == "cpu_op":
            seconds = max(0.0, event["dur"] - inside.get(id(event), 0.0)) / 1e6
            yield Kernel(event["name"], _names(around), seconds)


def _launched_in(intervals: Sequence[dict[str, Any]]) -> dict[int, tuple[str, ...]]:
    """For each correlation number, the operators and ranges around the call that launched it, the innermost first."""
    launches = [e for e in intervals if e.get("cat") not in _DEVICE and _correlation(e) is not None]
    numbers = {id(event): _correlation(event) for event in launches}
    nested = _nested([*(e for e in intervals if e.get("cat") in _HOST), *launches])
    return {number: _names(around) for event, around in nested if (number := numbers.get(id(event))) is not None}


def _correlation(event: dict[str, Any]) -> int | None:
    """The number that a launch and what it launched share."""
    return event.get("args", {}).get("correlation")


def _nested(intervals: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], tuple[dict[str, Any], ...]]]:
    """Each interval, with those of its thread that enclose it, the outermost first."""
    threads: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
    for event in intervals:
        threads.setdefault((event["pid"], event["tid"]), []).append(event)
    for members in threads.values():
        around: list[dict[str, Any]] = []
        for event in sorted(members, key=lambda e: (e["ts"], -e["dur"])):
            while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"]:
                around.pop()
            yield event, tuple(around)
            around.append(event)


def _names(around: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    return tuple(event["name"] for event in reversed(around))
