"""Who carries out the operations of the network and of the optimizer."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megascale.catalog.backends import (
    ACTIVATION_BACKENDS,
    ADD_NORM_BACKENDS,
    ATTENTION_BACKENDS,
    AUTO,
    CROSS_ENTROPY_BACKENDS,
    LINEAR_BACKENDS,
    NORM_BACKENDS,
    OPTIMIZER_BACKENDS,
    ROPE_BACKENDS,
    WGRAD_BACKENDS,
)
from megascale.config.section import Section, choice


class BackendsConfig(Section):
    """`[backends]`: auto is the best that is present and can serve (`megascale doctor`)."""

    linear: Annotated[str, choice(LINEAR_BACKENDS, AUTO)] = Field(
        AUTO, description="of the casts of linear layers to fp8, and of products of what was cast"
    )
    attention: Annotated[str, choice(ATTENTION_BACKENDS, AUTO)] = Field(AUTO, description="of attention")
    rope: Annotated[str, choice(ROPE_BACKENDS, AUTO)] = Field(AUTO, description="of rotary position embedding")
    norm: Annotated[str, choice(NORM_BACKENDS, AUTO)] = Field(AUTO, description="of norms")
    add_norm: Annotated[str, choice(ADD_NORM_BACKENDS, AUTO)] = Field(
        AUTO, description="of the residual sum and the norm of it that stand together in a serial block"
    )
    activation: Annotated[str, choice(ACTIVATION_BACKENDS, AUTO)] = Field(
        AUTO, description="of the MLP's non-linearity"
    )
    cross_entropy: Annotated[str, choice(CROSS_ENTROPY_BACKENDS, AUTO)] = Field(
        AUTO, description="of the loss of a chunk of logits and its gradient"
    )
    wgrad: Annotated[str, choice(WGRAD_BACKENDS, AUTO)] = Field(
        AUTO, description="of the GEMMs that add up the gradients of weights; those of fp8 layers are the torch way"
    )
    optimizer: Annotated[str, choice(OPTIMIZER_BACKENDS, AUTO)] = Field(AUTO, description="of the optimizer's step")
