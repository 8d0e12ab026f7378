"""`megascale quickstart`: corpus, tokenizer, token dataset, training in 3D parallelism, a sample of text, a summary.

Every step but the corpus is a command of the user interface. Existing files are not made again. The sample needs
transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import sysconfig
import time
from importlib.util import find_spec
from pathlib import Path

from megascale.cli.main import main
from megascale.config.loading import load_config
from megascale.core.files import is_file
from megascale.core.units import format_count, format_duration

CONFIG = "configs/quickstart.toml"
DATA = Path("data/quickstart")
VOCABULARY = 4096
PROMPT = "def main("
"""The sample continues this text, which the corpus has."""

BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""Flags of /proc/cpuinfo for instructions that multiply bf16; the last is Arm's."""


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    setting = f"override a setting of {CONFIG}, as section.key=value"
    sub.add_argument("overrides", metavar="key=value", nargs="*", default=[], help=setting)


def run(options: argparse.Namespace) -> int:
    """Run the command and return the exit status of the first step that fails, or 0.

    Raises: ConfigError for wrong settings; DataError if Python's library has no sources
    """
    start = time.monotonic()
    tokenizer, overrides = DATA / "tokenizer.json", [*precision_overrides(), *options.overrides]
    folder = shown(load_config(CONFIG, overrides, skip_sections=["data"]).folder)
    if not is_file(tokenizer):
        from megascale.data.prepare.python_corpus import make_corpus

        make_corpus(Path(sysconfig.get_path("stdlib")), DATA, VOCABULARY)
    steps = [
        ["data", "prepare", f"{DATA / split}.jsonl", "--output", f"{DATA / split}", "--tokenizer", f"{tokenizer}"]
        for split in ("train", "valid")
        if not is_file(DATA / f"{split}.json")
    ]
    steps.append(["train", CONFIG, *overrides])
    if find_spec("transformers"):
        steps.append(["sample", f"{folder}", "--prompt", PROMPT])
    for words in steps:
        print(f"\n$ megascale {shlex.join(words)}", flush=True)
        if status := main(words):
            return status
    print(summary(folder, time.monotonic() - start, overrides))
    return 0


def precision_overrides(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Return the override for bf16, which halves the time of a step, if this processor multiplies bf16."""
    try:
        return ["train.precision=bf16"] if BF16_FLAGS & set(cpuinfo.read_text().split()) else []
    except OSError:
        return []


def shown(path: Path) -> Path:
    """Return a path below the current folder relative to it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def summary(folder: Path, seconds: float, overrides: list[str]) -> str:
    """Summarise the metrics of the run in `folder`, and suggest a next command with the run's `overrides`."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [record for record in records if "loss" in record]
    valid = [record for record in records if "valid_loss" in record]
    first, last = steps[0], steps[-1]
    middle = sorted(steps, key=lambda record: record["tokens_per_s"])[len(steps) // 2]
    checkpoint = max((folder / "checkpoints").glob("step-*/manifest.json")).parent
    drop = valid[0]["valid_loss"] - valid[-1]["valid_loss"]
    programs = shown(Path(sys.executable).parent)
    return f"""
quickstart: {last["step"]} steps, {format_count(last["loss_tokens"])} tokens, {format_duration(seconds)} in all, \
{format_duration(sum(os.times()[:4]))} of processor time
  training loss    {first["loss"]:.3f} at step {first["step"]}, {last["loss"]:.3f} at step {last["step"]}
  validation loss  {valid[0]["valid_loss"]:.3f} before, {valid[-1]["valid_loss"]:.3f} after: {drop:.2f} nats less
  speed            {format_count(middle["tokens_per_s"])} tokens/s, MFU {middle["mfu_full"]:.1%} (full attention), \
{middle["mfu_causal"]:.1%} (causal), of the measured GEMM peak
  checkpoint       {checkpoint}
  TensorBoard      {programs}/tensorboard --logdir {folder / "tensorboard"}
  metrics          {folder / "metrics.jsonl"}

next: continue the run in another layout, two data-parallel replicas instead of four model-parallel ranks
  {programs}/megascale train {shlex.join([CONFIG, *overrides])} train.steps=280 parallel.tp=1 parallel.sp=false \
parallel.pp=1 parallel.vpp=1 parallel.dp=2"""
