"""The fit of a hardware profile to its measurements, and its file.

- Element-wise operations, Python overhead and the optimizer are fitted to training steps of small models: least squares
  attribute the seconds beyond the planner's estimate of GEMMs and attention.
- Oversubscription (`turn_s`): a job with two ranks per core is timed; the excess over the planner's estimate is divided
  by the number of collectives and messages. Interleaved steps of single ranks give the machine's speed at that time.
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megascale.bench import links, profile_steps
from megascale.bench.cost_fit import Measurement, fit_costs, mean_relative_error, rate_of_cost
from megascale.core.errors import MegascaleError
from megascale.core.files import write_text
from megascale.core.process import usable_cores
from megascale.plan.account.traffic import mean_calls
from megascale.plan.simulate import profiles
from megascale.plan.simulate.profiles import Hardware
from megascale.plan.simulate.step_time import StepParts

MAX_RANKS = 1024  # upper bound on the ranks of one machine


PLACEHOLDER_BANDWIDTH = 1e9  # memory bandwidth in bytes/s until the steps in the first precision are fitted
MAX_ERROR = 0.3  # largest plausible mean relative error of a fit
MAX_RATIO = 2.0  # ratio of slowest to fastest round above which other load disturbed the measurement


@dataclass(frozen=True)
class PrecisionMeasurements:
    """Measurements in one precision by all ranks; `steps` has a sample per case."""

    gemms: list[Measurement]
    attention_forward: list[Measurement]
    attention_backward: list[Measurement]
    steps: list[Measurement]


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


def fit_profile(
    memory: int,
    timed: Sequence[links.LinkTiming],
    measured: Mapping[str, PrecisionMeasurements],
    oversubscribed: profile_steps.OversubscribedSteps | None = None,
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


def _add_oversubscription(machine: MeasuredProfile, steps: profile_steps.OversubscribedSteps) -> None:
    """Add `turn_s`: seconds by which oversubscribed steps exceed the estimate, per collective or message."""
    hardware, config = Hardware.model_validate(machine.tree), profile_steps.oversubscribed_config(steps.ranks, "")
    stack, waiting = profiles.stack_on(hardware, "megascale"), hardware.node.ranks_per_core(steps.ranks) - 1
    shared, single = Measurement((), steps.seconds), Measurement((), steps.single_rank_seconds)
    pace = StepParts(profile_steps.single_rank_config(""), hardware, stack).estimate.step_s / single.median
    excess = shared.median * pace - StepParts(config, hardware, stack).estimate.step_s
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
    for case, step in zip(profile_steps.CASES, steps, strict=True):
        config = profile_steps.case_config(case, name, "")
        causes = StepParts(config, hardware, stack).estimate.causes
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
