"""Share of communication that overlap hides, measured on a cluster of network namespaces with slow links.

Three step times: `compute` with overlap over unlimited links; `off` without and `on` with overlap over links so slow
that communication takes about two fifths of a step without overlap.

    communication = off - compute
    ideal         = max(compute, communication)
    hidden        = (off - on) / (off - ideal)
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.hosts import run_torchrun
from lab.testbed import HostLink, Testbed
from megascale.cli.trace_selection import filter_steps, read_ranks
from megascale.core.errors import MegascaleError
from megascale.core.files import write_text
from megascale.operate.show.charts.timeline import render_runs

COMMUNICATION_SHARE = 0.4
"""Target share of communication in a step without overlap."""

WARM_UP_STEPS = 2
"""Untimed steps."""

TIMEOUT_S = 600.0

Settings = dict[str, str]
"""Configuration keys, with values as on the command line."""

COMMON_SETTINGS: Settings = {
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
"""MegaScale's parallel transformer block (section 3.1) with GeLU."""


@dataclass(frozen=True)
class OverlapCase:
    """A job on `hosts` hosts with one rank per host, and the `axes` to measure. `cores`: processor time of a host, for
    more hosts than cores. `others`: further values of the axes' switches, beside true, such as domino. `schedules`: to
    compare in place of overlap.
    """

    name: str
    hosts: int
    axes: tuple[str, ...]
    settings: Settings
    cores: float | None = None
    others: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ()

    def overlap_settings(self, way: str) -> Settings:
        if self.schedules:
            return {"parallel.schedule": f'"{way}"'}
        if self.axes == ("ep",):  # hidden by another micro-batch
            return {"parallel.schedule": '"1f1b"' if way == "off" else '"combined_1f1b"'}
        value = {"off": "false"}.get(way, f'"{way}"' if way in self.others else "true")
        return {f"overlap.{axis}": value for axis in self.axes}


def model_keys(layers: int, hidden: int, ffn: int) -> Settings:
    """Return the keys of a model's size; heads have 64 elements."""
    return {
        "model.num_layers": str(layers),
        "model.hidden_size": str(hidden),
        "model.num_heads": str(hidden // 64),
        "model.ffn_size": str(ffn),
    }


def batch_keys(micro: int, total: int) -> Settings:
    """Return the keys of the micro-batch and of the global batch."""
    return {"batch.micro": str(micro), "batch.global": str(total)}


CASES = {
    case.name: case
    for case in (
        OverlapCase(
            "dp", 2, ("dp",),
            model_keys(8, 256, 768) | batch_keys(24, 48) | {"parallel.dp": "2", "overlap.bucket_bytes": "4000000"},
        ),
        OverlapCase(
            "pp", 2, ("pp",),
            model_keys(8, 256, 768) | batch_keys(2, 48) | {"parallel.pp": "2", "parallel.vpp": "2"},
        ),
        OverlapCase(
            "cp", 2, ("cp",),
            model_keys(4, 256, 768) | batch_keys(1, 1) | {"model.seq_length": "4096", "parallel.cp": "2"},
        ),
        OverlapCase(
            "ep", 2, ("ep",),
            model_keys(4, 256, 768) | batch_keys(2, 24) | {"parallel.dp": "2", "parallel.ep": "2"}
            | {"model.experts": "8", "model.experts_per_token": "2", "model.expert_ffn_size": "512"},
        ),
        OverlapCase(
            "tp", 2, ("tp",),
            model_keys(12, 1024, 4096) | batch_keys(4, 4) | {"model.vocab_size": "4096"}
            | {"parallel.tp": "2", "parallel.sp": "true"} | PAPER_LAYER,
        ),
        *(
            OverlapCase(
                name, 2, ("tp",),
                model_keys(4, 512, 2048) | batch_keys(4, 4) | {"parallel.tp": "2", "parallel.sp": sequence},
                others=("domino",),
            )
            for name, sequence in (("tp-serial-sp", "true"), ("tp-serial", "false"))
        ),
        OverlapCase(
            "all", 8, ("tp", "pp", "dp"),
            model_keys(4, 512, 2048) | batch_keys(2, 32)
            | {"parallel.tp": "2", "parallel.sp": "true", "parallel.pp": "2", "parallel.vpp": "2", "parallel.dp": "2"}
            | {"overlap.bucket_bytes": "4000000"} | PAPER_LAYER,
            cores=0.22,
        ),
    )
}  # fmt: skip
"""Cases: every axis alone, and all axes together. Compute per byte is high enough for slow links: fast links would keep
the processors busy with the network stack.
"""


@dataclass(frozen=True)
class OverlapResult:
    """Step times in seconds, medians over rounds. `exposed_*`: exposed communication of the case's axes on rank 0."""

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
        """Share of the hideable communication that overlap hides."""
        return (self.off - self.on) / (self.off - self.ideal)


class OverlapError(MegascaleError):
    """A job of the benchmark failed."""


Log = Callable[[str], object]


def measure_overlap(case: OverlapCase, folder: Path, rounds: int, steps: int, log: Log) -> list[OverlapResult]:
    """Measure one case, a result for every way to overlap. The run folders stay in `folder`.

    Raises: TestbedError if this machine cannot have a testbed, OverlapError if a job fails
    """
    with Testbed(case.hosts, HostLink(), case.cores) as testbed:
        job = OverlapJob(testbed, case, folder, steps)
        rate = _calibrate_link_rate(job, log)
        testbed.set_link(HostLink(rate))
        times: dict[str, list[float]] = {name: [] for name in ("compute", "off", "on", *case.others)}
        exposed: dict[str, list[float]] = {name: [] for name in times}
        for number in range(rounds):
            for name in times:
                testbed.set_link(HostLink() if name == "compute" else HostLink(rate))
                step, exposed_s = job.measure_step(name)
                times[name].append(step)
                exposed[name].append(exposed_s)
            latest = "  ".join(f"{name} {values[-1]:.3f}" for name, values in times.items())
            log(f"{case.name} round {number + 1}/{rounds}: seconds per step  {latest}")
    median = {name: statistics.median(values) for name, values in times.items()}
    waits = {name: statistics.median(values) for name, values in exposed.items()}
    both, off = (rate, median["compute"], median["off"]), waits["off"]
    return [
        OverlapResult(case.name if way == "on" else f"{case.name}, {way}", *both, median[way], off, waits[way])
        for way in ("on", *case.others)
    ]


def _calibrate_link_rate(job: OverlapJob, log: Log) -> float:
    """Find the link rate, in bits/s, at which communication takes COMMUNICATION_SHARE of a step without overlap."""
    compute, _ = job.measure_step("compute")
    target = compute * COMMUNICATION_SHARE / (1 - COMMUNICATION_SHARE)
    rate = job.step_bytes("compute") * 8 / target
    for _ in range(2):
        job.testbed.set_link(HostLink(rate))
        off, _ = job.measure_step("off")
        log(f"{job.case.name}: {rate / 1e6:.0f} Mbit/s, {off:.3f} s per step, {compute:.3f} s of it compute")
        rate *= max(off - compute, 0.05 * compute) / target
    return rate


@dataclass(frozen=True)
class OverlapJob:
    """Runs of a case on a testbed."""

    testbed: Testbed
    case: OverlapCase
    folder: Path
    steps: int

    def measure_step(self, name: str) -> tuple[float, float]:
        """Run the job; return the median seconds of a step and of its exposed communication."""
        settings = (
            COMMON_SETTINGS | self.case.settings | self.case.overlap_settings(name) | {"train.steps": str(self.steps)}
        )
        config = self.folder / self.case.name / f"{name}.toml"
        config.parent.mkdir(parents=True, exist_ok=True)
        write_text(
            config, settings_to_toml({"name": f'"{name}"', "output_dir": json.dumps(str(config.parent))} | settings)
        )
        ends = run_torchrun(self.testbed, 1, ["-m", "megascale", "train", str(config)], timeout=TIMEOUT_S)
        failed = [end for end in ends if end.status]
        if failed:
            first = min(failed, key=lambda end: end.seconds)
            raise OverlapError(f"the job {config} exited with status {first.status}: {_last_line(first.stderr)}")
        records = self._records(name)
        step = statistics.median(record["step_time_s"] for record in records)
        return step, statistics.median(self._sum_over_axes(record, "exposed_s") for record in records)

    def step_bytes(self, name: str) -> float:
        """Return the tensor bytes per step that the case's axes communicate."""
        return statistics.median(self._sum_over_axes(record, "bytes") for record in self._records(name))

    def _sum_over_axes(self, record: Mapping[str, Any], key: str) -> float:
        return sum(record["communication"].get(axis, {}).get(key, 0.0) for axis in self.case.axes)

    def _records(self, name: str) -> list[dict[str, Any]]:
        return timed_steps(self.folder / self.case.name / name)


def overlap_picture(folder: Path, case: OverlapCase, step: int) -> str:
    """Draw a step without and with overlap at one time scale: of two ranks, or of the first rank of every tp group."""
    stride = int(case.settings.get("parallel.tp", "1")) if case.hosts > 2 else 1
    chosen, steps = [range(0, case.hosts, stride)], range(step, step + 1)
    runs = {title: folder / case.name / name for title, name in (("without overlap", "off"), ("with overlap", "on"))}
    return render_runs(
        {title: [filter_steps(rank.events, steps) for rank in read_ranks(run, chosen, steps)]
         for title, run in runs.items()}
    )  # fmt: skip


def timed_steps(run: Path) -> list[dict[str, Any]]:
    """Read the metrics of a run's steps after the warm-up."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line.get("step", 0) > WARM_UP_STEPS and "loss" in line]


def settings_to_toml(settings: Settings) -> str:
    """Write settings as TOML, which has dotted keys."""
    return "".join(f"{key} = {value}\n" for key, value in settings.items())


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no message")


def table(results: Sequence[OverlapResult]) -> str:
    """Format results as a Markdown table."""
    head = "| axes | link Mbit/s | compute s | communication s | off s | on s | ideal s | hidden | exposed off, on s |"
    lines = [head, "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for r in results:
        lines.append(
            f"| {r.case} | {r.rate / 1e6:,.0f} | {r.compute:.3f} | {r.communication:.3f} | {r.off:.3f} | {r.on:.3f} "
            f"| {r.ideal:.3f} | {r.hidden:.0%} | {r.exposed_off:.3f}, {r.exposed_on:.3f} |"
        )
    return "\n".join(lines)
