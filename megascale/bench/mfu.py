"""Model FLOPs utilisation of real training steps on one device (`megascale bench mfu`): what is run, and how the result
is told. `bench.speed` runs it.

A model too large for the device is cut: a slice has its first layers, and the whole embedding and head. FLOPs are those
of the slice. Its head weighs more than in the whole model; the result says how much.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megascale.account.flops import TokenFlops, hardware_flops, head_flops, mfu, token_flops
from megascale.account.parameters import parameter_count
from megascale.account.peaks import Peak
from megascale.bench.spread import Spread
from megascale.config.model import ModelConfig
from megascale.config.run import RunConfig
from megascale.core.units import format_bytes, format_count, format_flops

LEAST_STEPS = 20
"""Timed steps that a median and quartiles are worth stating of."""

WARM_UP = 5
PROFILED = 3

CONVENTIONS = ("full", "causal")
"""How much of the attention matrix counts (`account.flops`)."""


ALL_CAST = {"bf16_first": 0, "bf16_last": 0}
"""Of `[fp8]`: no layer stays in bf16."""


def preset_tree(preset: str) -> dict[str, Any]:
    """A run of a preset on random tokens, as a configuration file would hold it: bf16, and four micro-batches a step, a
    job's usual few. In fp8 every layer is cast: a slice has no first or last layer of its own.
    """
    return {
        "name": preset,
        "model": {"preset": preset},
        "batch": {"micro": 1, "global": 4},
        "train": {"precision": "bf16"},
        "optimizer": {"lr": 1e-4, "decay": "constant"},
        "fp8": dict(ALL_CAST),
        "data": {"mock": True},
        "checkpoint": {"every": 0},
    }


@dataclass(frozen=True)
class Steps:
    """How many steps are not timed at first, how many are timed, and how many are then run under the profiler."""

    warm_up: int = WARM_UP
    timed: int = LEAST_STEPS
    profiled: int = PROFILED

    @property
    def total(self) -> int:
        return self.warm_up + self.timed + self.profiled


@dataclass(frozen=True)
class Fit:
    """How many of a model's layers, `whole`, fit a device: a step of one took `first` bytes, each further one takes
    `layer`, of which `state` are weights, gradients and optimizer; `room` may be used.
    """

    whole: int
    room: int
    first: int
    layer: int
    state: int

    @property
    def layers(self) -> int:
        """0 if not even one fits."""
        return min(self.whole, max(0, 1 + (self.room - self.first) // self.layer))

    def __str__(self) -> str:
        room, first, layer, state = map(format_bytes, (self.room, self.first, self.layer, self.state))
        return f"{self.layers} layers fit {room}: one takes {first}, each further one {layer}, {state} of it state"


@dataclass(frozen=True)
class Machine:
    """Where it ran. `backends`: who carried out which operation. `peak`: the device's; `attainable`: the rate that
    matrix products reached.
    """

    device: str
    torch: str
    backends: Mapping[str, str]
    peak: Peak | None
    attainable: Peak | None


@dataclass(frozen=True)
class Speed:
    """The result. `step`: seconds; `losses` of the first step and the last one timed; `kernels`: shares of a step by
    purpose (`bench.kernels`), `whole`: the model that this is a slice of.
    """

    config: RunConfig
    whole: ModelConfig
    fit: Fit | None
    machine: Machine
    warm_up: int
    step: Spread
    losses: tuple[float, float]
    peak_memory: int
    kernels: Mapping[str, float]

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.config.batch.total * self.config.model.seq_length

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step.median

    @property
    def flops(self) -> TokenFlops:
        """Of the model, for a token."""
        return token_flops(self.config.model)

    def used(self, flops: TokenFlops, peak: Peak | None) -> dict[str, float | None]:
        """`flops` a token against a peak, in both conventions."""
        return {c: mfu(getattr(flops, c), self.tokens_per_s, peak.flops) if peak else None for c in CONVENTIONS}

    @property
    def utilisation(self) -> dict[str, dict[str, float | None]]:
        """MFU, HFU, and the model's FLOPs against what products attain."""
        done = hardware_flops(self.config)
        return {
            "mfu": self.used(self.flops, self.machine.peak),
            "hfu": self.used(done, self.machine.peak),
            "of_attainable": self.used(self.flops, self.machine.attainable),
        }

    def head_share(self, layers: int) -> float:
        """The part of the FLOPs (full) that is the head's in a model of so many layers."""
        model = with_layers(self.whole, layers)
        return head_flops(model) / token_flops(model).full

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        model = self.config.model
        return {
            "name": self.config.name,
            "layers": model.num_layers,
            "whole_layers": self.whole.num_layers,
            "parameters": parameter_count(model),
            "precision": self.config.train.precision,
            "tokens": self.tokens,
            "warm_up": self.warm_up,
            "step_s": asdict(self.step),
            "tokens_per_s": self.tokens_per_s,
            "flops_per_token": {c: getattr(self.flops, c) for c in CONVENTIONS},
            "model_flops_per_s": {c: getattr(self.flops, c) * self.tokens_per_s for c in CONVENTIONS},
            **self.utilisation,
            "head_share": {"slice": self.head_share(model.num_layers), "whole": self.head_share(self.whole.num_layers)},
            "peak_memory_bytes": self.peak_memory,
            "losses": list(self.losses),
            "kernels": dict(self.kernels),
            "fit": asdict(self.fit) | {"layers": self.fit.layers} if self.fit else None,
            **asdict(self.machine),
            "config": self.config.model_dump(by_alias=True, mode="json"),
        }


def with_layers(model: ModelConfig, layers: int) -> ModelConfig:
    """The model with another number of layers: with fewer than its windows, the first of these."""
    window = model.window[:layers] if isinstance(model.window, list) else model.window
    return model.model_copy(update={"num_layers": layers, "window": window})


def sized(config: RunConfig, layers: int) -> RunConfig:
    """The run with another number of layers, on one device, where they are one chunk."""
    parallel = config.parallel.model_copy(update={"layers_per_chunk": None})
    return config.model_copy(update={"model": with_layers(config.model, layers), "parallel": parallel})


def table(speed: Speed) -> str:
    """The result for people."""
    config, machine, step = speed.config, speed.machine, speed.step
    model, batch = config.model, config.batch
    backends = ", ".join(f"{operation} {name}" for operation, name in machine.backends.items())
    lines = [
        f"{config.name}: {_slice(speed)}, {format_count(parameter_count(model))} parameters, {config.train.precision}",
        f"on {machine.device}, torch {machine.torch}; {backends}",
        f"a step is {batch.total} x {model.seq_length} tokens in micro-batches of {batch.micro}; "
        f"{step.count} steps after {speed.warm_up} that do not count",
        *([str(speed.fit)] if speed.fit else []),
        "",
        f"step         {step.median * 1e3:,.1f} ms  (quartiles {step.low * 1e3:,.1f}..{step.high * 1e3:,.1f})",
        f"tokens/s     {speed.tokens_per_s:,.0f}",
        f"peak memory  {format_bytes(speed.peak_memory)}",
        f"loss         {speed.losses[0]:.4f} in the first step, {speed.losses[1]:.4f} in the last",
        "",
        f"{'attention matrix':16}{'full':>16}{'causal':>16}",
        _row("model FLOPs", [format_flops(getattr(speed.flops, c) * speed.tokens_per_s) for c in CONVENTIONS]),
        *_utilisation(speed),
    ]
    if shown := [f"{name:<13} {share:6.1%}" for name, share in speed.kernels.items() if share >= 5e-4]:
        lines += ["", "share of a step's time", *_columns(shown)]
    return "\n".join(lines)


def _slice(speed: Speed) -> str:
    layers, whole = speed.config.model.num_layers, speed.whole.num_layers
    if layers == whole:
        return f"all {layers} layers"
    head, in_whole = speed.head_share(layers), speed.head_share(whole)
    return f"{layers} of {whole} layers (the head is {head:.0%} of the FLOPs, {in_whole:.0%} in the whole model)"


def _utilisation(speed: Speed) -> list[str]:
    machine, lines = speed.machine, []
    against = {"mfu": machine.peak, "hfu": machine.peak, "of_attainable": machine.attainable}
    for name, shares in speed.utilisation.items():
        peak = against[name]
        shown = ["n/a" if share is None else f"{share:.1%}" for share in shares.values()]
        note = f"  of {format_flops(peak.flops)} ({peak.source})" if peak and name != "hfu" else ""
        lines.append(_row({"mfu": "MFU", "hfu": "HFU", "of_attainable": "of attainable"}[name], shown) + note)
    return lines


def _row(name: str, cells: list[str]) -> str:
    return f"{name:16}" + "".join(f"{cell:>16}" for cell in cells)


def _columns(cells: list[str], width: int = 4) -> list[str]:
    return ["    ".join(cells[start : start + width]) for start in range(0, len(cells), width)]
