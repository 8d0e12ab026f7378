"""Selection of a backend for each operation: the requested backend, or under auto the first able to run.

`OpContext`, `OpBackend`: the question and the interface. `unsupported_reason`, `select_backend`, `selected_backends`:
the choice. `build_op`: the operation. `NotByDefault`, `BackendChoice`, `BackendError`: answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megascale.catalog.backends import AUTO, BACKENDS, FUSIBLE_OPERATIONS, Requirement, unmet_requirement
from megascale.catalog.recipes import RECIPES, TENSOR
from megascale.config.backends import BackendsConfig
from megascale.config.model import ModelConfig
from megascale.core.errors import Exit, MegascaleError
from megascale.device import Device

CompileFn = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Maps a function to its compiled form, or to itself."""


class BackendError(MegascaleError):
    """The requested backend or compiler cannot run on this machine."""

    exit_status = Exit.CONFIG


class NotByDefault(str):
    """A reason to skip a working backend under auto. An explicit request selects the backend all the same."""


@dataclass(frozen=True)
class OpContext:
    """The model, layout and device that a backend must support.

    `dtype`: of activations; `tp`: tensor-parallel size; `compiled`: blocks run under torch.compile; `recipe`: the FP8
    recipe (`catalog.recipes`) of linear layers, None without FP8; `document_mask`: attention stays within documents;
    `attends_in_parts`: to some of the keys at a time; `z_loss`: coefficient of the loss's z-loss.
    """

    model: ModelConfig
    backends: BackendsConfig
    dtype: torch.dtype
    device: Device
    tp: int = 1
    optimizer: str = "adamw"
    compiled: bool = False
    recipe: str | None = None
    document_mask: bool = False
    attends_in_parts: bool = False
    z_loss: float = 0.0

    @property
    def takes_amax(self) -> bool:
        """True if casts of FP8 layers spare a pass by an amax that is kept with a tensor (`ops.known_amax`)."""
        return self.casts_by_tensor and RECIPES[str(self.recipe)].facts["scaling"] == "current"

    @property
    def casts_by_tensor(self) -> bool:
        """True if FP8 layers have a scale per tensor."""
        return self.recipe is not None and RECIPES[self.recipe].facts["input"].block == TENSOR

    def requested_backend(self, operation: str) -> str:
        """Return the backend in `[backends]`. In a compiled block, auto means `compile` for fusible operations."""
        requested: str = getattr(self.backends, operation)
        fuses = (
            self.compiled
            and operation in FUSIBLE_OPERATIONS
            and self.uses(operation)
            and "compile" in BACKENDS[operation].cards
        )
        return "compile" if requested == AUTO and fuses else requested

    def uses(self, operation: str) -> bool:
        """Return True if the model contains the operation."""
        return self.requirement(operation).used

    def requirement(self, operation: str) -> Requirement:
        """Return the demands that cards answer from their facts, without a device."""
        dtype = str(self.dtype).removeprefix("torch.")
        given = operation, self.model, dtype, self.optimizer, self.tp, self.recipe
        parts = self.attends_in_parts
        return Requirement.for_operation(*given, document_mask=self.document_mask, attends_in_parts=parts)


class OpBackend(Protocol):
    """An implementation of an operation, loaded from a card in `catalog.backends`. Always supported by default."""

    def unsupported_reason(self, context: OpContext) -> str | None:
        """Say why this backend cannot run, beyond the facts of its card; `NotByDefault` if only auto skips it.

        None if supported. May import the library to test its presence.
        """
        return None

    def build(self, context: OpContext) -> Callable[..., Any]:
        """Return the operation's function. Called only if supported."""


@dataclass(frozen=True)
class BackendChoice:
    """The backend of an operation. `rejected`: earlier candidates, with reasons."""

    operation: str
    backend: str
    rejected: Mapping[str, str]


def unsupported_reason(operation: str, name: str, context: OpContext) -> str | None:
    """Say why a backend cannot run, or auto skips it (`NotByDefault`); None if supported."""
    card = BACKENDS[operation][name]
    return unmet_requirement(card, context.requirement(operation)) or card.load()().unsupported_reason(context)


def select_backend(operation: str, context: OpContext) -> BackendChoice:
    """Select the backend of an operation according to `[backends]`.

    Raises: BackendError if the requested backend, or under auto every backend, is unsupported
    """
    requested = context.requested_backend(operation)
    rejected: dict[str, str] = {}
    cards = BACKENDS[operation]
    # where casts take an amax, those that find it as they write come first
    for name in sorted(cards.names(), key=lambda name: context.takes_amax and not cards[name].facts.get("finds_amax")):
        if requested in (name, AUTO):
            reason = unsupported_reason(operation, name, context)
            if reason is None or (requested == name and isinstance(reason, NotByDefault)):
                return BackendChoice(operation, name, rejected)
            rejected[name] = reason
    reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected.items())
    hint = f"backends.{operation}=auto" if requested != AUTO else "another device, or train.precision=bf16"
    if requested != getattr(context.backends, operation):
        hint = "train.compile=false"
    raise BackendError(f"backends.{operation} = {requested!r} cannot serve: {reasons}", hint=hint)


def build_op(operation: str, context: OpContext) -> Any:
    """Build an operation with its selected backend."""
    return BACKENDS[operation][select_backend(operation, context).backend].load()().build(context)


def selected_backends(context: OpContext) -> dict[str, str]:
    """Return the backend of every operation in the model."""
    return {operation: select_backend(operation, context).backend for operation in filter(context.uses, BACKENDS)}
