"""How fast the real training step of a configuration is on one device: `megascale bench mfu`.

Steps are timed by marks in the device's own work, one a step, and read when all is done: nothing waits between steps
but what a step itself waits for, and the loading of its batch counts. Then a few steps run under torch's profiler,
which says what the time went to.
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

from megascale.account.memory import fullest_rank, state_bytes
from megascale.bench import kernels
from megascale.bench.gemm import attainable
from megascale.bench.mfu import ALL_CAST, Fit, Machine, Speed, Steps, sized
from megascale.bench.spread import Spread, between
from megascale.comm import init
from megascale.config.explain import check_again
from megascale.config.model import ModelConfig
from megascale.config.run import RunConfig
from megascale.core.errors import MegascaleError
from megascale.core.rank import Rank
from megascale.core.units import format_bytes
from megascale.device import Device, detect, out_of_memory
from megascale.ops.select import Setting, serving
from megascale.train.build import Run, build, mesh_of
from megascale.train.gc import ScheduledCollection
from megascale.train.peak import find_peak
from megascale.train.step import train_step
from megascale.train.stop import Stop

RESERVE = 0.1
"""The share of the free memory that `fit` leaves for fragments, and for what kernels and libraries take."""

Say = Callable[[str], object]


def measure(config: RunConfig, whole: ModelConfig, steps: Steps, say: Say, *, fit: bool = False) -> Speed:
    """Run a resolved configuration of one process and measure it: the `whole` model, or a slice of it, with `fit` as
    many of its layers as fit the device. `say` is told what goes on.

    Raises: MegascaleError if it does not fit the device's memory; ConfigError if as many layers as fit break a rule
    """
    rank = Rank(0, 1, 0, socket.gethostname())
    device = detect()
    unsaved = {"every": 0, "memory_every": 0, "replicate": False}  # no memory is taken for copies either
    checkpoint = config.checkpoint.model_copy(update=unsaved)
    config = config.model_copy(update={"checkpoint": checkpoint})
    init.start(rank, device)
    try:
        bench = _Bench(rank, device, steps, say)
        _check_memory(sized(config, 1) if fit else config, device)
        with _enough_memory(config):
            found = bench.fit(config, whole.num_layers) if fit else None
        if found is not None:
            config = sized(config, found.layers)
            check_again(config, f"--layers fit: {found.layers} of {whole.num_layers} layers")
        with _enough_memory(config):
            return bench.run(config, whole, found)
    finally:
        init.stop()


@contextmanager
def _enough_memory(config: RunConfig) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise _too_large(config) from error


def _check_memory(config: RunConfig, device: Device) -> None:
    """On a CPU, where nothing is raised when memory is full, refuse what cannot fit."""
    needed, free = fullest_rank(config).total, device.free_memory()
    if device.is_cpu and needed > free:
        raise _too_large(config, f": it takes {format_bytes(needed)}, {format_bytes(free)} are free")


def _too_large(config: RunConfig, why: str = "") -> MegascaleError:
    layers = config.model.num_layers
    what = f"{config.name} with {layers} layer{'s' if layers > 1 else ''} does not fit the device's memory{why}"
    fewer = "--layers fit, fewer layers, or " if layers > 1 else ""
    return MegascaleError(what, mend=f"{fewer}a smaller batch.micro")


@dataclass(frozen=True)
class _Bench:
    rank: Rank
    device: Device
    steps: Steps
    say: Say

    def build(self, config: RunConfig) -> Run:
        self.say(f"building {config.name} with {config.model.num_layers} of its layers on {self.device.name}")
        return build(config, mesh_of(config, self.rank, self.device), self.device, Stop())

    def fit(self, config: RunConfig, whole: int) -> Fit:
        """Measure a step of one layer on one micro-batch, and count what each further layer takes; where windows differ
        the layer that takes most.

        Raises: MegascaleError if not even one layer fits
        """
        one, *others = _probes(config)
        room, before = int(self.device.free_memory() * (1 - RESERVE)), self.device.peak_memory()
        probed = [self.probe(each) for each in (one, *others)]
        saved, first = max(kept for kept, _ in probed), max(peak for _, peak in probed) - before
        state = state_bytes(sized(one, 2), 0).total - state_bytes(one, 0).total
        found = Fit(whole, room, first, state + saved, state)
        self.say(str(found))
        if not found.layers:
            raise MegascaleError(f"not one layer of {config.name} fits: {found}", mend="a smaller batch.micro")
        return found

    def probe(self, config: RunConfig) -> tuple[int, int]:
        """Measure what the first layer keeps in a step, and the most memory that was in use until its end."""
        run = self.build(config)
        kept = _saved_by_layer(run)
        self.device.synchronize()
        peak = self.device.peak_memory()
        del run
        self.forget()
        return kept, peak

    def run(self, config: RunConfig, whole: ModelConfig, fit: Fit | None) -> Speed:
        """Time the steps, then profile some."""
        run = self.build(config)
        self.say(f"{self.steps.total} steps, the last {self.steps.profiled} of them under the profiler")
        with ScheduledCollection():
            times, losses = time_steps(run, self.steps.warm_up + self.steps.timed)
            timed = times[self.steps.warm_up :]
            shares = profile_steps(run, self.steps.profiled, Spread.of(timed).median)
        memory, backends, peak = self.device.peak_memory(), serving(Setting.of(config, self.device)), find_peak(run)
        del run
        self.forget()
        rows, precision = config.batch.micro * config.model.seq_length, config.train.precision
        best = attainable(config.model, rows, precision, self.device)
        if self.device.is_cpu and peak and best and precision != "fp8" and best.flops > peak.flops:
            peak = best  # both are measured, and what was slower had the machine less to itself
        machine = Machine(self.device.name, torch.__version__, backends, peak, best)
        ends = losses[0], losses[-1]
        return Speed(config, whole, fit, machine, self.steps.warm_up, Spread.of(timed), ends, memory, shares)

    def forget(self) -> None:
        """Free the memory of a run that is gone."""
        gc.collect()
        self.device.release_memory()


def time_steps(run: Run, count: int) -> tuple[list[float], list[float]]:
    """Train for some steps. Returns the seconds of each, and the losses."""
    timer, losses = run.device.timer(), []
    marks = [timer.mark()]
    for _ in range(count):
        losses.append(_step(run))
        marks.append(timer.mark())
    run.device.synchronize()
    return between(timer, marks), losses


def profile_steps(run: Run, count: int, step_s: float) -> dict[str, float]:
    """Train for some more steps, and tell what a step's time goes to (`kernels.shares`); none for no steps.

    The profiler delays a host that issues work, but not the work of a GPU: that is compared with `step_s`, the time of
    a step without it. On a CPU operators are delayed too, and compared with the steps that they are of.
    """
    if not count:
        return {}
    times: list[float] = []
    profile = kernels.profile(lambda: times.extend(time_steps(run, count)[0]), run.device)
    return kernels.shares(profile, sum(times) if run.device.is_cpu else count * step_s)


def _step(run: Run) -> float:
    """Train for one step; return its loss."""
    loss = train_step(run, run.train.batch(run.progress.samples)).loss
    run.mesh.recorder.settle()  # as the loop does: marks pile up else
    return loss


def _probes(config: RunConfig) -> list[RunConfig]:
    """The run with one layer, of each window, and one micro-batch, not compiled: compiled layers keep no more. In fp8
    the layer is cast, as are those that are counted after it.
    """
    batch = config.batch.model_copy(update={"total": config.batch.micro})
    train = config.train.model_copy(update={"compile": False})
    fp8 = config.fp8.model_copy(update=ALL_CAST)
    one = sized(config, 1).model_copy(update={"batch": batch, "train": train, "fp8": fp8})
    models = [one.model.model_copy(update={"window": window}) for window in dict.fromkeys(config.model.windows)]
    return [one.model_copy(update={"model": model}) for model in models]


def _saved_by_layer(run: Run) -> int:
    """Take a step of one micro-batch; return the bytes that the first layer saves for backward, its input included."""
    (stage,) = run.stages
    layer = next(iter(stage.layers.values()))
    weights = {bucket.weights.untyped_storage().data_ptr() for bucket in run.gradients.buckets}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)

    def enter(_: Any, inputs: tuple[Any, ...]) -> None:
        keep(inputs[0])
        hooks.__enter__()

    def leave(*_: Any) -> None:
        hooks.__exit__()
        for handle in handles:  # what a backward computes again it does not keep
            handle.remove()

    handles = [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)]
    _step(run)
    return sum(kept.values())
