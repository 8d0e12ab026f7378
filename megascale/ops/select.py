"""Which backend carries out each operation: the best that can, or the one that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megascale.catalog.backends import AUTO, BACKENDS, FUSED, Need, lacks
from megascale.catalog.precisions import PRECISIONS
from megascale.config.backends import BackendsConfig
from megascale.config.model import ModelConfig
from megascale.config.run import RunConfig
from megascale.core.errors import Exit, MegascaleError
from megascale.device import Device


class BackendError(MegascaleError):
    """What a configuration asks for cannot be done on this machine."""

    exit_status = Exit.CONFIG


class Reluctance(str):
    """A refusal of a backend that could serve: auto passes it over, who asks for it gets it."""


@dataclass(frozen=True)
class Setting:
    """What operations have to serve: a model whose activations have `dtype`, cut over `tp` ranks, on a device, trained
    by an `optimizer`. `compiled`: as parts of blocks that torch.compile compiles. `recipe`: that of `catalog.recipes`
    by which linear layers multiply in 8 bits, None if they do not.
    """

    model: ModelConfig
    backends: BackendsConfig
    dtype: torch.dtype
    device: Device
    tp: int = 1
    optimizer: str = "adamw"
    compiled: bool = False
    recipe: str | None = None

    @classmethod
    def of(cls, config: RunConfig, device: Device) -> Setting:
        """What the operations of a run have to serve."""
        dtype = getattr(torch, PRECISIONS[config.train.precision].facts["compute"])
        tp, optimizer = config.parallel.tp, config.optimizer.name
        recipe = config.fp8.recipe if config.train.precision == "fp8" else None
        return cls(config.model, config.backends, dtype, device, tp, optimizer, config.train.compile, recipe)

    def asked(self, operation: str) -> str:
        """The backend that `[backends]` asks for. In a compiled block auto is what the compiler fuses with the rest."""
        asked: str = getattr(self.backends, operation)
        fuses = self.compiled and operation in FUSED and self.uses(operation) and "compile" in BACKENDS[operation].cards
        return "compile" if asked == AUTO and fuses else asked

    def uses(self, operation: str) -> bool:
        """Whether the model has the operation at all."""
        return self.need(operation).used

    def need(self, operation: str) -> Need:
        """What backends are asked for by their cards, before they look at the device."""
        number_format = str(self.dtype).removeprefix("torch.")
        return Need.of(operation, self.model, number_format, self.optimizer, self.tp, self.recipe)


class Backend(Protocol):
    """One implementation of an operation; the body of a card in `catalog.backends`. By default it serves."""

    def refusal(self, setting: Setting) -> str | None:
        """Why it cannot serve what its card does not deny, or does not unless asked for (`Reluctance`), in a few words;
        None if it serves. Imports its library only to see whether it is there.
        """
        return None

    def build(self, setting: Setting) -> Callable[..., Any]:
        """The operation. Called where there is no refusal."""


@dataclass(frozen=True)
class Choice:
    """Who carries out an operation. `refusals`: of the better ones, and why not."""

    operation: str
    backend: str
    refusals: Mapping[str, str]


def refusal(operation: str, name: str, setting: Setting) -> str | None:
    """Why a backend cannot serve, or does not unless asked for (`Reluctance`); None if it serves."""
    card = BACKENDS[operation][name]
    return lacks(card, setting.need(operation)) or card.load()().refusal(setting)


def select(operation: str, setting: Setting) -> Choice:
    """Choose a backend as `[backends]` asks.

    Raises: BackendError if the one that is asked for cannot serve
    """
    asked = setting.asked(operation)
    refusals: dict[str, str] = {}
    for name in BACKENDS[operation].names():
        if asked in (name, AUTO):
            reason = refusal(operation, name, setting)
            if reason is None or (asked == name and isinstance(reason, Reluctance)):
                return Choice(operation, name, refusals)
            refusals[name] = reason
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
    mend = f"backends.{operation}=auto" if asked != AUTO else "another device, or train.precision=bf16"
    if asked != getattr(setting.backends, operation):
        mend = "train.compile=false"
    raise BackendError(f"backends.{operation} = {asked!r} cannot serve: {reasons}", mend=mend)


def build(operation: str, setting: Setting) -> Any:
    """The operation, by the backend that `select` finds."""
    return BACKENDS[operation][select(operation, setting).backend].load()().build(setting)


def serving(setting: Setting) -> dict[str, str]:
    """Return the backend of each operation that the model has."""
    return {operation: select(operation, setting).backend for operation in filter(setting.uses, BACKENDS)}
