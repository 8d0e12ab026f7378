"""Training steps with sparse attention beside dense ones on this machine, at several lengths.

    .venv/bin/python tools/bench/sparse_attention.py [--lengths 2048 8192] [--rounds 5]

Attention alone runs forward and backward on random q, k and v of the model's heads. Cases take turns, after a time of
each that does not count. Times are the process's CPU seconds, on one thread, which other load on the machine changes
little. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megascale.bench.timed_steps import build_run, take_step
from megascale.config.loading import load_config
from megascale.config.run import RunConfig
from megascale.device import detect_device
from megascale.ops.core_attention import AttentionMask, torch_attend
from megascale.plan.account.attended import count_scores_in

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import pipes

CONFIG = """
name = "sparse-attention"
[model]
num_layers = 2
hidden_size = 512
num_heads = 8
num_kv_heads = 4
ffn_size = 1536
vocab_size = 4096
norm = "rmsnorm"
activation = "swiglu"
position = "rope"
bias = false
[batch]
micro = 1
global = 1
[train]
steps = 1000
precision = "fp32"
[optimizer]
lr = 1e-4
[data]
mock = true
[checkpoint]
every = 0
"""
SPARSE = "{local_blocks = 4, stride = 8, block = 64}"
KINDS = {"dense": "auto", "sparse": SPARSE}
HEADER = ["tokens", "attention", "scores of a head", "share", "attention, CPU s", "speed", "step, CPU s", "speed"]


def main() -> None:
    """Measure, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for length in options.lengths for row in measure(length, options.rounds)]
    print("\n".join(pipes(HEADER, *rows)))


def measure(length: int, rounds: int) -> list[list[str]]:
    """Return the rows of a length."""
    configs = {kind: configure(length, table) for kind, table in KINDS.items()}
    runs = {kind: build_run(config, detect_device(allow_gpu=False)) for kind, config in configs.items()}
    steps = medians({kind: partial(take_step, run) for kind, run in runs.items()}, rounds)
    cores = medians({kind: attention(config) for kind, config in configs.items()}, rounds)
    scores = {kind: count_scores_in([length], config.model.windows[0])[1] for kind, config in configs.items()}
    return [
        [
            f"{length:,}", kind, f"{scores[kind] / 1e6:.2f} M", f"{scores[kind] / scores['dense']:.0%}",
            f"{cores[kind]:.3f}", f"{cores['dense'] / cores[kind]:.2f}",
            f"{steps[kind]:.3f}", f"{steps['dense'] / steps[kind]:.2f}",
        ]
        for kind in KINDS
    ]  # fmt: skip


def configure(length: int, sparse: str) -> RunConfig:
    """Return the configuration of a length, with a table of `model.sparse_attention` or auto."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.toml"
        path.write_text(f'output_dir = "{folder}"\n{CONFIG}')
        overrides = [f"model.seq_length={length}", f"model.sparse_attention={sparse}"]
        return load_config(str(path), overrides).resolve(1)


def attention(config: RunConfig) -> Callable[[], Any]:
    """Return a function that runs attention of a layer forward and backward."""
    model, attend = config.model, torch_attend()
    heads = (model.num_heads, model.num_kv_heads, model.num_kv_heads)
    q, k, v = (torch.randn(1, count, model.seq_length, model.head_dim, requires_grad=True) for count in heads)
    mask = AttentionMask(model.windows[0], heads=range(model.num_heads))
    return lambda: attend(q, k, v, mask).sum().backward()


def medians(cases: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median CPU seconds of cases that take turns, after a first time each."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds + 1):
        for name, case in cases.items():
            start = time.process_time()
            case()
            seconds[name].append(time.process_time() - start)
    return {name: statistics.median(each[1:]) for name, each in seconds.items()}


if __name__ == "__main__":
    main()
