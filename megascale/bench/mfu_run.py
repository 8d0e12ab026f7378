"""Timing and profiling of real training steps on one device, for `megascale bench mfu`.

A mark on the device's stream after every step, read when all steps are done, times the steps without extra
synchronisation; batch loading is included. A few more steps run under torch's profiler for the time by kind of kernel.
"""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megascale.bench.gemm import attainable_peak
from megascale.bench.mfu import ALL_LAYERS_FP8, DeviceSetup, LayerFit, MfuResult, StepCounts, config_with_layers
from megascale.bench.quartiles import Quartiles, intervals
from megascale.comm import init
from megascale.config.loading import check_rules
from megascale.config.model import ModelConfig
from megascale.config.run import RunConfig
from megascale.core.errors import MegascaleError
from megascale.core.rank import Rank
from megascale.core.units import format_bytes
from megascale.device import Device, detect_device, is_out_of_memory
from megascale.ops.select import selected_backends
from megascale.plan.account.memory import JobMemory
from megascale.plan.account.state_bytes import state_bytes
from megascale.train import kernels
from megascale.train.build import build_mesh, build_rank_run
from megascale.train.op_context import op_context
from megascale.train.peak_flops import find_peak_flops
from megascale.train.run import Run
from megascale.train.scheduled_gc import without_automatic_gc
from megascale.train.step import train_step
from megascale.train.stop import StopRequest

RESERVED_SHARE = 0.1
"""Share of free memory that `--layers fit` reserves for fragmentation, kernels and libraries."""

Log = Callable[[str], object]


def measure_mfu(
    config: RunConfig, full_model: ModelConfig, steps: StepCounts, log: Log, *, fit: bool = False
) -> MfuResult:
    """Measure a resolved configuration of one process: `full_model` or a slice; with `fit`, the largest slice that fits
    in the device's memory. `log` receives progress messages.

    Raises: MegascaleError if the model does not fit; ConfigError if the largest slice that fits breaks a rule
    """
    rank = Rank(0, 1, 0, socket.gethostname())
    device = detect_device()
    unsaved = {"every": 0, "memory_every": 0, "replicate": False}  # without memory for checkpoint copies
    checkpoint = config.checkpoint.model_copy(update=unsaved)
    whole = config.batch.model_copy(update={"rampup": None})
    config = config.model_copy(update={"checkpoint": checkpoint, "batch": whole})
    init.init_distributed(rank, device)
    try:
        bench = _Bench(rank, device, steps, log)
        _check_memory(config_with_layers(config, 1) if fit else config, device)
        with _explain_out_of_memory(config.name, config.model.num_layers):
            fit_result = bench.fit_layers(config, full_model.num_layers) if fit else None
        if fit_result is not None:
            config = config_with_layers(config, fit_result.layers)
            check_rules(config, f"--layers fit: {fit_result.layers} of {full_model.num_layers} layers")
        with _explain_out_of_memory(config.name, config.model.num_layers):
            return bench.time_and_profile(config, full_model, fit_result)
    finally:
        init.shutdown_distributed()


@contextmanager
def _explain_out_of_memory(name: str, layers: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise _too_large(name, layers) from error


def _check_memory(config: RunConfig, device: Device) -> None:
    """Refuse a model that exceeds a CPU's free memory: there, no out-of-memory error is raised."""
    needed, free = JobMemory(config).fullest().total, device.free_memory()
    if device.is_cpu and needed > free:
        why = f": it needs {format_bytes(needed)}, {format_bytes(free)} are free"
        raise _too_large(config.name, config.model.num_layers, why)


def _too_large(name: str, layers: int, why: str = "") -> MegascaleError:
    message = f"{name} with {layers} layer{'s' if layers > 1 else ''} does not fit in the device's memory{why}"
    fewer = "give --layers fit, fewer layers, or " if layers > 1 else "give "
    return MegascaleError(message, hint=f"{fewer}a smaller batch.micro")


@dataclass(frozen=True)
class _Bench:
    rank: Rank
    device: Device
    steps: StepCounts
    log: Log

    def build_run(self, config: RunConfig) -> Run:
        self.log(f"building {config.name} with {config.model.num_layers} layers on {self.device.name}")
        return build_rank_run(config, build_mesh(config, self.rank, self.device), self.device, StopRequest())

    def fit_layers(self, config: RunConfig, total_layers: int) -> LayerFit:
        """Measure the memory of a step with one layer and one micro-batch, and add the memory of further layers. If
        windows differ, the layer with the most memory counts.

        Raises: MegascaleError if a single layer does not fit
        """
        probes = _probes(config)
        available, before = int(self.device.free_memory() * (1 - RESERVED_SHARE)), self.device.peak_memory()
        measured = [self.measure_one_layer(probe) for probe in probes]
        saved, first = max(saved for saved, _ in measured), max(peak for _, peak in measured) - before
        state = state_bytes(config_with_layers(probes[0], 2), 0).total - state_bytes(probes[0], 0).total
        fit = LayerFit(total_layers, available, first, state + saved, state)
        self.log(str(fit))
        if not fit.layers:
            raise MegascaleError(f"one layer of {config.name} does not fit: {fit}", hint="give a smaller batch.micro")
        return fit

    def measure_one_layer(self, config: RunConfig) -> tuple[int, int]:
        """Measure the bytes that the first layer saves for backward, and the peak memory of the step."""
        run = self.build_run(config)
        saved = _saved_by_layer(run)
        self.device.synchronize()
        peak = self.device.peak_memory()
        del run
        self.free_memory()
        return saved, peak

    def time_and_profile(self, config: RunConfig, full_model: ModelConfig, fit: LayerFit | None) -> MfuResult:
        """Time steps, then profile further steps."""
        run = self.build_run(config)
        self.log(f"{self.steps.total} steps, the last {self.steps.profiled} of them under the profiler")
        with without_automatic_gc():
            times, losses = time_steps(run, self.steps.warm_up + self.steps.timed)
            timed = times[self.steps.warm_up :]
            shares = profile_steps(run, self.steps.profiled, Quartiles.from_values(timed).median)
        memory, backends, peak = (
            self.device.peak_memory(),
            selected_backends(op_context(config, self.device)),
            find_peak_flops(run),
        )
        del run
        self.free_memory()
        rows, precision = config.batch.micro * config.model.seq_length, config.train.precision
        best = attainable_peak(config.model, rows, precision, self.device)
        if self.device.is_cpu and peak and best and not config.train.quantizes and best.flops > peak.flops:
            peak = best  # both are measured: other load slowed the lower rate
        machine = DeviceSetup(self.device.name, torch.__version__, backends, peak, best)
        ends = losses[0], losses[-1]
        return MfuResult(
            config, full_model, fit, machine, self.steps.warm_up, Quartiles.from_values(timed), ends, memory, shares
        )

    def free_memory(self) -> None:
        """Return the memory of a deleted run to the device."""
        gc.collect()
        self.device.release_memory()


def time_steps(run: Run, count: int) -> tuple[list[float], list[float]]:
    """Train for `count` steps; return the seconds and the loss of every step."""
    timer, losses = run.device.timer(), []
    marks = [timer.mark()]
    for _ in range(count):
        losses.append(_step(run))
        marks.append(timer.mark())
    run.device.synchronize()
    return intervals(timer, marks), losses


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


def _step(run: Run) -> float:
    """Train for one step; return the loss."""
    loss = train_step(run, run.train_loader.batch(run.progress.samples)).loss
    run.mesh.recorder.resolve_marks()  # as in the training loop, or marks accumulate
    return loss


def _probes(config: RunConfig) -> list[RunConfig]:
    """Return runs with one layer, one per distinct window, and one micro-batch. Without compilation, as compiled layers
    save no more; in fp8 the layer is quantized, like the further layers.
    """
    batch = config.batch.model_copy(update={"total": config.batch.micro})
    train = config.train.model_copy(update={"compile": False})
    fp8 = config.fp8.model_copy(update=ALL_LAYERS_FP8)
    one = config_with_layers(config, 1).model_copy(update={"batch": batch, "train": train, "fp8": fp8})
    models = [one.model.model_copy(update={"window": window}) for window in dict.fromkeys(config.model.windows)]
    return [one.model_copy(update={"model": model}) for model in models]


def _saved_by_layer(run: Run) -> int:
    """Train for a step of one micro-batch; return the bytes that the first layer saves for backward, input included."""
    (stage,) = run.stages
    layer = next(iter(stage.layers.values()))
    weights = {bucket.weights.untyped_storage().data_ptr() for bucket in run.buffers.buckets}
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)

    def start_saving(_: Any, inputs: tuple[Any, ...]) -> None:
        keep(inputs[0])
        hooks.__enter__()

    def leave(*_: Any) -> None:
        hooks.__exit__()
        for handle in handles:  # recomputation in backward saves nothing further
            handle.remove()

    handles = [layer.register_forward_pre_hook(start_saving), layer.register_forward_hook(leave)]
    _step(run)
    return sum(saved.values())
