"""Profiles of hardware and of software stacks, each a TOML file of `configs/hardware` or `configs/stacks`.

Of `attained` values `tools/calibrate.py` fits the share of the GEMM peak and a stack's slowdown and fixed time to
published steps; others are usual values. All else is stated. `configs/errors.toml` has the errors of left-out sources.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from megascale.account.memory import Holding
from megascale.account.peaks import ACCELERATORS
from megascale.config.files import read
from megascale.config.profile import read_section
from megascale.config.section import Count, Section
from megascale.core.errors import ConfigError, Problem
from megascale.core.registry import nearest

Positive = Annotated[float, Field(gt=0)]
Rate = Annotated[float, Field(ge=1e6)]
"""Bytes or FLOPs a second: less than 1e6 is a mistake, such as GB/s or TFLOP/s."""
Format = Annotated[str, Field(pattern="^(fp64|fp32|tf32|fp16|bf16|fp8)$")]
Whole = BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)
"""An integer that may be written as 80e9."""
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Profile = TypeVar("Profile", "Hardware", "Stack")
NAMES = {accelerator.name: accelerator for accelerator in ACCELERATORS}
Generation = Annotated[str, Field(pattern="^20[0-9][0-9]$")]
Kernel = Literal["unfused", "flash1", "triton", "flash2", "flash3"]

THIS = "this"
"""The hardware profile of this machine, which `megascale bench profile` writes."""

SCALE = 256
"""Devices up to which a step loses nothing to their number."""

SCALE_LOSS = 0.018
"""Share of a step for each doubling of the devices beyond SCALE, fitted on published steps of 257 to 1,024 devices."""

FP8_RATES = {"row": 0.70, "block": 0.87}
"""By scale, over tensor-wise GEMMs: Llama 3 8B on H100 takes 12% longer row-wise (pytorch/torchtitan@7a04053: 6,424 and
7,186 tokens/s), steps in MXFP8 on B200 and GB300 take 4% longer (Megatron-Bridge, tools/calibration).
"""


class Reached(Section):
    """Shares of a device's peak that an attention kernel reaches."""

    forward: Share = Field(description="share of the peak")
    backward: Share = Field(description="share of the peak")


class Attention(Section):
    """Attention on a processor, which also computes some masked scores."""

    rate: Positive = Field(description="FLOP/s")
    keys: NotNegative = Field(description="keys that a query takes time for, besides those that it sees")
    width: NotNegative = Field(description="elements of a head that a score takes time for, besides its width")


class Measured(Section):
    """One core of a processor in one dtype. A GEMM takes `product_s` + FLOPs / `rate` + bytes / `bandwidth`."""

    rate: Positive = Field(description="FLOP/s of large GEMMs")
    bandwidth: Positive = Field(description="bytes/s of a GEMM's operands and result")
    product_s: NotNegative = Field(description="seconds of a GEMM, however small")
    attend: Attention = Field(description="attention in a forward")
    attend_back: Attention = Field(description="attention in a backward")
    elementwise: Positive = Field(description="bytes/s of element-wise operations, were they fused")
    layer_s: NotNegative = Field(description="seconds of a layer's forward, however small; a backward has two")


def _known(name: str) -> str:
    if name not in NAMES:
        raise ValueError(f"'{name}' is not one of {', '.join(NAMES)}")
    return name


class Device(Section):
    """One accelerator, or one core of a processor."""

    memory: Annotated[Count, Whole] = Field(description="bytes")
    reserve: Annotated[int, Whole] = Field(3 << 30, ge=0, description="bytes of the driver, of NCCL and of fragments")
    bandwidth: Rate = Field(description="bytes/s of its memory")
    units: Count = Field(description="multiprocessors: tiles of a GEMM that are computed at once")
    accelerator: Annotated[str, AfterValidator(_known)] | None = Field(None, description="a name of account/peaks.py")
    peak: dict[Format, Rate] = Field({}, description="FLOP/s by format, where they are not the accelerator's")
    clock: Share = Field(1.0, description="share of the clock at which the peak is stated, where power is limited")
    attention: dict[Kernel, Reached] = Field({}, description="what kernels reach of the 16-bit peak")
    measured: dict[str, Measured] = Field({}, description="a processor's own times, by format")

    @model_validator(mode="after")
    def _has_room(self) -> Device:
        if self.memory <= self.reserve:
            raise ValueError(f"memory of {self.memory} bytes is no more than the reserve of {self.reserve}")
        return self

    def reached(self, kernel: Kernel) -> Reached | None:
        """The shares of an attention kernel, or else of the next newer one with shares, or of an older one."""
        kernels, index = get_args(Kernel), get_args(Kernel).index(kernel)
        nearest_first = [*kernels[index:], *kernels[:index][::-1]]
        return next((self.attention[name] for name in nearest_first if name in self.attention), None)

    def multiplies(self, dtype: str) -> bool:
        """Tell whether the device has a peak in a dtype."""
        return dtype in self._peaks

    def peak_of(self, dtype: str) -> float:
        """FLOP/s of dense GEMMs; bf16 is as fast as fp16 if it has no peak. Raises: ConfigError for a dtype without."""
        peaks = self._peaks
        name = "fp16" if dtype == "bf16" and "bf16" not in peaks else dtype
        if name not in peaks:
            hint = f"device.peak has {', '.join(peaks)}" if peaks else "give device.accelerator or device.peak"
            raise ConfigError([Problem("hardware", "train.precision", f"the device multiplies no {name}", hint)])
        return peaks[name] * self.clock

    @property
    def _peaks(self) -> Mapping[str, float]:
        measured = {dtype: rates.rate for dtype, rates in self.measured.items()}
        return {**(NAMES[self.accelerator].peak if self.accelerator else {}), **measured, **self.peak}


class Link(Section):
    """A link between devices."""

    bandwidth: Rate = Field(description="bytes/s each way: of a device in a node; of a node in the network")
    latency: Annotated[float, Field(gt=0, lt=1)] = Field(description="seconds of one message")


class Node(Link):
    """The devices that share a host."""

    devices: Count = Field(8, description="devices of a node")
    cores: int = Field(0, ge=0, description="cores that compute, where devices are processes; 0: each has its own")
    turn_s: NotNegative = Field(0.0, description="seconds of a collective for each other rank that shares a core")
    message: Link | None = Field(None, description="the link of point-to-point messages, where it is another")

    def ranks_a_core(self, world: int) -> float:
        """Ranks of a job that take turns on a core, 1 or more."""
        return max(1.0, min(world, self.devices) / self.cores) if self.cores else 1.0


class Network(Link):
    """The links between nodes. Groups of `nodes` share a switch, with 1 / `taper` of the bandwidth above."""

    nodes: Count = Field(2**40, description="nodes under one switch")
    taper: Annotated[float, Field(ge=1)] = Field(1.0, description="oversubscription above that switch")


class Attained(Section):
    """Shares of the stated rates that a machine reaches: `gemm` is fitted, others are usual or measured values."""

    gemm: Share | dict[Generation, Share] = Field(0.72, description="of GEMMs; or by year of libraries, { 2021 = 0.7 }")
    fp8: dict[str, Share] = Field(FP8_RATES, description="of FP8 GEMMs by what shares a scale, over tensor-wise ones")
    memory: Share = Field(0.75, description="share of the memory's bandwidth that element-wise operations reach")
    link: Share = Field(0.70, description="share of the bandwidth inside a node that collectives reach")
    network: Share = Field(0.70, description="share of the bandwidth between nodes that collectives reach")
    hiding: Share = Field(0.75, description="share of overlapped communication that does not slow compute down")

    def gemm_share(self, generation: int) -> float:
        """The share of the peak with libraries of a year, or else with the next older ones in the profile."""
        if isinstance(self.gemm, float):
            return self.gemm
        years = sorted(self.gemm)
        return self.gemm[max([year for year in years if int(year) <= generation] or years[:1])]


class Hides(Section):
    """The communication that a stack overlaps with compute."""

    tp: Literal["none", "backward", "all"] = Field("none", description="backward: under wgrad; all: under every GEMM")
    pp: bool = Field(False, description="sends and receives do not wait for each other")
    dp: bool = Field(False, description="gradients are reduced and weights gathered under other chunks' work")


class Cost(Section):
    """Factors and fixed times of a stack on its hardware."""

    slowdown: Positive = Field(1.0, description="factor of all compute times")
    passes: Positive = Field(1.2, description="passes of element-wise operations over memory, for one if fused")
    step_s: NotNegative = Field(0.05, description="fixed seconds of a step, such as data and logging")
    scale_loss: Fraction = Field(SCALE_LOSS, description=f"share of a step for each doubling of devices beyond {SCALE}")


class Found(Section):
    """The measured part of a stack: what it overlaps, and what it costs."""

    hides: Hides = Hides()
    attained: Cost = Cost()


class Hardware(Section):
    """A cluster of nodes of one kind."""

    name: str = Field("", description="name of the file")
    device: Device
    node: Node
    network: Network
    attained: Attained = Attained()
    stack: Found | None = Field(None, description="stacks on this machine as measured, in place of their own values")

    def room(self, world: int) -> int:
        """Bytes for the tensors of each of `world` ranks, which may share a device."""
        return int((self.device.memory - self.device.reserve) / self.node.ranks_a_core(world))


class Stack(Found):
    """A trainer and its libraries."""

    name: str = Field("", description="name of the file")
    generation: int = Field(2024, ge=2016, le=2100, description="year of its libraries, for attained.gemm of hardware")
    attention: Kernel = Field("flash2", description="the attention kernel")
    gradient_bytes: Literal[0, 2, 4, 8] = Field(0, description="of an element that is reduced; 0: as it is accumulated")
    shards_weights: bool = Field(False, description="ZeRO 3: layers are gathered before they are used")
    reduces_each: bool = Field(False, description="with zero = 2 gradients are reduced after every micro-batch")
    fp8_weights: Literal["beside", "instead"] = Field("beside", description="beside weights in 16 bits, or instead")
    host_s: NotNegative = Field(0.0, description="seconds to launch a layer's forward; a backward takes twice that")
    launch_blocking: bool = Field(False, description="CUDA_LAUNCH_BLOCKING: the device waits for every launch")
    stops_early: bool = Field(False, description="full recomputation leaves out a block's result, which nothing needs")

    @property
    def holding(self) -> Holding:
        """How ranks hold weights, for their memory."""
        return Holding(self.shards_weights, self.fp8_weights)


def hardware(name: str) -> Hardware:
    """Read a hardware profile: a name in `configs/hardware`, a file, or `this`. Raises: ConfigError for a mistake."""
    return _load(name, "hardware", "--hardware", Hardware)


def stack(name: str) -> Stack:
    """Read a stack profile: a name in `configs/stacks`, or a file. Raises: ConfigError for a mistake."""
    return _load(name, "stacks", "--stack", Stack)


def stack_on(hardware: Hardware, name: str) -> Stack:
    """Read a stack, with values measured on this hardware in place of its own. Raises: ConfigError as `stack`."""
    profile = stack(name)
    return profile.model_copy(update=dict(hardware.stack)) if hardware.stack else profile


def expected_error(hardware: Hardware, stack: Stack) -> float | None:
    """The mean error of step time for left-out sources of this accelerator, as a share; None without sources."""
    error: float | None = _errors()["error"].get(hardware.device.accelerator or "")
    return None if hardware.stack else error


def measured(hardware: Hardware, stack: Stack) -> bool:
    """Tell whether measured steps of this stack on this hardware are in the fit."""
    return bool(hardware.stack) or stack.name in _errors()["measured"].get(hardware.name, [])


def names(folder: str) -> list[str]:
    """The names of the profiles in a folder of `configs`."""
    return sorted(path.stem for path in (_configs() / folder).glob("*.toml"))


def path_of(folder: str, name: str) -> Path:
    """The path of a profile's file. The profile of `this` machine is in the user's configuration folder."""
    if (folder, name) == ("hardware", THIS):
        home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        return Path(home) / "megascale" / "hardware" / f"{THIS}.toml"
    return Path(name) if name.endswith(".toml") else _configs() / folder / f"{name}.toml"


def _configs() -> Path:
    """The folder of profiles: in the repository, or where an installation puts it."""
    repository = Path(__file__).parents[2] / "configs"
    return repository if repository.is_dir() else Path(sysconfig.get_path("data")) / "share/megascale/configs"


@lru_cache(1)
def _errors() -> dict[str, Any]:
    return read(str(_configs() / "errors.toml")).tree


def _load(name: str, folder: str, option: str, profile: type[Profile]) -> Profile:
    path = path_of(folder, name)
    if path.is_file() or name.endswith(".toml"):
        return read_section(str(path), profile, name=path.stem)
    if (folder, name) == ("hardware", THIS):
        hint = "`megascale bench profile` measures it"
        raise ConfigError([Problem(str(path), "", "this machine has not been measured", hint)])
    known, close = names(folder), nearest(name, names(folder))
    alike = [profile_name for profile_name in known if profile_name.startswith(name)] or ([close] if close else known)
    hint = f"did you mean '{alike[0]}'?" if len(alike) == 1 else f"one of {', '.join(alike)}, or a file of your own"
    raise ConfigError([Problem("command line", option, f"there is no profile '{name}'", hint)])
