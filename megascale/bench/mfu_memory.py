"""Memory of a benchmark's model: whether it fits, and how many of its layers do, for `megascale bench mfu`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from megascale.bench.mfu import ALL_LAYERS_FP8, LayerFit, config_with_layers
from megascale.bench.timed_steps import build_run, take_step
from megascale.config.run import RunConfig
from megascale.core.errors import MegascaleError
from megascale.core.rank import Rank
from megascale.core.units import format_bytes
from megascale.device import Device, is_out_of_memory
from megascale.plan.account.state_bytes import state_bytes
from megascale.train.run import Run

RESERVED_SHARE = 0.1  # share of free memory that `--layers fit` reserves for fragmentation, kernels and libraries

Log = Callable[[str], object]


def check_memory(needed: int, name: str, layers: int, device: Device) -> None:
    """Refuse a model that needs more than a CPU's free memory, where no out-of-memory error is raised.

    Raises: MegascaleError
    """
    free = device.free_memory()
    if device.is_cpu and needed > free:
        why = f": it needs {format_bytes(needed)}, {format_bytes(free)} are free"
        raise _too_large(name, layers, why)


@contextmanager
def explain_out_of_memory(name: str, layers: int) -> Iterator[None]:
    """Explain errors in the block that say that the device's memory is full. Raises: MegascaleError"""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise _too_large(name, layers) from error


def _too_large(name: str, layers: int, why: str = "") -> MegascaleError:
    message = f"{name} with {layers} layer{'s' if layers > 1 else ''} does not fit in the device's memory{why}"
    fewer = "give --layers fit, fewer layers, or " if layers > 1 else "give "
    return MegascaleError(message, hint=f"{fewer}a smaller batch.micro")


def fit_layers(config: RunConfig, total_layers: int, rank: Rank, device: Device, log: Log) -> LayerFit:
    """Measure the memory of a step with one layer and one micro-batch, and add the memory of further layers. If windows
    or kinds of attention differ, the layer with the most memory counts. The layer is not compiled, as compiled layers
    save no more; in fp8 it is quantized, like the further layers.

    Raises: MegascaleError if a single layer does not fit
    """
    one = config_with_layers(config, 1)
    one = one.changed(batch={"total": config.batch.micro}, train={"compile": False}, fp8=ALL_LAYERS_FP8)
    available, before = int(device.free_memory() * (1 - RESERVED_SHARE)), device.peak_memory()
    saved, peaks = list[int](), list[int]()
    pattern = config.model.attention_pattern or [None]
    for reach, letter in dict.fromkeys(zip(config.model.windows, cycle(pattern), strict=False)):
        one = one.changed(model={"window": reach if isinstance(reach, int) else None, "attention_pattern": letter})
        log(f"building {one.name} with 1 layers on {device.name}")
        run = build_run(one, device, rank)
        saved.append(saved_by_layer(run))
        device.synchronize()
        peaks.append(device.peak_memory())
        del run
        free_memory(device)
    state = state_bytes(config_with_layers(one, 2), 0).total - state_bytes(one, 0).total
    fit = LayerFit(total_layers, available, max(peaks) - before, state + max(saved), state)
    log(str(fit))
    if not fit.layers:
        raise MegascaleError(f"one layer of {config.name} does not fit: {fit}", hint="give a smaller batch.micro")
    return fit


def free_memory(device: Device) -> None:
    """Return the memory of a deleted run to the device."""
    gc.collect()
    device.release_memory()


def saved_by_layer(run: Run) -> int:
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
    take_step(run)
    return sum(saved.values())
