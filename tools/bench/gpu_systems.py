"""The cases that are measured on one device, the systems, and the command with which each trains a case.

A case is a file in configs/bench, which `megascale train` runs too. Peers are given the same sizes, batch and
optimizer, and a vocabulary padded as ours is.
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

from megascale.account.flops import token_flops
from megascale.account.parameters import parameter_count
from megascale.bench.mfu import CONVENTIONS
from megascale.bench.spread import Spread
from megascale.config.explain import load
from megascale.config.run import RunConfig
from megascale.layout.tensors import padded_vocab

CONFIGS = ROOT / "configs" / "bench"
CASES = ("llama3-1b", "llama3-8b-slice", "gpt3-175b-slice", "megascale-175b-slice")

SCRIPTS = {"torchtitan": "gpu_torchtitan.py", "megatron-core": "gpu_megatron.py"}
SYSTEMS = (OURS, *SCRIPTS)

SMALL = (
    "model.num_layers=2", "model.hidden_size=64", "model.num_heads=4", "model.ffn_size=128", "model.vocab_size=500",
    "model.seq_length=64", "batch.micro=1", "batch.global=2",
)  # fmt: skip
"""What makes a case one for a CPU: to see that everything runs."""

TOLERANCE = 0.02
"""By what share of megascale's first loss another's may differ: weights and tokens are of each system's own, drawn
alike.
"""


@dataclass(frozen=True)
class Job:
    """One case in one precision. `layers`: instead of those of its file; FIT: as many as megascale finds to fit.
    `patches`: the folder of the scripts that let the peers run on a CPU.
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
        """What is changed in the case's file."""
        small = list(SMALL) if self.small else []
        if self.small and self.case.startswith("llama"):
            small.append("model.num_kv_heads=2")
        layers = [f"model.num_layers={self.layers}"] if isinstance(self.layers, int) else []
        return [*small, *layers, f"train.precision={self.precision}"]

    @property
    def file(self) -> Path:
        return CONFIGS / f"{self.case}.toml"

    def config(self) -> RunConfig:
        """What is trained. Raises: ConfigError"""
        return load(str(self.file), self.settings)

    def task(self) -> dict[str, Any]:
        """What a peer's script is told (`gpu_peer.Task`)."""
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
        """Numbers in the model, the padding of its vocabulary among them."""
        model = self.config().model
        return parameter_count(model.model_copy(update={"vocab_size": padded_vocab(model, 1)}))


FIT = "fit"

Record = dict[str, Any]
"""One run of a system, as it is kept: what was run, and what came of it, or a `failure`."""


def measure(system: str, job: Job, python: Path, seconds: float, scratch: str) -> Record:
    """Run a system, for at most `seconds`."""
    config = job.config()
    record: Record = {
        "id": uuid.uuid4().hex, "case": job.case, "precision": job.precision, "system": system, "small": job.small,
        "layers": None if job.layers == FIT else config.model.num_layers,
    }  # fmt: skip
    out = output(command(system, job, python, Path(scratch)), seconds, scratch)
    if isinstance(out, Failure):
        return record | {"failure": short(out.why)}
    found = json.loads(out.splitlines()[-1])
    if "refusal" in found:
        return record | {"failure": found["refusal"]}
    if system == OURS:
        return record | found
    if found["parameters"] != job.parameters():
        why = f"not the same model: {found['parameters']:,} parameters, not {job.parameters():,}"
        return record | {"failure": why}
    step = Spread.of(found.pop("step_s"))
    speed = config.batch.total * config.model.seq_length / step.median
    flops = {convention: getattr(token_flops(config.model), convention) for convention in CONVENTIONS}
    return record | found | {"step_s": vars(step), "tokens_per_s": speed, "flops_per_token": flops}


def command(system: str, job: Job, python: Path, scratch: Path) -> list[str]:
    """The command that runs a system and prints one JSON object last. A peer's task is written into `scratch`."""
    if system == OURS:
        steps = ["--steps", str(job.steps), "--warm-up", str(job.warm_up)]
        fit = ["--layers", FIT] if job.layers == FIT else []
        words = ["bench", "mfu", "--config", str(job.file), *fit, *steps, "--json", *job.settings]
        return [str(python), "-W", "ignore", "-m", "megascale", *words]
    task = scratch / "task.json"
    task.write_text(json.dumps(job.task()), encoding="utf-8")
    return [str(python), "-W", "ignore", str(HERE / SCRIPTS[system]), str(task)]


def products(python: Path, seconds: float, scratch: str, *, small: bool) -> dict[str, Any] | Failure:
    """What `megascale bench gemm` measures here."""
    sizes = ["--sizes", "64x64x64", "128x256x128"] if small else []
    out = output([str(python), "-m", "megascale", "bench", "gemm", "--json", *sizes], seconds, scratch)
    return out if isinstance(out, Failure) else dict(json.loads(out))


def agree(record: Record, others: list[Record]) -> Record:
    """The record, or a failure if its first loss is not what megascale's is for the same case."""
    ours = [o["losses"][0] for o in others if o["system"] == OURS and same_case(o, record) and "losses" in o]
    if "losses" not in record or not ours:
        return record
    found, wanted = record["losses"][0], ours[0]
    if abs(found - wanted) <= TOLERANCE * wanted:
        return record
    kept = {key: record[key] for key in ("case", "precision", "system", "small", "layers", "device", "id")}
    return kept | {"failure": f"not the same task: the first loss is {found:.4f}, megascale's is {wanted:.4f}"}


def same_case(one: Record, other: Record) -> bool:
    """Whether two runs are of the same model and batch."""
    return all(one[key] == other[key] for key in ("case", "layers", "small"))


def short(why: str) -> str:
    """An error in a line for a table."""
    if "OutOfMemoryError" in why or "out of memory" in why:
        return "out of memory"
    return why if len(why) <= 160 else why[:157] + "..."


def python_of(system: str, *, small: bool) -> Path | None:
    """The Python that runs a peer here; None if there is none. One with a torch for the CPU serves small cases."""
    if (own := peer_install.beside(system)) is not None:
        return own
    if system == "megatron-core":
        return Path(sys.executable) if find_spec("megatron") is not None else None
    return peer_install.python_of(system) if small else None
