"""Hardware profile of this machine's processor (`megascale bench profile`), for `megascale plan --hardware this`.

- GEMMs, attention and links are timed alone, with one rank per core, all at the same time.
- Element-wise operations, Python overhead and the optimizer are fitted to training steps of small models: least squares
  attribute the seconds beyond the planner's estimate of GEMMs and attention.
- Oversubscription (`turn_s`): a job with two ranks per core is timed; the excess over the planner's estimate is divided
  by the number of collectives and messages. Interleaved steps of single ranks give the machine's speed at that time.
"""

from __future__ import annotations

import datetime
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megascale.bench import cpu_core, links
from megascale.bench.cost_fit import Measurement, fit_costs, mean_relative_error, rate_of_cost
from megascale.bench.timed_steps import build_run, take_step
from megascale.catalog.precisions import PRECISIONS
from megascale.comm.mesh import Mesh, open_mesh
from megascale.comm.totals import device_barrier
from megascale.config.run import RunConfig
from megascale.core.errors import MegascaleError
from megascale.core.files import write_text
from megascale.core.process import usable_cores
from megascale.core.rank import Rank
from megascale.device import Device
from megascale.layout.topology import Topology
from megascale.plan.account.traffic import mean_calls
from megascale.plan.simulate import profiles
from megascale.plan.simulate.profiles import Hardware
from megascale.plan.simulate.step_time import estimate
from megascale.train.run import Run
from megascale.train.scheduled_gc import without_automatic_gc

FORMATS = ("fp32", "bf16")
"""Precisions to measure. Steps in the first precision also give the costs that do not depend on precision."""

MAX_RANKS = 1024
"""Upper bound on the ranks of one machine."""


class ModelCase(NamedTuple):
    """A small model with heads of HEAD_DIM, and its batch, for timed steps."""

    layers: int
    hidden: int
    ffn: int
    seq: int
    vocab: int
    micro: int
    total: int


CASES = (
    ModelCase(1, 64, 192, 32, 256, 1, 4),
    ModelCase(4, 64, 192, 32, 256, 1, 4),
    ModelCase(2, 128, 384, 128, 512, 2, 4),
    ModelCase(6, 128, 384, 128, 512, 2, 4),
    ModelCase(1, 128, 384, 256, 4096, 4, 4),
    ModelCase(1, 256, 704, 32, 16384, 1, 1),
    ModelCase(2, 256, 704, 128, 512, 2, 2),
    ModelCase(3, 256, 704, 256, 512, 4, 4),
    ModelCase(2, 384, 1024, 256, 512, 2, 2),
)
"""Cases with few and many layers, narrow and wide, with small and large vocabularies, to separate the costs."""

OVERSUBSCRIBED_CASE = ModelCase(4, 256, 704, 256, 512, 2, 16)
"""Model for ranks that share cores, with tp 2 and pp 2; the batch is per replica."""

SINGLE_RANK_CASE = OVERSUBSCRIBED_CASE._replace(total=4)
"""Model that a single rank per core trains between the oversubscribed steps."""

PLACEHOLDER_BANDWIDTH = 1e9
"""Memory bandwidth in bytes/s until the steps in the first precision are fitted."""

HEAD_DIM = 32
ROUNDS = 5
OVERSUBSCRIBED_ROUNDS = 10
WARM_UP = 1

MAX_ERROR = 0.3
"""Largest plausible mean relative error of a fit."""

MAX_RATIO = 2.0
"""Ratio of slowest to fastest round above which other load disturbed the measurement."""

Log = Callable[[str], object]


@dataclass(frozen=True)
class PrecisionMeasurements:
    """Measurements in one precision by all ranks; `steps` has a sample per case."""

    gemms: list[Measurement]
    attention_forward: list[Measurement]
    attention_backward: list[Measurement]
    steps: list[Measurement]


@dataclass(frozen=True)
class OversubscribedSteps:
    """Seconds of steps of OVERSUBSCRIBED_CASE with `ranks` ranks, and of SINGLE_RANK_CASE steps between them."""

    ranks: int
    seconds: tuple[float, ...]
    single_rank_seconds: tuple[float, ...]


@dataclass(frozen=True)
class Quality:
    """Quality of a measurement. `error`: mean relative error of the fitted costs; `ratio`: slowest round divided by the
    fastest, the median over samples.
    """

    error: float
    ratio: float


@dataclass(frozen=True)
class MeasuredProfile:
    """A hardware profile as nested tables, and the quality of its measurements."""

    tree: dict[str, Any]
    quality: dict[str, Quality]

    def fit_costs(self, name: str, samples: Sequence[Measurement]) -> tuple[float, ...]:
        """Fit the seconds per unit of each amount, and record the quality of the fit."""
        fitted = fit_costs(samples)
        ratio = statistics.median(sample.ratio for sample in samples)
        self.quality[name] = Quality(mean_relative_error(samples, fitted), ratio)
        return fitted


def measure_oversubscribed(device: Device, rank: Rank) -> OversubscribedSteps:
    """Time steps of all ranks of a job, several per core; between them, steps of a single rank on every core."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        config = _oversubscribed_config(rank.world_size, folder)
        run = build_run(config, device, rank)
        single_run = build_run(_config(SINGLE_RANK_CASE, FORMATS[0], folder), device)
    seconds: list[float] = []
    local_seconds: list[float] = []
    with without_automatic_gc():
        for _ in range(WARM_UP + OVERSUBSCRIBED_ROUNDS):
            device_barrier(run.mesh, device.torch_device)
            start = time.perf_counter()
            take_step(run)
            device_barrier(run.mesh, device.torch_device)
            seconds.append(time.perf_counter() - start)
            if rank.rank < usable_cores():
                local_seconds.append(_step_cpu_seconds(single_run))
    gathered = run.mesh.world.control.all_gather(local_seconds[WARM_UP:], "single-rank steps")
    single_rank = [value for values in gathered for value in values]
    return OversubscribedSteps(rank.world_size, tuple(seconds[WARM_UP:]), tuple(single_rank))


def _oversubscribed_config(ranks: int, folder: str) -> RunConfig:
    parallel = {"tp": 2 - ranks % 2, "pp": 2 if ranks % 4 == 0 else 1}
    replicas = ranks // math.prod(parallel.values())
    case = OVERSUBSCRIBED_CASE._replace(total=OVERSUBSCRIBED_CASE.total * replicas)
    return _config(case, FORMATS[0], folder, dp=replicas, **parallel)


def measure_profile(
    device: Device,
    rank: int,
    world: int,
    log: Log,
    formats: Sequence[str] = FORMATS,
    oversubscribed: OversubscribedSteps | None = None,
) -> MeasuredProfile | None:
    """Measure with all ranks of a job, one per core. Rank 0 returns the profile, with oversubscription if
    `oversubscribed` is given.

    Raises: MegascaleError if a measurement is implausible
    """
    torch.set_num_threads(1)
    mesh = open_mesh(Topology(dp=world), rank, tied=False)
    log("links")
    timed = links.measure_links(device, rank, world, links.SIZES)
    measured = {name: _samples(name, mesh, device, log) for name in formats}
    return fit_profile(device.total_memory(), timed, measured, oversubscribed) if rank == 0 else None


def _samples(name: str, mesh: Mesh, device: Device, log: Log) -> PrecisionMeasurements:
    dtype = getattr(torch, PRECISIONS[name].facts["compute_dtype"])
    log(f"GEMMs and attention in {name}")
    gemms = _measure_on_all_ranks(mesh, lambda: cpu_core.measure_gemms(dtype))
    attention_forward = _measure_on_all_ranks(mesh, lambda: cpu_core.measure_attention(dtype, backward=False))
    attention_backward = _measure_on_all_ranks(mesh, lambda: cpu_core.measure_attention(dtype, backward=True))
    log(f"steps in {name}")
    steps = [_measure_on_all_ranks(mesh, partial(_steps, case, name, device))[0] for case in CASES]
    return PrecisionMeasurements(gemms, attention_forward, attention_backward, steps)


def _measure_on_all_ranks(mesh: Mesh, work: Callable[[], list[Measurement]]) -> list[Measurement]:
    """Measure on all ranks at the same time, and gather the timings."""
    mesh.world.control.barrier("measurement")
    results = [[sample.amounts, sample.seconds] for sample in work()]
    ranks = zip(*mesh.world.control.all_gather(results, "measurements"), strict=True)
    return [Measurement(tuple(same[0][0]), tuple(s for _, seconds in same for s in seconds)) for same in ranks]


def fit_profile(
    memory: int,
    timed: Sequence[links.LinkTiming],
    measured: Mapping[str, PrecisionMeasurements],
    oversubscribed: OversubscribedSteps | None = None,
) -> MeasuredProfile:
    """Fit the profile of a machine with `memory` bytes to its measurements.

    Raises: MegascaleError if a measurement is implausible
    """
    cores = usable_cores()
    collectives, messages = links.fit_link(timed, links.COLLECTIVES), links.fit_link(timed, ["message"])
    tree = {
        "device": {
            "memory": memory // cores, "reserve": 0, "bandwidth": PLACEHOLDER_BANDWIDTH, "units": 1, "measured": {},
        },
        "node": {"devices": MAX_RANKS, "cores": cores, **vars(collectives), "message": vars(messages)},
        "network": vars(messages),  # links between machines are not measured
        "attained": {"gemm": 1.0, "memory": 1.0, "link": 1.0, "network": 1.0},
        "stack": {"overlaps": {"pp": True}, "attained": {"passes": 1.0, "step_s": 0.0}},
    }  # fmt: skip
    machine = MeasuredProfile(tree, {})
    for name, samples in measured.items():
        call, flop, byte = machine.fit_costs(f"GEMMs in {name}", samples.gemms)
        forward = machine.fit_costs(f"attention in {name}", samples.attention_forward)
        backward = machine.fit_costs(f"attention backward in {name}", samples.attention_backward)
        tree["device"]["measured"][name] = {
            "rate": rate_of_cost(flop), "bandwidth": rate_of_cost(byte), "gemm_s": call,
            "attention_forward": _attention_costs(forward), "attention_backward": _attention_costs(backward),
        }  # fmt: skip
        _add_step_costs(machine, name, samples.steps, first=name == next(iter(measured)))
    if oversubscribed:
        _add_oversubscription(machine, oversubscribed)
    for name, quality in machine.quality.items():
        if quality.error > MAX_ERROR or quality.ratio > MAX_RATIO:
            message = f"{name}: rounds differ by a factor of {quality.ratio:.2f}, mean error {quality.error:.0%}"
            raise MegascaleError(message, hint="measure again when the machine is idle")
    return machine


def _attention_costs(fitted: tuple[float, ...]) -> dict[str, float]:
    flop, per_key, per_element = fitted
    flop = 1 / rate_of_cost(flop)
    return {"rate": rate_of_cost(flop), "keys": per_key / flop, "width": per_element / flop}


def _steps(case: ModelCase, name: str, device: Device) -> list[Measurement]:
    with tempfile.TemporaryDirectory() as folder:
        run = build_run(_config(case, name, folder), device)
    with without_automatic_gc():
        seconds = [_step_cpu_seconds(run) for _ in range(WARM_UP + ROUNDS)]
    return [Measurement((), tuple(seconds[WARM_UP:]))]


def _step_cpu_seconds(run: Run) -> float:
    start = time.process_time()
    take_step(run)
    return time.process_time() - start


def _config(case: ModelCase, name: str, folder: str, **parallel: int) -> RunConfig:
    tree = {
        "name": "profile",
        "model": {
            "num_layers": case.layers, "hidden_size": case.hidden, "num_heads": case.hidden // HEAD_DIM,
            "ffn_size": case.ffn, "vocab_size": case.vocab, "seq_length": case.seq, "norm": "rmsnorm",
            "activation": "swiglu", "position": "rope", "bias": False, "tie_embeddings": False,
        },
        "parallel": parallel,
        "batch": {"micro": case.micro, "global": case.total},
        "train": {"steps": WARM_UP + OVERSUBSCRIBED_ROUNDS, "precision": name},
        "optimizer": {"lr": 1e-3},
        "data": {"mock": True},
        "checkpoint": {"every": 0},
        "observe": {"dir": folder, "tensorboard": False},
    }  # fmt: skip
    return RunConfig.model_validate(tree).resolve(None)


def _add_oversubscription(machine: MeasuredProfile, steps: OversubscribedSteps) -> None:
    """Add `turn_s`: seconds by which oversubscribed steps exceed the estimate, per collective or message."""
    hardware, config = Hardware.model_validate(machine.tree), _oversubscribed_config(steps.ranks, "")
    stack, waiting = profiles.stack_on(hardware, "megascale"), hardware.node.ranks_per_core(steps.ranks) - 1
    shared, single = Measurement((), steps.seconds), Measurement((), steps.single_rank_seconds)
    pace = estimate(_config(SINGLE_RANK_CASE, FORMATS[0], ""), hardware, stack).step_s / single.median
    excess = shared.median * pace - estimate(config, hardware, stack).step_s
    machine.tree["node"]["turn_s"] = max(0.0, excess) / (waiting * mean_calls(config)) if waiting else 0.0
    machine.quality[f"steps of {steps.ranks} ranks"] = Quality(0.0, shared.ratio)
    machine.quality["steps between them"] = Quality(abs(1 - pace), single.ratio)


def _add_step_costs(machine: MeasuredProfile, name: str, steps: Sequence[Measurement], *, first: bool) -> None:
    """Fit the seconds of steps beyond GEMMs and attention: per byte of element-wise operations and per layer; in the
    `first` precision also per byte of the optimizer and per step, which hold for every precision.
    """
    device, step_s = machine.tree["device"], machine.tree["stack"]["attained"]["step_s"]
    measured = device["measured"][name]
    measured |= {"elementwise": 1.0, "layer_s": 0.0}  # at 1 byte/s the planner's seconds are bytes
    hardware = Hardware.model_validate(machine.tree | {"device": device})
    slow = hardware.device.model_copy(update={"bandwidth": 1.0})
    hardware = hardware.model_copy(update={"device": slow})
    stack, samples = profiles.stack_on(hardware, "megascale"), []
    for case, step in zip(CASES, steps, strict=True):
        config = _config(case, name, "")
        causes = estimate(config, hardware, stack).causes
        known, layers = causes["gemm"] + causes["attention"], 3.0 * case.layers * config.num_microbatches
        amounts: tuple[float, ...] = causes["elementwise"], layers, causes["optimizer"], 1.0
        if not first:
            known, amounts = known + causes["optimizer"] / device["bandwidth"] + step_s, amounts[:2]
        samples.append(Measurement(amounts, step.seconds, known))
    byte, layer, *once = machine.fit_costs(f"steps in {name}", samples)
    measured |= {"elementwise": rate_of_cost(byte), "layer_s": layer}
    if first:
        device["bandwidth"], machine.tree["stack"]["attained"]["step_s"] = rate_of_cost(once[0]), once[1]


def write_profile(path: Path, machine: MeasuredProfile, processor: str, ranks: int) -> None:
    """Write the profile of a `processor`, measured by `ranks` ranks, atomically. Raises: OSError"""
    day = datetime.datetime.now(datetime.UTC).date()
    worst = max(quality.ratio for quality in machine.quality.values())
    lines = [
        f"# {processor}, {usable_cores()} cores: `megascale bench profile` with {ranks} ranks and torch "
        f"{torch.__version__}, {day}",
        f"# The slowest round took at most {worst:.2f} times the quickest.",
        *_toml_lines(machine.tree, ""),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "\n".join(lines) + "\n")


def _toml_lines(tree: Mapping[str, Any], table: str) -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _toml_lines(value, f"{table}{key}.")
        else:
            yield f"{table}{key} = {f'{value:.4g}' if isinstance(value, float) else str(value).lower()}"


def table(machine: MeasuredProfile) -> str:
    """Format the quality of the measurements as a text table."""
    lines = [f"{'measurement':30} {'slowest / fastest':>19} {'mean error':>11}"]
    lines += [f"{name:30} {quality.ratio:>19.2f} {quality.error:>11.1%}" for name, quality in machine.quality.items()]
    return "\n".join(lines)


def as_json(machine: MeasuredProfile) -> dict[str, Any]:
    """Return the profile and its quality as JSON values."""
    return {"profile": machine.tree, "quality": {name: vars(quality) for name, quality in machine.quality.items()}}
