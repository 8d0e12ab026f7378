"""How much communication overlap hides: the same job with it and without, on a cluster of namespaces with slow links.

Three step times tell it. `compute`: overlapped, over links that nothing limits. `off`: one after the other, over links
so slow that communication takes about two fifths of the step. `on`: overlapped, over the same links. What could be
hidden is the smaller of compute and communication (off - compute); what was hidden is off - on.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale.core.errors import MegascaleError
from megascale.core.files import write_text
from megascale.launch.hosts import torchrun
from megascale.launch.testbed import Link, Testbed

SHARE = 0.4
"""Of a step without overlap that communication is to take."""

WARM_UP = 2
"""Steps that do not count."""

TIMEOUT_S = 600.0

Settings = dict[str, str]
"""Keys of the configuration, and their values as on the command line."""

COMMON: Settings = {
    "model.vocab_size": "2048",
    "model.seq_length": "256",
    "model.norm": '"rmsnorm"',
    "model.activation": '"swiglu"',
    "model.position": '"rope"',
    "model.bias": "false",
    "model.tie_embeddings": "false",
    "train.log_every": "1",
    "optimizer.lr": "1e-4",
    "data.mock": "true",
    "checkpoint.every": "0",
    "observe.tensorboard": "false",
}


PAPER_LAYER: Settings = {"model.block": '"parallel"', "model.activation": '"gelu"'}
"""MegaScale's layer (section 3.1): attention and MLP side by side, and GeLU."""


@dataclass(frozen=True)
class Case:
    """A job on `hosts` hosts with one rank each, and the axes whose overlap is switched. `cores`: processor time of a
    host, where there are more hosts than this machine has cores.
    """

    name: str
    hosts: int
    axes: tuple[str, ...]
    settings: Settings
    cores: float | None = None

    def switched(self, on: bool) -> Settings:
        return {f"overlap.{axis}": str(on).lower() for axis in self.axes}


def _model(layers: int, hidden: int, ffn: int) -> Settings:
    return {
        "model.num_layers": str(layers),
        "model.hidden_size": str(hidden),
        "model.num_heads": str(hidden // 64),
        "model.ffn_size": str(ffn),
    }


def _batch(micro: int, total: int) -> Settings:
    return {"batch.micro": str(micro), "batch.global": str(total)}


CASES = {
    case.name: case
    for case in (
        Case(
            "dp", 2, ("dp",),
            _model(8, 256, 768) | _batch(24, 48) | {"parallel.dp": "2", "overlap.bucket_bytes": "4000000"},
        ),
        Case(
            "pp", 2, ("pp",),
            _model(8, 256, 768) | _batch(2, 48) | {"parallel.pp": "2", "parallel.vpp": "2"},
        ),
        Case(
            "tp", 2, ("tp",),
            _model(12, 1024, 4096) | _batch(4, 4) | {"model.vocab_size": "4096"}
            | {"parallel.tp": "2", "parallel.sp": "true"} | PAPER_LAYER,
        ),
        Case(
            "all", 8, ("tp", "pp", "dp"),
            _model(4, 512, 2048) | _batch(2, 32)
            | {"parallel.tp": "2", "parallel.sp": "true", "parallel.pp": "2", "parallel.vpp": "2", "parallel.dp": "2"}
            | {"overlap.bucket_bytes": "4000000"} | PAPER_LAYER,
            cores=0.22,
        ),
    )
}  # fmt: skip
"""Each axis alone, and all together. What is computed for each byte is chosen so that the links can be slow: fast ones
would keep the processors busy with the network itself.
"""


@dataclass(frozen=True)
class Result:
    """Step times in seconds, medians over the rounds. `exposed`: of the case's axes together on rank 0."""

    case: str
    rate: float
    compute: float
    off: float
    on: float
    exposed_off: float
    exposed_on: float

    @property
    def communication(self) -> float:
        return self.off - self.compute

    @property
    def ideal(self) -> float:
        return max(self.compute, self.communication)

    @property
    def hidden(self) -> float:
        """The share of what could be hidden that was."""
        return (self.off - self.on) / (self.off - self.ideal)


class OverlapError(MegascaleError):
    """A job of the benchmark that did not end well."""


Say = Callable[[str], object]


def measure(case: Case, folder: Path, rounds: int, steps: int, say: Say) -> Result:
    """Measure one case; the runs stay in `folder`.

    Raises: TestbedError where there can be no testbed, OverlapError if a job fails
    """
    with Testbed(case.hosts, Link(), case.cores) as testbed:
        job = _Job(testbed, case, folder, steps)
        rate = _find_rate(job, say)
        testbed.shape(Link(rate))
        times: dict[str, list[float]] = {"compute": [], "off": [], "on": []}
        exposed: dict[str, list[float]] = {"compute": [], "off": [], "on": []}
        for number in range(rounds):
            for name in times:
                testbed.shape(Link() if name == "compute" else Link(rate))
                step, waited = job.run(name, overlap=name != "off")
                times[name].append(step)
                exposed[name].append(waited)
            shown = "  ".join(f"{name} {values[-1]:.3f}" for name, values in times.items())
            say(f"{case.name} round {number + 1}/{rounds}: seconds a step  {shown}")
    median = {name: statistics.median(values) for name, values in times.items()}
    waits = {name: statistics.median(values) for name, values in exposed.items()}
    return Result(case.name, rate, median["compute"], median["off"], median["on"], waits["off"], waits["on"])


def _find_rate(job: _Job, say: Say) -> float:
    """A rate of the links, bits a second, at which communication takes SHARE of a step without overlap."""
    compute, _ = job.run("compute", overlap=True)
    wanted = compute * SHARE / (1 - SHARE)
    rate = job.bytes_of("compute") * 8 / wanted
    for _ in range(2):
        job.testbed.shape(Link(rate))
        off, _ = job.run("off", overlap=False)
        say(f"{job.case.name}: {rate / 1e6:.0f} Mbit/s, {off:.3f} s a step of which {compute:.3f} s compute")
        rate *= max(off - compute, 0.05 * compute) / wanted
    return rate


@dataclass(frozen=True)
class _Job:
    testbed: Testbed
    case: Case
    folder: Path
    steps: int

    def run(self, name: str, *, overlap: bool) -> tuple[float, float]:
        """Median seconds of a step, and of what the case's axes exposed in it."""
        settings = COMMON | self.case.settings | self.case.switched(overlap) | {"train.steps": str(self.steps)}
        config = self.folder / self.case.name / f"{name}.toml"
        config.parent.mkdir(parents=True, exist_ok=True)
        write_text(config, to_toml({"name": f'"{name}"', "observe.dir": json.dumps(str(config.parent))} | settings))
        ends = torchrun(self.testbed, 1, ["-m", "megascale", "train", str(config)], timeout=TIMEOUT_S)
        failed = [end for end in ends if end.status]
        if failed:
            first = min(failed, key=lambda end: end.seconds)
            raise OverlapError(f"the job {config} ended with status {first.status}: {_last_line(first.err)}")
        records = self._records(name)
        step = statistics.median(record["step_time_s"] for record in records)
        return step, statistics.median(self._of_axes(record, "exposed_s") for record in records)

    def bytes_of(self, name: str) -> float:
        """Bytes a step of the case's axes, as their tensors count."""
        return statistics.median(self._of_axes(record, "bytes") for record in self._records(name))

    def _of_axes(self, record: Mapping[str, Any], what: str) -> float:
        return sum(record["communication"].get(axis, {}).get(what, 0.0) for axis in self.case.axes)

    def _records(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / self.case.name / name / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [line for line in lines if line.get("step", 0) > WARM_UP and "loss" in line]


def to_toml(settings: Settings) -> str:
    """Dotted keys as a file: TOML takes them as they are."""
    return "".join(f"{key} = {value}\n" for key, value in settings.items())


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "nothing was said")


def table(results: Sequence[Result]) -> str:
    """Results in Markdown."""
    head = "| axes | link Mbit/s | compute s | communication s | off s | on s | ideal s | hidden | exposed off, on s |"
    lines = [head, "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for r in results:
        lines.append(
            f"| {r.case} | {r.rate / 1e6:,.0f} | {r.compute:.3f} | {r.communication:.3f} | {r.off:.3f} | {r.on:.3f} "
            f"| {r.ideal:.3f} | {r.hidden:.0%} | {r.exposed_off:.3f}, {r.exposed_on:.3f} |"
        )
    return "\n".join(lines)


def progress(text: str) -> None:
    """A line for people, where it does not mix with results."""
    print(text, file=sys.stderr, flush=True)
