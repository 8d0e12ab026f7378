"""What a plan is made for: hardware and a software stack, each a TOML file of `configs/hardware` and `configs/stacks`.

Both separate facts, which somebody states, from `attained`, which `tools/calibrate.py` fits on published step times and
is explained, with its error, in docs/planning.md.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from megascale.config.files import Source, read
from megascale.config.section import Count, Section
from megascale.core.errors import ConfigError, Problem
from megascale.core.registry import nearest
from megascale.plan.hardware import ACCELERATORS
from megascale.plan.own import THIS, own_profile

Positive = Annotated[float, Field(gt=0)]
Rate = Annotated[float, Field(ge=1e6)]
"""A second, of bytes or FLOPs: no number of GB/s or TFLOP/s."""
Format = Annotated[str, Field(pattern="^(fp64|fp32|tf32|fp16|bf16|fp8)$")]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
NAMES = {accelerator.name: accelerator for accelerator in ACCELERATORS}
Kernel = Literal["unfused", "flash1", "triton", "flash2", "flash3"]


class Reached(Section):
    """Of a peak."""

    forward: Share = Field(description="by a forward")
    backward: Share = Field(description="by a backward")


class Attention(Section):
    """On a processor, which also computes some scores that the mask hides."""

    rate: Positive = Field(description="FLOP/s")
    keys: NotNegative = Field(description="that a query takes time for, besides those that it sees")
    width: NotNegative = Field(description="of a head: a score takes as long as so many of its numbers, besides them")


class Measured(Section):
    """What a process does on a core of a processor, in one number format. A product takes `product_s`, its FLOPs over
    `rate` and the bytes of its factors and result over `bandwidth`.
    """

    rate: Positive = Field(description="FLOP/s of large matrix products")
    bandwidth: Positive = Field(description="bytes/s of a product's numbers")
    product_s: NotNegative = Field(description="seconds of a product, however small")
    attend: Attention = Field(description="in a forward")
    attend_back: Attention = Field(description="in a backward")
    elementwise: Positive = Field(description="bytes/s of what element-wise operations move, were they fused")
    layer_s: NotNegative = Field(description="seconds of a layer's forward, however small; a backward has two")


def _known(name: str) -> str:
    if name not in NAMES:
        raise ValueError(f"'{name}' is not one of {', '.join(NAMES)}")
    return name


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = BeforeValidator(_whole)
"""80e9 is a whole number too."""


class Device(Section):
    """One accelerator, or a core of a processor."""

    memory: Annotated[Count, Whole] = Field(description="bytes")
    reserve: Annotated[int, Whole] = Field(
        3 * 2**30, ge=0, description="bytes that the driver, communication and fragments take"
    )
    bandwidth: Rate = Field(description="of its memory, bytes/s")
    units: Count = Field(description="multiprocessors: tiles of a matrix product that are worked on at once")
    accelerator: Annotated[str, AfterValidator(_known)] | None = Field(None, description="by name, of plan/hardware.py")
    peak: dict[Format, Rate] = Field({}, description="FLOP/s by format, where they are not the accelerator's")
    clock: Share = Field(1.0, description="of the clock at which the peak is stated, where power is limited")
    attention: dict[Kernel, Reached] = Field({}, description="what kernels reach of the 16-bit peak")
    measured: dict[str, Measured] = Field({}, description="of a processor, by format")

    @model_validator(mode="after")
    def _has_room(self) -> Device:
        if self.memory <= self.reserve:
            raise ValueError(f"memory of {self.memory} bytes is no more than the reserve of {self.reserve}")
        return self

    def reached(self, kernel: Kernel) -> Reached | None:
        """What a kernel of attention reaches: as much as the next newer that is named, or older, where it is not."""
        kernels = get_args(Kernel)
        at = kernels.index(kernel)
        order = [*kernels[at:], *reversed(kernels[:at])]
        return next((self.attention[each] for each in order if each in self.attention), None)

    @property
    def room(self) -> int:
        """Bytes for a rank's tensors."""
        return self.memory - self.reserve

    def multiplies(self, number_format: str) -> bool:
        """Whether a peak is known."""
        return number_format in self._peaks

    def peak_of(self, number_format: str) -> float:
        """FLOP/s of dense matrix products.

        Raises: ConfigError for a format that the device does not multiply.
        """
        known = self._peaks
        if number_format == "bf16" and "bf16" not in known:  # as fast as the other 16 bits, where it is there at all
            number_format = "fp16"
        if number_format not in known:
            found = f"the device multiplies no {number_format}"
            mend = f"device.peak has {', '.join(known)}" if known else "give device.accelerator or device.peak"
            raise ConfigError([Problem("hardware", "train.precision", found, mend)])
        return known[number_format] * self.clock

    @property
    def _peaks(self) -> Mapping[str, float]:
        measured = {name: found.rate for name, found in self.measured.items()}
        return {**(NAMES[self.accelerator].peak if self.accelerator else {}), **measured, **self.peak}


class Link(Section):
    """A way between devices. `bandwidth`: bytes/s each way."""

    bandwidth: Rate = Field(description="bytes/s each way: of a device in a node; of a node in the network")
    latency: Annotated[float, Field(gt=0, lt=1)] = Field(description="seconds of one message")


class Node(Link):
    """What devices share."""

    devices: Count = Field(8, description="in a node")
    cores: int = Field(0, ge=0, description="that compute, where devices are processes; 0: each is one of its own")
    turn_s: NotNegative = Field(
        0.0, description="seconds that a communication costs a rank for each other rank that shares its core"
    )
    message: Link | None = Field(None, description="from one rank to another, where collectives go another way")

    def ranks_a_core(self, world: int) -> float:
        """Ranks of a job that take turns on a core, 1 or more."""
        return max(1.0, min(world, self.devices) / self.cores) if self.cores else 1.0


class Network(Link):
    """Between nodes. Groups of `nodes` have one switch above them; beyond it is 1 / `taper` of the bandwidth."""

    nodes: Count = Field(2**40, description="under one switch")
    taper: Annotated[float, Field(ge=1)] = Field(1.0, description="oversubscription above that switch")


class Attained(Section):
    """What is reached of what is stated."""

    gemm: Share = Field(0.75, description="of the peak, by large matrix products")
    memory: Share = Field(0.75, description="of the memory's bandwidth, by element-wise operations")
    link: Share = Field(0.75, description="of the bandwidth inside a node, by collectives")
    network: Share = Field(0.75, description="of the bandwidth between nodes, by collectives")
    hiding: Share = Field(
        0.75, description="of the time of communication behind compute, what does not slow compute down"
    )


class Hides(Section):
    """What communication a stack hides behind compute."""

    tp: Literal["none", "backward", "all"] = Field(
        "none", description="backward: behind the products of weights' gradients; all: behind every product"
    )
    pp: bool = Field(False, description="sends and receives do not wait for each other")
    dp: bool = Field(False, description="gradients are reduced and weights gathered behind other chunks' work")


class Cost(Section):
    """What a stack makes of its hardware."""

    slowdown: Positive = Field(1.0, description="of all compute, over the hardware's attained")
    passes: Positive = Field(1.2, description="of element-wise operations over memory, of those of fused ones")
    step_s: NotNegative = Field(0.1, description="seconds of a step that are nothing else")
    message_s: NotNegative = Field(0.0, description="seconds that all stands still for a message that is not hidden")


class Found(Section):
    """Of a stack on some hardware."""

    hides: Hides = Hides()
    attained: Cost = Cost()


class Hardware(Section):
    """A cluster of one kind of node."""

    name: str = Field("", description="the file's")
    device: Device
    node: Node
    network: Network
    spread: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="standard deviation of the devices' speeds, of their mean"
    )
    attained: Attained = Attained()
    stack: Found | None = Field(None, description="of a stack that was measured here, in place of its own")

    def room(self, world: int) -> int:
        """Bytes for the tensors of one of `world` ranks, which may share a device."""
        return int(self.device.room / self.node.ranks_a_core(world))


class Stack(Section):
    """A trainer and its libraries."""

    name: str = Field("", description="the file's")
    attention: Kernel = Field("flash2", description="the kernel")
    gradient_bytes: Literal[0, 2, 4, 8] = Field(
        0, description="of a number of a gradient, added up and reduced; 0: as the precision accumulates"
    )
    adds_apart: bool = Field(
        False, description="a pass over memory adds weights' gradients to those of other micro-batches, no product does"
    )
    broadcasts: bool = Field(
        False, description="with ZeRO 1 or 2 ranks broadcast the tensors that they updated, one rank after another"
    )
    shards_weights: bool = Field(False, description="ZeRO 3: layers are gathered before they are used")
    gathers_again: bool = Field(
        False,
        description="with ZeRO 3: what is computed again is gathered for that, and again for its backward",
    )
    gather_rate: Rate | None = Field(
        None, description="bytes/s that a stack's own code leaves to gathers and reductions with ZeRO 3"
    )
    host_s: NotNegative = Field(
        0.0, description="seconds that a host takes to launch a layer's forward; for a backward it takes twice that"
    )
    launch_blocking: bool = Field(
        False, description="the host waits for each operation of the device, which then waits for the host"
    )
    stops_early: bool = Field(
        False, description="full recomputation leaves out a block's result, which no backward needs"
    )
    hides: Hides = Hides()
    attained: Cost = Cost()

    @model_validator(mode="after")
    def _shards_or_broadcasts(self) -> Stack:
        if self.shards_weights and self.broadcasts:
            raise ValueError("shards_weights is ZeRO 3, where no rank has whole tensors to send: leave broadcasts out")
        if (self.gathers_again or self.gather_rate) and not self.shards_weights:
            raise ValueError("gathers_again and gather_rate are of ZeRO 3: leave them out, or set shards_weights")
        if self.launch_blocking and not self.host_s:
            raise ValueError("launch_blocking adds the host's time to the device's: give host_s")
        return self


Profile = TypeVar("Profile", Hardware, Stack)


def hardware(name: str) -> Hardware:
    """A profile of `configs/hardware` by its name, or of a file.

    Raises: ConfigError for one that is not there, or has mistakes.
    """
    return _load(name, "hardware", Hardware)


def stack(name: str) -> Stack:
    """A profile of `configs/stacks` by its name, or of a file.

    Raises: ConfigError for one that is not there, or has mistakes.
    """
    return _load(name, "stacks", Stack)


def stack_on(hardware: Hardware, name: str) -> Stack:
    """A stack on some hardware: as its profile says, but for what was measured there.

    Raises: ConfigError as `stack` does.
    """
    found = stack(name)
    return found.model_copy(update=dict(hardware.stack)) if hardware.stack else found


OPTIONS = {"hardware": "--hardware", "stacks": "--stack"}


def names(folder: str) -> list[str]:
    """The profiles that a folder of `configs` has."""
    return sorted(path.stem for path in _folder(folder).glob("*.toml") if path.stem != "base")


def _folder(folder: str) -> Path:
    """In the repository, or where an installation puts it."""
    own = Path(__file__).parents[2] / "configs" / folder
    return own if own.is_dir() else Path(sysconfig.get_path("data")) / "share/megascale/configs" / folder


def path_of(folder: str, name: str) -> Path:
    """The file of a profile."""
    if folder == "hardware" and name == THIS:
        return own_profile()
    return Path(name) if name.endswith(".toml") else _folder(folder) / f"{name}.toml"


def _load(name: str, folder: str, profile: type[Profile]) -> Profile:
    path = path_of(folder, name)
    known = names(folder)
    if path == own_profile() and not path.is_file():
        found, mend = "this machine has not been measured", "`megascale bench profile` measures it"
        raise ConfigError([Problem(str(path), "", found, mend)])
    if path != own_profile() and not name.endswith(".toml") and name not in known:
        alike, close = [each for each in known if each.startswith(name)], nearest(name, known)
        if close and len(alike) < 2:
            mend = f"did you mean '{alike[0] if alike else close}'?"
        else:
            mend = f"one of {', '.join(alike or known)}, or a file of your own"
        raise ConfigError([Problem("command line", OPTIONS[folder], f"there is no profile '{name}'", mend)])
    source = read(str(path))
    try:
        return profile.model_validate({"name": path.stem, **source.tree})
    except ValidationError as error:
        raise ConfigError([_problem(source, profile, each) for each in error.errors()]) from None


def _problem(source: Source, profile: type[Section], detail: ErrorDetails) -> Problem:
    *tables, name = [str(part) for part in detail["loc"] if part != "[key]"] or [""]
    key, fields = ".".join([*tables, name]).strip("."), _fields(profile, tables)
    if detail["type"] == "extra_forbidden":
        close = nearest(name, fields)
        mend = f"did you mean '{close}'?" if close else f"one of {', '.join(fields)}"
        return Problem(source.place(key), key, "there is no such key", mend)
    if detail["type"] == "missing" or isinstance(detail["input"], dict):
        found = detail["msg"].removeprefix("Value error, ")
    else:
        found = f"{detail['input']!r}: {detail['msg']}"
    mend = (fields[name].description if name in fields else "") or "docs/planning.md has the keys"
    return Problem(source.place(key), key, found, mend)


def _fields(section: type[Section], tables: Sequence[str]) -> Mapping[str, FieldInfo]:
    """The keys of a table, as far as they have names."""
    for table in tables:
        field = section.model_fields.get(table)
        types = [field.annotation, *get_args(field.annotation)] if field else []
        inner = [each for each in types if isinstance(each, type) and issubclass(each, Section)]
        if not inner:
            return {}
        section = inner[0]
    return section.model_fields
