#!/usr/bin/env python3
"""Write docs/results/gpu-suite.md from a file of `make test-gpu`, such as build/test-gpu-1.json.

`matrix` makes the table of docs/status.md: features, tests on CPUs, and results of the GPU suite on that page.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from results import pipes, write_page

ROOT = Path(__file__).parents[1]
SUITE = ROOT / "docs" / "results" / "gpu-suite.md"
NOT_RUN = "not run"


@dataclass(frozen=True)
class Feature:
    """A feature, the folders or files of its tests on CPUs, and the files of its GPU tests."""

    name: str
    cpu: tuple[str, ...]
    gpu: tuple[str, ...] = ()


FEATURES = (
    Feature(
        "tp, sp, pp, vpp, dp, ZeRO 0 to 3, hybrid sharding, mixed",
        ("parallel", "schedule", "layout"),
        ("layouts", "pipeline"),
    ),
    Feature(
        "schedules with split backwards, on a V, in pairs, partial",
        (
            "schedule",
            "parallel/test_split_backward.py",
            "parallel/test_segments.py",
            "parallel/test_partial_pipelines.py",
        ),
    ),
    Feature(
        "vocabulary over pipeline stages", ("schedule/test_shared_vocabulary.py", "parallel/test_vocabulary_passes.py")
    ),
    Feature(
        "overlap on tp, pp, dp",
        ("parallel/test_tp_overlap.py", "parallel/test_domino.py", "tools/lab/test_overlap.py"),
        ("overlap",),
    ),
    Feature("context and hybrid data parallelism", ("parallel", "layout"), ("layouts",)),
    Feature("experts, ep", ("parallel/experts",), ("experts",)),
    Feature("latent attention, sinks, multi-token prediction", ("model", "convert", "train"), ("experts",)),
    Feature(
        "linear attention; sparse attention by head",
        ("model/test_lightning_attention.py", "parallel/test_sparse_attention.py"),
    ),
    Feature(
        "distillation, objectives, growth, frozen parameters",
        (
            "train/test_distillation.py",
            "train/test_objectives.py",
            "convert/test_growth.py",
            "train/test_frozen_parameters.py",
        ),
    ),
    Feature(
        "saved tensors and optimizer state in host memory or files",
        ("parallel/test_layer_memory.py", "optim/test_host_updates.py"),
    ),
    Feature("early exits", ("train/test_exit_losses.py", "plan/account/test_exits.py")),
    Feature("fp64, fp32, bf16, FP8, FP4; masks; backends", ("train", "ops", "model"), ("exactness", "fp8")),
    Feature("attention by fused kernels", ("ops",), ("attention",)),
    Feature("wgrad GEMMs that add to fp32", ("ops",), ("accumulation",)),
    Feature("update rules", ("optim",), ("optimizers",)),
    Feature("memory as planned, out of memory, fifty steps", ("plan",), ("memory",)),
    Feature("steps without a host synchronization; event log", ("record", "train"), ("synchronisation",)),
    Feature("checkpoints, resume, copies in memory", ("checkpoint",), ("checkpoint",)),
    Feature("ranks that die or stop are named", ("operate/diagnose", "comm"), ("faults",)),
    Feature("mistakes with GPUs are refused", ("cli", "config"), ("refusals",)),
    Feature("speed of a step", ("bench",), ("speed",)),
    Feature("`launch`: driver, agents, spares, Slurm", ("operate/driver", "operate/node", "operate/channel")),
    Feature("several sites, rebuilt stages", ("train/test_outer_steps.py", "checkpoint/test_lost_stages.py")),
    Feature("node checks", ("operate/health",)),
    Feature("event store, findings, metrics", ("operate/store", "operate/diagnose")),
    Feature("`watch`, `dashboard`, `trace`", ("operate/show",)),
    Feature("data: preparation, blends, packing, readers", ("data",)),
    Feature("weights of Hugging Face, checkpoints of Megatron-LM and torchtitan, both ways", ("convert",)),
    Feature("`plan`, `check`", ("plan", "config", "cli")),
)


def matrix() -> list[list[str]]:
    """Return the rows of the matrix, the head first.

    Raises: ValueError if a test that a row names does not exist
    """
    outcomes = suite_outcomes()
    rows = [["feature", "CPU tests", "one H200: cases passed", "two or more GPUs"]]
    for feature in FEATURES:
        cpu = [f"tests/{path}" for path in feature.cpu]
        gpu = [f"tests/gpu/test_{name}.py" for name in feature.gpu]
        if missing := [path for path in (*cpu, *gpu) if not (ROOT / path).exists()]:
            raise ValueError(f"{feature.name}: no {', '.join(missing)}")
        one = [outcomes[path] for path in gpu if path in outcomes]
        several = [path for path in gpu if re.search(r"\bgpu\((?:[2-9]|count)", (ROOT / path).read_text())]
        passed = f"{sum(ok for ok, _ in one)} of {sum(cases for _, cases in one)}" if one else ""
        rows.append([feature.name, ", ".join(f"`{path}`" for path in cpu), passed, NOT_RUN if several else ""])
    return rows


def suite_outcomes() -> dict[str, tuple[int, int]]:
    """Return how many cases passed and how many there are, by test file, from the page of the GPU suite."""
    found: dict[str, tuple[int, int]] = {}
    row = re.compile(r"^\| `(tests/gpu/\w+\.py)::\w+` \| (\d+) \| (\d+) \|", re.MULTILINE)
    for path, cases, passed in row.findall(SUITE.read_text(encoding="utf-8")):
        before = found.get(path, (0, 0))
        found[path] = before[0] + int(passed), before[1] + int(cases)
    return found


def write_suite(path: Path) -> Path:
    """Write the page of the GPU suite from the JSON file of a run; return the page's path."""
    record = json.loads(path.read_text(encoding="utf-8"))
    outcomes: dict[str, Counter[str]] = {}
    for result in record["results"]:
        test = result["name"].partition("[")[0].removeprefix("tests/gpu/")
        outcomes.setdefault(f"`tests/gpu/{test}`", Counter())[result["outcome"]] += 1
    rows = [
        [test, str(found.total()), *(str(found[outcome]) for outcome in ("passed", "failed", "skipped"))]
        for test, found in outcomes.items()
    ]
    measured = f"The tests for {record['gpus']} GPUs ran on {record['machine']['device']}."
    table = pipes(["test", "cases", "passed", "failed", "not run"], *rows)
    return write_page("gpu-suite", "GPU suite", measured, ["\n".join(table)], [f"make test-gpu GPUS={record['gpus']}"])


def main() -> None:
    """Run the tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="of `make test-gpu`")
    print(write_suite(parser.parse_args().file))


if __name__ == "__main__":
    main()
