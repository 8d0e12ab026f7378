#!/usr/bin/env python3
"""Run the quickstart: corpus, tokenizer, token dataset, training in 3D parallelism, and a summary.

Every step is a command of the user interface. Existing files are not made again.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from megascale.core.units import format_count, format_duration

CONFIG = "configs/quickstart.toml"
DATA = Path("data/quickstart")
RUN = Path("runs/quickstart")


def main() -> int:
    """Run the tool. Exit status: of the first command that fails, or 0."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    start = time.monotonic()
    corpus = [sys.executable, "tools/corpus.py", "--output", str(DATA)]
    if not (DATA / "tokenizer.json").is_file():
        run(corpus)
    for split in ("train", "valid"):
        if not (DATA / f"{split}.json").is_file():
            source, tokenizer = DATA / f"{split}.jsonl", DATA / "tokenizer.json"
            run([*megascale("data", "prepare"), source, "--output", DATA / split, "--tokenizer", tokenizer])
    run(megascale("train", CONFIG))
    print(summary(time.monotonic() - start))
    return 0


def megascale(*arguments: str) -> list[str]:
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


def summary(seconds: float) -> str:
    """Summarise the run's metrics, and suggest a next command."""
    records = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [record for record in records if "loss" in record]
    valid = [record for record in records if "valid_loss" in record]
    first, last = steps[0], steps[-1]
    middle = sorted(steps, key=lambda record: record["tokens_per_s"])[len(steps) // 2]
    checkpoint = max((RUN / "checkpoints").glob("step-*/manifest.json")).parent
    drop = valid[0]["valid_loss"] - valid[-1]["valid_loss"]
    return f"""
quickstart: {last["step"]} steps, {format_count(last["loss_tokens"])} tokens, {format_duration(seconds)} in all
  training loss    {first["loss"]:.3f} at step {first["step"]}, {last["loss"]:.3f} at step {last["step"]}
  validation loss  {valid[0]["valid_loss"]:.3f} before, {valid[-1]["valid_loss"]:.3f} after: {drop:.2f} nats less
  speed            {format_count(middle["tokens_per_s"])} tokens/s, MFU {middle["mfu_full"]:.1%} (full attention), \
{middle["mfu_causal"]:.1%} (causal), of the measured GEMM peak
  checkpoint       {checkpoint}
  TensorBoard      .venv/bin/tensorboard --logdir {RUN / "tensorboard"}
  metrics          {RUN / "metrics.jsonl"}

next: continue the run in another layout, two data-parallel replicas instead of four model-parallel ranks
  .venv/bin/megascale train {CONFIG} train.steps=280 parallel.tp=1 parallel.sp=false parallel.pp=1 parallel.vpp=1 \
parallel.dp=2"""


if __name__ == "__main__":
    sys.exit(main())
