"""A step of one rank of a large job on one GPU without its peers: real kernels on this rank's shapes, and
communication that moves nothing between devices. Figures: time of the device and of the host a layer and micro-batch,
peak memory, and kernels by time.

Received tensors are random, gathered ones repeat the rank's own part, and sums are the rank's own. Waits for peers and
the time of communication are not included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from typing import Any

from torch import Tensor

from megascale.bench.mfu_memory import free_memory
from megascale.bench.timed_steps import take_step, time_steps
from megascale.comm.group import Group
from megascale.comm.mesh import GroupSpec, Mesh, assemble_mesh
from megascale.comm.timeout import Timeout
from megascale.comm.work import COMPLETED, LostWork, TransportWork
from megascale.config.loading import load_config
from megascale.config.run import RunConfig
from megascale.device import Device, detect_device, profiler_range
from megascale.layout.chunks import stages_of
from megascale.layout.topology import topology_of
from megascale.plan.dryrun.fake_mesh import FakeTransport
from megascale.record.recorder import Recorder
from megascale.train.build import build_rank_run
from megascale.train.kernels import KernelProfile, profile_kernels, purpose_seconds
from megascale.train.run import Run
from megascale.train.stop import StopRequest

WARM_UP, TIMED = 2, 3
KERNELS = 12
"""Kernels in the figures."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--config", required=True, metavar="FILE", help="of the whole job")
    parser.add_argument("--ranks", type=int, required=True, help="of the whole job")
    parser.add_argument("--rank", type=int, default=0, help="that is run; default %(default)s")
    parser.add_argument("--micro", type=int, nargs="+", default=[1], help="sizes of a micro-batch; default 1")
    parser.add_argument("--micro-batches", type=int, default=8, help="of a step; default %(default)s")
    parser.add_argument("--device", choices=("any", "cpu"), default="any", help="default %(default)s")
    parser.add_argument("overrides", nargs="*", metavar="key=value")


def run(options: argparse.Namespace) -> int:
    """Print a JSON object of the figures."""
    device, figures = detect_device(allow_gpu=options.device == "any"), dict[str, Any]()
    for micro in options.micro:
        config = rank_config(options, micro)
        mine = measure(build(config, options.rank, device))
        figures |= {f"micro-batch {micro}: {name}": value for name, value in mine.items()}
        free_memory(device)
    print(json.dumps({"figures": figures}))
    return 0


def rank_config(options: argparse.Namespace, micro: int) -> RunConfig:
    """Return the resolved configuration, with few micro-batches, and without what asks the peers."""
    whole = load_config(options.config, options.overrides, options.ranks)
    samples = micro * options.micro_batches * whole.dp
    words = [f"batch.micro={micro}", f"batch.global={samples}", "overlap.tp=false", "data.mock=true"]
    words += ["data.reader=rank", "checkpoint.every=0", "checkpoint.in_memory_every=0", "checkpoint.replicate=false"]
    return load_config(options.config, [*options.overrides, *words], options.ranks)


class LocalTransport(FakeTransport):
    """Collectives that repeat or keep what the rank has."""

    def all_gather(self, out: Tensor, part: Tensor) -> TransportWork:
        out.view(-1, part.numel()).copy_(part.flatten().clone())  # the part may be a view of the whole
        return COMPLETED

    def reduce_scatter(self, out: Tensor, full: Tensor) -> TransportWork:
        out.flatten().copy_(full.flatten()[: out.numel()])
        return COMPLETED

    def all_to_all(self, outgoing: Any, incoming: Any) -> TransportWork:
        for out, into in zip(outgoing, incoming, strict=True):
            into.copy_(out)
        return COMPLETED


def message(kind: str, group: Group, tensor: Tensor, peer: int) -> TransportWork:
    """Send nothing; receive random numbers."""
    if kind == "receive":
        tensor.normal_()
    return LostWork(group.recorder.mark())


def build(config: RunConfig, rank: int, device: Device) -> Run:
    """Build the run of a rank on this device."""
    recorder = Recorder(device.timer(), named_range=profiler_range)

    def open_one(spec: GroupSpec) -> Group:
        index = spec.ranks.index(rank)
        if len(spec.ranks) == 1:
            return Group(spec.name, spec.ranks, index, recorder=recorder)
        local: Any = LocalTransport()
        return Group(spec.name, spec.ranks, index, None, recorder, local, local if spec.messages else None, local)

    topology, tied = topology_of(config.parallel), config.model.tie_embeddings
    placement = stages_of(config.model, config.parallel).placement
    mesh: Mesh = assemble_mesh(
        topology, rank, placement, open_one, lambda: message, tied=tied, recorder=recorder, timeout=Timeout()
    )
    return build_rank_run(config, mesh, device, StopRequest())


def measure(run: Run) -> dict[str, Any]:
    """Run steps, time the device and the host, and profile one step."""
    begun = time.perf_counter()
    take_step(run)
    first, _ = time.perf_counter() - begun, time_steps(run, WARM_UP)
    step = statistics.median(time_steps(run, TIMED)[0])
    layers = sum(len(stage.layers) for stage in run.stages)
    passes, peak = layers * run.config.num_microbatches, run.device.peak_memory()
    host = host_seconds(run)
    profile = profile_kernels(lambda: take_step(run), run.device)
    return {
        "seconds to the end of the first step": round(first, 2),
        "device, ms a layer and micro-batch": round(step / passes * 1e3, 3),
        "host, ms a layer and micro-batch": round(host / passes * 1e3, 3),
        "peak memory, GB": round(peak / 1e9, 1),
        **shares(profile),
    }


def host_seconds(run: Run) -> float:
    """Return the seconds in which the host issues the pipeline's actions of a step, each to an idle device."""
    release, spent, begun = run.pipeline.release_sent, [0.0], [time.perf_counter()]

    def after_action() -> None:
        spent[0] += time.perf_counter() - begun[0]
        release()
        run.device.synchronize()
        begun[0] = time.perf_counter()

    def start(*_: Any) -> None:
        run.device.synchronize()
        begun[0] = time.perf_counter()

    hook = run.stages[0].register_forward_pre_hook(start)
    run.pipeline.release_sent = after_action  # type: ignore[method-assign]
    take_step(run)
    run.pipeline.release_sent = release  # type: ignore[method-assign]
    hook.remove()
    return spent[0]


def shares(profile: KernelProfile) -> dict[str, str]:
    """Return the milliseconds of every purpose, and of the kernels with the most."""
    purposes = {name: seconds for name, seconds in purpose_seconds(profile).items() if seconds}
    kernels, calls = Counter[str](), Counter[str]()
    for kernel in profile.kernels:
        kernels[kernel.name] += kernel.seconds  # type: ignore[assignment]
        calls[kernel.name] += 1
    longest = {f"{calls[name]} x {name[:70]}": seconds for name, seconds in kernels.most_common(KERNELS)}
    return {name: f"{seconds * 1e3:.2f} ms" for name, seconds in (purposes | longest).items()}
