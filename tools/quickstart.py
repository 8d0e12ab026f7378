#!/usr/bin/env python3
"""Run the quickstart: corpus, tokenizer, token dataset, training in 3D parallelism, a sample of text, and a summary.

Every step is a command of the user interface. Existing files are not made again. Training computes in bf16 on a
processor that multiplies bf16, else in fp32.
"""

from __future__ import annotations

import json
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from megascale.cli.parsing import CommandParser
from megascale.core.units import format_count, format_duration

CONFIG = "configs/quickstart.toml"
DATA = Path("data/quickstart")
RUN = Path("runs/quickstart")
PROMPT = "def main("
"""The sample continues this text, which the corpus has."""

BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""Flags of /proc/cpuinfo for instructions that multiply bf16; the last is Arm's."""


def main() -> int:
    """Run the tool. Exit status: of the first command that fails, or 0."""
    CommandParser("tools/quickstart.py", __doc__ or "", "python tools/quickstart.py", "docs/first-hour.md").parse_args()
    start = time.monotonic()
    corpus = [sys.executable, "tools/corpus.py", "--output", str(DATA)]
    if not (DATA / "tokenizer.json").is_file():
        run(corpus)
    for split in ("train", "valid"):
        if not (DATA / f"{split}.json").is_file():
            source, tokenizer = DATA / f"{split}.jsonl", DATA / "tokenizer.json"
            run([*megascale("data", "prepare"), source, "--output", DATA / split, "--tokenizer", tokenizer])
    overrides = precision_overrides()
    run(megascale("train", CONFIG, *overrides))
    run(megascale("sample", RUN, "--prompt", PROMPT))
    print(summary(time.monotonic() - start, "".join(f" {override}" for override in overrides)))
    return 0


def precision_overrides(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Return the override for bf16, which halves the time of a step, if this processor multiplies bf16."""
    try:
        return ["train.precision=bf16"] if BF16_FLAGS & set(cpuinfo.read_text().split()) else []
    except OSError:
        return []


def megascale(*arguments: str | Path) -> list[str | Path]:
    """Return the `megascale` command of this Python."""
    return [sys.executable, "-m", "megascale", *arguments]


def run(command: list[Any]) -> None:
    """Print and run a command; exit with its status if it fails."""
    words = [str(word) for word in command]
    shown = ["python" if word == sys.executable else word for word in words]
    print(f"\n$ {shlex.join(shown)}", flush=True)
    status = subprocess.run(words, check=False).returncode
    if status:
        sys.exit(status)


def summary(seconds: float, overrides: str) -> str:
    """Summarise the run's metrics, and suggest a next command with the `overrides` of this run."""
    records = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [record for record in records if "loss" in record]
    valid = [record for record in records if "valid_loss" in record]
    first, last = steps[0], steps[-1]
    middle = sorted(steps, key=lambda record: record["tokens_per_s"])[len(steps) // 2]
    checkpoint = max((RUN / "checkpoints").glob("step-*/manifest.json")).parent
    drop = valid[0]["valid_loss"] - valid[-1]["valid_loss"]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor_time = format_duration(used.ru_utime + used.ru_stime)
    return f"""
quickstart: {last["step"]} steps, {format_count(last["loss_tokens"])} tokens, {format_duration(seconds)} in all, \
{processor_time} of processor time
  training loss    {first["loss"]:.3f} at step {first["step"]}, {last["loss"]:.3f} at step {last["step"]}
  validation loss  {valid[0]["valid_loss"]:.3f} before, {valid[-1]["valid_loss"]:.3f} after: {drop:.2f} nats less
  speed            {format_count(middle["tokens_per_s"])} tokens/s, MFU {middle["mfu_full"]:.1%} (full attention), \
{middle["mfu_causal"]:.1%} (causal), of the measured GEMM peak
  checkpoint       {checkpoint}
  TensorBoard      .venv/bin/tensorboard --logdir {RUN / "tensorboard"}
  metrics          {RUN / "metrics.jsonl"}

next: continue the run in another layout, two data-parallel replicas instead of four model-parallel ranks
  .venv/bin/megascale train {CONFIG}{overrides} train.steps=280 parallel.tp=1 parallel.sp=false parallel.pp=1 \
parallel.vpp=1 parallel.dp=2"""


if __name__ == "__main__":
    sys.exit(main())
