"""The start of training data beside megatron-core's loader: a blend of many files, an index of many documents, many
processes at once.

    .venv/bin/python tools/bench/data_start.py --folder build/data-start

Datasets are synthetic: real indices, and tokens in sparse files. Every start is a process of its own, of both systems
in turn; CPU seconds tell more than seconds on a busy machine. The folder needs about 10 GB, and is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megascale.data.read.indexed_dataset import HEADER

CASE = Path(__file__).with_name("data_start_case.py")
TOKEN_BYTES = 2


@dataclass(frozen=True)
class Data:
    """Datasets of a case: their number, documents of each, mean tokens of a document; and the run on them."""

    name: str
    files: int
    documents: int
    length: int
    seq_length: int
    steps: int
    batch: int


BLEND = Data("blend of {files:,} files of {documents:,} documents", 1000, 70_000, 100, 512, 10_000, 1024)
DOCUMENTS = Data("a dataset of {documents:,} documents", 1, 100_000_000, 500, 4096, 10_000, 1024)


def make(folder: Path, data: Data) -> None:
    """Write the datasets that are missing: an index of random lengths, and a sparse file of as many tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(data.files):
        prefix = folder / f"set{number:04}"
        if prefix.with_suffix(".idx").exists():
            continue
        lengths = np.random.default_rng(number).integers(1, 2 * data.length, data.documents, dtype=np.int32)
        ends = np.cumsum(lengths, dtype=np.int64) * TOKEN_BYTES
        with open(prefix.with_suffix(".bin"), "wb") as file:
            file.truncate(int(ends[-1]))
        header = np.array([(b"MMIDIDX\x00\x00", 1, 8, data.documents, data.documents + 1)], dtype=HEADER)
        with open(prefix.with_suffix(".idx.part"), "wb") as file:
            for part in (header, lengths, ends - lengths.astype(np.int64) * TOKEN_BYTES):
                file.write(part.tobytes())
            file.write(np.arange(data.documents + 1, dtype=np.int64).tobytes())
        prefix.with_suffix(".idx.part").rename(prefix.with_suffix(".idx"))


def start(system: str, folder: Path, data: Data, *flags: str) -> dict[str, Any]:
    """Run one start; return its figures."""
    sizes = ["--seq-length", str(data.seq_length), "--steps", str(data.steps), "--batch", str(data.batch)]
    command = [sys.executable, str(CASE), system, str(folder / "data"), "--cache", str(folder / system), *sizes, *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def cell(figures: dict[str, Any], name: str) -> str:
    """Format seconds, with CPU seconds."""
    return f"{figures[f'{name}_s']:.2f} ({figures[f'{name}_cpu_s']:.2f})"


def run(folder: Path, data: Data) -> None:
    """Print the table of a case."""
    make(folder / "data", data)
    print(f"\n{data.name.format(files=data.files, documents=data.documents)}, samples of {data.seq_length} tokens, ")
    print(f"{data.steps:,} steps of {data.batch:,}: seconds (CPU seconds)\n")
    print("| system | start | import | open or build | first step's samples | RSS MiB |\n|---|---|---|---|---|---|")
    starts: list[tuple[str, str, list[str]]] = [("megascale", "first", []), ("megatron-core", "first", [])]
    for _ in range(2):
        starts += [("megascale", "again", ["--again"]), ("megatron-core", "again", ["--again"])]
        starts += [("megatron-core", "again, fast_cache_load", ["--again", "--fast"])]
    for system in ("megascale", "megatron-core"):
        shutil.rmtree(folder / system, ignore_errors=True)
    for system, name, flags in starts:
        figures = start(system, folder, data, *flags)
        parts = " | ".join(cell(figures, part) for part in ("import", "start", "first_step"))
        print(f"| {system} | {name} | {parts} | {figures['rss_mib']:.0f} |", flush=True)


def run_processes(folder: Path, data: Data, processes: int, samples: int) -> None:
    """Print the table of many processes that start at once, after `run`."""
    print(f"\n{processes} processes, forked after the imports, each with {samples} samples of the first step\n")
    print("| system | all ready, s | CPU s of all | private MiB of a process |\n|---|---|---|---|")
    for _ in range(2):
        for system, flags in (("megascale", ["--again"]), ("megatron-core", ["--again", "--fast"])):
            figures = start(system, folder, data, *flags, "--processes", str(processes), "--samples", str(samples))
            print(
                f"| {system} | {figures['all_ready_s']:.2f} | {figures['cpu_s']:.1f} | {figures['private_mib']:.0f} |",
                flush=True,
            )


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/data-start"))
    parser.add_argument("--scale", type=float, default=1.0, help="share of files and documents")
    parser.add_argument("--processes", type=int, default=64)
    parser.add_argument("--samples", type=int, default=64, help="samples that each of many processes reads")
    parser.add_argument("--cases", nargs="+", choices=["blend", "documents"], default=["blend", "documents"])
    options = parser.parse_args()
    print(f"load of the machine: {os.getloadavg()[0]:.1f}, {os.cpu_count()} CPUs")
    for name, data in (("blend", BLEND), ("documents", DOCUMENTS)):
        if name in options.cases:
            facts = vars(data) | {"documents": max(1, int(data.documents * options.scale))}
            facts["files"] = max(1, int(data.files * options.scale))
            run(options.folder / name, Data(**facts))
            run_processes(options.folder / name, Data(**facts), options.processes, options.samples)
    print(f"\nload of the machine: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
