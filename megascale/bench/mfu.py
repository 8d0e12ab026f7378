"""Model FLOPs utilisation of real training steps on one device (`megascale bench mfu`): configuration and result. The
measurement itself is `bench.mfu_run`.

A model too large for the device is cut to a slice: its first layers, with the whole embedding and head. FLOPs are the
slice's. The head has a larger share of the FLOPs than in the whole model; the result states both shares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megascale.bench.quartiles import Quartiles
from megascale.catalog.accelerators import Peak
from megascale.catalog.presets import PRESETS
from megascale.config.model import ModelConfig
from megascale.config.run import RunConfig
from megascale.core.units import format_bytes, format_flops
from megascale.layout.parameters import active_parameter_count, describe_parameters, parameter_count
from megascale.layout.parts.part import TokenFlops
from megascale.plan.account.attended import expected_scores
from megascale.plan.account.flops import hardware_flops, head_flops, mfu, model_flops, token_flops

MIN_TIMED_STEPS = 20  # fewest timed steps for a median and quartiles

WARM_UP_STEPS = 5
PROFILED_STEPS = 3

CONVENTIONS = ("full", "causal")  # FLOP conventions: the full attention matrix, or the causal half (`account.flops`)


ALL_LAYERS_FP8 = {"first_layers_bf16": 0, "last_layers_bf16": 0}  # settings of `[fp8]` that leave no layer in bf16


def preset_tree(preset: str) -> dict[str, Any]:
    """Return the configuration of a preset on random tokens: bf16, four micro-batches per step. With fp8 every layer is
    quantized, because a slice lacks the whole model's last layers.
    """
    return {
        "name": preset,
        "model": {"preset": preset},
        "batch": {"micro": 1, "global": 4},
        "train": {"precision": "bf16"},
        "optimizer": {"lr": 1e-4, "decay": "constant"},
        "fp8": dict(ALL_LAYERS_FP8),
        "data": {"mock": True},
        "checkpoint": {"every": 0},
    }


@dataclass(frozen=True)
class StepCounts:
    """Numbers of steps, in order: untimed, timed, under the profiler."""

    warm_up: int = WARM_UP_STEPS
    timed: int = MIN_TIMED_STEPS
    profiled: int = PROFILED_STEPS

    @property
    def total(self) -> int:
        return self.warm_up + self.timed + self.profiled


@dataclass(frozen=True)
class LayerFit:
    """Number of a model's `total_layers` that fit in `available` bytes: a step with one layer took `first` bytes, a
    further layer takes `layer` bytes, of which `state` are weights, gradients and optimizer.
    """

    total_layers: int
    available: int
    first: int
    layer: int
    state: int

    @property
    def layers(self) -> int:
        """Number of layers that fit; 0 if a single layer does not fit."""
        return min(self.total_layers, max(0, 1 + (self.available - self.first) // self.layer))

    def __str__(self) -> str:
        available, first, layer, state = map(format_bytes, (self.available, self.first, self.layer, self.state))
        further = f"each further layer {layer}, of which {state} is state"
        return f"{self.layers} layers fit in {available}: the first takes {first}, {further}"


@dataclass(frozen=True)
class DeviceSetup:
    """Device and software of a measurement. `backends`: backend by operation; `peak`: the device's peak; `attainable`:
    the rate of the model's GEMMs alone.
    """

    device: str
    torch: str
    backends: Mapping[str, str]
    peak: Peak | None
    attainable: Peak | None


@dataclass(frozen=True)
class MfuResult:
    """Result of the benchmark. `full_model`: the model before slicing; `step`: seconds; `losses`: of the first and the
    last timed step; `kernels`: share of a step by purpose (`train.kernels`).
    """

    config: RunConfig
    full_model: ModelConfig
    fit: LayerFit | None
    machine: DeviceSetup
    warm_up: int
    step: Quartiles
    losses: tuple[float, float]
    peak_memory: int
    kernels: Mapping[str, float]

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.config.batch.total * self.config.model.seq_length

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step.median

    @property
    def flops(self) -> TokenFlops:
        """Model FLOPs per token."""
        return model_flops(self.config, expected_scores(self.config.model, self.config.data))

    def utilisation_of(self, flops: TokenFlops, peak: Peak | None) -> dict[str, float | None]:
        """Utilisation of a peak by `flops` per token, in both conventions."""
        return {c: mfu(getattr(flops, c), self.tokens_per_s, peak.flops) if peak else None for c in CONVENTIONS}

    @property
    def utilisation(self) -> dict[str, dict[str, float | None]]:
        """MFU, HFU, and the model's FLOPs relative to the GEMMs' attainable rate."""
        done = hardware_flops(self.config)
        return {
            "mfu": self.utilisation_of(self.flops, self.machine.peak),
            "hfu": self.utilisation_of(done, self.machine.peak),
            "of_attainable": self.utilisation_of(self.flops, self.machine.attainable),
        }

    def head_share(self, layers: int) -> float:
        """Share of the head in the FLOPs (full convention) of a model with `layers` layers."""
        model = model_with_layers(self.full_model, layers)
        return head_flops(model) / token_flops(model).full

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        model = self.config.model
        return {
            "name": self.config.name,
            "layers": model.num_layers,
            "whole_layers": self.full_model.num_layers,
            "parameters": parameter_count(model),
            "active_parameters": active_parameter_count(model),
            "precision": self.config.train.precision,
            "tokens": self.tokens,
            "warm_up": self.warm_up,
            "step_s": asdict(self.step),
            "tokens_per_s": self.tokens_per_s,
            "flops_per_token": {c: getattr(self.flops, c) for c in CONVENTIONS},
            "model_flops_per_s": {c: getattr(self.flops, c) * self.tokens_per_s for c in CONVENTIONS},
            **self.utilisation,
            "head_share": {
                "slice": self.head_share(model.num_layers),
                "whole": self.head_share(self.full_model.num_layers),
            },
            "peak_memory_bytes": self.peak_memory,
            "losses": list(self.losses),
            "kernels": dict(self.kernels),
            "fit": asdict(self.fit) | {"layers": self.fit.layers} if self.fit else None,
            **asdict(self.machine),
            "config": self.config.model_dump(by_alias=True, mode="json"),
        }


def model_with_layers(model: ModelConfig, layers: int) -> ModelConfig:
    """Return the model with another number of layers; a list of windows is cut to its first `layers`."""
    window = model.window[:layers] if isinstance(model.window, list) else model.window
    return model.model_copy(update={"num_layers": layers, "window": window})


def whole_model(model: ModelConfig) -> ModelConfig:
    """Return the model with all layers of its preset."""
    return model_with_layers(model, max(model.num_layers, PRESETS.get(model.preset or "", {}).get("num_layers", 0)))


def config_with_layers(config: RunConfig, layers: int) -> RunConfig:
    """Return the run with another number of layers, all in one model chunk."""
    parallel = config.parallel.model_copy(update={"layers_per_chunk": None})
    return config.model_copy(update={"model": model_with_layers(config.model, layers), "parallel": parallel})


def table(speed: MfuResult) -> str:
    """Format the result as text."""
    config, machine, step = speed.config, speed.machine, speed.step
    model, batch = config.model, config.batch
    layers, total = model.num_layers, speed.full_model.num_layers
    cut = f"all {layers} layers"
    if layers < total:
        head, full_head = speed.head_share(layers), speed.head_share(total)
        cut = f"{layers} of {total} layers (head: {head:.0%} of the FLOPs, {full_head:.0%} in the whole model)"
    backends = ", ".join(f"{operation} {name}" for operation, name in machine.backends.items())
    lines = [
        f"{config.name}: {cut}, {describe_parameters(model)}, {config.train.precision}",
        f"on {machine.device}, torch {machine.torch}; {backends}",
        f"{batch.total} x {model.seq_length} tokens per step in micro-batches of {batch.micro}; "
        f"{step.count} timed steps after {speed.warm_up} warm-up steps",
        *([str(speed.fit)] if speed.fit else []),
        "",
        f"step         {step.median * 1e3:,.1f} ms  (quartiles {step.low * 1e3:,.1f}..{step.high * 1e3:,.1f})",
        f"tokens/s     {speed.tokens_per_s:,.0f}",
        f"peak memory  {format_bytes(speed.peak_memory)}",
        f"loss         {speed.losses[0]:.4f} in the first step, {speed.losses[1]:.4f} in the last",
        "",
        f"{'attention matrix':16}{'full':>16}{'causal':>16}",
        _row("model FLOPs", [format_flops(getattr(speed.flops, c) * speed.tokens_per_s) for c in CONVENTIONS]),
    ]
    against = {
        "mfu": ("MFU", machine.peak),
        "hfu": ("HFU", None),
        "of_attainable": ("of attainable", machine.attainable),
    }
    for name, shares in speed.utilisation.items():
        label, peak = against[name]
        cells = ["n/a" if share is None else f"{share:.1%}" for share in shares.values()]
        note = f"  of {format_flops(peak.flops)} ({peak.source})" if peak else ""
        lines.append(_row(label, cells) + note)
    if parts := [f"{name:<13} {share:6.1%}" for name, share in speed.kernels.items() if share >= 5e-4]:
        rows = ["    ".join(parts[start : start + 4]) for start in range(0, len(parts), 4)]
        lines += ["", "share of a step's time", *rows]
    return "\n".join(lines)


def _row(name: str, cells: list[str]) -> str:
    return f"{name:16}" + "".join(f"{cell:>16}" for cell in cells)
