"""A hardware profile of this machine's processor, for `megascale plan --hardware this` (`megascale bench profile`).

Products, attention and links are measured by themselves, by as many ranks at once as there are cores. What a step does
besides (element-wise operations, Python between them, the optimizer) is measured in steps of the trainer itself, of
small models: the planner says what their products and their attention take, and least squares divide the rest. What
turns on a shared core cost is what a job of twice as many ranks takes longer than the planner says without them, at the
speed that the machine has just then: between its steps, ranks with a core each take steps that the planner knows.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from megascale.account.traffic import calls
from megascale.bench import links, processor
from megascale.bench.fit import Sample, costs, error, rate
from megascale.catalog.precisions import PRECISIONS
from megascale.comm.mesh import Mesh, open_mesh, single
from megascale.comm.totals import meet
from megascale.config.run import RunConfig
from megascale.core.errors import MegascaleError
from megascale.core.process import usable_cores
from megascale.core.rank import Rank
from megascale.device import Device
from megascale.layout.topology import Topology
from megascale.simulate import profiles
from megascale.simulate.profiles import Hardware
from megascale.simulate.step_time import estimate
from megascale.train.build import Run, build, mesh_of
from megascale.train.gc import ScheduledCollection
from megascale.train.step import train_step
from megascale.train.stop import Stop

FORMATS = ("fp32", "bf16")
"""The precisions that are measured. Steps in the first one tell what no format changes."""

RANKS = 1024
"""More than one machine ever has."""


class Case(NamedTuple):
    """A small model and its batch, of which steps are timed. A head is HEAD wide."""

    layers: int
    hidden: int
    ffn: int
    seq: int
    vocab: int
    micro: int
    total: int


CASES = (
    Case(1, 64, 192, 32, 256, 1, 4),
    Case(4, 64, 192, 32, 256, 1, 4),
    Case(2, 128, 384, 128, 512, 2, 4),
    Case(6, 128, 384, 128, 512, 2, 4),
    Case(1, 128, 384, 256, 4096, 4, 4),
    Case(1, 256, 704, 32, 16384, 1, 1),
    Case(2, 256, 704, 128, 512, 2, 2),
    Case(3, 256, 704, 256, 512, 4, 4),
    Case(2, 384, 1024, 256, 512, 2, 2),
)
"""Few layers and many, narrow and wide, with a large vocabulary and with a small one: what costs differ in."""

CROWDED = Case(4, 256, 704, 256, 512, 2, 16)
"""The model that ranks which share cores train, in tp 2 and pp 2; its batch is that of each replica."""

APART = CROWDED._replace(total=4)
"""The model that one rank a core trains between these steps, each by itself."""

UNKNOWN = 1e9
"""The bandwidth of the memory, bytes/s, until the steps in the first precision have told it."""

HEAD = 32
ROUNDS = 5
CROWDED_ROUNDS = 10
WARM_UP = 1

ERROR = 0.3
"""The largest mean error of what was fitted that makes sense."""

BUSY = 2.0
"""Rounds of one measurement that differ so much were disturbed."""

Say = Callable[[str], object]


@dataclass(frozen=True)
class Samples:
    """The measurements in one precision, by all ranks together; `steps` of each case."""

    products: list[Sample]
    attend: list[Sample]
    attend_back: list[Sample]
    steps: list[Sample]


@dataclass(frozen=True)
class Crowd:
    """Seconds of steps of CROWDED with so many ranks, more than there are cores, and of those of APART between them."""

    ranks: int
    seconds: tuple[float, ...]
    apart: tuple[float, ...]


@dataclass(frozen=True)
class Quality:
    """How well something was measured. `error`: the mean relative error of the costs that were found; `ratio`: the
    slowest round over the quickest, the median over what was measured.
    """

    error: float
    ratio: float


@dataclass(frozen=True)
class Machine:
    """A hardware profile, as tables, and how well its parts were measured."""

    tree: dict[str, Any]
    quality: dict[str, Quality]

    def costs(self, name: str, samples: Sequence[Sample]) -> tuple[float, ...]:
        """Fit the seconds of one of each thing that samples took, and note the quality of the fit."""
        found = costs(samples)
        self.quality[name] = Quality(error(samples, found), statistics.median(each.ratio for each in samples))
        return found

    def check(self) -> None:
        """Raises: MegascaleError if something was measured that makes no sense."""
        for name, found in self.quality.items():
            if found.error > ERROR or found.ratio > BUSY:
                what = f"{name}: rounds differ {found.ratio:.2f} times, and what was found is {found.error:.0%} off"
                raise MegascaleError(what, mend="measure again when the machine has less else to do")


def crowded(device: Device, rank: Rank) -> Crowd:
    """Train with all ranks of a job that was brought together, several on a core; between steps, with one on each."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        config = _crowded_config(rank.world, folder)
        run = build(config, mesh_of(config, rank, device), device, Stop())
        apart = build(_config(APART, FORMATS[0], folder), single(), device, Stop())
    seconds: list[float] = []
    own: list[float] = []
    with ScheduledCollection():
        for _ in range(WARM_UP + CROWDED_ROUNDS):
            meet(run.mesh, device.torch)
            start = time.perf_counter()
            _step(run)
            meet(run.mesh, device.torch)
            seconds.append(time.perf_counter() - start)
            if rank.rank < usable_cores():
                own.append(_own_seconds(apart))
    found = [each for some in run.mesh.world.control.gather(own[WARM_UP:], "steps alone") for each in some]
    return Crowd(rank.world, tuple(seconds[WARM_UP:]), tuple(found))


def _crowded_config(ranks: int, folder: str) -> RunConfig:
    parallel = {"tp": 2 - ranks % 2, "pp": 2 if ranks % 4 == 0 else 1}
    shards = ranks // math.prod(parallel.values())
    return _config(CROWDED._replace(total=CROWDED.total * shards), FORMATS[0], folder, dp=shards, **parallel)


def measure(
    device: Device, rank: int, world: int, say: Say, formats: Sequence[str] = FORMATS, crowd: Crowd | None = None
) -> Machine | None:
    """Measure with all ranks of a job that was brought together, one on a core. The profile, on the first rank, with
    what ranks that share cores wait if it is known what a `crowd` takes.

    Raises: MegascaleError if what was measured makes no sense
    """
    torch.set_num_threads(1)
    mesh = open_mesh(Topology(dp=world), rank, tied=False)
    say("links")
    timed = links.measure(device, rank, world, links.SIZES)
    found = {name: _samples(name, mesh, device, say) for name in formats}
    return machine_of(device.memory(), timed, found, crowd) if rank == 0 else None


def _samples(name: str, mesh: Mesh, device: Device, say: Say) -> Samples:
    dtype = getattr(torch, PRECISIONS[name].facts["compute"])
    say(f"products and attention in {name}")
    products = _together(mesh, lambda: processor.products(dtype))
    attend = _together(mesh, lambda: processor.attention(dtype, backward=False))
    attend_back = _together(mesh, lambda: processor.attention(dtype, backward=True))
    say(f"steps in {name}")
    steps = [_together(mesh, partial(_steps, case, name, device))[0] for case in CASES]
    return Samples(products, attend, attend_back, steps)


def _together(mesh: Mesh, work: Callable[[], list[Sample]]) -> list[Sample]:
    """Gather what all ranks measure at the same time."""
    mesh.world.control.barrier("measuring")
    found = [[sample.amounts, sample.seconds] for sample in work()]
    ranks = zip(*mesh.world.control.gather(found, "what was measured"), strict=True)
    return [Sample(tuple(same[0][0]), tuple(s for _, seconds in same for s in seconds)) for same in ranks]


def machine_of(
    memory: int, timed: Sequence[links.Timed], found: Mapping[str, Samples], crowd: Crowd | None = None
) -> Machine:
    """The profile of a machine with so many bytes, from what was measured on it.

    Raises: MegascaleError if it makes no sense
    """
    cores = usable_cores()
    collectives, messages = links.way(timed, links.COLLECTIVES), links.way(timed, ["message"])
    tree = {
        "device": {"memory": memory // cores, "reserve": 0, "bandwidth": UNKNOWN, "units": 1, "measured": {}},
        "node": {"devices": RANKS, "cores": cores, **vars(collectives), "message": vars(messages)},
        "network": vars(messages),  # between machines like this one nothing was measured
        "attained": {"gemm": 1.0, "memory": 1.0, "link": 1.0, "network": 1.0},
        "stack": {"hides": {"pp": True}, "attained": {"passes": 1.0, "step_s": 0.0}},
    }
    machine = Machine(tree, {})
    for name, samples in found.items():
        call, flop, byte = machine.costs(f"products in {name}", samples.products)
        tree["device"]["measured"][name] = {
            "rate": rate(flop), "bandwidth": rate(byte), "product_s": call,
            "attend": _attention(machine.costs(f"attention in {name}", samples.attend)),
            "attend_back": _attention(machine.costs(f"attention's backward in {name}", samples.attend_back)),
        }  # fmt: skip
        _add_steps(machine, name, samples.steps, first=name == next(iter(found)))
    if crowd:
        _add_turns(machine, crowd)
    machine.check()
    return machine


def _attention(found: tuple[float, ...]) -> dict[str, float]:
    flop, key, number = found
    flop = 1 / rate(flop)
    return {"rate": rate(flop), "keys": key / flop, "width": number / flop}


def _steps(case: Case, name: str, device: Device) -> list[Sample]:
    """Steps of the trainer, in seconds of this process's time."""
    with tempfile.TemporaryDirectory() as folder:
        run = build(_config(case, name, folder), single(), device, Stop())
    with ScheduledCollection():
        seconds = [_own_seconds(run) for _ in range(WARM_UP + ROUNDS)]
    return [Sample((), tuple(seconds[WARM_UP:]))]


def _own_seconds(run: Run) -> float:
    """Take a step; return the seconds of processor time that it takes."""
    start = time.process_time()
    _step(run)
    return time.process_time() - start


def _step(run: Run) -> None:
    train_step(run, run.train.batch(run.progress.samples))
    run.mesh.recorder.settle()


def _config(case: Case, name: str, folder: str, **parallel: int) -> RunConfig:
    tree = {
        "name": "profile",
        "model": {
            "num_layers": case.layers, "hidden_size": case.hidden, "num_heads": case.hidden // HEAD,
            "ffn_size": case.ffn, "vocab_size": case.vocab, "seq_length": case.seq, "norm": "rmsnorm",
            "activation": "swiglu", "position": "rope", "bias": False, "tie_embeddings": False,
        },
        "parallel": parallel,
        "batch": {"micro": case.micro, "global": case.total},
        "train": {"steps": WARM_UP + CROWDED_ROUNDS, "precision": name},
        "optimizer": {"lr": 1e-3},
        "data": {"mock": True},
        "checkpoint": {"every": 0},
        "observe": {"dir": folder, "tensorboard": False},
    }  # fmt: skip
    return RunConfig.model_validate(tree).resolve(None)


def _add_turns(machine: Machine, crowd: Crowd) -> None:
    """Add `turn_s`: the seconds by which a crowd's steps exceed its ranks' work on the cores, per communication."""
    hardware, config = Hardware.model_validate(machine.tree), _crowded_config(crowd.ranks, "")
    stack, others = profiles.stack_on(hardware, "megascale"), hardware.node.ranks_a_core(crowd.ranks) - 1
    found, apart = Sample((), crowd.seconds), Sample((), crowd.apart)
    pace = estimate(_config(APART, FORMATS[0], ""), hardware, stack).step_s / apart.median
    waited = found.median * pace - estimate(config, hardware, stack).step_s
    machine.tree["node"]["turn_s"] = max(0.0, waited) / (others * calls(config)) if others else 0.0
    machine.quality[f"steps of {crowd.ranks} ranks"] = Quality(0.0, found.ratio)
    machine.quality["steps between them"] = Quality(abs(1 - pace), apart.ratio)


def _add_steps(machine: Machine, name: str, steps: Sequence[Sample], *, first: bool) -> None:
    """Divide what steps take besides their products and attention: among element-wise operations by their bytes,
    layers, and, in the `first` format, the optimizer by its bytes, and the step. The others know the last two.
    """
    device, step_s = machine.tree["device"], machine.tree["stack"]["attained"]["step_s"]
    found = device["measured"][name]
    found |= {"elementwise": 1.0, "layer_s": 0.0}  # a byte a second: the planner's seconds are bytes
    hardware = Hardware.model_validate(machine.tree | {"device": device})
    slow = hardware.device.model_copy(update={"bandwidth": 1.0})
    hardware = hardware.model_copy(update={"device": slow})
    stack, samples = profiles.stack_on(hardware, "megascale"), []
    for case, step in zip(CASES, steps, strict=True):
        config = _config(case, name, "")
        causes = estimate(config, hardware, stack).causes
        known, layers = causes["gemm"] + causes["attention"], 3.0 * case.layers * config.micro_batches
        amounts: tuple[float, ...] = causes["elementwise"], layers, causes["optimizer"], 1.0
        if not first:
            known, amounts = known + causes["optimizer"] / device["bandwidth"] + step_s, amounts[:2]
        samples.append(Sample(amounts, step.seconds, known))
    byte, layer, *once = machine.costs(f"steps in {name}", samples)
    found |= {"elementwise": rate(byte), "layer_s": layer}
    if first:
        device["bandwidth"], machine.tree["stack"]["attained"]["step_s"] = rate(once[0]), once[1]


def table(machine: Machine) -> str:
    """How well it was measured, for people."""
    lines = [f"{'measured':30} {'slowest / quickest':>19} {'mean error':>11}"]
    lines += [f"{name:30} {found.ratio:>19.2f} {found.error:>11.1%}" for name, found in machine.quality.items()]
    return "\n".join(lines)


def as_json(machine: Machine) -> dict[str, Any]:
    """The profile and its quality as plain values."""
    return {"profile": machine.tree, "quality": {name: vars(found) for name, found in machine.quality.items()}}
