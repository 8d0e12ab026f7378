"""Cases and systems of the one-GPU comparison, and the command to train a case with a system.

A case is a configuration file in configs/bench. Peers get the same sizes, batch, optimizer and padded vocabulary.
"""

from __future__ import annotations

import json
import sys
import uuid
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import peer_install
from peer_run import Failure, output
from peer_systems import HERE, OURS, ROOT

from megascale.bench.mfu import CONVENTIONS
from megascale.bench.quartiles import Quartiles
from megascale.config.loading import load_config
from megascale.config.run import RunConfig
from megascale.layout.parameters import parameter_count
from megascale.layout.tensors import padded_vocab
from megascale.plan.account.flops import token_flops

CONFIGS = ROOT / "configs" / "bench"
CASES = ("llama3-1b", "llama3-8b-slice", "gpt3-175b-slice", "megascale-175b-slice")

SCRIPTS = {"torchtitan": "gpu_torchtitan.py", "megatron-core": "gpu_megatron.py"}
SYSTEMS = (OURS, *SCRIPTS)

SMALL = (
    "model.num_layers=2", "model.hidden_size=64", "model.num_heads=4", "model.ffn_size=128", "model.vocab_size=500",
    "model.seq_length=64", "batch.micro=1", "batch.global=2",
)  # fmt: skip
"""Settings that shrink a case for a CPU, to test the tool."""

TOLERANCE = 0.02
"""Largest relative difference between a peer's first loss and megascale's. Every system draws its own weights and
tokens, from the same distributions.
"""


@dataclass(frozen=True)
class Job:
    """One case in one precision. `layers`: override of the file's, or FIT: as many as fit with megascale. `patches`:
    folder of the peers' CPU patches.
    """

    case: str
    precision: str
    steps: int
    warm_up: int
    layers: int | str | None = None
    small: bool = False
    patches: Path = HERE

    @property
    def settings(self) -> list[str]:
        """Overrides of the case's file."""
        small = list(SMALL) if self.small else []
        if self.small and self.case.startswith("llama"):
            small.append("model.num_kv_heads=2")
        layers = [f"model.num_layers={self.layers}"] if isinstance(self.layers, int) else []
        return [*small, *layers, f"train.precision={self.precision}"]

    @property
    def file(self) -> Path:
        return CONFIGS / f"{self.case}.toml"

    def config(self) -> RunConfig:
        """Load the configuration. Raises: ConfigError"""
        return load_config(str(self.file), self.settings)

    def task(self) -> dict[str, Any]:
        """Return the task for a peer's script (`gpu_peer.Task`)."""
        config = self.config()
        return {
            "model": config.model.model_dump() | {"vocab_size": padded_vocab(config.model, 1)},
            "precision": self.precision,
            "micro": config.batch.micro,
            "total": config.batch.total,
            "warm_up": self.warm_up,
            "steps": self.steps,
            "optimizer": config.optimizer.model_dump(),
            "seed": config.train.seed,
            "cpu": self.small,
            "patches": str(self.patches),
        }

    def parameters(self) -> int:
        """Count the model's parameters, with the padded vocabulary."""
        model = self.config().model
        return parameter_count(model.model_copy(update={"vocab_size": padded_vocab(model, 1)}))


FIT = "fit"

Record = dict[str, Any]
"""Stored run of a system: case, precision and layers, with the result or a `failure`."""


def measure(system: str, job: Job, python: Path, seconds: float, scratch: str) -> Record:
    """Run a system for at most `seconds`, and return the record."""
    config = job.config()
    record: Record = {
        "id": uuid.uuid4().hex, "case": job.case, "precision": job.precision, "system": system, "small": job.small,
        "layers": None if job.layers == FIT else config.model.num_layers,
    }  # fmt: skip
    out = output(command(system, job, python, Path(scratch)), seconds, scratch)
    if isinstance(out, Failure):
        return record | {"failure": short(out.why)}
    report = json.loads(out.splitlines()[-1])
    if "unsupported_reason" in report:
        return record | {"failure": report["unsupported_reason"]}
    if system == OURS:
        return record | report
    if report["parameters"] != job.parameters():
        why = f"not the same model: {report['parameters']:,} parameters, not {job.parameters():,}"
        return record | {"failure": why}
    step = Quartiles.from_values(report.pop("step_s"))
    speed = config.batch.total * config.model.seq_length / step.median
    flops = {convention: getattr(token_flops(config.model), convention) for convention in CONVENTIONS}
    return record | report | {"step_s": vars(step), "tokens_per_s": speed, "flops_per_token": flops}


def command(system: str, job: Job, python: Path, scratch: Path) -> list[str]:
    """Return the command to run a system; its last line is a JSON object. A peer's task is written to `scratch`."""
    if system == OURS:
        steps = ["--steps", str(job.steps), "--warm-up", str(job.warm_up)]
        fit = ["--layers", FIT] if job.layers == FIT else []
        words = ["bench", "mfu", "--config", str(job.file), *fit, *steps, "--json", *job.settings]
        return [str(python), "-W", "ignore", "-m", "megascale", *words]
    task = scratch / "task.json"
    task.write_text(json.dumps(job.task()), encoding="utf-8")
    return [str(python), "-W", "ignore", str(HERE / SCRIPTS[system]), str(task)]


def gemm_rates(python: Path, seconds: float, scratch: str, *, small: bool) -> dict[str, Any] | Failure:
    """Run `megascale bench gemm` and return its JSON object."""
    sizes = ["--sizes", "64x64x64", "128x256x128"] if small else []
    out = output([str(python), "-m", "megascale", "bench", "gemm", "--json", *sizes], seconds, scratch)
    return out if isinstance(out, Failure) else dict(json.loads(out))


def agree(record: Record, records: list[Record]) -> Record:
    """Return the record, or a failure if its first loss differs from megascale's for the same case."""
    ours = [r["losses"][0] for r in records if r["system"] == OURS and same_case(r, record) and "losses" in r]
    if "losses" not in record or not ours:
        return record
    loss, expected = record["losses"][0], ours[0]
    if abs(loss - expected) <= TOLERANCE * expected:
        return record
    identity = {key: record[key] for key in ("case", "precision", "system", "small", "layers", "device", "id")}
    return identity | {"failure": f"not the same task: the first loss is {loss:.4f}, megascale's is {expected:.4f}"}


def same_case(first: Record, second: Record) -> bool:
    """Return True for two runs of the same model and batch."""
    return all(first[key] == second[key] for key in ("case", "layers", "small"))


def short(why: str) -> str:
    """Shorten an error message for a table."""
    if "OutOfMemoryError" in why or "out of memory" in why:
        return "out of memory"
    return why if len(why) <= 160 else why[:157] + "..."


def python_of(system: str, *, small: bool) -> Path | None:
    """Find the Python of a peer; None if not installed. Small cases may use a Python with a CPU build of torch."""
    if (python := peer_install.beside(system)) is not None:
        return python
    if system == "megatron-core":
        return Path(sys.executable) if find_spec("megatron") is not None else None
    return peer_install.python_of(system) if small else None
