"""Training on documents of long-tailed lengths: static context parallelism beside hybrid data parallelism, on hosts of
a testbed (network namespaces) with links of a given rate; needs root.

Every run has the same model, documents and batches, and must have the same losses; runs alternate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np

from lab.hosts import run_torchrun
from lab.overlap import COMMON_SETTINGS, Settings, settings_to_toml, timed_steps
from lab.testbed import HostLink, Testbed
from megascale.core.files import write_text
from megascale.data.prepare.dataset_writer import DatasetWriter
from megascale.data.read.indexed_dataset import TokenizerInfo

VOCABULARY = 2048

MODEL: Settings = {
    "model.num_layers": "4",
    "model.hidden_size": "256",
    "model.num_heads": "4",
    "model.ffn_size": "768",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--hosts", type=int, default=4, help="ranks, each on a host of its own; default %(default)s")
    parser.add_argument("--rate", type=float, default=250, metavar="MBIT", help="Mbit/s of a link; default %(default)s")
    parser.add_argument("--longest", type=int, default=4096, help="tokens of a sample; default %(default)s")
    parser.add_argument("--median", type=int, default=100, help="tokens of a document; default %(default)s")
    parser.add_argument("--sigma", type=float, default=1.5, help="of the lognormal lengths; default %(default)s")
    parser.add_argument("--batch", type=int, default=4, help="samples of a step; default %(default)s")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)


def run(options: argparse.Namespace) -> int:
    """Run the jobs; return 1 if the losses differ."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        lengths = write_documents(folder / "documents", options)
        cores = None if options.hosts <= 2 else 2 / options.hosts
        with Testbed(options.hosts, HostLink(options.rate * 1e6), cores) as testbed:
            return compare(testbed, folder, options, lengths)


def write_documents(prefix: Path, options: argparse.Namespace) -> np.ndarray:
    """Write documents for all steps; return their lengths."""
    chance = np.random.default_rng(0)
    drawn = np.exp(np.log(options.median) + options.sigma * chance.standard_normal(200_000))
    lengths = np.clip(drawn, 16, options.longest).astype(int)
    needed = 2 * options.longest * options.batch * options.steps
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), needed)) + 1]
    with DatasetWriter(prefix, np.uint16) as writer:
        for length in lengths:
            writer.append(chance.integers(0, VOCABULARY, length), np.array([length]))
        writer.commit(TokenizerInfo("random", "0", VOCABULARY - 1), VOCABULARY)
    return lengths


def ways(options: argparse.Namespace) -> dict[str, Settings]:
    """Return the keys of every way."""
    cp = {"parallel.cp": str(options.hosts)}
    rank_tokens = str(options.longest // options.hosts)
    return {
        "ring": cp,
        "ulysses": cp | {"parallel.cp_mode": '"ulysses"'},
        "hybrid": cp | {"parallel.hybrid_dp": "true", "data.max_tokens_per_rank": rank_tokens},
    }


def compare(testbed: Testbed, folder: Path, options: argparse.Namespace, lengths: np.ndarray) -> int:
    """Train in every way in turn, and print the table."""
    times: dict[str, list[float]] = {name: [] for name in ways(options)}
    losses: dict[str, list[float]] = {}
    for number in range(options.rounds):
        for name, keys in ways(options).items():
            step, losses[name] = train(testbed, folder / f"{name}-{number}", folder / "documents", options, keys)
            times[name].append(step)
    tokens = options.longest * options.batch
    quarters = ", ".join(f"{share}% {np.percentile(lengths, share):,.0f}" for share in (50, 90, 99))
    print(
        f"{options.hosts} ranks, {options.rate:g} Mbit/s; documents of {quarters}, longest {lengths.max():,} tokens\n"
    )
    print("| way | s a step | tokens/s | against ring |\n| --- | ---: | ---: | ---: |")
    for name, values in times.items():
        step, ring = statistics.median(values), statistics.median(times["ring"])
        print(f"| {name} | {step:.2f} | {tokens / step:,.0f} | {ring / step:.2f} |")
    different = [name for name in losses if not np.allclose(losses[name], losses["ring"], rtol=1e-4)]
    if different:
        print(f"the losses of {', '.join(different)} differ from ring's: {losses}", file=sys.stderr)
    return int(bool(different))


def train(
    testbed: Testbed, folder: Path, prefix: Path, options: argparse.Namespace, keys: Settings
) -> tuple[float, list[float]]:
    """Run a job; return the median seconds of a step, and the losses, after the warm-up."""
    folder.mkdir()
    common = {key: value for key, value in COMMON_SETTINGS.items() if key != "data.mock"} | MODEL
    common |= {"model.vocab_size": str(VOCABULARY), "model.seq_length": str(options.longest), "batch.micro": "1"}
    common |= {
        "batch.global": str(options.batch),
        "train.steps": str(options.steps),
        "data.attention_mask": '"document"',
    }
    common |= {"name": '"run"', "output_dir": json.dumps(str(folder)), "data.train": json.dumps(str(prefix))}
    write_text(folder / "run.toml", settings_to_toml(common | keys))
    ends = run_torchrun(testbed, 1, ["-m", "megascale", "train", str(folder / "run.toml")])
    if failed := [end for end in ends if end.status]:
        raise SystemExit(f"the job {folder.name} failed:\n{failed[0].stderr[-3000:]}")
    steps = timed_steps(folder / "run")
    return statistics.median(step["step_time_s"] for step in steps), [step["loss"] for step in steps]
