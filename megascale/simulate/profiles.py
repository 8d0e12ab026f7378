"""Profiles of the hardware and the software stack that a plan is made for, each a TOML file of `configs/hardware` or
`configs/stacks`.

Facts that somebody states are kept apart from `attained`. Of that the share of the GEMM peak, a stack's slowdown and
its fixed time are fitted to published steps (`tools/calibrate.py`); the others have usual values.
`configs/errors.toml` says how far plans were off where the fit had not seen the source.
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
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
NAMES = {accelerator.name: accelerator for accelerator in ACCELERATORS}
Generation = Annotated[str, Field(pattern="^20[0-9][0-9]$")]
Kernel = Literal["unfused", "flash1", "triton", "flash2", "flash3"]

THIS = "this"
"""The name of this machine's hardware profile, which `megascale bench profile` writes."""

OPTIONS = {"hardware": "--hardware", "stacks": "--stack"}

SCALE = 256
"""Devices up to which a step loses nothing to their number."""

SCALE_LOSS = 0.018
"""Share of a step that each doubling of the devices beyond SCALE costs: fitted by tools/calibrate.py, for all
stacks together, on published steps of 257 to 1,024 devices.
"""

FP8_RATES = {"row": 0.70, "block": 0.87}
"""Such that row-wise steps of Llama 3 8B on H100 take 12% longer than tensor-wise ones (pytorch/torchtitan@7a04053:
6,424 and 7,186 tokens/s), and MXFP8 ones on B200 and GB300 4% (Megatron-Bridge, tools/calibration).
"""


class Reached(Section):
    """Shares of a device's peak that a kernel reaches."""

    forward: Share = Field(description="share of the peak")
    backward: Share = Field(description="share of the peak")


class Attention(Section):
    """Attention on a processor, which also computes some scores that the mask hides."""

    rate: Positive = Field(description="FLOP/s")
    keys: NotNegative = Field(description="keys that a query takes time for, besides those that it sees")
    width: NotNegative = Field(description="elements of a head that a score takes time for, besides its width")


class Measured(Section):
    """Rates of a process on one core of a processor, in one number format. A GEMM takes `product_s` + FLOPs / `rate` +
    bytes of its operands and result / `bandwidth`.
    """

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


Whole = BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)
"""An integer that may be written as 80e9."""


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
        """The shares of an attention kernel, or of the next newer one that is named, or else of an older one."""
        kernels = get_args(Kernel)
        newer, older = kernels[kernels.index(kernel) :], kernels[: kernels.index(kernel)]
        return next((self.attention[each] for each in (*newer, *older[::-1]) if each in self.attention), None)

    @property
    def room(self) -> int:
        """Bytes for a rank's tensors."""
        return self.memory - self.reserve

    def multiplies(self, number_format: str) -> bool:
        """Tell whether the device has a peak in a format."""
        return number_format in self._peaks

    def peak_of(self, number_format: str) -> float:
        """FLOP/s of dense GEMMs.

        Raises: ConfigError for a format that the device does not multiply.
        """
        known = self._peaks
        if number_format == "bf16" and "bf16" not in known:  # as fast as the other 16-bit format, where that is there
            number_format = "fp16"
        if number_format not in known:
            mend = f"device.peak has {', '.join(known)}" if known else "give device.accelerator or device.peak"
            found = f"the device multiplies no {number_format}"
            raise ConfigError([Problem("hardware", "train.precision", found, mend)])
        return known[number_format] * self.clock

    @property
    def _peaks(self) -> Mapping[str, float]:
        measured = {name: found.rate for name, found in self.measured.items()}
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
    """The links between nodes. Groups of `nodes` share a switch; above it is 1 / `taper` of the bandwidth."""

    nodes: Count = Field(2**40, description="nodes under one switch")
    taper: Annotated[float, Field(ge=1)] = Field(1.0, description="oversubscription above that switch")


class Attained(Section):
    """Shares of the stated rates that a machine reaches. Only `gemm` is fitted; the others are usual values, which the
    profile of a machine that was measured may state.
    """

    gemm: Share | dict[Generation, Share] = Field(0.72, description="of GEMMs; or by year of libraries, { 2021 = 0.7 }")
    fp8: dict[str, Share] = Field(FP8_RATES, description="of FP8 GEMMs by what shares a scale, over tensor-wise ones")
    memory: Share = Field(0.75, description="share of the memory's bandwidth that element-wise operations reach")
    link: Share = Field(0.70, description="share of the bandwidth inside a node that collectives reach")
    network: Share = Field(0.70, description="share of the bandwidth between nodes that collectives reach")
    hiding: Share = Field(0.75, description="share of overlapped communication that does not slow compute down")

    def gemm_share(self, generation: int) -> float:
        """The share of the peak with libraries of a year: that of the newest that are no newer."""
        if isinstance(self.gemm, float):
            return self.gemm
        years = sorted(map(int, self.gemm))
        return self.gemm[str(max([year for year in years if year <= generation] or years[:1]))]


class Hides(Section):
    """The communication that a stack overlaps with compute."""

    tp: Literal["none", "backward", "all"] = Field("none", description="backward: under wgrad; all: under every GEMM")
    pp: bool = Field(False, description="sends and receives do not wait for each other")
    dp: bool = Field(False, description="gradients are reduced and weights gathered under other chunks' work")


class Cost(Section):
    """Factors and fixed times of a stack on its hardware."""

    slowdown: Positive = Field(1.0, description="factor of all compute times")
    passes: Positive = Field(
        1.2, description="passes of element-wise operations over memory, for one if all were fused"
    )
    step_s: NotNegative = Field(0.05, description="fixed seconds of a step, such as data and logging")
    scale_loss: Fraction = Field(
        SCALE_LOSS, description=f"share of a step for each doubling of the devices beyond {SCALE}"
    )


class Found(Section):
    """A stack as it was measured on some hardware."""

    hides: Hides = Hides()
    attained: Cost = Cost()


class Hardware(Section):
    """A cluster of nodes of one kind."""

    name: str = Field("", description="name of the file")
    device: Device
    node: Node
    network: Network
    attained: Attained = Attained()
    stack: Found | None = Field(None, description="what was measured of stacks on this machine, in place of their own")

    def room(self, world: int) -> int:
        """Bytes for the tensors of one of `world` ranks, which may share a device."""
        return int(self.device.room / self.node.ranks_a_core(world))


class Stack(Section):
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
    hides: Hides = Hides()
    attained: Cost = Cost()

    @property
    def holding(self) -> Holding:
        """How ranks hold weights, for their memory."""
        return Holding(self.shards_weights, self.fp8_weights)


Profile = TypeVar("Profile", Hardware, Stack)


def hardware(name: str) -> Hardware:
    """Read a profile of `configs/hardware` by its name, of a file, or of this machine.

    Raises: ConfigError for one that is not there, or has mistakes.
    """
    return _load(name, "hardware", Hardware)


def stack(name: str) -> Stack:
    """Read a profile of `configs/stacks` by its name, or of a file.

    Raises: ConfigError for one that is not there, or has mistakes.
    """
    return _load(name, "stacks", Stack)


def stack_on(hardware: Hardware, name: str) -> Stack:
    """Read a stack, with what was measured of stacks on this hardware in place of its own.

    Raises: ConfigError as `stack` does.
    """
    found = stack(name)
    return found.model_copy(update=dict(hardware.stack)) if hardware.stack else found


def expected_error(hardware: Hardware, stack: Stack) -> float | None:
    """The mean error of step time to expect, as a share: that of published steps of this accelerator, each planned by a
    fit of the other sources. None where there are none.
    """
    found: float | None = _errors()["error"].get(hardware.device.accelerator or "")
    return None if hardware.stack else found


def measured(hardware: Hardware, stack: Stack) -> bool:
    """Tell whether steps of this stack on this hardware were measured, and seen by the fit."""
    return bool(hardware.stack) or stack.name in _errors()["measured"].get(hardware.name, [])


def names(folder: str) -> list[str]:
    """The profiles that a folder of `configs` has."""
    return sorted(path.stem for path in (_configs() / folder).glob("*.toml"))


def path_of(folder: str, name: str) -> Path:
    """The path of a profile's file."""
    if folder == "hardware" and name == THIS:
        return own_profile()
    return Path(name) if name.endswith(".toml") else _configs() / folder / f"{name}.toml"


def own_profile() -> Path:
    """The path of this machine's hardware profile, below the user's configuration folder."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "megascale" / "hardware" / f"{THIS}.toml"


def _configs() -> Path:
    """The folder of profiles: in the repository, or where an installation puts it."""
    own = Path(__file__).parents[2] / "configs"
    return own if own.is_dir() else Path(sysconfig.get_path("data")) / "share/megascale/configs"


@lru_cache(1)
def _errors() -> dict[str, Any]:
    return read(str(_configs() / "errors.toml")).tree


def _load(name: str, folder: str, profile: type[Profile]) -> Profile:
    path, known = path_of(folder, name), names(folder)
    if path == own_profile() and not path.is_file():
        found, mend = "this machine has not been measured", "`megascale bench profile` measures it"
        raise ConfigError([Problem(str(path), "", found, mend)])
    if path != own_profile() and not name.endswith(".toml") and name not in known:
        alike, close = [each for each in known if each.startswith(name)], nearest(name, known)
        one = alike[0] if len(alike) == 1 else None if alike else close
        mend = f"did you mean '{one}'?" if one else f"one of {', '.join(alike or known)}, or a file of your own"
        raise ConfigError([Problem("command line", OPTIONS[folder], f"there is no profile '{name}'", mend)])
    return read_section(str(path), profile, name=path.stem)
