"""`megascale doctor`: this machine's hardware and software, the backend of every operation, and self-tests."""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import shutil
import subprocess
import textwrap
import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import megascale
from megascale.cli.arguments import add_config_arguments, add_json
from megascale.config.loading import load_config, load_config_tree
from megascale.config.run import RunConfig
from megascale.core.errors import Exit
from megascale.core.files import exists
from megascale.core.process import usable_cores
from megascale.core.units import format_bytes, format_flops

if TYPE_CHECKING:
    from megascale.device import Device
    from megascale.ops.selftest import BackendReport, OperationReport

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
first_layers_bf16 = 0
last_layers_bf16 = 0
[optimizer]
lr = 1e-3
[data]
mock = true
"""

WIDTH = 118


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_config_arguments(sub, optional="a small Llama, in fp32 and in bf16")
    add_json(sub)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status: 1 if a self-test fails, or if a requested backend cannot serve."""
    configs = configs_to_check(options.config, options.overrides)
    from rich.console import Console

    from megascale.catalog.backends import BACKENDS
    from megascale.device import detect_device
    from megascale.ops.advice import slow_backend_hint
    from megascale.ops.select import BackendError
    from megascale.ops.selftest import check_backends
    from megascale.train.op_context import op_context

    device = detect_device()
    settings = {name: op_context(config, device) for name, config in configs.items()}
    reports: dict[str, list[OperationReport]] = {name: [] for name in settings}
    with Console(stderr=True).status("", spinner="line") as status:  # torch.compile takes seconds
        facts = machine_facts(device, list(configs))
        for name, setting in settings.items():
            for operation in filter(setting.uses, BACKENDS):
                status.update(f"testing {operation} in {name}")
                reports[name].append(check_backends(operation, setting))
    slow = []
    for setting in settings.values():
        with contextlib.suppress(BackendError):  # the operation's report names the problem
            slow.append(slow_backend_hint(setting))
    hints = list(dict.fromkeys(filter(None, slow)))
    flat = [report for per_operation in reports.values() for report in per_operation]
    ok = not any(report.problem or any(verdict.failed for verdict in report.verdicts) for report in flat)
    if options.json:
        plain = {name: [asdict(report) for report in per_operation] for name, per_operation in reports.items()}
        print(json.dumps({"ok": ok, "machine": facts, "operations": plain, "slow": hints}))
    else:
        warnings = [line for text in hints for line in _wrap("WARNING: ", text)]
        print("\n".join([*describe_machine(facts), "", *table(reports), *warnings]))
    return Exit.OK if ok else Exit.UNCLASSIFIED


def configs_to_check(path: str | None, overrides: Sequence[str]) -> dict[str, RunConfig]:
    """Load the configurations to check, by precision: the user's, or the built-in model in fp32 and in bf16.

    Raises: ConfigError with every mistake
    """
    if path and "=" in path and not exists(path):
        overrides = [path, *overrides]
        path = None
    if path:
        loaded = [load_config(path, overrides, skip_sections=["data"])]
    else:
        words = [[f"train.precision={name}", *overrides] for name in ("fp32", "bf16")]
        loaded = [load_config_tree(tomllib.loads(LLAMA_LIKE), "the built-in model", each) for each in words]
    return {config.train.precision: config for config in loaded}


def machine_facts(device: Device, precisions: Sequence[str]) -> dict[str, Any]:
    """Collect versions, the device and its peaks, compilers and libraries, as JSON values."""
    import torch

    from megascale.device import gpu_count, gpu_stack_versions
    from megascale.ops import compiled
    from megascale.ops.library import LIBRARIES

    return {
        "megascale": megascale.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "device": device.name,
        "count": 1 if device.is_cpu else gpu_count(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "memory_bytes": device.total_memory(),
        "peaks": {name: _peak(device, name) for name in precisions},
        "gpu_software": gpu_stack_versions(),
        "cpp_compiler": _version_of(compiled.cpp_compiler()),
        "cannot_compile": compiled.compile_unsupported_reason(device),
        "libraries": {library.package: library.version for library in LIBRARIES},
    }


def _peak(device: Device, precision: str) -> dict[str, Any]:
    """Peak FLOP/s: the vendor's for a GPU (None if unknown), for a CPU a measured GEMM rate and its dtype."""
    import torch

    from megascale.catalog.accelerators import stated_peak
    from megascale.catalog.precisions import PRECISIONS
    from megascale.ops.gemm_rate import gemm_rate

    if device.is_cpu:
        compute = PRECISIONS[precision].facts["compute_dtype"]
        return {"flops": gemm_rate(device, getattr(torch, compute)), "measured": compute}
    stated = stated_peak(device.name, precision)
    return {"flops": stated and stated.flops, "measured": None}


def _version_of(program: str) -> str | None:
    """The first line of what a program says about itself; None if it is missing."""
    if shutil.which(program) is None:
        return None
    completed = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=30)
    return (completed.stdout.splitlines() or [program])[0]


def describe_machine(facts: dict[str, Any]) -> list[str]:
    """Format the machine's facts as text lines."""
    count = f"{facts['count']} x " if facts["count"] > 1 else ""
    cores = f"{facts['cores']} cores, {facts['threads']} threads"
    peaks = [f"{name} {_stated(peak)}" for name, peak in facts["peaks"].items()]
    software = ", ".join(f"{name} {version}" for name, version in facts["gpu_software"].items())
    compiles = f"cannot compile: {facts['cannot_compile']}" if facts["cannot_compile"] else "can compile"
    versions = ", ".join(f"{name} {facts[name]}" for name in ("megascale", "python", "torch"))
    rows = {
        "versions": f"{versions}, {facts['system']}",
        "device": f"{count}{facts['device']}, {format_bytes(facts['memory_bytes'])}; {cores}",
        "peak": ", ".join(peaks),
        "GPU": software or "this torch was built without GPU support",
        "C++": f"{facts['cpp_compiler'] or 'none'}; torch.compile {compiles}",
        "libraries": ", ".join(f"{name} {version or '-'}" for name, version in facts["libraries"].items()),
    }
    return [line for name, text in rows.items() for line in _wrap(f"{name:<12}", text)]


def _stated(peak: dict[str, Any]) -> str:
    if peak["flops"] is None:
        return "unknown"
    source = f"measured, GEMMs in {peak['measured']}" if peak["measured"] else "vendor's"
    return f"{format_flops(peak['flops'])} ({source})"


def table(reports: dict[str, list[OperationReport]]) -> list[str]:
    """Format one line per backend of each operation: a column per precision, and the reason not to serve."""
    lines = [f"{'operation':<18}{'backend':<10}" + "".join(f"{name:<17}" for name in reports)]
    for operation_reports in zip(*reports.values(), strict=True):
        for number, verdicts in enumerate(zip(*(report.verdicts for report in operation_reports), strict=True)):
            operation = operation_reports[0].operation if number == 0 else ""
            cells = "".join(f"{_cell(verdict):<17}" for verdict in verdicts)
            why = [verdict.error or ("" if verdict.chosen else verdict.reason or "") for verdict in verdicts]
            each = "; ".join(f"{name}: {text}" for name, text in zip(reports, why, strict=True) if text)
            reason = why[0] if len(set(why)) == 1 else each  # stated once if all precisions share it
            lines += _wrap(f"{operation:<18}{verdicts[0].backend:<10}{cells}", reason)
    lines.append("")
    lines += _wrap("", LEGEND)
    problems = {report.problem for per_operation in reports.values() for report in per_operation if report.problem}
    return lines + [line for problem in sorted(problems) for line in _wrap("", problem)]


LEGEND = (
    "used: the backend that training uses; ok: a backend that backends.OPERATION may select. The number is the "
    "self-test's largest relative error on this device, of results and gradients or of optimizer steps, against the "
    "torch backend in fp64."
)


def _cell(verdict: BackendReport) -> str:
    if not verdict.supported:
        return "-"
    word = "FAILS" if verdict.failed else "used" if verdict.chosen else "ok"
    return word if verdict.difference is None else f"{word} {verdict.difference:.1e}"


def _wrap(start: str, text: str) -> list[str]:
    """Wrap `text` to the page after the prefix `start`, with a hanging indent."""
    lines = textwrap.wrap(text, WIDTH - len(start)) or [""]
    return [(start + lines[0]).rstrip(), *(" " * len(start) + line for line in lines[1:])]
