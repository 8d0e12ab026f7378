"""Who carries out the operations of the network and of the optimizer."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megascale.catalog.backends import AUTO, BACKENDS
from megascale.config.section import Section, choice


class BackendsConfig(Section):
    """`[backends]`: auto is the best that is present and can serve (`megascale doctor`)."""

    linear: Annotated[str, choice(BACKENDS["linear"], AUTO)] = Field(
        AUTO, description="of the casts of linear layers to fp8, and of products of what was cast"
    )
    attention: Annotated[str, choice(BACKENDS["attention"], AUTO)] = Field(AUTO, description="of attention")
    rope: Annotated[str, choice(BACKENDS["rope"], AUTO)] = Field(AUTO, description="of rotary position embedding")
    norm: Annotated[str, choice(BACKENDS["norm"], AUTO)] = Field(AUTO, description="of norms")
    add_norm: Annotated[str, choice(BACKENDS["add_norm"], AUTO)] = Field(
        AUTO, description="of the residual sum and the norm of it that stand together in a serial block"
    )
    activation: Annotated[str, choice(BACKENDS["activation"], AUTO)] = Field(
        AUTO, description="of the MLP's non-linearity"
    )
    cross_entropy: Annotated[str, choice(BACKENDS["cross_entropy"], AUTO)] = Field(
        AUTO, description="of the loss of a chunk of logits and its gradient"
    )
    wgrad: Annotated[str, choice(BACKENDS["wgrad"], AUTO)] = Field(
        AUTO, description="of the GEMMs that add up the gradients of weights; those of fp8 layers are the torch way"
    )
    optimizer: Annotated[str, choice(BACKENDS["optimizer"], AUTO)] = Field(AUTO, description="of the optimizer's step")
