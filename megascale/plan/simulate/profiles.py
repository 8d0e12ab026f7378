"""Profiles of hardware and software stacks, from TOML files in `configs/hardware` and `configs/stacks`.

`tools/calibrate.py` fits three `attained` values to published steps: the share of the GEMM peak, a stack's slowdown and
its fixed time. Other values are stated or usual. `configs/errors.toml` has the errors of left-out sources.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from megascale.catalog.accelerators import ACCELERATORS
from megascale.config.profile_files import load_profile, path_of
from megascale.config.section import Count, Section
from megascale.config.toml_reader import read_toml
from megascale.core.errors import ConfigError, Problem
from megascale.plan.account.state_bytes import WeightStorage

Positive = Annotated[float, Field(gt=0)]
Rate = Annotated[float, Field(ge=1e6)]
"""Bytes/s or FLOP/s: a value under 1e6 is a mistake, such as GB/s or TFLOP/s."""
Format = Annotated[str, Field(pattern="^(fp64|fp32|tf32|fp16|bf16|fp8|nvfp4)$")]
Whole = BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)
"""An integer, also in the form 80e9."""
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
ACCELERATORS_BY_NAME = {accelerator.name: accelerator for accelerator in ACCELERATORS}
Generation = Annotated[str, Field(pattern="^20[0-9][0-9]$")]
Kernel = Literal["unfused", "flash1", "triton", "flash2", "flash3"]

LARGE_JOB = 256  # most devices of a job without a loss with scale
SCALE_LOSS = 0.018  # share of a step per doubling beyond LARGE_JOB, fitted on published steps of 257 to 1,024 devices

FP8_RATES = {"row": 0.70, "block": 0.87, "mx": 0.87, "nvfp4": 0.74}
"""FP8 GEMM rates by granularity, relative to tensor-wise. Llama 3 8B on H100 takes 12% longer row-wise (6,424 and 7,186
tokens/s, pytorch/torchtitan@7a04053), MXFP8 steps on B200 and GB300 4% (Megatron-Bridge, tools/calibration). NVFP4's,
over its own peak, is the median of nine steps there; Transformer Engine's GEMMs alone reach 0.62 on B300.
"""


class AttentionShares(Section):
    """Shares of a device's peak attained by an attention kernel."""

    forward: Share = Field(description="share of the peak")
    backward: Share = Field(description="share of the peak")


class AttentionRate(Section):
    """Attention on a processor. Overhead counts as more keys or a larger head, such as for masked scores."""

    rate: Positive = Field(description="FLOP/s")
    keys: NotNegative = Field(description="overhead of a query, in keys")
    width: NotNegative = Field(description="overhead of a score, in elements of a head")


class Measured(Section):
    """A processor core in one dtype. A GEMM takes `gemm_s` + FLOPs / `rate` + bytes / `bandwidth` seconds."""

    rate: Positive = Field(description="FLOP/s of large GEMMs")
    bandwidth: Positive = Field(description="bytes/s of a GEMM's operands and result")
    gemm_s: NotNegative = Field(description="overhead of a GEMM in seconds")
    attention_forward: AttentionRate = Field(description="attention in forward")
    attention_backward: AttentionRate = Field(description="attention in backward")
    elementwise: Positive = Field(description="bytes/s of fused element-wise operations")
    layer_s: NotNegative = Field(description="overhead of a layer's forward in seconds; a backward has twice as much")


def _known(name: str) -> str:
    if name not in ACCELERATORS_BY_NAME:
        raise ValueError(f"'{name}' is not one of {', '.join(ACCELERATORS_BY_NAME)}")
    return name


class Device(Section):
    """An accelerator, or a core of a processor."""

    memory: Annotated[Count, Whole] = Field(description="bytes")
    reserve: Annotated[int, Whole] = Field(3 << 30, ge=0, description="bytes of driver, NCCL and fragmentation")
    bandwidth: Rate = Field(description="bytes/s of memory")
    host_bandwidth: Rate | None = Field(None, description="bytes/s to host memory, each way, if stated")
    units: Count = Field(description="multiprocessors: GEMM tiles in parallel")
    accelerator: Annotated[str, AfterValidator(_known)] | None = Field(None, description="of catalog/accelerators.py")
    peak: dict[Format, Rate] = Field({}, description="FLOP/s by dtype, in place of the accelerator's")
    clock: Share = Field(1.0, description="share of the peak's clock, for devices with a power limit")
    attention: dict[Kernel, AttentionShares] = Field({}, description="attained shares of the 16-bit peak, by kernel")
    measured: dict[str, Measured] = Field({}, description="measured rates of a processor, by dtype")

    @model_validator(mode="after")
    def _check_reserve(self) -> Device:
        if self.memory <= self.reserve:
            raise ValueError(f"memory of {self.memory} bytes is no more than the reserve of {self.reserve}")
        return self

    def attention_shares(self, kernel: Kernel) -> AttentionShares | None:
        """Return the shares of an attention kernel; if missing of the next newer one, else of an older one."""
        kernels, index = get_args(Kernel), get_args(Kernel).index(kernel)
        nearest_first = [*kernels[index:], *kernels[:index][::-1]]
        return next((self.attention[name] for name in nearest_first if name in self.attention), None)

    def multiplies(self, dtype: str) -> bool:
        return dtype in self._peaks

    def peak_of(self, dtype: str) -> float:
        """Return FLOP/s of dense GEMMs; bf16 falls back to fp16. Raises: ConfigError for a dtype without a peak."""
        peaks = self._peaks
        name = "fp16" if dtype == "bf16" and "bf16" not in peaks else dtype
        if name not in peaks:
            hint = f"device.peak has {', '.join(peaks)}" if peaks else "give device.accelerator or device.peak"
            raise ConfigError([Problem("hardware", "train.precision", f"the device multiplies no {name}", hint)])
        return peaks[name] * self.clock

    @property
    def _peaks(self) -> Mapping[str, float]:
        measured = {dtype: rates.rate for dtype, rates in self.measured.items()}
        return {**(ACCELERATORS_BY_NAME[self.accelerator].peak if self.accelerator else {}), **measured, **self.peak}


class Link(Section):
    """A link between devices."""

    bandwidth: Rate = Field(description="bytes/s each way: of a device in a node; of a node, or an island")
    latency: Annotated[float, Field(gt=0, lt=1)] = Field(description="seconds of one message")


class Drives(Section):
    """The NVMe drives of a node. The defaults are usual in data centers: 3.84 TB, PCIe 4, and a rating of one write of
    the whole drive a day during five years.
    """

    count: Count = Field(8, description="drives of a node, to which its devices write in equal parts")
    write: Rate = Field(3.8e9, description="bytes/s of sequential writes to a drive")
    read: Rate = Field(6.9e9, description="bytes/s of sequential reads from a drive")
    rated_bytes: Rate = Field(7.0e15, description="bytes that may be written to a drive in its life")


class Node(Link):
    """The devices of a host."""

    devices: Count = Field(8, description="devices of a node")
    memory: Annotated[int, Whole] = Field(2 << 40, gt=0, lt=2**63, description="bytes of host memory")
    drives: Drives = Drives()
    cores: int = Field(0, ge=0, description="cores, if devices are processes; 0: a core per device")
    memory_bandwidth: Rate | None = Field(None, description="bytes/s of the host's memory, for all devices, if stated")
    turn_s: NotNegative = Field(0.0, description="seconds of a collective per other rank on the same core")
    message: Link | None = Field(None, description="link of point-to-point messages, if different")

    def ranks_per_core(self, world: int) -> float:
        """Count the ranks of a job that take turns on a core, 1 or more."""
        return max(1.0, min(world, self.devices) / self.cores) if self.cores else 1.0


class Network(Link):
    """The links between nodes. Groups of `nodes` share a switch, with 1 / `taper` of the bandwidth above."""

    nodes: Count = Field(2**40, description="nodes under one switch")
    taper: Annotated[float, Field(ge=1)] = Field(1.0, description="oversubscription above that switch")
    rail_only: bool = Field(
        False, description="devices reach those of equal index in other nodes; other traffic passes a node's links too"
    )


class Islands(Link):
    """Equal parts of a cluster, such as sites, with slower links between them. The bandwidth is an island's."""

    devices: Count = Field(description="devices of an island")
    hardware: list[str] = Field(
        [], description="profiles of the islands in turn, files beside this one; by default all are as it"
    )


class Attained(Section):
    """Attained shares of stated rates: `gemm` is fitted, other values are usual or measured."""

    gemm: Share | dict[Generation, Share] = Field(0.72, description="of GEMMs; or by year of libraries, { 2021 = 0.7 }")
    fp8: dict[str, Share] = Field(FP8_RATES, description="of FP8 GEMMs by granularity of scales, over tensor-wise")
    memory: Share = Field(0.75, description="of memory bandwidth, in element-wise operations")
    link: Share = Field(0.70, description="of bandwidth inside a node, in collectives")
    network: Share = Field(0.70, description="of bandwidth between nodes, in collectives")
    overlap: Share = Field(0.75, description="share of overlapped communication without a slowdown of compute")

    def gemm_share(self, generation: int) -> float:
        """Return the share of the peak for libraries of a year; if missing, for the next older year."""
        if isinstance(self.gemm, float):
            return self.gemm
        years = sorted(self.gemm)
        return self.gemm[max([year for year in years if int(year) <= generation] or years[:1])]


class Overlaps(Section):
    """Communication overlapped with compute by a stack."""

    tp: Literal["none", "backward", "large", "all"] = Field(
        "none", description="backward: with wgrad; all: with every GEMM; large: with those that this trainer overlaps"
    )
    pp: bool = Field(False, description="asynchronous sends and receives")
    dp: bool = Field(False, description="gradient reductions and weight all-gathers overlap with compute")


class Cost(Section):
    """Factors and fixed times of a stack on its hardware."""

    slowdown: Positive = Field(1.0, description="factor of all compute times")
    passes: Positive = Field(1.2, description="memory traffic of element-wise operations, relative to fused ones")
    step_s: NotNegative = Field(0.05, description="fixed seconds of a step, such as data and logging")
    scale_loss: Fraction = Field(SCALE_LOSS, description=f"share of a step per doubling of devices beyond {LARGE_JOB}")


class MeasuredStack(Section):
    """The measured part of a stack: overlap and cost."""

    overlaps: Overlaps = Overlaps()
    attained: Cost = Cost()


class Hardware(Section):
    """A cluster of equal nodes."""

    name: str = Field("", description="name of the file")
    device: Device
    node: Node
    network: Network
    islands: Islands | None = Field(None, description="none if the network joins all nodes alike")
    attained: Attained = Attained()
    stack: MeasuredStack | None = Field(None, description="measured on this machine, in place of a stack's values")

    def store_rates(self, store: str) -> tuple[float, float]:
        """Return bytes/s of a device to a store of saved tensors, and back: to host memory over the device's link, with
        no limit if none is stated, and to NVMe over both.
        """
        node, link = self.node, (self.device.host_bandwidth or math.inf) * self.attained.link
        written, read = (rate * node.drives.count / node.devices for rate in (node.drives.write, node.drives.read))
        rates = {"device": (math.inf, math.inf), "host": (link, link), "nvme": (min(link, written), min(link, read))}
        return rates[store]

    def memory_limit(self, world: int) -> int:
        """Bytes for the tensors of a rank of `world`, on the smallest device; ranks may share a device."""
        devices = [(machine.device, machine.node.ranks_per_core(world)) for machine in self.machines]
        return min(int((device.memory - device.reserve) / ranks) for device, ranks in devices)

    @property
    def machines(self) -> list[Hardware]:
        """The hardware of the islands in turn: this one, or profiles with its links between islands."""
        if self.islands is None or not self.islands.hardware:
            return [self]
        between = {"islands": self.islands.model_copy(update={"hardware": []})}
        return [_machine(name).model_copy(update=between) for name in self.islands.hardware]


class Stack(MeasuredStack):
    """A trainer and its libraries."""

    name: str = Field("", description="name of the file")
    generation: int = Field(2024, ge=2016, le=2100, description="year of the libraries, for attained.gemm of hardware")
    attention: Kernel = Field("flash2", description="the attention kernel")
    gradient_bytes: Literal[0, 2, 4, 8] = Field(0, description="of a reduced element; 0: of the accumulation dtype")
    reduces_each: bool = Field(False, description="with zero = 2 gradients are reduced after every micro-batch")
    fp8_weights: Literal["beside", "instead"] = Field("beside", description="beside 16-bit weights, or instead")
    masters_alone: bool = Field(False, description="sharded weights are master weights alone, cast at each gather")
    host_s: NotNegative = Field(0.0, description="seconds to launch a layer's forward; a backward takes twice as long")
    launch_blocking: bool = Field(False, description="CUDA_LAUNCH_BLOCKING: the device waits for every launch")
    stops_early: bool = Field(False, description="full recomputation leaves out a block's last GEMM")
    spares_reads: bool = Field(False, description="norms and activations find amaxes for FP8 casts, or cast")
    imbalance: Annotated[float, Field(ge=1)] = Field(
        1.0, description="rows of experts on the fullest rank along ep, over the mean; 1: equal loads"
    )

    @property
    def storage(self) -> WeightStorage:
        return WeightStorage(self.fp8_weights, self.masters_alone, self.gradient_bytes)


def hardware(name: str) -> Hardware:
    """Read a hardware profile: a name in `configs/hardware`, a file, or `this`. Raises: ConfigError."""
    profile = load_profile(name, "hardware", "--hardware", Hardware)
    if not profile.islands:
        return profile
    path = path_of("hardware", name)
    names = [str(path.parent / each) if each.endswith(".toml") else each for each in profile.islands.hardware]
    for island in names:  # a mistake is told before anything is planned
        load_profile(island, "hardware", "islands.hardware", Hardware, str(path))
    islands = profile.islands.model_copy(update={"hardware": names})
    return profile.model_copy(update={"islands": islands})


@cache
def _machine(name: str) -> Hardware:
    return load_profile(name, "hardware", "islands.hardware", Hardware)


def stack(name: str) -> Stack:
    """Read a stack profile: a name in `configs/stacks`, or a file. Raises: ConfigError."""
    return load_profile(name, "stacks", "--stack", Stack)


def stack_on(hardware: Hardware, name: str) -> Stack:
    """Read a stack profile, with measured values of the hardware in place of the stack's. Raises: ConfigError."""
    profile = stack(name)
    return profile.model_copy(update=dict(hardware.stack)) if hardware.stack else profile


def expected_error(hardware: Hardware) -> float | None:
    """Return the mean relative error of step time over left-out sources of the accelerator; None without sources."""
    error: float | None = _errors()["error"].get(hardware.device.accelerator or "")
    return None if hardware.stack or hardware.islands else error


def measured(hardware: Hardware, stack: Stack) -> bool:
    """True if the fit has measured steps of the stack on the hardware."""
    return bool(hardware.stack) or stack.name in _errors()["measured"].get(hardware.name, [])


@lru_cache(1)
def _errors() -> dict[str, Any]:
    return read_toml(str(path_of("", "errors"))).tree
