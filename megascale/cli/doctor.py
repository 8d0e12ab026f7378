"""`megascale doctor`: what this machine has, which backend serves each operation and why, and self-tests."""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import shutil
import subprocess
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import megascale
from megascale.config.explain import load, load_tree
from megascale.config.run import RunConfig
from megascale.core.errors import Exit
from megascale.core.process import usable_cores
from megascale.core.units import format_bytes, format_flops

if TYPE_CHECKING:
    from megascale.device import Device
    from megascale.ops.selftest import Examination, Verdict

BUILT_IN = "the built-in model"
LLAMA_LIKE = """
name = "llama-like"
[model]
num_layers = 2
hidden_size = 256
num_heads = 4
num_kv_heads = 2
vocab_size = 32000
seq_length = 128
norm = "rmsnorm"
activation = "swiglu"
position = "rope"
bias = false
tie_embeddings = false
[batch]
global = 8
[train]
steps = 10
[fp8]
bf16_first = 0
bf16_last = 0
[optimizer]
lr = 1e-3
[data]
mock = true
"""
"""What is asked about where no configuration is given."""

WIDTH = 118
"""Columns of the page, at most."""


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    sub.add_argument("config", metavar="CONFIG", nargs="?", help="a TOML file (a small Llama, in fp32 and in bf16)")
    sub.add_argument("overrides", metavar="key=value", nargs="*", help="settings that win, as section.key=value")
    sub.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status: 1 if a self-test fails, or nothing serves as it is asked for."""
    configs = configurations(options.config, options.overrides)
    from rich.console import Console

    from megascale.device import detect

    device = detect()
    with Console(stderr=True).status("", spinner="line") as status:  # torch.compile takes its time
        facts = machine(device, list(configs))
        found = {name: examinations(config, device, name, status.update) for name, config in configs.items()}
    slow = slowness(configs.values(), device)
    ok = not any(one.problem or any(v.failed for v in one.verdicts) for all in found.values() for one in all)
    if options.json:
        plain = {name: [asdict(one) for one in all] for name, all in found.items()}
        print(json.dumps({"ok": ok, "machine": facts, "operations": plain, "slow": slow}))
    else:
        warnings = [line for text in slow for line in _wrapped("WARNING: ", text)]
        print("\n".join([*described(facts), "", *table(found), *warnings]))
    return Exit.OK if ok else Exit.UNCLASSIFIED


def configurations(path: str | None, overrides: Sequence[str]) -> dict[str, RunConfig]:
    """What is asked about, by its precision: one configuration, or without one the built-in in the two common ones.

    Raises: ConfigError with every mistake
    """
    if path and "=" in path and not Path(path).exists():
        overrides = [path, *overrides]
    elif path:
        given = load(path, overrides, unchecked=["data"])
        return {given.train.precision: given}
    asked = [[f"train.precision={name}", *overrides] for name in ("fp32", "bf16")]
    loaded = [load_tree(tomllib.loads(LLAMA_LIKE), BUILT_IN, words) for words in asked]
    return {config.train.precision: config for config in loaded}


def examinations(
    config: RunConfig, device: Device, precision: str, progress: Callable[[str], None]
) -> list[Examination]:
    """What every backend of every operation says, and what its self-test says of it."""
    from megascale.catalog.backends import BACKENDS
    from megascale.ops.select import Setting
    from megascale.ops.selftest import examine

    setting, found = Setting.of(config, device), []
    for operation in filter(setting.uses, BACKENDS):
        progress(f"testing {operation} in {precision}")
        found.append(examine(operation, setting))
    return found


def slowness(configs: Iterable[RunConfig], device: Device) -> list[str]:
    """List the operations that are slower than they need be here, each sentence once; skips a configuration that no
    backend serves.
    """
    from megascale.ops.advice import advice
    from megascale.ops.select import BackendError, Setting

    found: dict[str, None] = {}
    for config in configs:
        with contextlib.suppress(BackendError):  # its examination says why
            if text := advice(Setting.of(config, device)):
                found[text] = None
    return list(found)


def machine(device: Device, precisions: Sequence[str]) -> dict[str, Any]:
    """What there is: Python, torch, the device and its peaks, compilers, libraries. Plain values, for JSON."""
    import torch

    from megascale.device import gpus, versions
    from megascale.ops import compiled
    from megascale.ops.library import LIBRARIES

    return {
        "megascale": megascale.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "device": device.name,
        "count": 1 if device.is_cpu else gpus(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "memory_bytes": device.memory(),
        "peaks": {name: _peak(device, name) for name in precisions},
        "gpu_software": versions(),
        "cpp_compiler": _first_line(compiled.cpp_compiler(), "--version"),
        "cannot_compile": compiled.refusal(device),
        "libraries": {library.package: library.version for library in LIBRARIES},
    }


def _peak(device: Device, precision: str) -> dict[str, Any]:
    """The maker's peak of a GPU, nothing if it is not known; of a CPU what products reach, and in which format."""
    import torch

    from megascale.account.peaks import stated_peak
    from megascale.catalog.precisions import PRECISIONS
    from megascale.ops.gemm_rate import gemm_rate

    if device.is_cpu:
        compute = PRECISIONS[precision].facts["compute"]
        return {"flops": gemm_rate(device, getattr(torch, compute)), "measured": compute}
    stated = stated_peak(device.name, precision)
    return {"flops": stated and stated.flops, "measured": None}


def _first_line(*command: str) -> str | None:
    """What a program prints first; None if there is no such program."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return (done.stdout.splitlines() or [command[0]])[0]


def described(facts: dict[str, Any]) -> list[str]:
    """The machine, for people."""
    count = f"{facts['count']} x " if facts["count"] > 1 else ""
    cores = f"{facts['cores']} cores, {facts['threads']} threads"
    peaks = [f"{name} {_stated(peak)}" for name, peak in facts["peaks"].items()]
    software = ", ".join(f"{name} {version}" for name, version in facts["gpu_software"].items())
    cannot = facts["cannot_compile"]
    compiler = (
        f"{facts['cpp_compiler'] or 'none'}; torch.compile {f'cannot compile: {cannot}' if cannot else 'can compile'}"
    )
    libraries = ", ".join(f"{name} {version or '-'}" for name, version in facts["libraries"].items())
    versions = ", ".join(f"{name} {facts[name]}" for name in ("megascale", "python", "torch"))
    rows = {
        "versions": f"{versions}, {facts['system']}",
        "device": f"{count}{facts['device']}, {format_bytes(facts['memory_bytes'])}; {cores}",
        "peak": ", ".join(peaks),
        "GPU": software or "this torch was built without",
        "C++": compiler,
        "libraries": libraries,
    }
    return [line for name, text in rows.items() for line in _wrapped(f"{name:<12}", text)]


def _stated(peak: dict[str, Any]) -> str:
    if peak["flops"] is None:
        return "not known"
    how = f"measured now, by products in {peak['measured']}" if peak["measured"] else "stated"
    return f"{format_flops(peak['flops'])} ({how})"


def table(found: dict[str, list[Examination]]) -> list[str]:
    """One line for each backend of each operation, a column for each precision, and why it does not serve."""
    lines = [f"{'operation':<15}{'backend':<10}" + "".join(f"{name:<17}" for name in found)]
    for same in zip(*found.values(), strict=True):
        for number, verdicts in enumerate(zip(*(one.verdicts for one in same), strict=True)):
            operation = same[0].operation if number == 0 else ""
            cells = "".join(f"{_cell(verdict):<17}" for verdict in verdicts)
            lines += _wrapped(
                f"{operation:<15}{verdicts[0].backend:<10}{cells}", _reason(dict(zip(found, verdicts, strict=True)))
            )
    lines.append("")
    lines += _wrapped("", LEGEND)
    problems = {one.problem for all in found.values() for one in all if one.problem}
    return lines + [line for problem in sorted(problems) for line in _wrapped("", problem)]


LEGEND = (
    "serves: what runs; can: what would if backends.OPERATION asked for it. The number is its self-test on this "
    "device: the largest relative difference of result and gradients, or of an optimizer's steps, from the torch "
    "backend in fp64."
)


def _cell(verdict: Verdict) -> str:
    if not verdict.willing:
        return "-"
    word = "FAILS" if verdict.failed else "serves" if verdict.chosen else "can"
    return word if verdict.difference is None else f"{word} {verdict.difference:.1e}"


def _reason(verdicts: dict[str, Verdict]) -> str:
    """Why a backend does not serve, once where it is the same in each precision."""
    reasons = {
        name: verdict.error or ("" if verdict.chosen else verdict.refusal or "") for name, verdict in verdicts.items()
    }
    if len(set(reasons.values())) == 1:
        return next(iter(reasons.values()))
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason)


def _wrapped(start: str, text: str) -> list[str]:
    """`text` after `start`, and below itself where it is too long for the page."""
    lines = textwrap.wrap(text, WIDTH - len(start)) or [""]
    return [(start + lines[0]).rstrip(), *(" " * len(start) + line for line in lines[1:])]
