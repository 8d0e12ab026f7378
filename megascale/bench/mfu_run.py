"""Timing and profiling of real training steps on one device, for `megascale bench mfu`.

Batch loading is included. A few more steps run under torch's profiler for the time by kind of kernel.
"""

from __future__ import annotations

import socket

import torch

from megascale.bench.gemm import attainable_peak
from megascale.bench.mfu import DeviceSetup, MfuResult, StepCounts, config_with_layers
from megascale.bench.mfu_memory import Log, check_memory, explain_out_of_memory, fit_layers, free_memory
from megascale.bench.quartiles import Quartiles
from megascale.bench.timed_steps import build_run, time_steps
from megascale.comm import init
from megascale.config.loading import check_rules
from megascale.config.model import ModelConfig
from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.device import detect_device
from megascale.ops.select import selected_backends
from megascale.plan.account.memory import JobMemory
from megascale.train import kernels
from megascale.train.op_context import op_context
from megascale.train.peak_flops import find_peak_flops
from megascale.train.run import Run
from megascale.train.scheduled_gc import without_automatic_gc


def measure_mfu(
    config: RunConfig, full_model: ModelConfig, steps: StepCounts, log: Log, *, fit: bool = False
) -> MfuResult:
    """Measure a resolved configuration of one process: `full_model` or a slice; with `fit`, the largest slice that fits
    in the device's memory. `log` receives progress messages.

    Raises: MegascaleError if the model does not fit; ConfigError if the largest slice that fits breaks a rule
    """
    rank, device = Rank(0, 1, 0, socket.gethostname()), detect_device()
    fitted = None
    unsaved = {"every": 0, "in_memory_every": 0, "replicate": False}  # without memory for checkpoint copies
    config = config.changed(checkpoint=unsaved, batch={"rampup": None})
    init.init_distributed(rank, device)
    try:
        least = config_with_layers(config, 1) if fit else config
        check_memory(JobMemory(least).fullest().total, config.name, least.model.num_layers, device)
        if fit:
            with explain_out_of_memory(config.name, config.model.num_layers):
                fitted = fit_layers(config, full_model.num_layers, rank, device, log)
            config = config_with_layers(config, fitted.layers)
            check_rules(config, f"--layers fit: {fitted.layers} of {full_model.num_layers} layers")
        with explain_out_of_memory(config.name, config.model.num_layers):
            log(f"building {config.name} with {config.model.num_layers} layers on {device.name}")
            run = build_run(config, device, rank)
            log(f"{steps.total} steps, the last {steps.profiled} of them under the profiler")
            with without_automatic_gc():
                times, losses = time_steps(run, steps.warm_up + steps.timed)
                step = Quartiles.from_values(times[steps.warm_up :])
                shares = profile_steps(run, steps.profiled, step.median)
            memory, backends = device.peak_memory(), selected_backends(op_context(config, device))
            peak = find_peak_flops(run)
            del run
            free_memory(device)
            rows, precision = config.batch.micro * config.model.seq_length, config.train.precision
            best = attainable_peak(config.model, rows, precision, device)
    finally:
        init.shutdown_distributed()
    if device.is_cpu and peak and best and not config.train.quantizes and best.flops > peak.flops:
        peak = best  # both are measured: other load slowed the lower rate
    machine, ends = DeviceSetup(device.name, torch.__version__, backends, peak, best), (losses[0], losses[-1])
    return MfuResult(config, full_model, fitted, machine, steps.warm_up, step, ends, memory, shares)


def profile_steps(run: Run, count: int, step_s: float) -> dict[str, float]:
    """Train for `count` steps under the profiler; return the shares of a step by purpose (`kernels.time_shares`), or
    nothing for `count` 0.

    The profiler delays the host but not a GPU's kernels: kernel time is divided by `step_s`, the time of a step without
    the profiler. On a CPU operators are delayed too: their time is divided by the profiled steps' time.
    """
    if not count:
        return {}
    times: list[float] = []
    profile = kernels.profile_kernels(lambda: times.extend(time_steps(run, count)[0]), run.device)
    return kernels.time_shares(profile, sum(times) if run.device.is_cpu else count * step_s)
