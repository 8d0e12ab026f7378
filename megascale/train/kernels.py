"""Kernel time of a step by purpose (GEMM, attention, norms, ...), and idle time, from a trace of torch's profiler.

The trace has the GPU's kernels and copies with their launches, or the operators of a CPU. GEMMs, attention and
communication are recognised by the kernel's name, other kernels also by the operators and named ranges around the
launch (`record.recorder` names the actions of a step under a profiler).

- `profile_kernels`: run a function under the profiler
- `classify`: the purpose of a kernel
- `purpose_seconds`, `time_shares`: the seconds of every purpose; its share, and that of idle, in a span of time
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

from megascale.device import Device
from megascale.operate.show.summary import union_length
from megascale.record.events import OPTIMIZER_ACTIONS

_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}  # trace categories of GPU work
_HOST = {"cpu_op", "user_annotation"}  # trace categories of host ranges that may enclose further ranges


def _words(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(patterns), re.IGNORECASE)


_ATTENTION = _words(r"flash[_:]", r"flash_?att", r"fmha", r"sdpa", r"dot_?product_(\w+_)?attention", r"flex_attention",
                    r"ScaledDotProduct", r"AttentionKernel")  # fmt: skip
_GEMM = _words(r"gemm", r"nvjet", r"gemv", r"splitKreduce", r"cublas", r"triton_(tem|mm)\w*mm",
                  r"^aten::(mm|addmm|addmm_|bmm|baddbmm|matmul|linear|_scaled_mm(_v2)?)$")  # fmt: skip
_COMMUNICATION = _words(r"nccl", r"gloo", r"c10d::")

_NAMES = (("communication", _COMMUNICATION), ("attention", _ATTENTION), ("gemm", _GEMM))
"""Purposes recognised by the kernel's own name, before any enclosing range."""

_PURPOSES = (
    ("optimizer", _words(r"Optimizer\.step", r"adam", r"lamb(?!da)", r"multi_tensor_apply")),
    ("norms", _words(r"layer_?norm", r"rms_?norm", r"GammaBeta", r"rsqrt")),
    ("activation", _words(r"gelu", r"silu", r"swiglu", r"sigmoid")),
    ("rope", _words(r"(?<![a-z])rope(?![a-z])", r"rotary", r"RotateHeads")),
    ("loss", _words(r"cross_?entropy", r"log_?softmax", r"nll_loss")),
    ("quantise", _words(r"quanti[sz]e", r"cast_transpose", r"fp8", r"float8")),
    ("attention", _ATTENTION),
    ("gemm", _GEMM),
)
"""Purposes recognised by the name of the kernel or of an enclosing range."""

_COPIES = _words(r"memcpy", r"memset", r"copy", r"(?<!broad)cast", r"CatArray", r"fill", r"zero_",
                 r"^aten::(to|cat|contiguous)$")  # fmt: skip

ALL_PURPOSES = (
    "gemm", "attention", "norms", "activation", "rope", "loss", "quantise", "optimizer", "communication", "copies",
    "other",
)  # fmt: skip
"""Results of `classify`, in the order of tables."""


@dataclass(frozen=True)
class Kernel:
    """A kernel or copy of a GPU, or an operator of a CPU without the operators inside. `enclosing`: names of the ranges
    around the launch, innermost first.
    """

    name: str
    enclosing: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class KernelProfile:
    """Kernels, and the seconds with at least one kernel running (streams run kernels concurrently)."""

    kernels: tuple[Kernel, ...]
    busy_s: float


def classify(name: str, enclosing: Sequence[str] = ()) -> str:
    """Return the purpose of a kernel or operator, one of ALL_PURPOSES."""
    if OPTIMIZER_ACTIONS.intersection(enclosing):
        return "optimizer"
    for purpose, pattern in _NAMES:
        if pattern.search(name):
            return purpose
    for text in (name, *enclosing):
        for purpose, pattern in _PURPOSES:
            if pattern.search(text):
                return purpose
    return "copies" if _COPIES.search(name) else "other"


def purpose_seconds(profile: KernelProfile) -> dict[str, float]:
    """Return the seconds of every purpose."""
    result = dict.fromkeys(ALL_PURPOSES, 0.0)
    for kernel in profile.kernels:
        result[classify(kernel.name, kernel.enclosing)] += kernel.seconds
    return result


def time_shares(profile: KernelProfile, span: float) -> dict[str, float]:
    """Return the share of every purpose, and of `idle`, in a span of seconds."""
    shares = {purpose: seconds / span for purpose, seconds in purpose_seconds(profile).items()}
    return shares | {"idle": max(0.0, 1 - profile.busy_s / span)}


def profile_kernels(work: Callable[[], object], device: Device) -> KernelProfile:
    """Run `work` under torch's profiler."""
    with torch.profiler.profile() as profiler:
        work()
        device.synchronize()
    return kernels_of(profiler)


def kernels_of(profiler: torch.profiler.profile) -> KernelProfile:
    """Return the kernels that a profiler has seen, once it is stopped."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    return profile_from_trace(events)


def profile_from_trace(events: Iterable[dict[str, Any]]) -> KernelProfile:
    """Parse the `traceEvents`, in microseconds, of a trace exported by torch's profiler."""
    intervals = [event for event in events if event.get("ph") == "X"]
    device = [event for event in intervals if event.get("cat") in _DEVICE]
    if not device:
        operators = tuple(_operators(intervals))
        return KernelProfile(operators, sum(operator.seconds for operator in operators))
    enclosing = _launched_in(intervals)
    kernels = (Kernel(e["name"], enclosing.get(_correlation(e) or -1, ()), e["dur"] / 1e6) for e in device)
    return KernelProfile(tuple(kernels), union_length((e["ts"], e["ts"] + e["dur"]) for e in device) / 1e6)


def _operators(intervals: Sequence[dict[str, Any]]) -> Iterator[Kernel]:
    """Yield the operators with their self time."""
    inside: dict[int, float] = {}
    nested = list(_nested([event for event in intervals if event.get("cat") in _HOST]))
    for event, around in nested:
        if around:
            inside[id(around[-1])] = inside.get(id(around[-1]), 0.0) + event["dur"]
    for event, around in nested:
        if event["cat"] == "cpu_op":
            seconds = max(0.0, event["dur"] - inside.get(id(event), 0.0)) / 1e6
            yield Kernel(event["name"], _names(around), seconds)


def _launched_in(intervals: Sequence[dict[str, Any]]) -> dict[int, tuple[str, ...]]:
    """Map correlation ids to the names of the operators and ranges around the launch, innermost first."""
    launches = [e for e in intervals if e.get("cat") not in _DEVICE and _correlation(e) is not None]
    numbers = {id(event): _correlation(event) for event in launches}
    nested = _nested([*(e for e in intervals if e.get("cat") in _HOST), *launches])
    return {number: _names(around) for event, around in nested if (number := numbers.get(id(event))) is not None}


def _correlation(event: dict[str, Any]) -> int | None:
    """Return the id that a launch shares with its kernel."""
    return event.get("args", {}).get("correlation")


def _nested(intervals: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], tuple[dict[str, Any], ...]]]:
    """Yield every interval with the enclosing intervals of its thread, outermost first."""
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
