"""The section `[moe]`: how the training of experts balances their loads and exchanges tokens. `[model]` describes the
experts themselves.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megascale.config.section import Count, Float32, Section

MOST_BLOCKS = 64  # of a rank's tokens


class MoeConfig(Section):
    """`[moe]`: losses and a bias that balance experts, and the exchange of tokens."""

    balance: Literal["none", "sequence", "group", "step"] = Field(
        "none",
        description="loss that balances the experts of a layer, by their loads within each sequence, within groups of "
        "balance_group consecutive samples, or within the whole step before",
    )
    balance_weight: Annotated[Float32, Field(gt=0)] = Field(
        0.01, description="weight of the balance loss, relative to the mean loss of a token"
    )
    balance_group: Count = Field(1, description="samples of a group; a divisor of batch.micro x dp")
    z_loss_weight: Annotated[Float32, Field(ge=0)] = Field(
        0.0, description="weight of the mean squared logsumexp of the router's logits, which keeps them small; 0: none"
    )
    capacity_factor: Annotated[float, Field(gt=0, le=1e6)] | None = Field(
        None,
        description="most tokens of an expert in a sequence, relative to an even load; tokens beyond it, those of the "
        "least weights, skip the expert",
    )
    bias_rate: Annotated[Float32, Field(ge=0)] = Field(
        1e-3, description="step of model.balance_bias: up for an expert with less than the mean load, else down"
    )
    dispatcher: Literal["all_to_all", "all_gather"] = Field(
        "all_to_all",
        description="all_to_all sends a token's row to the ranks of its experts; all_gather gives every rank of ep all "
        "tokens, less traffic if experts_per_token > ep",
    )
    token_blocks: Annotated[int, Field(gt=0, le=MOST_BLOCKS)] = Field(
        1, description="blocks of a rank's tokens: the exchange of one overlaps with the GEMMs of another"
    )

    def region_axes(self, micro: int) -> tuple[str, ...]:
        """The axes of parallelism whose ranks share the regions of the balance loss, with `micro` samples of a
        micro-batch on a rank.
        """
        if self.balance not in ("sequence", "group"):
            return ()
        return ("tp", "cp", "dp") if micro % self.balance_group else ("tp", "cp")

    def shared_axes(self, micro: int) -> set[tuple[str, ...]]:
        """The axes of all groups that share regions, sequences with a capacity, or tokens."""
        capacity = () if self.capacity_factor is None else ("tp", "cp")
        tokens = ("ep",) if self.dispatcher == "all_gather" else ()
        return {axes for axes in (self.region_axes(micro), capacity, tokens) if axes}
